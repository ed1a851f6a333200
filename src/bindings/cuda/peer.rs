//! Between GPUs of one process, and between streams of one GPU.

use cudarc::driver::{result, sys};

use super::{CudaError, Device, DeviceBuffer, SideStream, cuda_error};

impl Device {
    /// Makes this GPU's context current on this thread, as calls about its memory expect.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(cuda_error("could not make the context current"))
    }

    /// Lets this GPU reach another's memory; without this, copies between them go through the host.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn enable_peer(&self, peer: &Self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: both contexts are alive as long as their devices are; the flags must be zero.
        let enabled = unsafe { sys::cuCtxEnablePeerAccess(peer.context.cu_ctx(), 0) };
        if enabled == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
            return Ok(());
        }
        enabled.result().map_err(cuda_error("could not enable peer access"))
    }

    /// Enqueues on this GPU a copy of the first `bytes` of a buffer into another, of whichever GPUs they are.
    ///
    /// # Panics
    ///
    /// If either buffer is shorter: that is a defect of the caller.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn copy_between(&self, from: &DeviceBuffer, to: &DeviceBuffer, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= from.bytes && bytes <= to.bytes, "a copy stays inside both buffers");
        self.bind()?;
        // SAFETY: both ranges are inside living allocations (asserted above), each named with its own context.
        unsafe {
            sys::cuMemcpyPeerAsync(
                to.pointer,
                to.context.cu_ctx(),
                from.pointer,
                from.context.cu_ctx(),
                bytes,
                self.stream.cu_stream(),
            )
        }
        .result()
        .map_err(cuda_error("could not enqueue a copy between GPUs"))
    }

    /// Enqueues a copy on a side stream.
    ///
    /// # Panics
    ///
    /// If either buffer is shorter: that is a defect of the caller.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn copy_on(
        &self,
        side: &SideStream,
        from: &DeviceBuffer,
        to: &DeviceBuffer,
        bytes: usize,
    ) -> Result<(), CudaError> {
        assert!(bytes <= from.bytes && bytes <= to.bytes, "a copy stays inside both buffers");
        // SAFETY: both ranges are inside living allocations (asserted above).
        unsafe { result::memcpy_dtod_async(to.pointer, from.pointer, bytes, side.0.cu_stream()) }
            .map_err(cuda_error("could not enqueue a copy"))
    }

    /// Waits until everything on a side stream is done.
    pub fn synchronize_side(&self, side: &SideStream) -> Result<(), CudaError> {
        side.0.synchronize().map_err(cuda_error("waiting for the GPU"))?;
        self.context.check_err().map_err(cuda_error("an earlier CUDA call"))
    }
}
