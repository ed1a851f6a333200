//! Launches that time nothing: what NCCL finds on idle and on busy GPUs, and what comes of collectives
//! that overlap.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::Duration;

use super::{Broken, Launch, NcclBackend, unexpected};
use crate::backend::{BackendError, LaunchPlan};
use crate::clock::{Clock, Deadline};
use crate::nccl_log::NcclLog;
use crate::record::{ChannelSearch, Outcome, OutcomeKind, OverlapCheck};
use crate::worker::protocol::{Answer, Order};

/// How long links are kept busy before NCCL looks at them: they take a fraction of that to speed up.
const WARM_UP_MS: u32 = 500;
/// What warming up and rounds may take beside a phase's own limit.
const WORK_EXPECTED: Duration = Duration::from_secs(10);
/// Size and number of the all-reduces of each chain that overlap: a decode step's, several times over.
const OVERLAP_BYTES: u64 = 65_536;
const OVERLAP_COLLECTIVES: u32 = 16;
/// Rounds between two looks at the clock.
const OVERLAP_ROUNDS: u32 = 10;

impl NcclBackend {
    /// What each rank's NCCL logged as its way to others in the last launch ("P2P/CUMEM"); an empty list
    /// where it logged nothing.
    pub fn last_transports(&self) -> Vec<Vec<String>> {
        self.transports.borrow().clone()
    }

    /// What NCCL makes of the machine by default: what each rank logged of a communicator that was opened
    /// and left again, with nothing measured on it. Nothing where it could not be opened: whoever measures
    /// finds out why.
    pub fn look(&mut self) -> Result<Vec<NcclLog>, BackendError> {
        let mut logs = Vec::new();
        let failure = self.check(&LaunchPlan::alone("default", BTreeMap::new(), Vec::new()), &mut |launch| {
            launch.join()?;
            logs.clone_from(&launch.logs);
            Ok(())
        })?;
        Ok(if failure.is_none() { logs } else { Vec::new() })
    }

    /// What NCCL's search for channels comes to with these variables, after copies that keep the links
    /// busy or without.
    pub fn channel_searches(
        &mut self,
        environment: &BTreeMap<String, String>,
        warm: bool,
    ) -> Result<Result<Vec<ChannelSearch>, Outcome>, BackendError> {
        let plan = LaunchPlan::alone("check", environment.clone(), Vec::new());
        let mut found = Vec::new();
        let outcome = self.check(&plan, &mut |launch| {
            if warm {
                let order = Order::WarmUp { milliseconds: WARM_UP_MS };
                for (rank, answer) in launch.step(|_| order.clone(), WORK_EXPECTED)?.into_iter().enumerate() {
                    let Answer::WarmedUp = answer else { return Err(unexpected(rank, &answer)) };
                }
            }
            let log = launch.join()?;
            found = log
                .graphs
                .iter()
                .map(|graph| ChannelSearch {
                    pattern: graph.name(),
                    channels: graph.channels,
                    bandwidth_gb_per_s: graph.bandwidth_gb_per_s,
                    path: graph.path.clone(),
                })
                .collect();
            Ok(())
        })?;
        Ok(match outcome {
            None => Ok(found),
            Some(outcome) => Err(outcome),
        })
    }

    /// Makes captured and uncaptured collectives of one communicator overlap for so many seconds.
    pub fn overlap(
        &mut self,
        environment: &BTreeMap<String, String>,
        seconds: f64,
        launch: u32,
        seed: u64,
    ) -> Result<OverlapCheck, BackendError> {
        let plan =
            LaunchPlan { launch, data_seed: seed, ..LaunchPlan::alone("check", environment.clone(), Vec::new()) };
        let (mut rounds, mut took_s) = (0, 0.0);
        let failure = self.check(&plan, &mut |launch| {
            launch.join()?;
            let order = Order::PrepareOverlap { bytes: OVERLAP_BYTES, collectives: OVERLAP_COLLECTIVES, seed };
            for (rank, answer) in launch.step(|_| order.clone(), WORK_EXPECTED)?.into_iter().enumerate() {
                let Answer::OverlapPrepared { .. } = answer else { return Err(unexpected(rank, &answer)) };
            }
            // Starting processes and joining is no overlap.
            let clock = Clock::real();
            let deadline = Deadline::after(Duration::try_from_secs_f64(seconds).unwrap_or_default());
            loop {
                let order = Order::Overlap { first_round: rounds, rounds: OVERLAP_ROUNDS };
                for (rank, answer) in launch.step(|_| order.clone(), WORK_EXPECTED)?.into_iter().enumerate() {
                    let Answer::Overlapped = answer else { return Err(unexpected(rank, &answer)) };
                }
                rounds += OVERLAP_ROUNDS;
                took_s = clock.elapsed_s();
                if launch.backend.setup.supervisor.interrupted() {
                    return Err(super::interrupted());
                }
                if deadline.is_over() {
                    return Ok(());
                }
            }
        })?;
        Ok(OverlapCheck { rounds, duration_s: super::round_us(took_s), failure })
    }

    /// Fresh processes that are greeted, do one thing, and are ended whatever came of it.
    fn check(
        &mut self,
        plan: &LaunchPlan,
        work: &mut dyn FnMut(&mut Launch<'_>) -> Result<(), Broken>,
    ) -> Result<Option<Outcome>, BackendError> {
        let mut refusal = None;
        let refused = self.room.get_mut().refuse(plan, &self.setup.environment, &mut |event| {
            if let crate::record::Event::CellFailed { outcome, .. } = event {
                refusal = Some(outcome);
            }
            ControlFlow::Continue(())
        });
        if refused {
            return Ok(refusal.or(Some(Outcome { kind: OutcomeKind::OutOfMemory, detail: String::new() })));
        }
        let mut launch = Launch::start(self, plan)?;
        let done = launch.hello().and_then(|()| work(&mut launch)).and_then(|()| launch.leave());
        let failure = done.err();
        launch.end(failure.as_ref(), &self.setup.logs)?;
        self.room.get_mut().clear(plan.launch, failure.is_some(), &self.setup.logs);
        if failure.as_ref().is_some_and(|failure| failure.gpu_suspect) {
            self.prove_gpus()?;
        }
        Ok(failure.map(|failure| failure.outcome))
    }
}

impl Launch<'_> {
    /// Joins a communicator; what its first rank logged.
    fn join(&mut self) -> Result<NcclLog, Broken> {
        let mut own = NcclLog::default();
        let order = Order::OpenCommunicator { unique_id: self.unique_id()?, group: None, channels_min: None };
        for (rank, answer) in self.step(|_| order.clone(), Duration::ZERO)?.into_iter().enumerate() {
            let Answer::Opened { log } = answer else { return Err(unexpected(rank, &answer)) };
            self.note_log(rank, &log, &mut own);
        }
        Ok(own)
    }

    /// Leaves it, and ends.
    fn leave(&mut self) -> Result<(), Broken> {
        self.step(|_| Order::CloseCommunicator, Duration::ZERO)?;
        let answers = self.step(|_| Order::Finish, Duration::ZERO)?;
        match answers.into_iter().enumerate().find(|(_, answer)| *answer != Answer::Finished) {
            None => Ok(()),
            Some((rank, answer)) => Err(unexpected(rank, &answer)),
        }
    }
}
