//! cuBLASLt, as far as a forward pass of matrix products needs it.
//!
//! Products are what a linear layer computes: y (tokens x outputs) = x (tokens x inputs) times the
//! transposed weights (outputs x inputs), all bfloat16 with 32-bit accumulation. cuBLASLt counts
//! columns first, so the same memory reads as D (outputs x tokens) = A^T (outputs x inputs) B.

use std::ffi::{c_int, c_void};
use std::path::Path;

use crate::bindings::cuda::{DevicePointer, StreamHandle};
use crate::dynlib::{DynamicLibraryError, dynamic_library};

/// `CUBLAS_COMPUTE_32F`, `CUDA_R_32F`, `CUDA_R_16BF` (library_types.h, cublas_api.h).
const COMPUTE_32F: c_int = 68;
const REAL_32F: c_int = 0;
const REAL_16BF: c_int = 14;
/// `CUBLASLT_MATMUL_DESC_TRANSA` and `CUBLAS_OP_T` (cublasLt.h).
const DESCRIPTOR_TRANSPOSE_A: c_int = 3;
const TRANSPOSE: i32 = 1;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES` (cublasLt.h).
const PREFERENCE_MAX_WORKSPACE: c_int = 1;

/// Workspace that every product may use: what PyTorch gives cuBLASLt on Hopper.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// `cublasLtMatmulAlgo_t`: opaque, to be passed back as it was given.
#[repr(C)]
#[derive(Clone, Copy)]
struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

dynamic_library! {
    /// The functions of libcublasLt that are used.
    struct CublasLtFunctions {
        fn cublasLtCreate(handle: *mut *mut c_void) -> c_int;
        fn cublasLtGetVersion() -> usize;
        fn cublasLtMatmulDescCreate(descriptor: *mut *mut c_void, compute: c_int, scale: c_int) -> c_int;
        fn cublasLtMatmulDescSetAttribute(
            descriptor: *mut c_void, attribute: c_int, value: *const c_void, bytes: usize,
        ) -> c_int;
        fn cublasLtMatmulDescDestroy(descriptor: *mut c_void) -> c_int;
        fn cublasLtMatrixLayoutCreate(
            layout: *mut *mut c_void, kind: c_int, rows: u64, columns: u64, leading: i64,
        ) -> c_int;
        fn cublasLtMatrixLayoutDestroy(layout: *mut c_void) -> c_int;
        fn cublasLtMatmulPreferenceCreate(preference: *mut *mut c_void) -> c_int;
        fn cublasLtMatmulPreferenceSetAttribute(
            preference: *mut c_void, attribute: c_int, value: *const c_void, bytes: usize,
        ) -> c_int;
        fn cublasLtMatmulPreferenceDestroy(preference: *mut c_void) -> c_int;
        fn cublasLtMatmulAlgoGetHeuristic(
            handle: *mut c_void, descriptor: *mut c_void, a: *mut c_void, b: *mut c_void, c: *mut c_void,
            d: *mut c_void, preference: *mut c_void, requested: c_int, results: *mut HeuristicResult,
            returned: *mut c_int,
        ) -> c_int;
        fn cublasLtMatmul(
            handle: *mut c_void, descriptor: *mut c_void, alpha: *const c_void, a: *const c_void,
            a_layout: *mut c_void, b: *const c_void, b_layout: *mut c_void, beta: *const c_void, c: *const c_void,
            c_layout: *mut c_void, d: *mut c_void, d_layout: *mut c_void, algorithm: *const Algorithm,
            workspace: *mut c_void, workspace_bytes: usize, stream: *mut c_void,
        ) -> c_int;
    }
}

/// A call that cuBLASLt did not accept.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("{call} returned {status}{}", meaning(*status))]
pub struct CublasLtError {
    /// The function.
    pub call: &'static str,
    /// `cublasStatus_t` as an integer.
    pub status: i32,
}

/// Names of the status codes (cublas_api.h).
const fn meaning(status: i32) -> &'static str {
    match status {
        1 => " (not initialised)",
        3 => " (out of memory)",
        7 => " (invalid value)",
        8 => " (architecture mismatch)",
        13 => " (execution failed)",
        14 => " (internal error)",
        15 => " (not supported)",
        _ => "",
    }
}

impl CublasLtError {
    /// Whether memory ran out.
    pub const fn is_out_of_memory(&self) -> bool {
        self.status == 3
    }
}

fn checked(call: &'static str, status: c_int) -> Result<(), CublasLtError> {
    if status == 0 { Ok(()) } else { Err(CublasLtError { call, status }) }
}

/// A loaded libcublasLt with a handle for the current context.
///
/// The handle and the descriptors of products live as long as the process: a worker is short-lived,
/// and destroying them after an error would only add calls that can fail.
pub struct CublasLt {
    functions: CublasLtFunctions,
    handle: *mut c_void,
}

/// A planned product.
pub struct Product {
    descriptor: *mut c_void,
    weights: *mut c_void,
    inputs: *mut c_void,
    outputs: *mut c_void,
    algorithm: Algorithm,
    workspace_bytes: usize,
}

impl CublasLt {
    /// Loads the library at this path (or the loader's, for a plain name) and makes a handle. The
    /// GPU's context must be current.
    #[expect(unsafe_code, reason = "foreign library")]
    pub fn load(path: &Path) -> Result<Result<Self, CublasLtError>, DynamicLibraryError> {
        // SAFETY: the signatures above are those of cublasLt.h, unchanged since CUDA 11; the path is
        // the library of the Python environment or the loader's.
        let functions = unsafe { CublasLtFunctions::load(path) }?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let status = unsafe { (functions.cublasLtCreate)(&raw mut handle) };
        Ok(checked("cublasLtCreate", status).map(|()| Self { functions, handle }))
    }

    /// Version number, such as 130101.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn version(&self) -> usize {
        // SAFETY: it takes nothing and returns a number.
        unsafe { (self.functions.cublasLtGetVersion)() }
    }

    /// Plans y = x W^T for `tokens` rows of `inputs` numbers and weights of `outputs` x `inputs`,
    /// with the first algorithm of cuBLASLt's own heuristic, as frameworks take it.
    #[expect(unsafe_code, reason = "foreign calls")]
    pub fn plan(&self, tokens: u64, inputs: u64, outputs: u64) -> Result<Product, CublasLtError> {
        let functions = &self.functions;
        let layout = |rows: u64, columns: u64| -> Result<*mut c_void, CublasLtError> {
            let mut layout = std::ptr::null_mut();
            // SAFETY: the pointer is to a live handle.
            let status = unsafe {
                (functions.cublasLtMatrixLayoutCreate)(&raw mut layout, REAL_16BF, rows, columns, rows as i64)
            };
            checked("cublasLtMatrixLayoutCreate", status).map(|()| layout)
        };
        let (mut descriptor, mut preference) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the pointers are to live handles and values of the sizes that are given.
        unsafe {
            checked(
                "cublasLtMatmulDescCreate",
                (functions.cublasLtMatmulDescCreate)(&raw mut descriptor, COMPUTE_32F, REAL_32F),
            )?;
            let transpose = TRANSPOSE;
            checked(
                "cublasLtMatmulDescSetAttribute",
                (functions.cublasLtMatmulDescSetAttribute)(
                    descriptor,
                    DESCRIPTOR_TRANSPOSE_A,
                    (&raw const transpose).cast(),
                    size_of_val(&transpose),
                ),
            )?;
            checked("cublasLtMatmulPreferenceCreate", (functions.cublasLtMatmulPreferenceCreate)(&raw mut preference))?;
            let workspace = WORKSPACE_BYTES as u64;
            checked(
                "cublasLtMatmulPreferenceSetAttribute",
                (functions.cublasLtMatmulPreferenceSetAttribute)(
                    preference,
                    PREFERENCE_MAX_WORKSPACE,
                    (&raw const workspace).cast(),
                    size_of_val(&workspace),
                ),
            )?;
        }
        let (weights, inputs_layout, outputs_layout) =
            (layout(inputs, outputs)?, layout(inputs, tokens)?, layout(outputs, tokens)?);
        let mut result = HeuristicResult {
            algorithm: Algorithm([0; 8]),
            workspace_bytes: 0,
            state: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut returned = 0;
        // SAFETY: all handles were made above; the result is one live struct, as requested.
        let status = unsafe {
            (functions.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                descriptor,
                weights,
                inputs_layout,
                outputs_layout,
                outputs_layout,
                preference,
                1,
                &raw mut result,
                &raw mut returned,
            )
        };
        // SAFETY: the preference was made above and is not used again.
        unsafe { (functions.cublasLtMatmulPreferenceDestroy)(preference) };
        checked("cublasLtMatmulAlgoGetHeuristic", status)?;
        checked("cublasLtMatmulAlgoGetHeuristic", if returned == 1 { result.state } else { 15 })?;
        Ok(Product {
            descriptor,
            weights,
            inputs: inputs_layout,
            outputs: outputs_layout,
            algorithm: result.algorithm,
            workspace_bytes: result.workspace_bytes,
        })
    }

    /// Enqueues a planned product. The buffers must hold what the plan says and outlive the work;
    /// the workspace must hold [`WORKSPACE_BYTES`] and belong to this stream alone.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn enqueue(
        &self,
        product: &Product,
        weights: DevicePointer,
        inputs: DevicePointer,
        outputs: DevicePointer,
        workspace: DevicePointer,
        stream: StreamHandle,
    ) -> Result<(), CublasLtError> {
        let (alpha, beta) = (1.0_f32, 0.0_f32);
        // SAFETY: descriptor and layouts were made by `plan`; alpha and beta are read before the call
        // returns (host pointers are the default mode); the buffers are as the caller vouches.
        let status = unsafe {
            (self.functions.cublasLtMatmul)(
                self.handle,
                product.descriptor,
                (&raw const alpha).cast(),
                weights.as_raw(),
                product.weights,
                inputs.as_raw(),
                product.inputs,
                (&raw const beta).cast(),
                outputs.as_raw(),
                product.outputs,
                outputs.as_raw(),
                product.outputs,
                &raw const product.algorithm,
                workspace.as_raw(),
                product.workspace_bytes,
                stream.as_raw(),
            )
        };
        checked("cublasLtMatmul", status)
    }

    /// Gives a plan's descriptors back.
    #[expect(unsafe_code, reason = "foreign calls")]
    #[expect(clippy::needless_pass_by_value, reason = "its descriptors are gone afterwards")]
    pub fn forget(&self, product: Product) {
        // SAFETY: made by `plan`, used no more since the product is consumed.
        unsafe {
            (self.functions.cublasLtMatmulDescDestroy)(product.descriptor);
            for layout in [product.weights, product.inputs, product.outputs] {
                (self.functions.cublasLtMatrixLayoutDestroy)(layout);
            }
        }
    }
}
