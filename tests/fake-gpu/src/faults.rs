//! Which fault strikes now.

use std::time::{Duration, Instant};

use crate::chance;
use crate::function::Function;
use crate::home::home;
use crate::scenario::{Fault, Kind, Phase, Scenario};

/// What is being done, for faults to be selected by.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moment<'a> {
    pub(crate) phase: Option<Phase>,
    pub(crate) call: Option<&'a str>,
    pub(crate) bytes: Option<u64>,
    /// Index into [`crate::choice::PROTOCOLS`].
    pub(crate) protocol: Option<usize>,
    pub(crate) function: Option<Function>,
}

/// How often each fault could have struck, and who is asking.
#[derive(Default)]
pub(crate) struct Faults {
    counts: Vec<u64>,
    /// The rank, and before there is one the GPU.
    pub(crate) rank: Option<u32>,
    /// The launch, once a communicator has told it.
    pub(crate) launch: Option<u64>,
}

/// The scenario of this process; the default one where it cannot be read, which no call survives.
pub(crate) fn scenario() -> &'static Scenario {
    static DEFAULT: std::sync::LazyLock<Scenario> = std::sync::LazyLock::new(Scenario::default);
    home().scenario.as_ref().unwrap_or(&DEFAULT)
}

impl Faults {
    /// Before there is a communicator, the GPU stands for the rank.
    pub(crate) fn stand_on(&mut self, gpu: u32) {
        if self.launch.is_none() {
            self.rank = Some(gpu);
        }
    }

    /// The first fault of this kind that strikes now.
    pub(crate) fn strikes(&mut self, kind: Kind, moment: Moment) -> Option<&'static Fault> {
        let faults = &scenario().fault;
        if faults.is_empty() {
            return None;
        }
        self.counts.resize(faults.len(), 0);
        let launch = self.launch();
        (0..faults.len()).find_map(|at| {
            let fault = &faults[at];
            (fault.kind == kind && self.is_selected(fault, moment, launch) && self.comes_true(at, fault, launch))
                .then_some(fault)
        })
    }

    /// Whether a fault of this kind, and of the particulars asked for, holds: for what is so rather than
    /// happens, and is therefore not counted. Chance is drawn once a launch.
    pub(crate) fn holds(&self, kind: Kind, moment: Moment, has: impl Fn(&Fault) -> bool) -> bool {
        self.all_that_hold(kind, moment).any(has)
    }

    /// All faults of a kind that hold.
    pub(crate) fn all_that_hold<'a>(
        &'a self,
        kind: Kind,
        moment: Moment<'a>,
    ) -> impl Iterator<Item = &'static Fault> + 'a {
        let launch = self.launch();
        scenario().fault.iter().enumerate().filter_map(move |(at, fault)| {
            let is_drawn = fault
                .probability
                .is_none_or(|chance| chance::unit(&[scenario().seed, 0xfa17, at as u64, launch]) < chance);
            (fault.kind == kind && self.is_selected(fault, moment, launch) && is_drawn).then_some(fault)
        })
    }

    /// Whether any fault is of this kind: a cheap question before many dear ones.
    pub(crate) fn any(kind: Kind) -> bool {
        scenario().fault.iter().any(|fault| fault.kind == kind)
    }

    pub(crate) fn launch(&self) -> u64 {
        self.launch.unwrap_or_else(|| home().launches() + 1)
    }

    fn is_selected(&self, fault: &Fault, moment: Moment, launch: u64) -> bool {
        let protocol =
            |word: &String| moment.protocol.is_some_and(|at| crate::choice::PROTOCOLS[at].eq_ignore_ascii_case(word));
        fault.phase.is_none_or(|phase| moment.phase == Some(phase))
            && fault.call.as_deref().is_none_or(|call| moment.call == Some(call))
            && fault.rank.is_none_or(|rank| self.rank == Some(rank))
            && fault.launches.is_none_or(|[first, last]| (first..=last).contains(&launch))
            && fault.above_bytes.is_none_or(|bytes| moment.bytes.is_some_and(|of| of > bytes))
            && fault.protocol.as_ref().is_none_or(protocol)
            && fault
                .collective
                .as_ref()
                .is_none_or(|word| moment.function.is_some_and(|function| function.name().eq_ignore_ascii_case(word)))
            && fault.when.iter().all(|(name, value)| std::env::var(name).unwrap_or_default() == *value)
    }

    fn comes_true(&mut self, at: usize, fault: &Fault, launch: u64) -> bool {
        self.counts[at] += 1;
        let count = self.counts[at];
        fault.at.is_none_or(|wanted| wanted == count)
            && fault
                .probability
                .is_none_or(|chance| chance::unit(&[scenario().seed, 0xfa17, at as u64, launch, count]) < chance)
    }
}

/// How long something is held up: until a time, or for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold(Option<Instant>);

impl Hold {
    pub(crate) const FOR_EVER: Self = Self(None);

    /// From now on, as long as the fault says.
    pub(crate) fn of(fault: &Fault) -> Self {
        Self(fault.seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds.max(0.0))))
    }

    pub(crate) fn lasts(self) -> bool {
        self.0.is_none_or(|until| Instant::now() < until)
    }

    /// Holds this thread up.
    pub(crate) fn wait(self) {
        while self.lasts() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Ends this process by the fault's signal.
pub(crate) fn die(fault: &Fault) -> ! {
    let signal = match fault.signal.as_deref() {
        Some("ABRT") => libc::SIGABRT,
        Some("SEGV") => libc::SIGSEGV,
        _ => libc::SIGKILL,
    };
    // SAFETY: the default action ends the process, whatever handler was there before.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
    std::process::abort()
}
