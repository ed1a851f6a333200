//! Sums to the bit, and where the parts of messages go.

use crate::function::{Function, Number};

/// Elements after which the tool's data check repeats its values. It is only ever tried: a message
/// that does not repeat is added up as it is.
pub(crate) const PERIOD: usize = 65_521;

/// Bytes of a message as they are sent: one period where it repeats, all of it otherwise.
pub(crate) fn essence(bytes: &[u8], number: Number) -> &[u8] {
    let period = PERIOD * number.size();
    let repeats = bytes.len() > 2 * period && bytes[period..] == bytes[..bytes.len() - period];
    if repeats { &bytes[..period] } else { bytes }
}

/// The sum of what every rank sent, as long as the longest of them; shorter ones repeat.
pub(crate) fn sum(sent: &[&[u8]], number: Number) -> Vec<u8> {
    let size = number.size();
    let length = sent.iter().map(|bytes| bytes.len() / size).max().unwrap_or(0);
    // The sum of negative zeros is one.
    let mut sums = vec![-0.0_f32; length];
    for bytes in sent.iter().filter(|bytes| bytes.len() >= size) {
        for piece in sums.chunks_mut(bytes.len() / size) {
            for (sum, element) in piece.iter_mut().zip(bytes.chunks_exact(size)) {
                *sum += number.wide(element);
            }
        }
    }
    let mut bytes = vec![0; length * size];
    for (element, sum) in bytes.chunks_exact_mut(size).zip(sums) {
        number.narrow(sum, element);
    }
    bytes
}

/// What so many more sums over `ranks` equal contributions make of values.
pub(crate) fn chain(bytes: &mut [u8], number: Number, ranks: usize, times: usize) {
    let doublings = ranks.trailing_zeros() as usize * times;
    if number == Number::Brain && ranks.is_power_of_two() && moves_freely(bytes, doublings) {
        for element in bytes.as_chunks_mut::<2>().0 {
            let value = u16::from_le_bytes(*element);
            if value << 1 != 0 {
                *element = (value + ((doublings as u16) << 7)).to_le_bytes();
            }
        }
        return;
    }
    let mut next = [0; 4];
    let next = &mut next[..number.size()];
    for element in bytes.chunks_exact_mut(number.size()) {
        for _ in 0..times {
            let value = number.wide(element);
            number.narrow((0..ranks).fold(-0.0, |sum, _| sum + value), next);
            if next == element {
                break;
            }
            element.copy_from_slice(next);
        }
    }
}

/// Whether every value stays a normal number when its exponent grows by so much.
fn moves_freely(bytes: &[u8], doublings: usize) -> bool {
    bytes.as_chunks::<2>().0.iter().all(|element| {
        let value = u16::from_le_bytes(*element);
        let exponent = usize::from(value >> 7 & 0xff);
        value << 1 == 0 || exponent > 0 && exponent + doublings < 0xff
    })
}

/// What a collective is about, beside its buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) function: Function,
    pub(crate) number: Number,
    /// The rank that broadcasts, or that a sum goes to.
    pub(crate) root: usize,
    /// How far around the ring a rank sends.
    pub(crate) shift: usize,
}

impl Shape {
    /// Whether a rank hands anything over.
    pub(crate) fn sends(self, rank: usize) -> bool {
        self.function != Function::Broadcast || rank == self.root
    }

    /// Writes what a rank receives, from what all sent (as `essence` makes it), after `chained` sums of a
    /// buffer over itself.
    pub(crate) fn receive(self, sent: &[&[u8]], rank: usize, chained: usize, target: &mut [u8]) {
        let ranks = sent.len();
        match self.function {
            Function::AllReduce => {
                let mut sums = sum(sent, self.number);
                chain(&mut sums, self.number, ranks, chained.saturating_sub(1));
                tile(target, &sums, 0);
            }
            Function::Reduce if rank == self.root => tile(target, &sum(sent, self.number), 0),
            Function::Reduce => {}
            Function::ReduceScatter => {
                let place = rank * target.len();
                tile(target, &sum(sent, self.number), place);
            }
            Function::AllGather => {
                let part = target.len() / ranks.max(1);
                for (piece, sent) in target.chunks_mut(part.max(1)).zip(sent) {
                    tile(piece, sent, 0);
                }
            }
            Function::Broadcast => tile(target, sent[self.root % ranks], 0),
            Function::SendRecv => tile(target, sent[(rank + ranks - self.shift % ranks) % ranks], 0),
        }
    }
}

/// Fills a target with a message that repeats, from a place in it.
fn tile(target: &mut [u8], message: &[u8], place: usize) {
    if message.is_empty() {
        return;
    }
    let mut from = place % message.len();
    let mut rest = target;
    while !rest.is_empty() {
        let length = (message.len() - from).min(rest.len());
        let (piece, behind) = rest.split_at_mut(length);
        piece.copy_from_slice(&message[from..from + length]);
        (rest, from) = (behind, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [Number; 4] = [Number::Int8, Number::Half, Number::Single, Number::Brain];

    fn bytes(values: impl IntoIterator<Item = f32>, number: Number) -> Vec<u8> {
        let mut all = Vec::new();
        for value in values {
            let mut element = vec![0; number.size()];
            number.narrow(value, &mut element);
            all.extend(element);
        }
        all
    }

    fn values(bytes: &[u8], number: Number) -> Vec<f32> {
        bytes.chunks_exact(number.size()).map(|element| number.wide(element)).collect()
    }

    #[test]
    fn sums_of_periods_and_of_whole_messages_agree() {
        for number in NUMBERS {
            let size = number.size();
            let long = bytes((0..PERIOD * 3 + 17).map(|i| ((i % PERIOD) % 9) as f32 - 4.0), number);
            assert_eq!(essence(&long, number).len(), PERIOD * size);
            let mut broken = long.clone();
            broken[PERIOD * 2 * size + 1] ^= 1;
            assert_eq!(essence(&broken, number).len(), broken.len());
            let whole = sum(&[&long, &long], number);
            let period = sum(&[essence(&long, number), essence(&long, number)], number);
            assert!(whole.iter().enumerate().all(|(i, value)| *value == period[i % period.len()]));
            assert_eq!(sum(&[&long, essence(&long, number)], number), whole);
        }
    }

    #[test]
    fn a_chain_is_what_its_sums_are_one_by_one() {
        for number in NUMBERS {
            let slowly = |value: f32, ranks: usize, times: usize| {
                let one = |value: f32| number.wide(&bytes([value], number));
                (0..times).fold(one(value), |value, _| one((0..ranks).map(|_| value).sum()))
            };
            for ranks in [2, 3, 6, 8] {
                for times in [0, 1, 5, 63] {
                    for value in [0.0, 3.0, -7.0, 1.0e-30, 1.0e30, f32::from_bits(0x0001_0000), f32::INFINITY] {
                        if number == Number::Int8 && value.abs() > 100.0 {
                            continue;
                        }
                        let mut chained = bytes([value], number);
                        chain(&mut chained, number, ranks, times);
                        let expected = bytes([slowly(value, ranks, times)], number);
                        assert_eq!(chained, expected, "{value} over {ranks} ranks {times} times in {number:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_rank_receives_what_is_its() {
        let number = Number::Brain;
        let sent: Vec<Vec<u8>> = (0..3).map(|rank| bytes((0..6).map(|i| (10 * rank + i) as f32), number)).collect();
        let sent: Vec<&[u8]> = sent.iter().map(Vec::as_slice).collect();
        let receive = |function, rank, elements: usize| {
            let mut target = bytes(vec![-1.0; elements], number);
            Shape { function, number, root: 1, shift: 1 }.receive(&sent, rank, 1, &mut target);
            values(&target, number)
        };
        let sums: Vec<f32> = (0..6).map(|i| (30 + 3 * i) as f32).collect();
        assert_eq!(receive(Function::AllReduce, 2, 6), sums);
        assert_eq!(receive(Function::Reduce, 1, 6), sums);
        assert_eq!(receive(Function::Reduce, 0, 6), [-1.0; 6]);
        assert_eq!(receive(Function::ReduceScatter, 2, 2), sums[4..]);
        assert_eq!(receive(Function::Broadcast, 0, 6), [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]);
        assert_eq!(receive(Function::SendRecv, 0, 6), [20.0, 21.0, 22.0, 23.0, 24.0, 25.0]);
        let gathered = receive(Function::AllGather, 0, 18);
        assert_eq!((gathered[0], gathered[6], gathered[17]), (0.0, 10.0, 25.0));
    }
}
