//! After the final: do captured and uncaptured collectives of a communicator survive each other, where a
//! finalist took away what keeps them apart?

use rand::RngExt;

use super::{Listener, Update};
use crate::backend::Backend;
use crate::campaign::{CampaignError, News};
use crate::choice::mixes_unsafely;
use crate::clock::Clock;
use crate::evidence::Evidence;
use crate::journal::Journal;
use crate::quarantine::quarantined;
use crate::record::{Arm, Event, OutcomeKind};
use crate::search::SearchContext;
use crate::seed::Seed;

/// Seconds of overlap for each such finalist, where nobody says otherwise.
pub(super) const OVERLAP_S: f64 = 60.0;

/// Checks the finalists that need it and were not checked before. Returns whether it came to its end.
pub(super) fn check_overlaps(
    context: &SearchContext,
    (seconds, seed): (f64, Seed),
    backend: &mut dyn Backend,
    (journal, clock, evidence): (&mut Journal, &mut Clock, &mut Evidence),
    listener: Listener<'_>,
) -> Result<bool, CampaignError> {
    for arm in in_question(context, evidence) {
        listener(Update::Notice(format!(
            "{}: captured and uncaptured collectives are made to overlap for {seconds} s",
            arm.name
        )));
        let mut environment = crate::space::variables(&arm);
        for (variable, value, _) in evidence.repairs() {
            environment.entry(variable.clone()).or_insert_with(|| value.clone());
        }
        let draw = seed.derive("overlap", &arm.id.0).random();
        let launch = evidence.next_launch();
        let Some(check) = backend.check_overlap(&arm.id, &environment, seconds, launch, draw)? else { continue };
        if check.failure.as_ref().is_some_and(|failure| failure.kind == OutcomeKind::Interrupted) {
            return Ok(false);
        }
        clock.advance_s(check.duration_s);
        let line = journal.append(clock.elapsed_s(), Event::OverlapChecked { arm: arm.id.clone(), check })?;
        journal.sync()?;
        evidence.tell(&line.event);
        listener(Update::Campaign(News::Line(&line)));
    }
    Ok(true)
}

fn in_question(context: &SearchContext, evidence: &Evidence) -> Vec<Arm> {
    let out = quarantined(evidence);
    let finalists = evidence.finalists().map(|(arms, _, _)| arms.to_vec()).unwrap_or_default();
    finalists
        .iter()
        .filter(|id| !out.contains(*id) && evidence.overlap(id).is_none())
        .filter(|id| !evidence.dropped().iter().any(|(dropped, _)| dropped == *id))
        .filter_map(|id| context.arms.iter().find(|arm| arm.id == *id))
        .filter(|arm| mixes_unsafely(arm))
        .cloned()
        .collect()
}
