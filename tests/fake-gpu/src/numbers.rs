//! Sums in bfloat16, to the bit.

/// Elements after which the tool's data check repeats its values. It is only ever tried: a message
/// that does not repeat is added up as it is.
pub(crate) const PERIOD: usize = 65_521;

fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to the nearest bfloat16, halves to even.
fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Bytes of a message as they are sent: one period where it repeats, all of it otherwise.
pub(crate) fn essence(bytes: &[u8]) -> &[u8] {
    let period = PERIOD * 2;
    let repeats = bytes.len() > 2 * period && bytes[period..] == bytes[..bytes.len() - period];
    if repeats { &bytes[..period] } else { bytes }
}

/// The sum of what every rank sent, as long as the longest of them; shorter ones repeat.
pub(crate) fn sum(sent: &[&[u8]]) -> Vec<u16> {
    let length = sent.iter().map(|bytes| bytes.len() / 2).max().unwrap_or(0);
    // The sum of negative zeros is one.
    let mut sums = vec![-0.0_f32; length];
    for bytes in sent.iter().filter(|bytes| bytes.len() >= 2) {
        for piece in sums.chunks_mut(bytes.len() / 2) {
            for (sum, element) in piece.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *sum += wide(u16::from_le_bytes(*element));
            }
        }
    }
    sums.into_iter().map(narrow).collect()
}

/// What so many more sums over `ranks` equal contributions make of values.
pub(crate) fn chain(values: &mut [u16], ranks: usize, times: usize) {
    let doublings = ranks.trailing_zeros() as usize * times;
    if ranks.is_power_of_two() && moves_freely(values, doublings) {
        for value in values.iter_mut().filter(|value| **value << 1 != 0) {
            *value += (doublings as u16) << 7;
        }
        return;
    }
    for value in values {
        for _ in 0..times {
            let mut sum = -0.0_f32;
            for _ in 0..ranks {
                sum += wide(*value);
            }
            let next = narrow(sum);
            if next == *value {
                break;
            }
            *value = next;
        }
    }
}

/// Whether every value stays a normal number when its exponent grows by so much.
fn moves_freely(values: &[u16], doublings: usize) -> bool {
    values.iter().all(|value| {
        let exponent = usize::from(value >> 7 & 0xff);
        value << 1 == 0 || exponent > 0 && exponent + doublings < 0xff
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| narrow(*value).to_le_bytes()).collect()
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        assert_eq!(narrow(1.0), 0x3f80);
        // Halfway between two neighbours: the even one.
        assert_eq!(narrow(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(narrow(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(narrow(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert_eq!(narrow(f32::MAX), 0x7f80);
        assert!(wide(narrow(f32::NAN)).is_nan());
    }

    #[test]
    fn sums_of_periods_and_of_whole_messages_agree() {
        let long: Vec<u8> = bytes(&(0..PERIOD * 3 + 17).map(|i| ((i % PERIOD) % 9) as f32 - 4.0).collect::<Vec<_>>());
        assert_eq!(essence(&long).len(), PERIOD * 2);
        let mut broken = long.clone();
        broken[PERIOD * 5] ^= 1;
        assert_eq!(essence(&broken).len(), broken.len());
        let whole = sum(&[&long, &long]);
        let period = sum(&[essence(&long), essence(&long)]);
        assert!(whole.iter().enumerate().all(|(i, value)| *value == period[i % PERIOD]));
        let mixed = sum(&[&long, essence(&long)]);
        assert_eq!(mixed, whole);
    }

    #[test]
    fn a_chain_is_what_its_sums_are_one_by_one() {
        let slowly = |value: f32, ranks: usize, times: usize| {
            (0..times).fold(narrow(value), |value, _| narrow((0..ranks).map(|_| wide(value)).sum()))
        };
        for ranks in [2, 3, 6, 8] {
            for times in [0, 1, 5, 63] {
                for value in [0.0, -0.0, 3.0, -7.0, 1.0e-30, 1.0e30, f32::from_bits(0x0001_0000), f32::INFINITY] {
                    let mut values = [narrow(value)];
                    chain(&mut values, ranks, times);
                    assert_eq!(values[0], slowly(value, ranks, times), "{value} over {ranks} ranks {times} times");
                }
            }
        }
    }
}
