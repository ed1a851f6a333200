//! Before an arm may be a finalist: does it get right what a server issues?

use super::{SearchContext, Want, living};
use crate::evidence::Evidence;
use crate::record::{ArmId, Phase};

/// The block that would-be finalists still need; none where all have passed, where the run has no gate,
/// or where its time is up. The default takes part once: what it cannot do is no fault of an arm.
pub(super) fn next<'a>(
    context: &SearchContext,
    evidence: &Evidence,
    arms: impl Iterator<Item = &'a ArmId>,
) -> Option<Want> {
    context.gate.as_ref()?;
    if context.budget_s.is_some_and(|budget| evidence.duration_s() >= budget) {
        return None;
    }
    let living = living(context, evidence);
    let needs = |arm: &&ArmId| living.contains(*arm) && evidence.gate(arm).is_none();
    let mut missing: Vec<ArmId> = arms.filter(needs).cloned().collect();
    if missing.is_empty() {
        return None;
    }
    missing.extend(Some(&context.default).filter(needs).cloned());
    Some(Want::Block { phase: Phase::Gate, arms: missing })
}
