//! Landscapes whose truth is known, noise drawn anew for each arm in each launch, and whole campaigns on them: the
//! strategy, the plan of the final and the verdict are the program's own, only the measuring is not.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use nccltune::choice::{CampaignFacts, judge, judge_update};
use nccltune::collective::{Collective, DataType, Form};
use nccltune::evidence::{Evidence, Objective, default_arm, measured_points};
use nccltune::journal;
use nccltune::record::{
    Arm, ArmId, BlockLaunch, CellMeasurement, Choice, EarlierArm, Effective, Event, Manifest, Phase, Point, PointKey,
    PointPhase, Settings, UpdateVerdict, VerdictKind,
};
use nccltune::search::{Confirm, PAIRS, RACING, SearchContext, Strategy as _, Want, earlier_arms, strategy};
use nccltune::seed::Seed;
use nccltune::space;
use rand::RngExt as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;

/// Seconds of a launch of one arm at five points on two GPUs: the largest median among the finals of the recorded runs.
const LAUNCH_S: f64 = 2.5;
/// Seconds of launches that `check` takes at most.
const CHECK_BUDGET_S: f64 = 100.0;

/// How a launch strays from the truth.
#[derive(Clone)]
pub(crate) enum Noise {
    /// One of these, at all points together: residuals that were measured.
    Measured(Vec<Vec<f64>>),
    /// 1.8 % for each arm in each launch, and one launch in thirteen slow by 8 %.
    Fixed,
}

/// A truth, and the noise around it.
#[derive(Clone)]
pub(crate) struct Landscape {
    pub(crate) name: String,
    pub(crate) manifest: Manifest,
    /// Log microseconds at each measured point.
    pub(crate) truth: BTreeMap<ArmId, Vec<f64>>,
    pub(crate) noise: Noise,
}

/// What a campaign came to.
pub(crate) struct Outcome {
    pub(crate) choice: Choice,
    /// The true log ratio of the objective of what ships over the best that may ship.
    pub(crate) regret: f64,
    /// The worst true log ratio of what ships at any point.
    pub(crate) worst: f64,
    /// Cells over the full grid, finals on both sides.
    pub(crate) share: f64,
    /// What a later race may begin with.
    pub(crate) earlier: Vec<EarlierArm>,
}

impl Landscape {
    /// A recorded run: medians over launches are the truth, residuals the noise.
    pub(crate) fn recorded(folder: &Path) -> Result<Self, Box<dyn Error>> {
        let manifest: Manifest = serde_json::from_str(&fs_err::read_to_string(folder.join("manifest.json"))?)?;
        let evidence = Evidence::of(&journal::read(folder)?);
        let points = measured_points(&manifest.workload);
        let (mut truth, mut residuals) = (BTreeMap::new(), Vec::new());
        for arm in &manifest.arms {
            // Launches in which the arm was measured everywhere, as logs.
            let mut launches: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
            for point in &points {
                for value in evidence.all_values(&arm.id, *point) {
                    launches.entry(value.launch).or_default().push(value.median_us.ln());
                }
            }
            let launches: Vec<Vec<f64>> = launches.into_values().filter(|logs| logs.len() == points.len()).collect();
            let column = |index: usize| launches.iter().map(|logs| logs[index]).collect::<Vec<f64>>();
            let medians: Option<Vec<f64>> =
                (0..points.len()).map(|index| nccltune::stats::median(&column(index))).collect();
            let Some(medians) = medians else { return Err(format!("{} was never measured", arm.name).into()) };
            truth.insert(arm.id.clone(), medians);
            if launches.len() > 1 {
                // Residuals about a mean of n are too small by the root of (n - 1) / n.
                let count = launches.len() as f64;
                let wider = (count / (count - 1.0)).sqrt();
                let mean = |index: usize| column(index).iter().sum::<f64>() / count;
                let means: Vec<f64> = (0..points.len()).map(mean).collect();
                residuals.extend(
                    launches.iter().map(|logs| {
                        logs.iter().zip(&means).map(|(log, mean)| (log - mean) * wider).collect::<Vec<f64>>()
                    }),
                );
            }
        }
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, manifest, truth, noise: Noise::Measured(residuals) })
    }

    /// The same, with the values of each variable permuted: what was true of one value is now true of another.
    /// Whatever of the order of values and names a search leans on is of no use here.
    pub(crate) fn permuted(&self, seed: u64) -> Self {
        let mut random = Seed(seed).derive("regret-permutation", &self.name);
        let mut values: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, value) in self.manifest.arms.iter().flat_map(|arm| &arm.env) {
            let known = values.entry(name).or_default();
            if !known.contains(&value.as_str()) {
                known.push(value);
            }
        }
        let mut renamed: BTreeMap<(&str, &str), &str> = BTreeMap::new();
        for (name, known) in &values {
            let mut shuffled = known.clone();
            shuffled.shuffle(&mut random);
            renamed.extend(known.iter().zip(shuffled).map(|(from, to)| ((*name, *from), to)));
        }
        let mut permuted = self.clone();
        permuted.name = format!("{} permuted", self.name);
        for arm in &self.manifest.arms {
            let env = arm.env.iter().map(|(name, value)| (name.clone(), renamed[&(name.as_str(), value.as_str())]));
            let env: BTreeMap<String, String> = env.map(|(name, value)| (name, value.to_owned())).collect();
            // Where rules leave the other arm out, this one keeps its own truth.
            if let Some(other) = self.manifest.arms.iter().find(|known| known.env == env) {
                permuted.truth.insert(arm.id.clone(), self.truth[&other.id].clone());
            }
        }
        permuted
    }

    /// A machine that does what `effect` says: the log ratio to the default at each of `points` sizes.
    pub(crate) fn planted(
        base: &Manifest,
        name: &str,
        arms: Vec<Arm>,
        points: usize,
        effect: &dyn Fn(&Arm) -> Vec<f64>,
    ) -> Self {
        let mut manifest = base.clone();
        let point = |index: usize| Point {
            collective: Collective::AllReduce,
            dtype: DataType::Bf16,
            bytes: 4096 << index,
            ranks: 2,
            calls_per_pass: 1,
            batch: index as u32 + 1,
            weight: 1.0,
            phase: PointPhase::Size,
            measured: true,
            origin: String::new(),
            form: Form::default(),
        };
        manifest.workload.points = (0..points).map(point).collect();
        manifest.workload.guard = Vec::new();
        let log = |index: usize| (10.0 * 1.5_f64.powi(index as i32)).ln();
        let truth = arms
            .iter()
            .map(|arm| (arm.id.clone(), effect(arm).iter().enumerate().map(|(at, ratio)| log(at) + ratio).collect()));
        let truth = truth.collect();
        manifest.arms = arms;
        Self { name: name.to_owned(), manifest, truth, noise: Noise::Fixed }
    }

    fn residual(&self, random: &mut ChaCha8Rng, points: usize) -> Vec<f64> {
        // Close to normal: the sum of twelve uniform draws.
        let mut normal = || (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
        match &self.noise {
            Noise::Fixed => {
                let launch = 0.018 * normal();
                let cells: Vec<f64> = (0..points).map(|_| launch + 0.004 * normal()).collect();
                let slow = if random.random::<f64>() < 0.075 { 1.08_f64.ln() } else { 0.0 };
                cells.into_iter().map(|log| log + slow).collect()
            }
            Noise::Measured(residuals) => residuals[random.random_range(0..residuals.len())].clone(),
        }
    }

    /// What `check` says of an arm that gained `recorded_log` when it was tuned, and after how many paired launches.
    pub(crate) fn check(&self, seed: u64, arm: &Arm, recorded_log: f64) -> (UpdateVerdict, u32) {
        let points = measured_points(&self.manifest.workload);
        let default = default_arm(&self.manifest.arms).expect("every run has its default");
        let context = SearchContext {
            arms: vec![default.clone(), arm.clone()],
            default: default.id.clone(),
            objective: Objective::of(&self.manifest.workload).expect("points are measured"),
            points: points.clone(),
            settings: self.manifest.settings.clone(),
            most_trial_launches: None,
            trial: None,
            gate: None,
            most_launches: None,
            budget_s: Some(CHECK_BUDGET_S),
            earlier: Vec::new(),
        };
        let confirm = Confirm { arm: arm.id.clone(), recorded_log: Some(recorded_log), most_pairs: PAIRS.1 };
        let mut random = Seed(seed).derive("check", &self.name);
        let (mut evidence, mut launch) = (Evidence::default(), 0);
        let mut block = 0;
        while let Want::Block { phase, arms } = confirm.next(&context, &evidence) {
            self.block(block, phase, &arms, &points, (&mut random, &mut launch, &mut evidence));
            block += 1;
        }
        let judged = judge_update(&context, &evidence, arm, recorded_log.exp(), true).expect("nothing fails here");
        (judged.verdict, judged.objective.launches)
    }

    /// One campaign.
    pub(crate) fn campaign(&self, seed: u64, settings: &Settings) -> Outcome {
        self.campaign_after(seed, settings, Vec::new())
    }

    /// One that begins with what an earlier one saw.
    pub(crate) fn campaign_after(&self, seed: u64, settings: &Settings, earlier: Vec<EarlierArm>) -> Outcome {
        let mut manifest = self.manifest.clone();
        manifest.settings = settings.clone();
        (manifest.trial, manifest.gate) = (None, None);
        let points = measured_points(&manifest.workload);
        let default = default_arm(&manifest.arms).expect("every run has its default").id.clone();
        let context = SearchContext {
            default: default.clone(),
            objective: Objective::of(&manifest.workload).expect("points are measured"),
            points: points.clone(),
            settings: settings.clone(),
            most_trial_launches: None,
            trial: None,
            gate: None,
            most_launches: None,
            budget_s: None,
            earlier,
            arms: manifest.arms.clone(),
        };
        let mut random = Seed(seed).derive("regret", &self.name);
        let mut evidence = Evidence::default();
        let mut launch = 0;
        for block in 0.. {
            let (phase, arms) = loop {
                match strategy(settings).next(&context, &evidence) {
                    Want::Block { phase, arms } => break (phase, arms),
                    Want::Finalists { arms, launches, reason } => {
                        evidence.tell(&Event::FinalistsChosen { arms, launches, reason });
                    }
                    Want::Drop { arm, reason, detail } => evidence.tell(&match evidence.finalists() {
                        Some(_) => Event::FinalistDropped { arm, reason, detail },
                        None => Event::ArmDropped { arm, reason, detail },
                    }),
                    Want::Trial { .. } | Want::Pause | Want::Done { .. } => {
                        return self.outcome(&context, &manifest, &evidence);
                    }
                }
            };
            self.block(block, phase, &arms, &points, (&mut random, &mut launch, &mut evidence));
        }
        unreachable!("a campaign ends")
    }

    fn block(
        &self,
        block: u32,
        phase: Phase,
        arms: &[ArmId],
        points: &[PointKey],
        (random, launch, evidence): (&mut ChaCha8Rng, &mut u32, &mut Evidence),
    ) {
        let first = *launch;
        let launches = arms.iter().zip(first..).map(|(arm, launch)| BlockLaunch { launch, arms: vec![arm.clone()] });
        evidence.tell(&Event::BlockPlanned { block, phase, launches: launches.collect() });
        for arm in arms {
            let residual = self.residual(random, points.len());
            for (point, (truth, noise)) in points.iter().zip(self.truth[arm].iter().zip(residual)) {
                evidence.tell(&Event::CellMeasured(CellMeasurement {
                    arm: arm.clone(),
                    point: *point,
                    block,
                    launch: *launch,
                    communicator: 0,
                    position: 0,
                    collectives_per_replay: 64,
                    replays_us: vec![(truth + noise).exp()],
                    effective: Effective::default(),
                    flags: Vec::new(),
                    call: None,
                    duration_s: 0.0,
                }));
            }
            evidence.tell(&Event::LaunchEnded {
                launch: *launch,
                duration_s: LAUNCH_S,
                set_by_environment: Vec::new(),
                outcome: None,
            });
            *launch += 1;
        }
        evidence.tell(&Event::BlockEnded { block });
    }

    fn outcome(&self, context: &SearchContext, manifest: &Manifest, evidence: &Evidence) -> Outcome {
        let facts = CampaignFacts { stopped_by: "complete".to_owned(), wall_s: 0.0, notes: Vec::new() };
        let choice = judge(manifest, context, evidence, &facts);
        let default = &self.truth[&context.default];
        let ratio = |arm: &ArmId| {
            let us = |logs: &[f64], key: PointKey| {
                context.points.iter().position(|point| *point == key).map(|index| logs[index].exp())
            };
            let log = context.objective.log_ratio(|key| Some((us(&self.truth[arm], key)?, us(default, key)?)));
            log.expect("every point has a truth")
        };
        let worst = |arm: &ArmId| {
            let logs = self.truth[arm].iter().zip(default).map(|(arm, default)| arm - default);
            logs.fold(f64::NEG_INFINITY, f64::max)
        };
        let limit = (1.0 + context.settings.max_regression).ln();
        let best = context.arms.iter().map(|arm| &arm.id).filter(|arm| worst(arm) <= limit).map(ratio);
        let best = best.fold(f64::INFINITY, f64::min);
        let winner = match choice.verdict {
            VerdictKind::Adopt => context.arms.iter().find(|arm| Some(&arm.name) == choice.winner.as_ref()),
            _ => None,
        };
        let shipped = winner.map_or(&context.default, |arm| &arm.id);
        Outcome {
            regret: ratio(shipped) - best,
            worst: worst(shipped),
            share: f64::from(choice.search.measured_cells) / f64::from(choice.search.full_grid_cells),
            earlier: earlier_arms(context, evidence),
            choice,
        }
    }
}

/// Settings of a racing run.
pub(crate) fn racing() -> Settings {
    Settings { strategy: RACING.to_owned(), ..Settings::default() }
}

/// Every combination of these values.
pub(crate) fn grid(axes: &[(&str, &[&str])]) -> Vec<Arm> {
    let mut arms = vec![BTreeMap::new()];
    for (name, values) in axes {
        arms = arms
            .into_iter()
            .flat_map(|env: BTreeMap<String, String>| {
                let with = |value: &&str| {
                    let mut env = env.clone();
                    if *value != space::UNSET {
                        env.insert((*name).to_owned(), (*value).to_owned());
                    }
                    env
                };
                values.iter().map(with).collect::<Vec<_>>()
            })
            .collect();
    }
    arms.into_iter().map(space::arm_of).collect()
}

/// The largest regret, as a share, that counts as within.
pub(crate) const WITHIN: f64 = 0.01;
