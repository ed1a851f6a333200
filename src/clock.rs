//! The only place that reads a clock: real time, or the virtual time of a simulation.

use std::time::{Duration, Instant, SystemTime};

/// Elapsed time of a run. Simulated and replayed runs advance it by hand.
#[derive(Debug)]
pub enum Clock {
    /// The machine's monotonic clock, and the seconds an earlier part of the run took.
    Real(Instant, f64),
    /// Seconds that only [`Clock::advance_s`] moves.
    Virtual(f64),
}

impl Clock {
    /// A clock that starts now.
    #[expect(clippy::disallowed_methods, reason = "this is the room for clocks")]
    pub fn real() -> Self {
        Self::Real(Instant::now(), 0.0)
    }

    /// A clock that stands at zero until it is advanced.
    pub const fn virtual_time() -> Self {
        Self::Virtual(0.0)
    }

    /// The same clock, as if this many seconds had passed already: a resumed run goes on counting.
    #[must_use]
    pub fn continued_from(self, seconds: f64) -> Self {
        match self {
            Self::Real(start, before) => Self::Real(start, before + seconds),
            Self::Virtual(now) => Self::Virtual(now + seconds),
        }
    }

    /// Seconds since the clock started.
    pub fn elapsed_s(&self) -> f64 {
        match self {
            Self::Real(start, before) => before + start.elapsed().as_secs_f64(),
            Self::Virtual(seconds) => *seconds,
        }
    }

    /// Moves a virtual clock; a real one moves by itself.
    pub fn advance_s(&mut self, seconds: f64) {
        if let Self::Virtual(now) = self {
            *now += seconds.max(0.0);
        }
    }
}

/// A point in real time after which waiting ends.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// `wait` from now.
    #[expect(clippy::disallowed_methods, reason = "this is the room for clocks")]
    pub fn after(wait: Duration) -> Self {
        Self(Instant::now() + wait)
    }

    /// What is left, zero once it has passed.
    #[expect(clippy::disallowed_methods, reason = "this is the room for clocks")]
    pub fn remaining(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    pub fn is_over(&self) -> bool {
        self.remaining().is_zero()
    }

    /// The instant itself, for libraries that sleep until one.
    pub const fn instant(&self) -> Instant {
        self.0
    }
}

/// The wall-clock time, for headers and manifests only; nothing is ever decided by it.
#[expect(clippy::disallowed_methods, reason = "this is the room for clocks")]
pub fn wall_time() -> SystemTime {
    SystemTime::now()
}

/// Microseconds of the wall clock since 1970, for telling which of several processes of this machine
/// noticed something first.
pub fn wall_time_us() -> u64 {
    wall_time().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_time_moves_only_by_hand_and_never_backwards() {
        let mut clock = Clock::virtual_time();
        clock.advance_s(2.5);
        clock.advance_s(-1.0);
        assert!((clock.elapsed_s() - 2.5).abs() < f64::EPSILON);
    }
}
