//! Status codes of the four libraries, as far as they are returned here.

/// CUresult (cuda.h).
pub(crate) mod cuda {
    pub(crate) const INVALID_VALUE: i32 = 1;
    pub(crate) const OUT_OF_MEMORY: i32 = 2;
    pub(crate) const NO_DEVICE: i32 = 100;
    pub(crate) const INVALID_DEVICE: i32 = 101;
    pub(crate) const INVALID_CONTEXT: i32 = 201;
    pub(crate) const PEER_ACCESS_UNSUPPORTED: i32 = 217;
    pub(crate) const INVALID_HANDLE: i32 = 400;
    pub(crate) const ILLEGAL_STATE: i32 = 401;
    pub(crate) const NOT_READY: i32 = 600;
    pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
    pub(crate) const NOT_SUPPORTED: i32 = 801;
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: i32 = 900;
    pub(crate) const STREAM_CAPTURE_INVALIDATED: i32 = 901;
    pub(crate) const STREAM_CAPTURE_MERGE: i32 = 902;
    pub(crate) const STREAM_CAPTURE_UNMATCHED: i32 = 903;
    pub(crate) const STREAM_CAPTURE_UNJOINED: i32 = 904;
    pub(crate) const STREAM_CAPTURE_ISOLATION: i32 = 905;
    pub(crate) const CAPTURED_EVENT: i32 = 907;
    pub(crate) const UNKNOWN: i32 = 999;

    /// Name and sentence of a code.
    pub(crate) fn words(code: i32) -> Option<(&'static std::ffi::CStr, &'static std::ffi::CStr)> {
        Some(match code {
            0 => (c"CUDA_SUCCESS", c"no error"),
            1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
            2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
            3 => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
            100 => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
            101 => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
            201 => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
            217 => (c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"peer access is not supported between these two devices"),
            400 => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
            401 => (c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state"),
            600 => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
            700 => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
            702 => (c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated"),
            719 => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
            801 => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
            900 => (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
            901 => {
                (c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture")
            }
            902 => (c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"operation would result in a merge of separate captures"),
            903 => (c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not ended in the same stream as it began"),
            904 => (c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work"),
            905 => (c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream"),
            907 => (c"CUDA_ERROR_CAPTURED_EVENT", c"operation not permitted on an event last recorded in a capture"),
            999 => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
            _ => return None,
        })
    }
}

/// ncclResult_t (nccl.h).
pub(crate) mod nccl {
    pub(crate) const UNHANDLED_CUDA: i32 = 1;
    pub(crate) const SYSTEM: i32 = 2;
    pub(crate) const INTERNAL: i32 = 3;
    pub(crate) const INVALID_ARGUMENT: i32 = 4;
    pub(crate) const INVALID_USAGE: i32 = 5;

    /// NCCL's sentence for a code.
    pub(crate) const fn words(code: i32) -> &'static std::ffi::CStr {
        match code {
            0 => c"no error",
            1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
            3 => c"internal error",
            4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
            5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
            6 => c"remote process exited or there was a network error",
            7 => c"NCCL operation in progress",
            _ => c"unknown result code",
        }
    }
}

/// nvmlReturn_t (nvml.h).
pub(crate) mod nvml {
    pub(crate) const INVALID_ARGUMENT: i32 = 2;
    pub(crate) const NOT_SUPPORTED: i32 = 3;
    pub(crate) const NOT_FOUND: i32 = 6;
    pub(crate) const INSUFFICIENT_SIZE: i32 = 7;
    pub(crate) const UNKNOWN: i32 = 999;
}

/// cublasStatus_t (cublas_api.h).
pub(crate) mod cublas {
    pub(crate) const NOT_INITIALIZED: i32 = 1;
    pub(crate) const INVALID_VALUE: i32 = 7;
    pub(crate) const INTERNAL_ERROR: i32 = 14;
    pub(crate) const NOT_SUPPORTED: i32 = 15;
}
