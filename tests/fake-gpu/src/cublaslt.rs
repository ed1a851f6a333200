//! libcublasLt.so.13, as far as a forward pass calls it. Products take time and leave their results
//! alone: nobody reads them.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use crate::cost;
use crate::engine::{Work, engine};
use crate::exports::{exports, put};
use crate::status::cublas;

/// CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUDA_R_32F.
const REAL_16BF: c_int = 14;
const COMPUTE_32F: c_int = 68;
const REAL_32F: c_int = 0;
/// CUBLASLT_MATMUL_DESC_TRANSA.
const TRANSPOSE_A: c_int = 3;
const VERSION: usize = 130_000;

/// What handles stand for.
enum Thing {
    Handle,
    Product { transposes: bool },
    Layout { rows: u64, columns: u64 },
    Preference,
}

static THINGS: Mutex<BTreeMap<usize, Thing>> = Mutex::new(BTreeMap::new());

fn keep(place: *mut *mut c_void, thing: Thing) -> Result<(), i32> {
    let number = engine().handle();
    THINGS.lock().unwrap_or_else(PoisonError::into_inner).insert(number, thing);
    put(place, number as *mut c_void, cublas::INVALID_VALUE)
}

fn forget(handle: *mut c_void) -> Result<(), i32> {
    let mut things = THINGS.lock().unwrap_or_else(PoisonError::into_inner);
    things.remove(&(handle as usize)).map(|_| ()).ok_or(cublas::INVALID_VALUE)
}

/// Looks at what a handle stands for.
fn look<T>(handle: *mut c_void, at: impl FnOnce(&mut Thing) -> Option<T>) -> Result<T, i32> {
    let mut things = THINGS.lock().unwrap_or_else(PoisonError::into_inner);
    things.get_mut(&(handle as usize)).and_then(at).ok_or(cublas::INVALID_VALUE)
}

fn layout(handle: *mut c_void) -> Result<(u64, u64), i32> {
    look(handle, |thing| if let Thing::Layout { rows, columns } = thing { Some((*rows, *columns)) } else { None })
}

fn is(handle: *mut c_void, wanted: impl FnOnce(&Thing) -> bool) -> Result<(), i32> {
    look(handle, |thing| wanted(thing).then_some(()))
}

/// Bytes that a product reads and writes, if its shapes go together: D = A^T B.
fn product_bytes(descriptor: *mut c_void, a: *mut c_void, b: *mut c_void, d: *mut c_void) -> Result<[u64; 3], i32> {
    let transposes =
        look(descriptor, |thing| if let Thing::Product { transposes } = thing { Some(*transposes) } else { None })?;
    if !transposes {
        return Err(cublas::NOT_SUPPORTED);
    }
    let ((inputs, outputs), (b_rows, tokens), (d_rows, d_columns)) = (layout(a)?, layout(b)?, layout(d)?);
    if (b_rows, d_rows, d_columns) != (inputs, outputs, tokens) {
        return Err(cublas::INVALID_VALUE);
    }
    Ok([inputs * outputs * 2, inputs * tokens * 2, outputs * tokens * 2])
}

/// cublasLtMatmulHeuristicResult_t.
#[repr(C)]
pub(crate) struct HeuristicResult {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

exports! {
    fn cublasLtCreate(handle: *mut *mut c_void) {
        crate::cuda::current().map_err(|_| cublas::NOT_INITIALIZED)?;
        keep(handle, Thing::Handle)
    }

    fn cublasLtDestroy(handle: *mut c_void) {
        forget(handle)
    }

    fn cublasLtMatmulDescCreate(descriptor: *mut *mut c_void, compute: c_int, scale: c_int) {
        if (compute, scale) != (COMPUTE_32F, REAL_32F) {
            return Err(cublas::NOT_SUPPORTED);
        }
        keep(descriptor, Thing::Product { transposes: false })
    }

    fn cublasLtMatmulDescSetAttribute(
        descriptor: *mut c_void, attribute: c_int, value: *const c_void, bytes: usize,
    ) {
        if attribute != TRANSPOSE_A || value.is_null() || bytes != 4 {
            return Err(cublas::NOT_SUPPORTED);
        }
        // SAFETY: the value has the four bytes that the caller says.
        let operation = unsafe { value.cast::<i32>().read_unaligned() };
        look(descriptor, |thing| {
            let Thing::Product { transposes } = thing else { return None };
            *transposes = operation == 1;
            Some(())
        })
    }

    fn cublasLtMatmulDescDestroy(descriptor: *mut c_void) {
        forget(descriptor)
    }

    fn cublasLtMatrixLayoutCreate(place: *mut *mut c_void, kind: c_int, rows: u64, columns: u64, leading: i64) {
        if kind != REAL_16BF || leading != rows as i64 {
            return Err(cublas::NOT_SUPPORTED);
        }
        keep(place, Thing::Layout { rows, columns })
    }

    fn cublasLtMatrixLayoutDestroy(layout: *mut c_void) {
        forget(layout)
    }

    fn cublasLtMatmulPreferenceCreate(preference: *mut *mut c_void) {
        keep(preference, Thing::Preference)
    }

    fn cublasLtMatmulPreferenceSetAttribute(
        preference: *mut c_void, _attribute: c_int, value: *const c_void, _bytes: usize,
    ) {
        if value.is_null() {
            return Err(cublas::INVALID_VALUE);
        }
        is(preference, |thing| matches!(thing, Thing::Preference))
    }

    fn cublasLtMatmulPreferenceDestroy(preference: *mut c_void) {
        forget(preference)
    }

    fn cublasLtMatmulAlgoGetHeuristic(
        handle: *mut c_void, descriptor: *mut c_void, a: *mut c_void, b: *mut c_void, _c: *mut c_void,
        d: *mut c_void, preference: *mut c_void, requested: c_int, results: *mut HeuristicResult,
        returned: *mut c_int,
    ) {
        is(handle, |thing| matches!(thing, Thing::Handle))?;
        is(preference, |thing| matches!(thing, Thing::Preference))?;
        product_bytes(descriptor, a, b, d)?;
        if requested < 1 {
            return Err(cublas::INVALID_VALUE);
        }
        let result =
            HeuristicResult { algorithm: [1; 8], workspace_bytes: 0, state: 0, waves: 1.0, reserved: [0; 4] };
        put(results, result, cublas::INVALID_VALUE)?;
        put(returned, 1, cublas::INVALID_VALUE)
    }

    fn cublasLtMatmul(
        handle: *mut c_void, descriptor: *mut c_void, _alpha: *const c_void, a: *const c_void,
        a_layout: *mut c_void, b: *const c_void, b_layout: *mut c_void, _beta: *const c_void, _c: *const c_void,
        _c_layout: *mut c_void, d: *mut c_void, d_layout: *mut c_void, _algorithm: *const c_void,
        _workspace: *mut c_void, _workspace_bytes: usize, stream: *mut c_void,
    ) {
        is(handle, |thing| matches!(thing, Thing::Handle))?;
        let bytes = product_bytes(descriptor, a_layout, b_layout, d_layout)?;
        let mut engine = engine();
        for (address, bytes) in [a as u64, b as u64, d as u64].into_iter().zip(bytes) {
            if !engine.memory.holds(address, bytes as usize) {
                return Err(cublas::INVALID_VALUE);
            }
        }
        let stream = stream as usize;
        let is_captured = engine.capture_of(stream).map_err(|_| cublas::INVALID_VALUE)?.is_some();
        let eager = if is_captured { 0.0 } else { cost::EAGER_NS };
        let work = Work::Busy(cost::product_ns(bytes.iter().sum()) + eager);
        engine.enqueue(stream, work).map_err(|_| cublas::INTERNAL_ERROR)
    }
}

/// The version that is played.
// SAFETY: the name is cuBLASLt's, and no other library of a process that loads this one has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the function keeps its name")]
pub(crate) extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}
