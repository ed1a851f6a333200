//! When everything happens: streams with clocks, marks on them, and collectives where ranks meet.
//!
//! Each rank tells the others its steps, and all work out all clocks, so that every rank comes to the
//! same times without a meeting per collective.

/// A step of a stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Step {
    /// Something that concerns this stream alone.
    Busy { stream: u32, ns: f64 },
    /// Notes the stream's clock under a number.
    Record { stream: u32, mark: u32 },
    /// Waits for a mark of this batch.
    Wait { stream: u32, mark: u32 },
    /// Waits for a time that was known before.
    AtLeast { stream: u32, ns: f64 },
    /// Meets the other ranks. `what` must be the same on all of them; where it is not, `lenient` ones
    /// go on with wrong data and others never come back.
    Collective { stream: u32, ns: f64, what: u32, lenient: bool },
}

/// What a rank tells about a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Packet {
    /// Where its streams' clocks stand.
    pub(crate) clocks: Vec<f64>,
    pub(crate) steps: Vec<Step>,
    /// Collectives of the batch whose data are exchanged: position of the first and length of chains.
    pub(crate) live: Vec<u64>,
    /// What it sends for the first of them.
    pub(crate) values: Vec<u8>,
}

/// Where a rank's clocks stand after a batch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) clocks: Vec<f64>,
    pub(crate) marks: Vec<f64>,
}

/// Ranks that do not do the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Discord {
    /// They waited at different places; this stand-in cannot play that.
    Batches,
    /// They chose differently, and wait for each other without end.
    Choices,
}

/// Outcomes of all ranks, and whether data went wrong on the way.
pub(crate) fn play(packets: &[Packet]) -> Result<(Vec<Outcome>, bool), Discord> {
    let mut outcomes: Vec<Outcome> =
        packets.iter().map(|packet| Outcome { clocks: packet.clocks.clone(), marks: Vec::new() }).collect();
    let mut rests: Vec<std::slice::Iter<Step>> = packets.iter().map(|packet| packet.steps.iter()).collect();
    let mut spoiled = false;
    loop {
        let meetings: Vec<Option<Step>> =
            rests.iter_mut().zip(&mut outcomes).map(|(rest, outcome)| until_meeting(rest, outcome)).collect();
        if meetings.iter().all(Option::is_none) {
            return Ok((outcomes, spoiled));
        }
        let mut end: f64 = 0.0;
        let mut first = None;
        let mut is_lenient = false;
        let mut differs = false;
        for (meeting, outcome) in meetings.iter().zip(&outcomes) {
            let Some(Step::Collective { stream, ns, what, lenient }) = *meeting else { return Err(Discord::Batches) };
            end = end.max(outcome.clocks[stream as usize] + ns);
            differs |= *first.get_or_insert(what) != what;
            is_lenient |= lenient;
        }
        if differs && !is_lenient {
            return Err(Discord::Choices);
        }
        spoiled |= differs;
        for (meeting, outcome) in meetings.iter().zip(&mut outcomes) {
            if let Some(Step::Collective { stream, .. }) = *meeting {
                outcome.clocks[stream as usize] = end;
            }
        }
    }
}

/// Goes on to a rank's next collective.
fn until_meeting(rest: &mut std::slice::Iter<Step>, outcome: &mut Outcome) -> Option<Step> {
    for step in rest {
        match *step {
            Step::Busy { stream, ns } => outcome.clocks[stream as usize] += ns,
            Step::Record { stream, mark } => {
                let mark = mark as usize;
                if outcome.marks.len() <= mark {
                    outcome.marks.resize(mark + 1, 0.0);
                }
                outcome.marks[mark] = outcome.clocks[stream as usize];
            }
            Step::Wait { stream, mark } => {
                let time = outcome.marks.get(mark as usize).copied().unwrap_or(0.0);
                let clock = &mut outcome.clocks[stream as usize];
                *clock = clock.max(time);
            }
            Step::AtLeast { stream, ns } => {
                let clock = &mut outcome.clocks[stream as usize];
                *clock = clock.max(ns);
            }
            Step::Collective { .. } => return Some(*step),
        }
    }
    None
}

impl Step {
    fn to_words(self) -> [u64; 2] {
        let word = |kind: u64, stream: u32, number: u32| kind | u64::from(stream) << 8 | u64::from(number) << 32;
        match self {
            Self::Busy { stream, ns } => [word(0, stream, 0), ns.to_bits()],
            Self::Record { stream, mark } => [word(1, stream, mark), 0],
            Self::Wait { stream, mark } => [word(2, stream, mark), 0],
            Self::AtLeast { stream, ns } => [word(3, stream, 0), ns.to_bits()],
            Self::Collective { stream, ns, what, lenient } => {
                [word(4 + u64::from(lenient), stream, what), ns.to_bits()]
            }
        }
    }

    fn from_words([word, value]: [u64; 2]) -> Option<Self> {
        let (stream, number, ns) = ((word >> 8) as u32 & 0x00ff_ffff, (word >> 32) as u32, f64::from_bits(value));
        Some(match word & 0xff {
            0 => Self::Busy { stream, ns },
            1 => Self::Record { stream, mark: number },
            2 => Self::Wait { stream, mark: number },
            3 => Self::AtLeast { stream, ns },
            kind @ (4 | 5) => Self::Collective { stream, ns, what: number, lenient: kind == 5 },
            _ => return None,
        })
    }
}

impl Packet {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut words = vec![self.clocks.len() as u64, self.steps.len() as u64, self.live.len() as u64];
        words.extend(self.clocks.iter().map(|clock| clock.to_bits()));
        words.extend(self.steps.iter().flat_map(|step| step.to_words()));
        words.extend(&self.live);
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        bytes.extend(&self.values);
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let mut word = || -> Option<u64> {
            let (first, behind) = rest.split_first_chunk::<8>()?;
            rest = behind;
            Some(u64::from_le_bytes(*first))
        };
        let (clocks, steps, live) = (word()?, word()?, word()?);
        let clocks = (0..clocks).map(|_| word().map(f64::from_bits)).collect::<Option<_>>()?;
        let steps = (0..steps).map(|_| Step::from_words([word()?, word()?])).collect::<Option<_>>()?;
        let live = (0..live).map(|_| word()).collect::<Option<_>>()?;
        Some(Self { clocks, steps, live, values: rest.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meeting(ns: f64, what: u32) -> Step {
        Step::Collective { stream: 0, ns, what, lenient: false }
    }

    #[test]
    fn the_slowest_rank_decides() {
        let fast = Packet {
            clocks: vec![0.0, 0.0],
            steps: vec![
                meeting(10.0, 7),
                Step::Record { stream: 0, mark: 0 },
                Step::Busy { stream: 1, ns: 50.0 },
                Step::Wait { stream: 1, mark: 0 },
                Step::Record { stream: 1, mark: 1 },
                Step::AtLeast { stream: 0, ns: 20.0 },
                meeting(10.0, 7),
            ],
            ..Packet::default()
        };
        let slow = Packet { clocks: vec![100.0], steps: vec![meeting(10.0, 7), meeting(15.0, 7)], ..Packet::default() };
        let (outcomes, spoiled) = play(&[fast, slow]).unwrap();
        assert!(!spoiled);
        assert_eq!(outcomes[0], Outcome { clocks: vec![125.0, 110.0], marks: vec![110.0, 110.0] });
        assert_eq!(outcomes[1].clocks, [125.0]);
    }

    #[test]
    fn discord_is_told_apart() {
        let packet = |steps: Vec<Step>| Packet { clocks: vec![0.0], steps, ..Packet::default() };
        assert_eq!(play(&[packet(vec![meeting(1.0, 1)]), packet(vec![])]), Err(Discord::Batches));
        assert_eq!(play(&[packet(vec![meeting(1.0, 1)]), packet(vec![meeting(1.0, 2)])]), Err(Discord::Choices));
        let lenient = Step::Collective { stream: 0, ns: 1.0, what: 2, lenient: true };
        assert!(play(&[packet(vec![meeting(1.0, 1)]), packet(vec![lenient])]).unwrap().1);
    }

    #[test]
    fn packets_read_back() {
        let packet = Packet {
            clocks: vec![1.5, -0.0],
            steps: vec![
                Step::Busy { stream: 1, ns: 0.25 },
                Step::Record { stream: 3, mark: 9 },
                Step::Wait { stream: 0x00ab_cdef, mark: u32::MAX },
                Step::AtLeast { stream: 0, ns: 1e18 },
                Step::Collective { stream: 2, ns: 3.0, what: 0xdead_beef, lenient: true },
                meeting(4.0, 5),
            ],
            live: vec![1, 2],
            values: vec![1, 2, 3],
        };
        let bytes = packet.to_bytes();
        assert_eq!(Packet::from_bytes(&bytes), Some(packet));
        assert_eq!(Packet::from_bytes(&bytes[..20]), None);
    }
}
