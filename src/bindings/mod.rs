//! Safe faces for the foreign libraries: NCCL (own loader) and the CUDA driver (cudarc).
//!
//! All `unsafe` of the measuring path lives in this folder and in the loader.

pub mod cuda;
pub mod nccl;
