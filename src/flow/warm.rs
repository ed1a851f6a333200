//! What an earlier run may tell a race: where to look first, and nothing else.

use std::path::Path;

use super::directory::{self, MANIFEST_FILE};
use super::tables::whole;
use crate::error_kind::{ErrorKind, Failure};
use crate::evidence::{Evidence, Objective, default_arm};
use crate::fingerprint::{Standing, compare};
use crate::journal;
use crate::record::{EarlierArm, FingerprintParts, Manifest, PointKey, WarmStart};
use crate::search::{SearchContext, earlier_arms};
use crate::wording::plural;

/// What a race of so many points is told. A manifest that was edited, or of another workload, tells nothing.
pub(super) fn earlier_at(warm_start: Option<&WarmStart>, points: usize) -> Vec<EarlierArm> {
    let arms = warm_start.iter().flat_map(|warm_start| &warm_start.earlier);
    arms.filter(|earlier| earlier.point_logs.len() == points).cloned().collect()
}

/// What becomes of an earlier run's figures at these points; what should be said about it is added to the notices.
pub(super) fn warm_start(
    run: &Path,
    (objective, points): (&Objective, &[PointKey]),
    is_simulated: bool,
    fingerprint: &FingerprintParts,
    notices: &mut Vec<String>,
) -> Result<WarmStart, Failure> {
    let usage = |text: String| Failure::new(ErrorKind::Usage, text);
    let manifest: Manifest = whole(directory::read(run, MANIFEST_FILE)?);
    if manifest.labels.simulated && !is_simulated {
        return Err(usage(format!("{} is simulated: it says nothing of these GPUs", run.display()))
            .with_hint("begin with a run that measured, or leave --warm-start out"));
    }
    let evidence = Evidence::of(&journal::read(run)?);
    let no_default = || usage(format!("{}: no arm is the default", run.display()));
    let context = SearchContext {
        default: default_arm(&manifest.arms).ok_or_else(no_default)?.id.clone(),
        objective: objective.clone(),
        points: points.to_vec(),
        settings: manifest.settings.clone(),
        most_trial_launches: None,
        trial: None,
        gate: None,
        most_launches: None,
        budget_s: None,
        earlier: Vec::new(),
        arms: manifest.arms,
    };
    let earlier = earlier_arms(&context, &evidence);
    if earlier.is_empty() {
        return Err(usage(format!("{} measured no arm at all points of this run", run.display()))
            .with_hint("begin with a run of the same workload and ranks, or leave --warm-start out"));
    }
    let name = run.file_name().map_or_else(|| run.to_string_lossy(), |name| name.to_string_lossy()).into_owned();
    let count = earlier.len() as u32;
    notices.push(format!(
        "the race begins with what {name} saw of {count} {}; its figures order the search and are part of no verdict",
        plural(count, "arm", "arms")
    ));
    // What the earlier run did not record did not change.
    let changed: Vec<String> = compare(&manifest.fingerprint.parts, &fingerprint.parts)
        .into_iter()
        .filter(|part| part.standing == Standing::Changed)
        .map(|part| part.name)
        .collect();
    if !changed.is_empty() {
        notices.push(format!("what is no longer as it was in {name}: {}", changed.join(", ")));
    }
    Ok(WarmStart { run: name, created: manifest.created, earlier })
}
