//! Safe faces for the foreign libraries: NCCL and cuBLASLt (own loader) and the CUDA driver (cudarc).
//!
//! All `unsafe` of the measuring path lives in this folder and in the loader.

pub mod cublaslt;
pub mod cuda;
pub mod nccl;
