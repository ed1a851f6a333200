//! The collectives a server issues, and the element types it issues them with.

use serde::{Deserialize, Serialize};

/// A collective operation, named as the field does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Collective {
    /// Every rank ends with the sum over all ranks.
    #[default]
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
    /// Every collective.
    pub const ALL: [Self; 6] =
        [Self::AllReduce, Self::AllGather, Self::ReduceScatter, Self::Broadcast, Self::Reduce, Self::SendRecv];

    /// The collective with this name, in any case and with `_` for `-`. Names: [`Collective::ALL`].
    pub fn parse(text: &str) -> Option<Self> {
        let wanted = text.trim().replace('_', "-");
        Self::ALL.into_iter().find(|collective| collective.name().eq_ignore_ascii_case(&wanted))
    }

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

    /// Parts of a message that ranks hold one each: the larger buffer is so many times the smaller one.
    const fn parts(self, ranks: u32) -> u64 {
        match self {
            Self::AllGather | Self::ReduceScatter => ranks as u64,
            Self::AllReduce | Self::Broadcast | Self::Reduce | Self::SendRecv => 1,
        }
    }

    /// Whether numbers of several ranks are added up; otherwise they are only moved.
    pub const fn adds_up(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Elements that NCCL is asked for (`sendcount`, `recvcount` or `count`) where the larger buffer of
    /// a rank holds `bytes`. `None` where that is no whole number of elements for every rank, or none.
    pub fn count(self, bytes: u64, dtype: DataType, ranks: u32) -> Option<u64> {
        let whole = self.parts(ranks.max(1)).checked_mul(dtype.size_bytes())?;
        (bytes > 0 && bytes.is_multiple_of(whole)).then(|| bytes / whole)
    }

    /// Bytes in which messages of this kind must be whole, with an element for every rank.
    pub const fn granularity_bytes(self, dtype: DataType, ranks: u32) -> u64 {
        self.parts(ranks) * dtype.size_bytes()
    }

    /// The bytes that NCCL's log names since 2.24 for a message of `bytes`: what one rank hands over or
    /// receives, where the larger buffer counts here. (src/enqueue.cc: `task->count *
    /// ncclTypeSize(task->datatype)`.)
    pub const fn logged_bytes(self, bytes: u64, ranks: u32) -> u64 {
        match bytes.checked_div(self.parts(ranks)) {
            Some(part) => part,
            None => bytes,
        }
    }

    /// Whether NCCL knows it in one buffer. A rank cannot send from where it receives.
    pub const fn works_in_place(self) -> bool {
        !matches!(self, Self::SendRecv)
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

/// How a collective is issued.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Issue {
    /// Replayed from a CUDA graph.
    #[default]
    Captured,
    /// Call by call, as engines do with prefill and with batches above their largest graph.
    Eager,
}

impl Issue {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Captured => "captured",
            Self::Eager => "eager",
        }
    }
}

/// Where a collective's result goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Over what was sent.
    #[default]
    InPlace,
    /// Into a buffer of its own.
    OutOfPlace,
}

impl Placement {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::InPlace => "in-place",
            Self::OutOfPlace => "out-of-place",
        }
    }
}

/// How a collective is issued and where its result goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Form {
    /// In a graph or call by call.
    pub issue: Issue,
    /// In place or not.
    pub placement: Placement,
}

impl Form {
    /// As engines' captured passes issue it: sums in place, as far as they are sums of whole messages;
    /// parts come from, or go to, tensors of their own.
    pub const fn usual(collective: Collective) -> Self {
        let placement = match collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => Placement::InPlace,
            Collective::AllGather | Collective::ReduceScatter | Collective::SendRecv => Placement::OutOfPlace,
        };
        Self { issue: Issue::Captured, placement }
    }

    /// The same, call by call.
    #[must_use]
    pub const fn eager(self) -> Self {
        Self { issue: Issue::Eager, ..self }
    }

    /// The same, in this place.
    #[must_use]
    pub const fn placed(self, placement: Placement) -> Self {
        Self { placement, ..self }
    }

    /// For serde: what older records mean without saying it, captured and in place, is left out.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

impl std::fmt::Display for Form {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}, {}", self.issue.name(), self.placement.name())
    }
}

/// The element type of a message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataType {
    /// bfloat16: what nearly every server reduces in, whatever the weights are stored as.
    #[default]
    Bf16,
    /// IEEE half precision.
    Fp16,
    /// IEEE single precision.
    Fp32,
    /// Eight-bit whole numbers, and every byte string that servers broadcast.
    Int8,
}

impl DataType {
    /// Every type.
    pub const ALL: [Self; 4] = [Self::Bf16, Self::Fp16, Self::Fp32, Self::Int8];

    /// The type with this name. Names: [`DataType::ALL`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(text.trim()))
    }

    /// Bytes per element.
    pub const fn size_bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::Fp16 => 2,
            Self::Fp32 => 4,
            Self::Int8 => 1,
        }
    }

    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp32 => "fp32",
            Self::Int8 => "int8",
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
        assert!((Collective::ReduceScatter.bus_factor(8) - 0.875).abs() < 1e-12);
        for collective in [Collective::Broadcast, Collective::Reduce, Collective::SendRecv] {
            assert!((collective.bus_factor(8) - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn counts_are_those_of_the_smaller_buffer() {
        // The logits of one row of Kimi-K2.5 over 8 GPUs: 327,680 bytes arrive, 40,960 are sent.
        assert_eq!(Collective::AllGather.count(327_680, DataType::Bf16, 8), Some(20_480));
        assert_eq!(Collective::AllGather.logged_bytes(327_680, 8), 40_960);
        assert_eq!(Collective::ReduceScatter.count(327_680, DataType::Fp32, 8), Some(10_240));
        assert_eq!(Collective::AllReduce.count(14_336, DataType::Bf16, 8), Some(7168));
        assert_eq!(Collective::AllReduce.logged_bytes(14_336, 8), 14_336);
        assert_eq!(Collective::SendRecv.count(3, DataType::Int8, 8), Some(3));
        assert_eq!(Collective::AllGather.count(327_680 + 2, DataType::Bf16, 8), None);
        assert_eq!(Collective::AllReduce.count(3, DataType::Bf16, 2), None);
        assert_eq!(Collective::AllReduce.count(0, DataType::Bf16, 2), None);
    }

    #[test]
    fn names_read_back() {
        for collective in Collective::ALL {
            assert_eq!(Collective::parse(collective.name()), Some(collective));
            assert_eq!(Collective::parse(&collective.name().replace('-', "_")), Some(collective));
        }
        for dtype in DataType::ALL {
            assert_eq!(DataType::parse(dtype.name()), Some(dtype));
        }
        assert_eq!((Collective::parse("all"), DataType::parse("fp64")), (None, None));
    }

    #[test]
    fn older_records_mean_captured_and_in_place() {
        assert_eq!(serde_json::from_str::<Form>("{}").unwrap(), Form::default());
        assert!(Form::usual(Collective::AllReduce).is_plain());
        assert!(!Form::usual(Collective::AllGather).is_plain());
        let text = serde_json::to_string(&Form::usual(Collective::AllGather).eager()).unwrap();
        assert_eq!(text, r#"{"issue":"eager","placement":"out-of-place"}"#);
    }
}
