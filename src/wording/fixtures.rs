//! Runs made up for tests of what is written about runs. The figures are plausible, not measured.

use std::collections::BTreeMap;

use crate::collective::{Collective, DataType, Form};
use crate::machine::{Gpu, LibrarySource, Machine, NcclLibrary};
use crate::record::{
    Answer, AnswerKind, Arm, ArmId, BackendKind, BatchObjective, CellMeasurement, Check, CheckReport, CheckVerdict,
    Choice, Contribution, Effective, FORMAT, FingerprintParts, Labels, Manifest, Memory, Objective, Origin, Pin, Point,
    PointKey, PointPhase, PointVerdict, SearchSummary, Settings, Space, Statistics, Thresholds, Trial, VerdictKind,
    Veto, Workload,
};

pub(crate) fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
    entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn point(collective: Collective, bytes: u64, calls: u32, batch: u32, phase: PointPhase, origin: &str) -> Point {
    Point {
        collective,
        dtype: DataType::Bf16,
        bytes,
        ranks: 8,
        calls_per_pass: calls,
        batch,
        weight: if phase == PointPhase::Prefill { 0.0 } else { 1.0 },
        phase,
        measured: true,
        origin: origin.to_owned(),
        form: Form::usual(collective),
    }
}

pub(crate) fn workload() -> Workload {
    use Collective::{AllGather, AllReduce};
    use PointPhase::{Prefill, Verify};
    let mut reference = point(AllReduce, 43_009, 1, 32, Verify, "an odd size, to show one");
    reference.measured = false;
    Workload {
        format: FORMAT,
        model: "Kimi-K2.5".to_owned(),
        engine: "sglang".to_owned(),
        tensor_parallel: 8,
        verify_tokens: 4,
        points: vec![
            point(AllReduce, 57_344, 122, 1, Verify, "after attention and after the experts, 61 layers"),
            point(AllReduce, 458_752, 122, 8, Verify, "after attention and after the experts, 61 layers"),
            point(AllReduce, 1_835_008, 122, 32, Verify, "after attention and after the experts, 61 layers"),
            reference,
        ],
        guard: vec![
            point(AllReduce, 117_440_512, 122, 1, Prefill, "a prefill chunk of 8192 tokens"),
            point(AllGather, 1_310_720, 1, 1, Prefill, "logits of the last token"),
        ],
        assumptions: vec![
            "prefill chunk 8192: sglang's default, not read from a server".to_owned(),
            "all batches weigh the same".to_owned(),
        ],
        ..Workload::default()
    }
}

/// An arm whose id is its name.
pub(crate) fn arm(name: &str, env: &[(&str, &str)]) -> Arm {
    Arm {
        id: ArmId(name.to_owned()),
        name: name.to_owned(),
        env: map(env),
        files: BTreeMap::new(),
        server_args: Vec::new(),
    }
}

/// An arm at one small point in the first launch of the first block.
pub(crate) fn cell(arm: &str) -> CellMeasurement {
    CellMeasurement {
        arm: ArmId(arm.to_owned()),
        point: PointKey::usual(Collective::AllReduce, DataType::Bf16, 4096, 2),
        block: 0,
        launch: 0,
        communicator: 0,
        position: 0,
        collectives_per_replay: 64,
        replays_us: vec![10.0],
        effective: Effective::default(),
        flags: Vec::new(),
        call: None,
        duration_s: 0.1,
    }
}

pub(crate) fn gpu(index: u32) -> Gpu {
    Gpu {
        index,
        uuid: format!("GPU-0000000{index}"),
        name: "NVIDIA RTX PRO 6000 Blackwell".to_owned(),
        pci_bus_id: format!("0000:{index}1:00.0"),
        memory_total_mib: Some(97_887),
        memory_free_mib: None,
        compute_capability: Some([12, 0]),
        pcie_generation: Some([5, 5]),
        pcie_width: Some([16, 16]),
        nvlinks: Some(0),
        persistence: None,
        utilization_percent: Some(0),
        process_ids: Vec::new(),
    }
}

pub(crate) fn manifest() -> Manifest {
    Manifest {
        warm_start: None,
        format: FORMAT,
        tool_version: "0.1.0".to_owned(),
        commit: None,
        created: "2026-11-30T09:14:07Z".to_owned(),
        arguments: vec!["tune".to_owned()],
        seed: 7,
        backend: BackendKind::Nccl,
        labels: Labels::default(),
        machine: Machine {
            name: "8x NVIDIA RTX PRO 6000 Blackwell".to_owned(),
            driver: Some("580.95.05".to_owned()),
            cuda_driver_version: Some(13_000),
            cpu: Some("AMD EPYC 9575F".to_owned()),
            gpus: (0..8).map(gpu).collect(),
        },
        fingerprint: FingerprintParts {
            combined: "3f2a9c5be1d04476a8b1c2d3e4f5061728394a5b6c7d8e9f00112233445566aa".to_owned(),
            parts: map(&[("driver", "580.95.05")]),
        },
        nccl: Some(NcclLibrary {
            path: "/opt/venv/nvidia/nccl/lib/libnccl.so.2".to_owned(),
            version: 22_809,
            sha256: "9c1d5e3f7a20b4c6d8e0f1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6".to_owned(),
            source: LibrarySource::PythonEnvironment,
        }),
        pins: vec![
            Pin { variable: "CUDA_DEVICE_MAX_CONNECTIONS".to_owned(), value: "8".to_owned(), origin: Origin::Engine },
            Pin { variable: "NCCL_CUMEM_ENABLE".to_owned(), value: "0".to_owned(), origin: Origin::Engine },
            Pin { variable: "NCCL_NVLS_ENABLE".to_owned(), value: "0".to_owned(), origin: Origin::Engine },
        ],
        kept_environment: Vec::new(),
        devices: (0..8).collect(),
        workload: workload(),
        space: Space {
            format: FORMAT,
            name: "pcie-decode".to_owned(),
            description: "Decode and verify on GPUs without NVLink.".to_owned(),
            axis: Vec::new(),
            arm: Vec::new(),
            rule: Vec::new(),
        },
        arms: Vec::new(),
        quarantined: Vec::new(),
        misjudged: None,
        tables: None,
        makes_tables: false,
        call_plugin: None,
        notices: Vec::new(),
        settings: Settings { strategy: "racing".to_owned(), search_blocks: 4, ..Settings::default() },
        trial: None,
        gate: None,
        checks: checks(),
        peer_access: None,
        space_arms: None,
        dead_axes: Vec::new(),
        cold_and_warm: None,
        recorded: None,
        imported_files: Vec::new(),
    }
}

/// A pin the way `--pin` makes one.
pub(crate) fn pinned(variable: &str, value: &str) -> Pin {
    Pin { variable: variable.to_owned(), value: value.to_owned(), origin: Origin::Pin }
}

fn ran(algo: &str, proto: &str, channels: u32) -> Effective {
    Effective {
        transport: Some("P2P/CUMEM".to_owned()),
        communicator_channels: Some(channels),
        algo: Some(algo.to_owned()),
        proto: Some(proto.to_owned()),
        channels: Some(channels),
        threads: None,
    }
}

fn point_verdict(point: &Point, baseline: f64, ratio: f64, half_width: f64) -> PointVerdict {
    PointVerdict {
        collective: point.collective,
        dtype: point.dtype,
        bytes: point.bytes,
        batch: point.batch,
        calls_per_pass: point.calls_per_pass,
        weight: point.weight,
        phase: point.phase,
        measured: point.measured,
        baseline_us: Some(baseline),
        winner_us: Some(baseline * ratio),
        ratio: Some(ratio),
        ratio_ci95: Some([ratio - half_width, ratio + half_width]),
        margin: Some(half_width),
        safe: Some(ratio + half_width <= 1.02),
        effective: Some(ran("ring", "ll", 8)),
        effective_default: Some(ran("ring", "simple", 4)),
        form: point.form,
    }
}

/// An adopted arm of three variables on real GPUs.
/// The row of the weighted mix.
pub(crate) fn mix(ratio: f64, ends: [f64; 2]) -> Trial {
    Trial {
        kind: "verify-pass".to_owned(),
        arm: "ring-ll-8ch".to_owned(),
        tokens: None,
        phase: None,
        captured: true,
        weight: 1.0,
        baseline_ms: None,
        winner_ms: None,
        ratio: Some(ratio),
        ratio_ci95: Some(ends),
        launches: 4,
        communication_share: None,
        floor_ms: None,
        crowded_ms: None,
        predicted_gain: None,
        measured_gain: Some(1.0 - ratio),
    }
}

pub(crate) fn adopt() -> Choice {
    let workload = workload();
    let env = map(&[("NCCL_MIN_NCHANNELS", "8"), ("NCCL_P2P_LEVEL", "SYS"), ("NCCL_PROTO", "LL")]);
    Choice {
        format: FORMAT,
        verdict: VerdictKind::Adopt,
        reason: "ring-ll-8ch beats the default by more than 2.0 % and regresses at no point.".to_owned(),
        misjudged: None,
        simulated: false,
        replayed: false,
        labels: Vec::new(),
        env: env.clone(),
        files: BTreeMap::new(),
        required_environment: map(&[
            ("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
            ("NCCL_CUMEM_ENABLE", "0"),
            ("NCCL_NVLS_ENABLE", "0"),
        ]),
        winner: Some("ring-ll-8ch".to_owned()),
        best_finalist: None,
        answers: vec![Answer {
            profile: "balanced".to_owned(),
            kind: AnswerKind::Env,
            env,
            files: BTreeMap::new(),
            table: None,
            server_args: Vec::new(),
        }],
        contributions: vec![Contribution {
            variable: "NCCL_MIN_NCHANNELS".to_owned(),
            ratio_with: 0.858,
            ratio_without: 0.931,
        }],
        objective: Objective {
            unit: "us_per_pass".to_owned(),
            weights: [("1", 1.0), ("8", 1.0), ("32", 1.0)].map(|(batch, weight)| (batch.to_owned(), weight)).into(),
            baseline: Some(6_410.2),
            winner: Some(5_499.9),
            ratio: Some(0.858),
            ratio_ci95: Some([0.848, 0.869]),
            batches: vec![
                BatchObjective { batch: 1, weight: 1.0, baseline_us: Some(2_989.0), winner_us: Some(2_303.4) },
                BatchObjective { batch: 8, weight: 1.0, baseline_us: Some(6_136.6), winner_us: Some(5_412.5) },
                BatchObjective { batch: 32, weight: 1.0, baseline_us: Some(14_359.4), winner_us: Some(13_340.2) },
            ],
        },
        points: vec![
            point_verdict(&workload.points[0], 24.5, 0.771, 0.012),
            point_verdict(&workload.points[1], 50.3, 0.882, 0.011),
            point_verdict(&workload.points[2], 117.7, 0.929, 0.014),
        ],
        guard: vec![
            point_verdict(&workload.guard[0], 5_812.0, 1.004, 0.009),
            point_verdict(&workload.guard[1], 61.8, 1.006, 0.031),
        ],
        unmeasured: Vec::new(),
        vetoed: vec![
            Veto {
                arm: ArmId("aa11bb22cc33".to_owned()),
                name: "ring-ll128-16ch".to_owned(),
                env: map(&[("NCCL_PROTO", "LL128")]),
                reason: "wrong-result in 1 of 3 launches: rank 5 differs at element 1,048,576".to_owned(),
            },
            Veto {
                arm: ArmId("dd44ee55ff66".to_owned()),
                name: "tree-ll-2ch".to_owned(),
                env: map(&[("NCCL_ALGO", "Tree")]),
                reason: "all-reduce bf16 112 MiB (prefill) is 41.3 % slower".to_owned(),
            },
        ],
        quarantined: Vec::new(),
        gate: None,
        noise_floor: Some(0.0092),
        thresholds: Thresholds { min_gain: 0.02, max_regression: 0.02 },
        statistics: Statistics {
            method: "20 % trimmed mean of log ratios of paired launches, Yuen's t interval".to_owned(),
            launches: 12,
            confidence: 0.95,
            seed: 7,
        },
        memory: Memory { device_mib_per_rank: Some(24.0), host_mib: Some(0.0), ..Memory::default() },
        repairs: Vec::new(),
        warnings: Vec::new(),
        peer_access: None,
        cold_and_warm: None,
        fingerprint: manifest().fingerprint.combined,
        search: SearchSummary {
            arms: 48,
            measured_cells: 1_204,
            full_grid_cells: 3_516,
            wall_s: 742.0,
            launches: 84,
            stopped_by: "complete".to_owned(),
        },
        trials: vec![
            Trial {
                tokens: Some(32),
                phase: Some(PointPhase::Verify),
                baseline_ms: Some(9.845),
                winner_ms: Some(9.385),
                communication_share: Some(0.731),
                floor_ms: Some(2.648),
                predicted_gain: Some(0.039),
                ..mix(0.953, [0.94, 0.966])
            },
            mix(0.91, [0.892, 0.928]),
        ],
        notes: Vec::new(),
    }
}

/// No arm gains enough, and that was shown.
pub(crate) fn keep_default() -> Choice {
    let mut choice = adopt();
    choice.verdict = VerdictKind::KeepDefault;
    choice.reason = "No finalist gains 2.0 % or more; the interval of the best excludes it.".to_owned();
    choice.env = BTreeMap::new();
    choice.winner = None;
    choice.answers = Vec::new();
    choice.objective.winner = None;
    choice.objective.ratio = Some(0.995);
    choice.objective.ratio_ci95 = Some([0.986, 1.004]);
    for batch in &mut choice.objective.batches {
        batch.winner_us = None;
    }
    choice.points = workload().points[..3]
        .iter()
        .zip([24.5, 50.3, 117.7])
        .map(|(p, us)| point_verdict(p, us, 0.995, 0.01))
        .collect();
    choice.memory = Memory::default();
    choice
}

/// The evidence reaches neither verdict: a noisy machine, a budget that ended.
pub(crate) fn undecided() -> Choice {
    let mut choice = keep_default();
    choice.verdict = VerdictKind::Undecided;
    choice.reason =
        "The best finalist may gain 6.9 % or lose 0.8 %: launches vary too much for 6 pairs to tell.".to_owned();
    choice.objective.ratio = Some(0.969);
    choice.objective.ratio_ci95 = Some([0.931, 1.008]);
    choice.statistics.launches = 6;
    choice.noise_floor = Some(0.038);
    choice.points = workload().points[..3]
        .iter()
        .zip([24.5, 50.3, 117.7])
        .map(|(p, us)| point_verdict(p, us, 0.969, 0.06))
        .collect();
    choice.unmeasured =
        vec!["send-recv bf16 57,344 B (pipeline stages): this version measures no send-recv".to_owned()];
    choice.notes = vec!["the default drifted by 3.1 % between the first and the last block".to_owned()];
    choice.search.stopped_by = "budget".to_owned();
    choice.vetoed = (1..=11)
        .map(|number| Veto {
            arm: ArmId(format!("{number:012x}")),
            name: format!("arm-{number}"),
            env: BTreeMap::new(),
            reason: "timed-out: no replay within 10 s".to_owned(),
        })
        .collect();
    choice
}

/// Turns a run into a simulated one.
pub(crate) fn simulated(mut choice: Choice) -> (Choice, Manifest) {
    let mut manifest = manifest();
    manifest.backend = BackendKind::Simulated;
    manifest.labels.simulated = true;
    manifest.machine.name = "simulated 8x RTX PRO 6000".to_owned();
    manifest.machine.driver = None;
    manifest.machine.cpu = None;
    manifest.nccl = None;
    choice.simulated = true;
    choice.labels = vec!["SIMULATED".to_owned()];
    (choice, manifest)
}

/// Turns a run into one through host memory, under a pin and with it as part of the answer.
pub(crate) fn host_memory(mut choice: Choice) -> (Choice, Manifest) {
    let mut manifest = manifest();
    manifest.labels.host_memory = true;
    manifest.pins.push(pinned("NCCL_P2P_DISABLE", "1"));
    choice.labels = vec!["HOST-MEMORY".to_owned()];
    if choice.verdict == VerdictKind::Adopt {
        choice.env = map(&[("NCCL_P2P_DISABLE", "1"), ("NCCL_PROTO", "LL")]);
        choice.answers[0].env = choice.env.clone();
    }
    for point in choice.points.iter_mut().chain(&mut choice.guard) {
        for effective in [&mut point.effective, &mut point.effective_default].into_iter().flatten() {
            effective.transport = Some("SHM/direct/direct".to_owned());
        }
    }
    (choice, manifest)
}

/// What doctor might find.
pub(crate) fn checks() -> CheckReport {
    let check = |name: &str, group: &str, verdict, question: &str, evidence: &str, advice: &str| Check {
        name: name.to_owned(),
        group: group.to_owned(),
        verdict,
        question: question.to_owned(),
        evidence: evidence.to_owned(),
        advice: advice.to_owned(),
    };
    CheckReport {
        format: FORMAT,
        checks: vec![
            check(
                "gpu-idle",
                "gpu",
                CheckVerdict::Fail,
                "Does anything else use the GPUs?",
                "GPU 3 is used by process 41207",
                "stop it, or leave that GPU out with --devices",
            ),
            check("pcie-link", "gpu", CheckVerdict::Pass, "Do all links run at full width?", "8 of 8 at x16", ""),
            check(
                "nccl-library",
                "nccl",
                CheckVerdict::Warn,
                "Will the server load the same library?",
                "two libraries: 2.28.9 and 2.27.3",
                "name the server's with --nccl-lib",
            ),
            check(
                "iommu",
                "system",
                CheckVerdict::Unknown,
                "Is the IOMMU out of the way of peer access?",
                "/proc/cmdline is not readable here",
                "",
            ),
        ],
    }
}
