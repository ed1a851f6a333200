//! Arms that share one communicator: the tuner plugin is told what to run, a graph is captured, and what it did is read
//! back before anything counts.
//!
//! What an arm's variables would have run is known without its communicator. A communicator that has channels to spare
//! is asked first what it runs by itself: thread thresholds and the least traffic of a channel then tell how many
//! channels are of use to a message. Fewer of them, as the arm's own communicator may have, are asked of the plugin;
//! as many or more change nothing. NCCL takes the smaller number in both forms, and as many threads.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Broken, Launch, Now, broken, effective_of, round_us, unexpected};
use crate::backend::{CommunicatorPlan, Sink, told};
use crate::clock::Clock;
use crate::collective::Collective;
use crate::knob::{CALL_VARIABLES, CallCell, CallForm};
use crate::nccl_log::NcclLog;
use crate::record::{CallTold, CellMeasurement, Effective, Event, Outcome, OutcomeKind, PointKey};
use crate::tuner_table::{Decision, decision_of};
use crate::worker::protocol::{Answer, CallChoice, ChoiceFate, Order};

/// What is in NCCL's line where it loaded this project's plugin: releases differ in the words between.
const LOADED: [&str; 2] = ["Using", "nccltune"];
/// Algorithms whose channels follow the rule above, by number: tree and ring.
const COUNTED: [usize; 2] = [0, 1];

/// A communicator that several arms share.
struct Shared {
    log: NcclLog,
    /// Channels that NCCL finds by itself, and those that this communicator has.
    found: u32,
    channels: u32,
    /// What it runs where nothing is said of channels.
    unlimited: BTreeMap<(Option<CallCell>, PointKey), Decision>,
}

/// What one arm wants of a point.
struct Wanted<'a> {
    point: PointKey,
    form: &'a CallForm,
    /// One algorithm with one protocol, or NCCL's own choice.
    cell: Option<CallCell>,
}

impl Launch<'_> {
    /// All arms of one communicator, one after another. `Ok(false)` if the sink asked for an end.
    pub(super) fn measure_calls<'plan>(
        &mut self,
        arms: &'plan [CommunicatorPlan],
        index: usize,
        position: &mut u32,
        now: &mut Now<'plan>,
        sink: Sink<'_>,
    ) -> Result<bool, Broken> {
        let mut shared = self.open_shared(arms)?;
        for plan in arms {
            let Some(form) = &plan.call else { continue };
            *now = Now { arm: &plan.arm, point: None };
            for point in &plan.points {
                now.point = Some(*point);
                let clock = Clock::real();
                let event = match self.measure_call(&mut shared, form, *point)? {
                    Ok((collectives, replays_us, call, log)) => {
                        let effective = effective_call(&shared, form, *point, &log);
                        let flags = self.flags(&plan.arm, *point, &effective, &shared.log, &CALL_VARIABLES);
                        *position += 1;
                        Event::CellMeasured(CellMeasurement {
                            arm: plan.arm.id.clone(),
                            point: *point,
                            block: self.plan.block,
                            launch: self.plan.launch,
                            communicator: index as u32,
                            position: *position - 1,
                            collectives_per_replay: collectives,
                            replays_us,
                            effective,
                            flags,
                            call: Some(call),
                            duration_s: round_us(clock.elapsed_s()),
                        })
                    }
                    // The arm failed, and nothing else.
                    Err(detail) => Event::CellFailed {
                        arm: plan.arm.id.clone(),
                        point: Some(*point),
                        block: self.plan.block,
                        launch: self.plan.launch,
                        outcome: Outcome { kind: OutcomeKind::Refused, detail },
                        duration_s: round_us(clock.elapsed_s()),
                    },
                };
                let has_failed = matches!(event, Event::CellFailed { .. });
                if sink(event).is_break() {
                    return Ok(false);
                }
                if has_failed {
                    break;
                }
            }
            now.point = None;
        }
        // What memory it took says nothing about any of its arms.
        self.leave_shared()?;
        Ok(true)
    }

    /// Opens the communicator with as many channels as any of its arms asks for.
    fn open_shared(&mut self, arms: &[CommunicatorPlan]) -> Result<Shared, Broken> {
        let channels_in = |log: &NcclLog| {
            let untold = || broken(OutcomeKind::Unsupported, "NCCL's log does not tell its channels".to_owned(), false);
            log.communicator_channels().ok_or_else(untold)
        };
        let is_loaded = |line: &String| LOADED.iter().all(|word| line.contains(word));
        let mut log = self.open(&arms[0], None)?;
        if let Some(missing) = self.logs.iter().find(|log| !log.tuner.iter().any(is_loaded)) {
            let said = missing.tuner.last().cloned().unwrap_or_else(|| "its log says nothing of it".to_owned());
            let why = format!("NCCL did not load the tuner plugin that a search at call level needs: {said}");
            self.unusable = Some(why.clone());
            return Err(broken(OutcomeKind::Unsupported, why, false));
        }
        let found = channels_in(&log)?;
        let asked = arms.iter().filter_map(|plan| plan.call.as_ref()?.channels_min).max();
        if let Some(asked) = asked.filter(|asked| *asked > found) {
            // Nothing was run in the first one, so that it cost no connections.
            self.leave_shared()?;
            log = self.open(&arms[0], Some(asked))?;
        }
        let channels = channels_in(&log)?;
        if let Some(asked) = asked.filter(|asked| *asked > channels) {
            let detail = format!("NCCL set up {channels} channels where the communicator was to have {asked}");
            return Err(broken(OutcomeKind::Refused, detail, false));
        }
        Ok(Shared { log, found, channels, unlimited: BTreeMap::new() })
    }

    /// Leaves a communicator of which nobody wants to know the memory.
    fn leave_shared(&mut self) -> Result<(), Broken> {
        for (rank, answer) in self.step(|_| Order::CloseCommunicator, Duration::ZERO)?.into_iter().enumerate() {
            let Answer::Closed { .. } = answer else { return Err(unexpected(rank, &answer)) };
        }
        Ok(())
    }

    /// One arm at one point: the collectives of a replay, its times, what the plugin was told, and what was logged; or
    /// why what ran is not what the arm means.
    #[expect(clippy::type_complexity, reason = "named where it is taken apart, above")]
    fn measure_call(
        &mut self,
        shared: &mut Shared,
        form: &CallForm,
        point: PointKey,
    ) -> Result<Result<(u32, Vec<f64>, CallTold, NcclLog), String>, Broken> {
        let Some(cell) = form.cell(point.collective.log_name()) else {
            return Ok(Err(format!("the tuner plugin cannot stand for the arm's variables at {point}")));
        };
        let choice = match self.choice(shared, &Wanted { point, form, cell })? {
            Ok(choice) => choice,
            Err(why) => return Ok(Err(why)),
        };
        self.choose(choice)?;
        let mut log = NcclLog::default();
        let (collectives, replays_us) = self.measure_cell(point, &mut log)?;
        if let Err(why) = self.proven(choice, point)? {
            return Ok(Err(why));
        }
        shared.log.transports.extend(log.transports.iter().cloned());
        let ran = decision_of(&effective_of(&log, point));
        match (choice, ran) {
            (Some(_), None) => return Ok(Err(untold(point))),
            (Some(chosen), Some(ran)) if chosen.channels > 0 && ran.channels > chosen.channels => {
                let (ran, chosen) = (ran.channels, chosen.channels);
                return Ok(Err(format!("{ran} channels ran where the tuner plugin chose {chosen}")));
            }
            _ => {}
        }
        Ok(Ok((collectives, replays_us, told_of(choice), log)))
    }

    /// What the plugin must be told so that the arm's own run comes of it.
    fn choice(
        &mut self,
        shared: &mut Shared,
        wanted: &Wanted<'_>,
    ) -> Result<Result<Option<CallChoice>, String>, Broken> {
        let Wanted { point, form, cell } = *wanted;
        let as_it_is = cell.map(|cell| choice_of(cell, 0));
        let most = form.channels(shared.found);
        if most >= shared.channels {
            return Ok(Ok(as_it_is));
        }
        let unlimited = match shared.unlimited.get(&(cell, point)) {
            Some(known) => *known,
            None => match self.look(shared, as_it_is, point)? {
                Ok(ran) => *shared.unlimited.entry((cell, point)).or_insert(ran),
                Err(why) => return Ok(Err(why)),
            },
        };
        if unlimited.channels <= most {
            return Ok(Ok(as_it_is));
        }
        if !COUNTED.contains(&unlimited.algorithm) {
            return Ok(Err(format!("how many channels NCCL takes at {point} cannot be told call by call")));
        }
        let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
        let cell = CallCell { algorithm: number(unlimited.algorithm), protocol: number(unlimited.protocol) };
        Ok(Ok(Some(choice_of(cell, most))))
    }

    /// What runs at a point where nothing is said of channels.
    fn look(
        &mut self,
        shared: &mut Shared,
        choice: Option<CallChoice>,
        point: PointKey,
    ) -> Result<Result<Decision, String>, Broken> {
        self.choose(choice)?;
        let mut log = NcclLog::default();
        self.prepare(point, &mut log)?;
        shared.log.transports.extend(log.transports.iter().cloned());
        if let Err(why) = self.proven(choice, point)? {
            return Ok(Err(why));
        }
        let ran = decision_of(&effective_of(&log, point));
        Ok(ran.ok_or_else(|| untold(point)))
    }

    /// Tells every rank's plugin what to choose from here on.
    fn choose(&mut self, choice: Option<CallChoice>) -> Result<(), Broken> {
        for (rank, answer) in self.step(|_| Order::Choose { choice }, Duration::ZERO)?.into_iter().enumerate() {
            let Answer::Chosen = answer else { return Err(unexpected(rank, &answer)) };
        }
        Ok(())
    }

    /// Whether every rank's plugin was asked since, and did as it was told; if not, what it did.
    fn proven(&mut self, choice: Option<CallChoice>, point: PointKey) -> Result<Result<(), String>, Broken> {
        if point.collective == Collective::SendRecv {
            // No plugin is asked.
            return Ok(Ok(()));
        }
        let mut odd = None;
        for (rank, answer) in self.step(|_| Order::ReadControl, Duration::ZERO)?.into_iter().enumerate() {
            let Answer::Control { fate, decisions, .. } = answer else { return Err(unexpected(rank, &answer)) };
            let before = std::mem::replace(&mut self.decisions[rank], decisions);
            let expected = if choice.is_some() { ChoiceFate::Honoured } else { ChoiceFate::Left };
            if decisions <= before || fate == ChoiceFate::Unasked {
                odd = odd.or(Some(format!("NCCL did not ask the tuner plugin of rank {rank} at {point}")));
            } else if fate != expected {
                let asked = choice.map_or_else(|| "its own choice".to_owned(), name_of);
                odd = odd.or(Some(match fate {
                    ChoiceFate::Unavailable => format!(
                        "NCCL cannot run {asked} here at {point}: the tuner plugin left its own choice, which is not \
                         what the arm means"
                    ),
                    _ => format!("the tuner plugin of rank {rank} did not choose {asked} at {point}"),
                }));
            }
        }
        Ok(odd.map_or(Ok(()), Err))
    }
}

/// What ran, as the arm's own communicator would tell it.
fn effective_call(shared: &Shared, form: &CallForm, point: PointKey, log: &NcclLog) -> Effective {
    Effective {
        transport: shared.log.transport(),
        communicator_channels: Some(form.channels(shared.found)),
        ..effective_of(log, point)
    }
}

fn untold(point: PointKey) -> String {
    format!("NCCL's log does not tell what ran at {point}")
}

const fn choice_of(cell: CallCell, channels: u32) -> CallChoice {
    CallChoice { algorithm: cell.algorithm, protocol: cell.protocol, channels }
}

fn told_of(choice: Option<CallChoice>) -> CallTold {
    let cell = choice.map(|choice| CallCell { algorithm: choice.algorithm, protocol: choice.protocol });
    told(cell, choice.map_or(0, |choice| choice.channels))
}

fn name_of(choice: CallChoice) -> String {
    let told = told_of(Some(choice));
    let channels = told.channels.map(|channels| format!(" over {channels} channels")).unwrap_or_default();
    format!("{} with {}{channels}", told.algo.unwrap_or_default(), told.proto.unwrap_or_default())
}
