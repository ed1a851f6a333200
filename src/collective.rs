//! The collectives a server issues, and the element types it issues them with.

use serde::{Deserialize, Serialize};

/// A collective operation, named as the field does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Collective {
    /// Every rank ends with the sum over all ranks.
    AllReduce,
    /// Every rank ends with the concatenation of all ranks' parts.
    AllGather,
    /// Every rank ends with its part of the sum.
    ReduceScatter,
    /// One rank's data reaches all.
    Broadcast,
    /// The sum reaches one rank.
    Reduce,
    /// Point to point between neighbours.
    SendRecv,
}

impl Collective {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::SendRecv => "send-recv",
        }
    }

    /// The name NCCL writes into its log ("AllReduce: 43008 Bytes -> ...").
    pub const fn log_name(self) -> &'static str {
        match self {
            Self::AllReduce => "AllReduce",
            Self::AllGather => "AllGather",
            Self::ReduceScatter => "ReduceScatter",
            Self::Broadcast => "Broadcast",
            Self::Reduce => "Reduce",
            Self::SendRecv => "SendRecv",
        }
    }

    /// Bus bandwidth over algorithm bandwidth for `ranks` ranks, as nccl-tests' PERFORMANCE.md
    /// defines it: the traffic that the slowest link must carry per byte of message.
    pub fn bus_factor(self, ranks: u32) -> f64 {
        let n = f64::from(ranks.max(1));
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::AllGather | Self::ReduceScatter => (n - 1.0) / n,
            Self::Broadcast | Self::Reduce | Self::SendRecv => 1.0,
        }
    }
}

impl std::fmt::Display for Collective {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// The element type of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataType {
    /// bfloat16: what nearly every server reduces in, whatever the weights are stored as.
    Bf16,
    /// IEEE half precision.
    Fp16,
    /// IEEE single precision.
    Fp32,
}

impl DataType {
    /// Bytes per element.
    pub const fn size_bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::Fp16 => 2,
            Self::Fp32 => 4,
        }
    }

    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp32 => "fp32",
        }
    }
}

impl std::fmt::Display for DataType {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        assert!((Collective::AllReduce.bus_factor(8) - 1.75).abs() < 1e-12);
        assert!((Collective::AllReduce.bus_factor(2) - 1.0).abs() < 1e-12);
        assert!((Collective::AllGather.bus_factor(8) - 0.875).abs() < 1e-12);
        assert!((Collective::Broadcast.bus_factor(8) - 1.0).abs() < 1e-12);
    }
}
