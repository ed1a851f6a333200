//! Collectives and the numbers they carry.

/// A collective, in NCCL's numbering; send and receive stand behind them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// ncclBroadcast.
    Broadcast = 0,
    /// ncclReduce.
    Reduce = 1,
    /// ncclAllGather.
    AllGather = 2,
    /// ncclReduceScatter.
    ReduceScatter = 3,
    /// ncclAllReduce.
    AllReduce = 4,
    /// ncclSend and ncclRecv in one group.
    SendRecv = 5,
}

impl Function {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Broadcast, Self::Reduce, Self::AllGather, Self::ReduceScatter, Self::AllReduce, Self::SendRecv];

    /// As NCCL's log writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Broadcast => "Broadcast",
            Self::Reduce => "Reduce",
            Self::AllGather => "AllGather",
            Self::ReduceScatter => "ReduceScatter",
            Self::AllReduce => "AllReduce",
            Self::SendRecv => "SendRecv",
        }
    }

    /// Bytes that a rank sends and receives, where `bytes` are those of its `count`.
    pub(crate) const fn buffers(self, bytes: usize, ranks: usize) -> (usize, usize) {
        match self {
            Self::AllGather => (bytes, bytes * ranks),
            Self::ReduceScatter => (bytes * ranks, bytes),
            Self::Broadcast | Self::Reduce | Self::AllReduce | Self::SendRecv => (bytes, bytes),
        }
    }
}

/// A type of numbers, by ncclDataType_t.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Number {
    Int8,
    Half,
    Single,
    Brain,
}

impl Number {
    pub(crate) const fn of(code: i32) -> Option<Self> {
        Some(match code {
            0 => Self::Int8,
            6 => Self::Half,
            7 => Self::Single,
            9 => Self::Brain,
            _ => return None,
        })
    }

    /// As NCCL's errors write it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "ncclInt8",
            Self::Half => "ncclFloat16",
            Self::Single => "ncclFloat32",
            Self::Brain => "ncclBfloat16",
        }
    }

    /// Bytes of one.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Half | Self::Brain => 2,
            Self::Single => 4,
        }
    }

    /// A number as single precision holds it; all of these do fit.
    pub(crate) fn wide(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::Int8, [a]) => f32::from(a.cast_signed()),
            (Self::Half, [a, b]) => wide_half(u16::from_le_bytes([*a, *b])),
            (Self::Brain, [a, b]) => f32::from_bits(u32::from(u16::from_le_bytes([*a, *b])) << 16),
            (Self::Single, [a, b, c, d]) => f32::from_le_bytes([*a, *b, *c, *d]),
            _ => f32::NAN,
        }
    }

    /// Rounds to the nearest number of this type, halves to even, and writes it. Whole numbers count around
    /// their end.
    pub(crate) fn narrow(self, value: f32, bytes: &mut [u8]) {
        match self {
            Self::Int8 => bytes.copy_from_slice(&[(value as i32) as u8]),
            Self::Half => bytes.copy_from_slice(&narrow_half(value).to_le_bytes()),
            Self::Brain => bytes.copy_from_slice(&narrow_brain(value).to_le_bytes()),
            Self::Single => bytes.copy_from_slice(&value.to_le_bytes()),
        }
    }
}

fn wide_half(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f32::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction * 2_f32.powi(-24),
        0x1f if fraction > 0.0 => f32::NAN,
        0x1f => f32::INFINITY,
        _ => (1.0 + fraction / 1024.0) * 2_f32.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

fn narrow_half(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16) as u16 & 0x8000;
    if value.is_nan() {
        return sign | 0x7e00;
    }
    let magnitude = value.abs();
    if magnitude >= 65_520.0 {
        return sign | 0x7c00;
    }
    // In steps of the smallest number that is told apart at this size; the product is exact.
    let exponent = (magnitude.to_bits() >> 23) as i32 - 127;
    let step = exponent.max(-14) - 10;
    let steps = (f64::from(magnitude) * 2_f64.powi(-step)).round_ties_even() as u32;
    // 2^10 steps and more carry the exponent, and what rounds up to the next power carries it further.
    sign + (((exponent.max(-14) + 14) as u16) << 10) + steps as u16
}

fn narrow_brain(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        assert_eq!(narrow_brain(1.0), 0x3f80);
        // Halfway between two neighbours: the even one.
        assert_eq!(narrow_brain(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(narrow_brain(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(narrow_brain(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert_eq!(narrow_brain(f32::MAX), 0x7f80);
        assert_eq!(narrow_half(1.0), 0x3c00);
        assert_eq!(narrow_half(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(narrow_half(1.0 + 3.0 / 2048.0), 0x3c02);
        assert_eq!(narrow_half(65_504.0), 0x7bff);
        assert_eq!(narrow_half(65_520.0), 0x7c00);
        assert_eq!(narrow_half(-2_f32.powi(-24)), 0x8001);
        assert_eq!(narrow_half(2_f32.powi(-26)), 0);
    }

    #[test]
    fn every_half_reads_back() {
        for bits in 0..=u16::MAX {
            let value = wide_half(bits);
            if value.is_nan() {
                assert!(wide_half(narrow_half(value)).is_nan());
            } else {
                assert_eq!(narrow_half(value), bits, "{value}");
            }
        }
    }

    #[test]
    fn whole_numbers_count_around_their_end() {
        let mut byte = [0];
        Number::Int8.narrow(Number::Int8.wide(&[100]) + Number::Int8.wide(&[100]), &mut byte);
        assert_eq!(byte[0].cast_signed(), -56);
    }
}
