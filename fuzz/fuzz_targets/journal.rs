//! A journal that somebody edited or a disk spoilt: it is refused, or everything that folds it holds:
//! evidence, strategy, verdict, tables, and the files of the answer.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use nccltune::choice::{CampaignFacts, judge};
use nccltune::emit::{EmitAs, render};
use nccltune::evidence::{Evidence, Objective, default_arm, measured_points};
use nccltune::journal::read_from;
use nccltune::knob;
use nccltune::quarantine::quarantined;
use nccltune::record::Manifest;
use nccltune::report::verdict_text;
use nccltune::search::{Exhaustive, SearchContext, Strategy as _};

/// A small recorded run with a trial. Most of its points are left out, so that a few lines of a journal
/// make a whole run and mutations hit what counts.
static RUN: LazyLock<(Manifest, SearchContext)> = LazyLock::new(|| {
    let text = include_str!("../../results/recorded/h200x2-host-memory-bench-sglang/manifest.json");
    let mut manifest: Manifest = serde_json::from_str(text).expect("recorded runs stay readable");
    let measured = manifest.workload.points.iter().position(|point| point.measured).expect("a measured point");
    manifest.workload.points = vec![manifest.workload.points.swap_remove(measured)];
    manifest.workload.guard.clear();
    if let Some(trial) = &mut manifest.trial {
        trial.cases.truncate(1);
    }
    let context = SearchContext {
        default: default_arm(&manifest.arms).expect("a default").id.clone(),
        objective: Objective::of(&manifest.workload).expect("an objective"),
        points: measured_points(&manifest.workload),
        settings: manifest.settings.clone(),
        most_launches: None,
            gate: None,
        most_trial_launches: None,
        trial: manifest.trial.clone(),
        budget_s: None,
        arms: manifest.arms.clone(),
    };
    (manifest, context)
});

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("run.jsonl");
    let Ok(lines) = read_from(bytes, path) else { return };
    let text: String =
        lines.iter().map(|line| serde_json::to_string(line).expect("what was read is written") + "\n").collect();
    assert_eq!(read_from(text.as_bytes(), path).expect("what is written is read"), lines);

    let (manifest, context) = &*RUN;
    let mut evidence = Evidence::default();
    for line in &lines {
        evidence.tell(&line.event);
    }
    let _ = (evidence.next_block(), evidence.next_launch(), quarantined(&evidence));
    let _ = evidence.open_block(&context.points, context.passes());
    for block in evidence.ended_blocks(nccltune::record::Phase::Trial) {
        let _ = evidence.throttle_difference(block);
    }
    let _ = Exhaustive.next(context, &evidence);
    let facts = CampaignFacts { stopped_by: "complete".to_owned(), wall_s: 1.0, notes: Vec::new() };
    let choice = judge(manifest, context, &evidence, &facts);
    let json = serde_json::to_string(&choice).expect("a choice is JSON");
    assert!(!json.is_empty() && !verdict_text(&choice, manifest, Some(100)).is_empty());
    for emit_as in EmitAs::ALL {
        let effect_of = |name: &str| knob::find(name).map(|knob| knob.effect.to_owned());
        let _ = render(&choice, manifest, std::path::Path::new("/srv/run"), emit_as, &effect_of);
    }
});
