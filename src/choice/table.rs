//! An answer with a tuner table: what must hold where the plugin is not found, and what the table says nothing about.

use std::collections::BTreeSet;

use super::{FEWEST_LAUNCHES, candidate};
use crate::evidence::Evidence;
use crate::file_kind::FileKind;
use crate::knob;
use crate::machine::NcclVersion;
use crate::record::{Arm, Manifest};
use crate::search::SearchContext;
use crate::space;
use crate::wording::plural;

/// Why an arm with a table may not ship although it gained. NCCL goes on in silence where it does not find the plugin,
/// so what stands beside the table must have passed without it, and may not open LL128.
pub(super) fn veto(manifest: &Manifest, context: &SearchContext, evidence: &Evidence, arm: &Arm) -> Option<String> {
    let base = space::without_table(arm)?;
    let version = manifest.nccl.as_ref().map(|nccl| NcclVersion::from_code(nccl.version));
    // Where no library was loaded, the rules of the release that this tool was checked on.
    let version = version.unwrap_or(NcclVersion::v2(28, 9));
    let opens = base.env.get("NCCL_PROTO").is_some_and(|text| {
        context.points.iter().any(|point| knob::opens_ll128(text, version, point.collective.log_name()))
    });
    if opens {
        return Some(
            "NCCL_PROTO beside the table opens LL128, which a server that does not find the plugin would run unchecked"
                .to_owned(),
        );
    }
    if base.id == context.default {
        return None;
    }
    let untold = "a server that does not find the plugin runs with them";
    let Some(known) = context.arms.iter().find(|known| known.id == base.id) else {
        return Some(format!("the variables beside its table were never measured without it, and {untold}"));
    };
    if let Some(failure) = evidence.benchmark_failures_of(&known.id).last() {
        return Some(format!(
            "{}, which stands beside its table, fails without it, and {untold}: {}",
            known.name, failure.detail
        ));
    }
    match candidate(manifest, context, evidence, known) {
        Some(passed) if passed.objective.count >= FEWEST_LAUNCHES => passed.veto.map(|reason| {
            format!("{}, which stands beside its table, does not pass without it, and {untold}: {reason}", known.name)
        }),
        _ => Some(format!(
            "{}, which stands beside its table, was not judged without it on {FEWEST_LAUNCHES} paired launches, and \
             {untold}",
            known.name
        )),
    }
}

/// What whoever deploys a table must know: the server's other communicators.
pub(super) fn warnings(manifest: &Manifest, context: &SearchContext, arm: &Arm) -> Vec<String> {
    if !arm.files.contains_key(&FileKind::TunerTable) {
        return Vec::new();
    }
    let measured: BTreeSet<u32> = context.points.iter().map(|point| point.ranks).collect();
    let workload = &manifest.workload;
    let others: Vec<String> = workload
        .points
        .iter()
        .chain(&workload.guard)
        .map(|point| point.ranks)
        .collect::<BTreeSet<u32>>()
        .difference(&measured)
        .map(ToString::to_string)
        .collect();
    if others.is_empty() {
        return Vec::new();
    }
    let own: Vec<String> = measured.iter().map(ToString::to_string).collect();
    vec![format!(
        "the tuner table is for communicators of {} {}; the server also opens some of {}, which keep NCCL's own choices",
        own.join(" and "),
        plural(measured.len() as u32, "ranks", "ranks"),
        others.join(" and ")
    )]
}
