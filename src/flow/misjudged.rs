//! Does NCCL misjudge this box? Then arms with a graph file that sets it right join the search.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::files::RunFiles;
use crate::backend::nccl::NcclBackend;
use crate::discovery::{self, wiring_of};
use crate::error_kind::Failure;
use crate::file_kind::FileKind;
use crate::machine::{Gpu, NcclVersion, Topology};
use crate::misjudged::{Found, Ring, best_ring, plain_ring, why_misjudged};
use crate::nccl_log::NcclLog;
use crate::nccl_model::{Communicator, Release, Settings};
use crate::probe::Question;
use crate::process::Supervisor;
use crate::record::{Arm, FORMAT, MisjudgedBox, NamedArm, Space, Workload};
use crate::space;

/// Whether a graph file is made for a box that NCCL misjudges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RepairGraph {
    /// Where NCCL misjudges the box, and the file cannot harm another group of GPUs.
    #[default]
    Auto,
    /// Nowhere.
    Never,
    /// Wherever the links are known well enough to make one.
    Always,
}

/// Releases from which on GPUs of this capability may find no ring at any speed that is tried.
const DEMANDING_CAPABILITY: i32 = 10;
/// The arm with the file alone.
const ARM: &str = "repaired-graph";
/// What else is tried beside the file. More channels than the file's are rings of the same order again;
/// thresholds make small messages use them. Values are canonical, as those of a space are by then.
const COMPANIONS: [&[(&str, &str)]; 6] = [
    &[],
    &[("NCCL_MIN_NCHANNELS", "8")],
    &[("NCCL_MIN_NCHANNELS", "16")],
    &[("NCCL_MIN_NCHANNELS", "8"), ("NCCL_THREAD_THRESHOLDS", "-1-1-1+8")],
    &[("NCCL_MIN_NCHANNELS", "16"), ("NCCL_THREAD_THRESHOLDS", "-1-1-1+8")],
    &[("NCCL_MIN_NCHANNELS", "16"), ("NCCL_THREAD_THRESHOLDS", "-1-1-1+2")],
];

/// What is known of the box.
pub(super) struct Sight {
    /// How its GPUs hang together, in the order of the ranks; else what kept it from being known.
    pub(super) topology: Result<Topology, String>,
    /// What each rank's NCCL logged of a communicator with its defaults, where one was opened.
    pub(super) logs: Vec<NcclLog>,
}

/// What decides about a file.
pub(super) struct Case<'a> {
    /// What the user wants.
    pub(super) wish: RepairGraph,
    /// GPUs of the group, in the order of the ranks.
    pub(super) gpus: &'a [Gpu],
    /// GPUs of the box.
    pub(super) gpus_in_box: usize,
    /// What is served.
    pub(super) workload: &'a Workload,
    /// Variables that hold in every arm.
    pub(super) pins: &'a BTreeMap<String, String>,
    /// The release.
    pub(super) version: NcclVersion,
    /// Risks that are taken.
    pub(super) risks: &'a BTreeSet<String>,
}

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Repaired {
    /// For the manifest, where arms were made.
    pub(super) misjudged: Option<MisjudgedBox>,
    /// The arms.
    pub(super) arms: Vec<Arm>,
    /// What the user should know.
    pub(super) notices: Vec<String>,
}

impl Case<'_> {
    /// Whether there is anything to look at: a file that is in force already is the user's own answer.
    pub(super) fn is_open(&self) -> bool {
        let is_pinned =
            [FileKind::Topology, FileKind::Graph].iter().any(|kind| self.pins.contains_key(kind.variable()));
        self.wish != RepairGraph::Never && !is_pinned && self.gpus.len() > 1
    }

    /// What the model makes of the box with these pins, where it knows the release.
    fn by_model(&self, topology: &Topology) -> Option<Found> {
        let release = Release::of(self.version).ok()?;
        let settings = Settings::read(self.pins, self.version);
        Communicator::new(topology, &settings, release, None).ok().map(|communicator| Found::by_model(&communicator))
    }

    /// Whether NCCL itself should be asked: where its rules say that it misjudges the box, and where
    /// nobody knows on GPUs of which it demands much. Asking costs the start of one communicator.
    fn is_worth_asking(&self, topology: &Result<Topology, String>) -> bool {
        let has_nvlink = self.gpus.iter().any(|gpu| gpu.nvlinks.is_some_and(|links| links > 0));
        let is_demanding =
            self.gpus.iter().any(|gpu| gpu.compute_capability.is_some_and(|[major, _]| major >= DEMANDING_CAPABILITY));
        match topology {
            _ if has_nvlink => false,
            _ if self.wish == RepairGraph::Always => true,
            Ok(topology) => match (self.by_model(topology), best_ring(topology)) {
                (Some(found), Some(ring)) => why_misjudged(&found, &ring).is_some(),
                _ => is_demanding,
            },
            Err(_) => is_demanding,
        }
    }

    /// Looks at this machine: its wiring, and where that is worth it what NCCL itself makes of it. Whoever lets it
    /// start something holds the GPUs.
    pub(super) fn look(
        &self,
        supervisor: &Supervisor,
        environment: &BTreeMap<String, String>,
        start: Option<impl FnOnce() -> NcclBackend>,
    ) -> Result<Sight, Failure> {
        let topology = match discovery::ask(supervisor, &Question::Wiring, environment) {
            Ok(report) => wiring_of(Path::new("/"), self.gpus, &report).topology.map_err(|unknown| unknown.join("; ")),
            Err(error) => Err(error.to_string()),
        };
        let Some(start) = start.filter(|_| self.is_worth_asking(&topology)) else {
            return Ok(Sight { topology, logs: Vec::new() });
        };
        Ok(Sight { topology, logs: start().look()? })
    }

    /// Why the file would harm: NCCL applies it to every communicator of a process, and stops where one
    /// has other GPUs than the file.
    fn other_groups(&self) -> Option<String> {
        let ranks = self.gpus.len() as u32;
        let other = self.workload.points.iter().chain(&self.workload.guard).find(|point| point.ranks != ranks);
        let what = match other {
            Some(point) => {
                format!("the workload has a {} of {} ranks beside those of {ranks}", point.collective, point.ranks)
            }
            None if self.gpus_in_box > self.gpus.len() => {
                format!(
                    "the box has {} GPUs and a group has {ranks}, so a server may open groups of others",
                    self.gpus_in_box
                )
            }
            None => return None,
        };
        Some(format!(
            "no graph file is tried: {what}; NCCL applies the file to every communicator of a process and stops where \
             the GPUs are others (--repair-graph always tries it all the same)"
        ))
    }

    /// Makes the file and its arms, where they are called for.
    pub(super) fn repaired(&self, sight: &Sight, files: &mut RunFiles) -> Result<Repaired, Failure> {
        let by_log = sight.logs.first().and_then(Found::by_log);
        let told = |notice: &str| Ok(Repaired { notices: vec![notice.to_owned()], ..Repaired::default() });
        let by_model = sight.topology.as_ref().ok().and_then(|topology| self.by_model(topology));
        // NCCL's own word counts for more than what is known of its rules; which transport it takes, it
        // says only later.
        let found = match (by_log, by_model) {
            (Some(log), Some(model)) => Some((Found { is_direct: model.is_direct, ..log }, "log")),
            (Some(log), None) => Some((log, "log")),
            (None, Some(model)) => Some((model, "model")),
            (None, None) => None,
        };
        let ring = match &sight.topology {
            Ok(topology) => best_ring(topology),
            Err(_) => plain_ring(self.gpus),
        };
        let (Some(ring), Some((found, source))) = (ring, found) else {
            return if self.wish == RepairGraph::Always {
                let unknown = sight.topology.as_ref().err().map(|why| format!(" ({why})")).unwrap_or_default();
                told(&format!(
                    "no graph file can be made: what the links carry, or what NCCL makes of them, is not known{unknown}"
                ))
            } else {
                Ok(Repaired::default())
            };
        };
        let reason = match (why_misjudged(&found, &ring), self.wish) {
            (Some(why), _) => why,
            (None, RepairGraph::Always) => format!(
                "NCCL counts on {} GB/s around the ring, and a file that says {} x {} GB/s was asked for",
                found.ring_gbps, ring.channels, ring.channel_gbps
            ),
            (None, _) => return Ok(Repaired::default()),
        };
        if self.wish != RepairGraph::Always
            && let Some(why_not) = self.other_groups()
        {
            return told(&format!("{reason}; {why_not}"));
        }
        let Some(file) = ring.graph_file(&self.devices(sight)) else { return Ok(Repaired::default()) };
        let sha256 = files.add(FileKind::Graph, file.write());
        let (arms, mut notices) = self.arms(&sha256)?;
        notices.insert(0, notice(&reason, &ring, arms.len()));
        let ids = arms.iter().map(|arm| arm.id.clone()).collect();
        let misjudged = MisjudgedBox { reason, source: source.to_owned(), arms: ids };
        Ok(Repaired { misjudged: Some(misjudged), arms, notices })
    }

    /// The numbers by which NCCL calls the GPUs in its files, by rank: NVML's, which differ from the
    /// positions among visible GPUs where some are hidden.
    fn devices(&self, sight: &Sight) -> Vec<u32> {
        let logged: Option<Vec<u32>> = sight.logs.iter().map(|log| log.nvml_device).collect();
        match logged {
            Some(devices) if devices.len() == self.gpus.len() => devices,
            _ => self.gpus.iter().map(|gpu| gpu.index).collect(),
        }
    }

    /// The file alone and with companions, as far as pins, release and risks allow them.
    fn arms(&self, sha256: &str) -> Result<(Vec<Arm>, Vec<String>), Failure> {
        let named = |companions: &&[(&str, &str)]| {
            let words = companions.iter().map(|(name, value)| format!(" {}={value}", name.trim_start_matches("NCCL_")));
            NamedArm {
                name: std::iter::once(ARM.to_owned()).chain(words).collect(),
                note: String::new(),
                env: companions.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
                files: BTreeMap::from([(FileKind::Graph, sha256.to_owned())]),
            }
        };
        let space = Space {
            format: FORMAT,
            name: ARM.to_owned(),
            description: "a graph file for a box that NCCL misjudges".to_owned(),
            axis: Vec::new(),
            arm: COMPANIONS.iter().map(named).collect(),
            rule: Vec::new(),
        };
        let found = space::enumerate(&space, self.pins, self.version, self.risks)?;
        // Enumeration always brings the default, which is there already.
        let arms = found.arms.into_iter().filter(|arm| !arm.files.is_empty()).collect();
        Ok((arms, found.notices))
    }
}

fn notice(reason: &str, ring: &Ring, arms: usize) -> String {
    let order: Vec<String> = ring.order.iter().map(u32::to_string).collect();
    format!(
        "{reason}; {arms} arms with a graph file that says so are tried (ranks {}), and judged like any other",
        order.join("-")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knob;
    use crate::machine::{CpuNode, Layout, PcieLink};
    use crate::nccl_log;
    use crate::wording::fixtures;

    const VERSION: NcclVersion = NcclVersion::v2(28, 9);

    fn workload(ranks: u32) -> Workload {
        let mut workload = fixtures::manifest().workload;
        for point in workload.points.iter_mut().chain(&mut workload.guard) {
            point.ranks = ranks;
        }
        workload
    }

    fn turin(gpus: usize) -> Topology {
        let cpu = CpuNode { family: 0x1a, model: 2, ..CpuNode::amd(0) };
        Topology::of_layout(Layout::Sys2, gpus, [12, 0], PcieLink::x16(5), &cpu).unwrap()
    }

    fn case<'a>(
        gpus: &'a [Gpu],
        workload: &'a Workload,
        pins: &'a BTreeMap<String, String>,
        risks: &'a BTreeSet<String>,
    ) -> Case<'a> {
        let wish = RepairGraph::Auto;
        Case { wish, gpus, gpus_in_box: gpus.len(), workload, pins, version: VERSION, risks }
    }

    /// What comes of eight GPUs between two sockets.
    fn of_eight(wish: RepairGraph, gpus_in_box: usize, workload: &Workload, sight: &Sight) -> (Repaired, RunFiles) {
        let gpus: Vec<Gpu> = (0..8).map(fixtures::gpu).collect();
        let (pins, risks) = (BTreeMap::new(), BTreeSet::new());
        let case = Case { wish, gpus_in_box, ..case(&gpus, workload, &pins, &risks) };
        assert_eq!(case.is_open(), wish != RepairGraph::Never);
        let mut files = RunFiles::default();
        (case.repaired(sight, &mut files).unwrap(), files)
    }

    fn known() -> Sight {
        Sight { topology: Ok(turin(8)), logs: Vec::new() }
    }

    #[test]
    fn companions_are_written_as_a_space_has_them() {
        for (name, value) in COMPANIONS.into_iter().flatten() {
            assert_eq!(knob::canonical_value(name, value).as_deref(), Ok(*value), "{name}");
        }
    }

    #[test]
    fn a_misjudged_box_gets_arms_that_share_one_file() {
        let (repaired, files) = of_eight(RepairGraph::Auto, 8, &workload(8), &known());
        let misjudged = repaired.misjudged.unwrap();
        assert_eq!((misjudged.source.as_str(), misjudged.arms.len()), ("model", COMPANIONS.len()));
        assert_eq!(files.names().count(), 1);
        assert_eq!(repaired.arms[0].name, ARM);
        assert!(repaired.arms[0].env.is_empty());
        let hashes: BTreeSet<&String> = repaired.arms.iter().flat_map(|arm| arm.files.values()).collect();
        assert_eq!(hashes.len(), 1);
        let [notice] = repaired.notices.as_slice() else { panic!("{:?}", repaired.notices) };
        assert!(notice.contains("6 arms") && notice.contains("0-1-2-3-4-5-6-7"), "{notice}");
    }

    #[test]
    fn other_groups_of_gpus_keep_the_file_away_unless_it_is_asked_for() {
        let refused = |gpus_in_box, workload: &Workload| {
            let (repaired, files) = of_eight(RepairGraph::Auto, gpus_in_box, workload, &known());
            assert!(repaired.arms.is_empty() && repaired.misjudged.is_none() && files.names().count() == 0);
            let [notice] = repaired.notices.try_into().unwrap();
            assert!(notice.contains("--repair-graph always"), "{notice}");
            notice
        };
        let notice = refused(16, &workload(8));
        assert!(notice.contains("16 GPUs and a group has 8"), "{notice}");
        let mut pipeline = workload(8);
        pipeline.guard[0].ranks = 2;
        let notice = refused(8, &pipeline);
        assert!(notice.contains("of 2 ranks beside those of 8"), "{notice}");
        assert_eq!(of_eight(RepairGraph::Always, 16, &pipeline, &known()).0.arms.len(), COMPANIONS.len());
    }

    #[test]
    fn nccls_own_word_decides_over_the_model() {
        let line = "Pattern 4, crossNic 0, nChannels 2, bw 24.000000/24.000000, type SYS/PIX, sameChannels 1";
        let sound = nccl_log::parse(format!("box:1:1 [0] NCCL INFO {line}\n"));
        let told = Sight { logs: vec![sound], ..known() };
        let (repaired, _) = of_eight(RepairGraph::Auto, 8, &workload(8), &told);
        assert!(repaired.arms.is_empty() && repaired.notices.is_empty());
        // Asked for all the same, and then with the reason that there is.
        let (repaired, _) = of_eight(RepairGraph::Always, 8, &workload(8), &told);
        assert!(repaired.misjudged.unwrap().reason.contains("counts on 48 GB/s"));
    }

    #[test]
    fn gpus_are_named_by_nvmls_numbers_where_nccl_told_them() {
        let log = |device: u32| {
            nccl_log::parse(format!(
                "box:1:1 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 1, bw 0.100000/0.100000, type SYS/PIX, same\n\
                 box:1:1 [0] NCCL INFO ncclCommInitRank comm 0x5 rank 0 cudaDev 0 nvmlDev {device} busId 1 - Init COMPLETE\n"
            ))
        };
        // Nothing is known of the wiring: the order of the ranks, at the speed of the GPUs' own links.
        let sight = Sight { topology: Err("no /sys".to_owned()), logs: (10..18).map(log).collect() };
        let gpus: Vec<Gpu> = (0..8).map(fixtures::gpu).collect();
        let (pins, risks, workload) = (BTreeMap::new(), BTreeSet::new(), workload(8));
        let case = case(&gpus, &workload, &pins, &risks);
        assert_eq!(case.devices(&sight), (10..18).collect::<Vec<_>>());
        let repaired = case.repaired(&sight, &mut RunFiles::default()).unwrap();
        assert_eq!(repaired.misjudged.unwrap().source, "log");
    }

    #[test]
    fn a_file_that_is_in_force_already_is_the_users_own_answer() {
        let gpus: Vec<Gpu> = (0..8).map(fixtures::gpu).collect();
        let pins = BTreeMap::from([("NCCL_GRAPH_FILE".to_owned(), "/etc/ring.xml".to_owned())]);
        let (risks, workload) = (BTreeSet::new(), workload(8));
        let case = case(&gpus, &workload, &pins, &risks);
        assert!(!case.is_open());
    }
}
