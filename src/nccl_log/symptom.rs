//! Trouble that NCCL's log tells in words of its own.

/// Trouble with a name and a known cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Symptom {
    /// NCCL could not create its buffers in /dev/shm, most often because it is too small.
    SharedMemoryFailed,
    /// CUDA refuses peer access between two GPUs that NCCL wanted to connect.
    PeerAccessUnsupported,
    /// Device or host memory ran out.
    OutOfMemory,
    /// Two ranks were given the same GPU.
    DuplicateGpu,
    /// Ranks run different releases of NCCL.
    VersionMismatch,
    /// Neither peer access, shared memory nor a network connects two ranks.
    NoTransport,
    /// NCCL_ALGO or NCCL_PROTO holds a word that NCCL does not know.
    UnknownListWord,
    /// What NCCL_ALGO and NCCL_PROTO leave over cannot do the operation.
    NoAlgorithm,
}

impl Symptom {
    /// Every symptom.
    pub const ALL: [Self; 8] = [
        Self::SharedMemoryFailed,
        Self::PeerAccessUnsupported,
        Self::OutOfMemory,
        Self::DuplicateGpu,
        Self::VersionMismatch,
        Self::NoTransport,
        Self::UnknownListWord,
        Self::NoAlgorithm,
    ];

    /// Whether a text that quotes NCCL, such as an outcome's detail, shows it.
    pub fn shows_in(self, text: &str) -> bool {
        self.marks().iter().any(|mark| text.contains(mark))
    }

    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SharedMemoryFailed => "shared-memory-failed",
            Self::PeerAccessUnsupported => "peer-access-unsupported",
            Self::OutOfMemory => "out-of-memory",
            Self::DuplicateGpu => "duplicate-gpu",
            Self::VersionMismatch => "version-mismatch",
            Self::NoTransport => "no-transport",
            Self::UnknownListWord => "unknown-list-word",
            Self::NoAlgorithm => "no-algorithm",
        }
    }

    /// What happened, in a sentence.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::SharedMemoryFailed => "NCCL could not get the shared memory it needs in /dev/shm.",
            Self::PeerAccessUnsupported => "CUDA does not support peer access between two of the GPUs.",
            Self::OutOfMemory => "Memory ran out.",
            Self::DuplicateGpu => "Two ranks were started on the same GPU.",
            Self::VersionMismatch => "The ranks loaded different releases of NCCL.",
            Self::NoTransport => {
                "Nothing connects two of the ranks: peer access, shared memory and network are all off."
            }
            Self::UnknownListWord => "NCCL_ALGO or NCCL_PROTO holds a word that NCCL does not know.",
            Self::NoAlgorithm => "NCCL_ALGO and NCCL_PROTO leave nothing that can do the operation.",
        }
    }

    /// Parts of lines that show it. They are too particular to occur in lines about anything else.
    pub(super) const fn marks(self) -> &'static [&'static str] {
        match self {
            Self::SharedMemoryFailed => &["failed to extend /dev/shm/", "Error while creating shared memory segment"],
            Self::PeerAccessUnsupported => {
                &["Cuda failure 217", "peer access is not supported between these two devices"]
            }
            Self::OutOfMemory => {
                &["Failed to CUDA calloc", "Failed to CUDA malloc", "Failed to CUDA host alloc", "out of memory"]
            }
            Self::DuplicateGpu => &["Duplicate GPU detected", "Multiple Ranks are using the same GPU"],
            Self::VersionMismatch => &["Mismatched NCCL version detected"],
            Self::NoTransport => &["No transport found for rank"],
            Self::UnknownListWord => &[
                "Unrecognized element token",
                "Unrecognized prefix token",
                "All entries except the first must have a prefix",
            ],
            Self::NoAlgorithm => &["o algorithm/protocol available"],
        }
    }
}
