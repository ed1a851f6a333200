//! What a launch on GPUs costs, for plans and progress bars, and for the order of levels: a block changes the costliest
//! least.
//!
//! A level costs what it repeats: init + connect(channels) + capture for a launch, connect and a short init for a
//! communicator, a capture for a call. Seen on two H200 with NCCL 2.28.9, buffers in host memory.

use itertools::Itertools;

use super::{CommunicatorPlan, LaunchPlan};
use crate::knob::CallForm;

/// Processes, contexts, the first communicator and the connections of its first algorithm.
const LAUNCH_S: f64 = 1.6;
/// Every further communicator in living processes, before it is connected.
const INIT_S: f64 = 0.03;
/// The first use of an algorithm connects all channels of a communicator: 0.39 s for 32 of them.
const CONNECT_S_PER_CHANNEL: f64 = 0.012;
/// Channels of a communicator whose variables do not say: what NCCL took there by itself made up 0.2 s.
const CHANNELS_ASSUMED: u32 = 14;
/// A graph of some dozens of collectives, its first runs and the check of its data.
const CAPTURE_S: f64 = 0.0013;
/// Bytes that are copied to the host and compared in a second.
const CHECKED_BYTES_PER_S: f64 = 4e8;
/// A step between parent and workers, beside what it does.
const STEP_S: f64 = 0.01;
/// A forward pass in its variants.
const PASS_S: f64 = 2.0;

/// Seconds of a launch on GPUs.
pub fn expected_on_gpus_s(plan: &LaunchPlan) -> f64 {
    let communicators: f64 = plan.shared().enumerate().map(|(index, shared)| communicator_s(index, shared)).sum();
    let cells: f64 = plan
        .communicators
        .iter()
        .flat_map(|communicator| &communicator.points)
        .map(|point| CAPTURE_S + plan.cell_time_ms / 1000.0 + point.bytes as f64 / CHECKED_BYTES_PER_S)
        .sum();
    let checks: f64 = plan
        .communicators
        .iter()
        .flat_map(|communicator| &communicator.checks)
        .map(|check| STEP_S + f64::from(check.repeats) * (STEP_S + check.point.bytes as f64 / CHECKED_BYTES_PER_S))
        .sum();
    let passes: usize = plan.communicators.iter().map(|communicator| communicator.passes.len()).sum();
    LAUNCH_S + communicators + cells + checks + PASS_S * passes as f64
}

/// Seconds of the communicator with this number: its init, and connections for each algorithm that is used in it.
fn communicator_s(index: usize, shared: &[CommunicatorPlan]) -> f64 {
    let connect_s = CONNECT_S_PER_CHANNEL * f64::from(channels(shared));
    let algorithms = shared.iter().map(|plan| plan.call.as_ref().map(|form| algorithm(plan, form))).unique().count();
    // The first init of all, and its first algorithm, are part of the launch.
    let (init_s, connected) = if index == 0 { (0.0, algorithms.saturating_sub(1)) } else { (INIT_S, algorithms) };
    init_s + connect_s * connected as f64
}

/// Channels that are connected.
fn channels(shared: &[CommunicatorPlan]) -> u32 {
    let asked = |plan: &CommunicatorPlan| plan.arm.env.get("NCCL_MIN_NCHANNELS")?.parse::<u32>().ok();
    shared.iter().filter_map(asked).max().map_or(CHANNELS_ASSUMED, |channels| channels.min(64))
}

/// The algorithm that an arm runs of its first point, where it says so.
fn algorithm(plan: &CommunicatorPlan, form: &CallForm) -> Option<u32> {
    let point = plan.points.first()?;
    form.cell(point.collective.log_name())?.map(|cell| cell.algorithm)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::collective::{Collective, DataType};
    use crate::machine::NcclVersion;
    use crate::record::PointKey;
    use crate::wording::fixtures::arm;

    /// The 28 arms of {ring, tree} x {LL, Simple} x channels, at eleven sizes; in one communicator, or each in its own.
    fn plan(is_shared: bool) -> LaunchPlan {
        let points: Vec<PointKey> =
            (12..=22).map(|power| PointKey::usual(Collective::AllReduce, DataType::Bf16, 1 << power, 2)).collect();
        let mut plan = LaunchPlan { cell_time_ms: 3.0, ..LaunchPlan::alone("x", BTreeMap::new(), Vec::new()) };
        plan.communicators.clear();
        for (algo, proto) in ["Ring", "Tree"].into_iter().cartesian_product(["LL", "Simple"]) {
            for channels in ["", "1", "2", "4", "8", "16", "32"] {
                let mut env = vec![("NCCL_ALGO", algo), ("NCCL_PROTO", proto)];
                if !channels.is_empty() {
                    env.extend([("NCCL_MIN_NCHANNELS", channels), ("NCCL_MAX_NCHANNELS", channels)]);
                }
                let arm = arm(&format!("{algo} {proto} {channels}"), &env);
                plan.communicators.push(CommunicatorPlan {
                    call: CallForm::of(&arm.env, NcclVersion::v2(28, 9)).filter(|_| is_shared),
                    arm,
                    variables: BTreeMap::new(),
                    points: points.clone(),
                    checks: Vec::new(),
                    passes: Vec::new(),
                });
            }
        }
        plan
    }

    #[test]
    fn a_call_costs_less_than_a_communicator_and_that_less_than_a_launch() {
        let (calls, communicators) = (plan(true), plan(false));
        assert_eq!((calls.shared().count(), communicators.shared().count()), (1, 28));
        let (calls_s, communicators_s) = (expected_on_gpus_s(&calls), expected_on_gpus_s(&communicators));
        let launches_s = 28.0
            * expected_on_gpus_s(&LaunchPlan {
                communicators: communicators.communicators[..1].to_vec(),
                ..communicators.clone()
            });
        assert!(calls_s < communicators_s && communicators_s < launches_s, "{calls_s} {communicators_s} {launches_s}");
        // 1.6 s fixed, 0.4 s for the second algorithm over 32 channels, 4.3 ms a cell, and the check of 28 times 8 MB.
        let cells_s = 28.0 * (11.0 * 0.0043 + f64::from((1 << 23) - (1 << 12)) / 4e8);
        assert!((calls_s - (1.6 + 32.0 * 0.012 + cells_s)).abs() < 1e-9, "{calls_s}");
    }
}
