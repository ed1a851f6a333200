//! The model of NCCL's choices against what NCCL itself did: its logs on real GPUs, and its own code run
//! without one. A model that agreed only with its authors' reading would fail here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fs_err as fs;
use nccltune::collective::Collective;
use nccltune::machine::{
    Architecture, CpuNode, CpuVendor, GpuNode, Layout, NcclVersion, NvLink, NvLinkEnd, PathKind, PcieLink, PeerAccess,
    Topology, Upstream,
};
use nccltune::nccl_model::graph_file::FileGraph;
use nccltune::nccl_model::{
    Algorithm, Choice, Communicator, Disabled, Finding, GraphFile, GraphFileError, MAX_BYTES, ModelError, Override,
    Pattern, Protocol, Release, Settings, Transport,
};
use nccltune::record::Event;

use crate::command::{assert_shown, journal_in, manifest_in, recorded};

const V2_28_9: NcclVersion = NcclVersion::v2(28, 9);
/// Between the two, the searches below come to the same in every release.
const RELEASES_OF_THE_TABLE: [NcclVersion; 5] =
    [NcclVersion::v2(26, 6), NcclVersion::v2(27, 7), V2_28_9, NcclVersion::v2(29, 7), NcclVersion::v2(30, 7)];
const COLLECTIVES: [Collective; 5] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
];
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn environment(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn communicator_of(topology: &Topology, pairs: &[(&str, &str)], version: NcclVersion) -> Communicator {
    try_communicator(topology, pairs, version).unwrap_or_else(|error| panic!("{version} {pairs:?}: {error}"))
}

fn try_communicator(
    topology: &Topology,
    pairs: &[(&str, &str)],
    version: NcclVersion,
) -> Result<Communicator, ModelError> {
    let settings = Settings::read(&environment(pairs), version);
    Communicator::new(topology, &settings, Release::of(version)?, None)
}

fn choice(communicator: &Communicator, collective: Collective, bytes: u64) -> Choice {
    communicator.choose(collective, bytes).unwrap_or_else(|error| panic!("{collective} {bytes}: {error}"))
}

fn cpu(name: &str) -> CpuNode {
    match name {
        "amd" => CpuNode::amd(0),
        "bdw" => CpuNode::intel(0, 0x4F),
        "skl" => CpuNode::intel(0, 0x55),
        "icx" => CpuNode::intel(0, 0x6A),
        "spr" => CpuNode::intel(0, 0x8F),
        "emr" => CpuNode::intel(0, 0xCF),
        "arm" => {
            CpuNode { numa_node: 0, architecture: Architecture::Arm64, vendor: CpuVendor::Other, family: 0, model: 0 }
        }
        other => panic!("no CPU {other}"),
    }
}

fn eight(layout: Layout, capability: [u32; 2], generation: u32, cpu_name: &str) -> Topology {
    Topology::of_layout(layout, 8, capability, PcieLink::x16(generation), &cpu(cpu_name)).expect("a topology")
}

// Graphs.

/// Capabilities; layouts; CPUs; then for PCIe generations 3, 4 and 5 the ring as "channels x GB/s" (empty:
/// not part of this row). Default environment, all peer access granted, 8 GPUs with x16.
type Row = (&'static [[u32; 2]], &'static [Layout], &'static [&'static str], [&'static str; 3]);

const AMPERE: &[[u32; 2]] = &[[8, 0], [8, 6], [8, 9]];
const HOPPER: &[[u32; 2]] = &[[9, 0]];
const BLACKWELL: &[[u32; 2]] = &[[10, 0], [12, 0]];
const ONE_SOCKET: &[Layout] = &[Layout::Phb1, Layout::Pix1, Layout::Pxb1];
const TWO_SOCKETS: &[Layout] = &[Layout::Sys2, Layout::Pix2];
const SOCKETS: &[Layout] = &[Layout::Sys2, Layout::Sys4, Layout::Pix2, Layout::Pix4];

const TABLE: &[Row] = &[
    (AMPERE, ONE_SOCKET, &["amd"], ["1x12", "2x12", "2x20"]),
    (AMPERE, &[Layout::Phb1], &["skl", "spr", "emr"], ["1x10", "1x20", "2x20"]),
    (AMPERE, SOCKETS, &["amd"], ["1x12", "1x15", "1x15"]),
    (AMPERE, TWO_SOCKETS, &["skl", "icx"], ["1x10", "1x10", "1x10"]),
    (AMPERE, TWO_SOCKETS, &["spr"], ["", "1x20", "1x20"]),
    (AMPERE, &[Layout::Sys2], &["emr"], ["", "1x20", "2x20"]),
    (AMPERE, &[Layout::Pix2], &["emr"], ["", "2x12", "2x20"]),
    (HOPPER, &[Layout::Phb1, Layout::Pix1], &["amd"], ["", "1x24", "2x24"]),
    (HOPPER, TWO_SOCKETS, &["amd"], ["", "1x15", "1x15"]),
    (HOPPER, &[Layout::Sys2], &["spr"], ["", "1x20", "2x11"]),
    // One switch on each socket: notes that circulate say 1x20, NCCL's code says this.
    (HOPPER, &[Layout::Pix2], &["spr"], ["", "2x11", ""]),
    (BLACKWELL, &[Layout::Phb1, Layout::Pix1], &["amd"], ["1x0.1", "1x24", "2x24"]),
    (BLACKWELL, &[Layout::Phb1], &["skl", "spr", "emr"], ["1x0.1", "1x20", "2x20"]),
    (BLACKWELL, SOCKETS, &["amd"], ["1x0.1", "1x0.1", "1x0.1"]),
    (BLACKWELL, TWO_SOCKETS, &["skl"], ["1x0.1", "1x0.1", "1x0.1"]),
    (BLACKWELL, TWO_SOCKETS, &["spr"], ["", "1x20", "1x20"]),
    (BLACKWELL, &[Layout::Sys2], &["emr"], ["", "1x20", "2x20"]),
];

/// The reference table of ring graphs: NCCL's graph code run offline on these machines.
#[test]
fn rings_are_those_of_the_reference_table_in_every_row() {
    let mut wrong = Vec::new();
    for (capabilities, layouts, cpus, speeds) in TABLE {
        for (layout, cpu_name) in layouts.iter().flat_map(|layout| cpus.iter().map(move |cpu| (*layout, *cpu))) {
            for (generation, wanted) in [3, 4, 5].into_iter().zip(speeds).filter(|(_, wanted)| !wanted.is_empty()) {
                for (index, capability) in capabilities.iter().enumerate() {
                    let topology = eight(layout, *capability, generation, cpu_name);
                    // Capabilities of one row share their speeds, so one of them stands for all in every release.
                    let releases = if index == 0 { &RELEASES_OF_THE_TABLE[..] } else { &[V2_28_9] };
                    for version in releases {
                        let communicator = communicator_of(&topology, &[], *version);
                        let ring = &communicator.graphs().ring;
                        let found = format!("{}x{}", ring.channels, rounded(ring.channel_bandwidth_gbps));
                        let is_fallback = *wanted == "1x0.1";
                        let is_doubled = communicator.channels() == ring.channels * 2;
                        if found != *wanted || ring.is_fallback != is_fallback || !is_doubled {
                            let machine = format!("{layout:?} {cpu_name} generation {generation}");
                            wrong.push(format!("{version} {capability:?} {machine}: {found}, not {wanted}"));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn rounded(gbps: f64) -> f64 {
    (gbps * 1000.0).round() / 1000.0
}

/// Sapphire Rapids on Hopper: a tree may be faster than the ring it was searched after.
#[test]
fn a_tree_may_be_faster_than_its_ring() {
    let communicator = communicator_of(&eight(Layout::Sys2, [9, 0], 5, "spr"), &[], V2_28_9);
    let graphs = communicator.graphs();
    assert_eq!((graphs.ring.channels, rounded(graphs.ring.channel_bandwidth_gbps)), (2, 11.0));
    assert_eq!((graphs.tree.channels, rounded(graphs.tree.channel_bandwidth_gbps)), (2, 20.0));
    assert_eq!(choice(&communicator, Collective::AllReduce, MIB).algorithm, Algorithm::Ring);
    assert_eq!(choice(&communicator, Collective::AllReduce, 2 * MIB).algorithm, Algorithm::Tree);
}

/// Before 2.25 these GPUs had the speeds of Hopper, of which 15 fits between AMD's sockets.
#[test]
fn the_fallback_came_with_the_speeds_of_2_25() {
    let topology = eight(Layout::Sys2, [12, 0], 5, "amd");
    for (version, is_fallback) in [
        (NcclVersion::v2(23, 4), false),
        (NcclVersion::v2(24, 3), false),
        (NcclVersion::v2(25, 1), true),
        (V2_28_9, true),
    ] {
        let ring = communicator_of(&topology, &[], version).graphs().ring.clone();
        assert_eq!(ring.is_fallback, is_fallback, "{version}: {ring:?}");
    }
}

#[test]
fn from_2_30_7_on_an_idle_link_counts_at_the_speed_it_has_now() {
    let mut topology = eight(Layout::Phb1, [12, 0], 5, "amd");
    for gpu in &mut topology.gpus {
        gpu.link.generation_now = Some(1);
    }
    assert!(!communicator_of(&topology, &[], NcclVersion::v2(30, 4)).graphs().ring.is_fallback);
    let idle = communicator_of(&topology, &[], NcclVersion::v2(30, 7));
    assert!(idle.graphs().ring.is_fallback);
    let told: Vec<String> = idle.findings().iter().map(ToString::to_string).collect();
    assert!(told.iter().any(|text| text.contains("generation 1 of 5") && text.contains("idle")), "{told:?}");
}

#[test]
fn it_says_in_one_sentence_why_the_default_is_wrong() {
    let communicator = communicator_of(&eight(Layout::Sys2, [12, 0], 5, "amd"), &[("NCCL_P2P_LEVEL", "SYS")], V2_28_9);
    let told: Vec<String> = communicator.findings().iter().map(ToString::to_string).collect();
    assert_eq!(
        told,
        ["no ring fits the speeds this release tries (18 GB/s and up; the slowest link between sockets has 16 GB/s), \
          so NCCL goes on with the GPUs in simple order at 0.1 GB/s"]
    );
    let plain = communicator_of(&eight(Layout::Phb1, [8, 9], 4, "amd"), &[("NCCL_P2P_LEVEL", "SYS")], V2_28_9);
    assert_eq!(plain.findings(), []);
}

// Choices.

/// The first size from which Simple is chosen, among powers of two.
fn first_simple(communicator: &Communicator) -> Option<u64> {
    (10..30)
        .map(|power| 1 << power)
        .find(|bytes| choice(communicator, Collective::AllReduce, *bytes).protocol == Protocol::Simple)
}

/// Where a ring of so much bandwidth goes over to Simple, on PCIe, with 8 ranks.
#[test]
fn simple_begins_where_the_bandwidth_of_the_ring_says() {
    for (layout, capability, generation, cpu_name, bus_gbps, first) in [
        (Layout::Sys2, [8, 0], 4, "skl", 10.0, 512 * KIB),
        // At 12 GB/s exactly it is still half a MiB, because LL gets 6 and Simple 12.
        (Layout::Phb1, [8, 9], 3, "amd", 12.0, 512 * KIB),
        (Layout::Sys2, [8, 0], 4, "amd", 15.0, MIB),
        (Layout::Phb1, [8, 9], 4, "amd", 24.0, MIB),
        (Layout::Phb1, [8, 9], 5, "amd", 40.0, 2 * MIB),
        (Layout::Phb1, [12, 0], 5, "amd", 48.0, 2 * MIB),
        // The fallback: nearly everything is Simple.
        (Layout::Sys2, [12, 0], 5, "amd", 0.1, 4 * KIB),
    ] {
        let communicator = communicator_of(&eight(layout, capability, generation, cpu_name), &[], V2_28_9);
        let bus = rounded(communicator.graphs().ring.bandwidth_gbps());
        assert_eq!((bus, first_simple(&communicator)), (bus_gbps, Some(first)), "{layout:?} {capability:?}");
        for power in 1..32 {
            let chosen = choice(&communicator, Collective::AllReduce, 1 << power);
            assert_eq!(chosen.algorithm, Algorithm::Ring, "{layout:?}: 2^{power}");
        }
    }
}

#[test]
fn the_minimum_of_channels_alone_changes_nothing_below_64_kib_and_thresholds_do() {
    let topology = eight(Layout::Phb1, [12, 0], 5, "amd");
    let plain = communicator_of(&topology, &[], V2_28_9);
    let raised = communicator_of(&topology, &[("NCCL_MIN_NCHANNELS", "16")], V2_28_9);
    assert_eq!((plain.channels(), raised.channels()), (4, 16));
    for bytes in (1..64).map(|kib| kib * KIB) {
        assert_eq!(
            choice(&plain, Collective::AllReduce, bytes),
            choice(&raised, Collective::AllReduce, bytes),
            "{bytes}"
        );
    }
    // At 256 KiB it does.
    assert_eq!(choice(&plain, Collective::AllReduce, 256 * KIB).channels, 4);
    assert_eq!(choice(&raised, Collective::AllReduce, 256 * KIB).channels, 8);
    let lowered = communicator_of(
        &topology,
        &[("NCCL_MIN_NCHANNELS", "16"), ("NCCL_THREAD_THRESHOLDS", "8 8 64 2 8 64")],
        V2_28_9,
    );
    let small = choice(&lowered, Collective::AllReduce, 32 * KIB);
    assert_eq!((small.channels, choice(&plain, Collective::AllReduce, 32 * KIB).channels), (16, 1));
}

/// A byte of LL counts as four when a message is cut into channels since 2.26.2, not since 2.23; and the
/// least traffic of a channel doubled in 2.29.2.
#[test]
fn the_least_bytes_of_a_channel_follow_the_release() {
    let topology = eight(Layout::Phb1, [12, 0], 5, "amd");
    let variables = [("NCCL_MIN_NCHANNELS", "32"), ("NCCL_THREAD_THRESHOLDS", "0 0 0 0 0 0")];
    for (version, protocol, least) in [
        (NcclVersion::v2(23, 4), "LL", 8 * KIB),
        (NcclVersion::v2(25, 1), "LL", 8 * KIB),
        (NcclVersion::v2(26, 2), "LL", 2 * KIB),
        (V2_28_9, "LL", 2 * KIB),
        (V2_28_9, "Simple", 8 * KIB),
        (NcclVersion::v2(29, 2), "LL", 4 * KIB),
        (NcclVersion::v2(30, 7), "Simple", 16 * KIB),
    ] {
        let communicator = communicator_of(&topology, &[variables[0], variables[1], ("NCCL_PROTO", protocol)], version);
        for channels in [1, 2, 3, 8] {
            let chosen = choice(&communicator, Collective::AllReduce, least * channels);
            assert_eq!(u64::from(chosen.channels), channels, "{version} {protocol}");
        }
    }
}

#[test]
fn a_plugin_decides_algorithm_protocol_and_channels_but_not_threads() {
    let communicator =
        communicator_of(&eight(Layout::Phb1, [12, 0], 5, "amd"), &[("NCCL_MIN_NCHANNELS", "8")], V2_28_9);
    let own = choice(&communicator, Collective::AllReduce, 32 * KIB);
    assert_eq!((own.algorithm, own.protocol, own.channels, own.threads), (Algorithm::Ring, Protocol::Ll, 1, 512));
    let ask = |kernel, channels| {
        communicator.choose_with(Collective::AllReduce, 32 * KIB, Override { kernel, channels }).expect("a choice")
    };
    let spread = ask(None, Some(8));
    assert_eq!((spread.channels, spread.threads, spread.predicted_us), (8, 512, own.predicted_us));
    assert_eq!(ask(None, Some(64)).channels, 8, "no more than the communicator has");
    let tree = ask(Some((Algorithm::Tree, Protocol::Simple)), None);
    assert_eq!((tree.algorithm, tree.protocol, tree.threads), (Algorithm::Tree, Protocol::Simple, 640));
    assert_eq!(tree.runner_up.map(|second| second.algorithm), Some(Algorithm::Ring));
    // LL128 is off here, and stays off.
    assert_eq!(ask(Some((Algorithm::Ring, Protocol::Ll128)), None), own);
}

#[test]
fn ll128_is_off_on_pcie_by_default_and_on_where_it_is_named() {
    let topology = eight(Layout::Phb1, [12, 0], 5, "amd");
    let ll128 = |communicator: &Communicator| {
        let all = communicator.candidates(Collective::AllReduce, MIB).expect("candidates");
        let found = all.into_iter().find(|one| one.algorithm == Algorithm::Ring && one.protocol == Protocol::Ll128);
        found.expect("ring LL128").time_us
    };
    let default = communicator_of(&topology, &[], V2_28_9);
    let Err(Disabled::Ll128Gate { reason }) = ll128(&default) else { panic!("{:?}", ll128(&default)) };
    assert!(reason.contains("host bridge") && reason.contains("NVLink"), "{reason}");
    assert!(ll128(&communicator_of(&topology, &[("NCCL_PROTO", "LL,LL128,Simple")], V2_28_9)).is_ok());
    // On NVLink, which capabilities have it differs by release.
    for (capability, version, is_on) in [
        ([9, 0], NcclVersion::v2(23, 4), true),
        ([10, 0], NcclVersion::v2(24, 3), false),
        ([10, 0], NcclVersion::v2(25, 1), true),
        ([10, 3], NcclVersion::v2(26, 6), false),
        ([10, 3], NcclVersion::v2(27, 7), true),
        ([8, 6], NcclVersion::v2(26, 6), false),
        ([8, 6], NcclVersion::v2(27, 7), true),
    ] {
        let communicator = communicator_of(&eight(Layout::NvSwitch, capability, 5, "spr"), &[], version);
        assert_eq!(ll128(&communicator).is_ok(), is_on, "{capability:?} {version}");
    }
}

#[test]
fn equal_variables_and_their_older_names_are_one() {
    let topology = eight(Layout::Phb1, [8, 9], 4, "amd");
    for (pairs, channels) in [
        (vec![("NCCL_MAX_NCHANNELS", "1")], 1),
        (vec![("NCCL_MAX_NRINGS", "3")], 3),
        (vec![("NCCL_MAX_NRINGS", "3"), ("NCCL_MAX_NCHANNELS", "2")], 2),
        (vec![("NCCL_MIN_NCHANNELS", "8"), ("NCCL_MAX_NCHANNELS", "2")], 8),
        (vec![("NCCL_MIN_CTAS", "8"), ("NCCL_MAX_CTAS", "2")], 2),
        (vec![("NCCL_MIN_CTAS", "6")], 6),
        (vec![("NCCL_MAX_CTAS", "3"), ("NCCL_MAX_NCHANNELS", "2")], 2),
        (vec![("NCCL_MIN_NCHANNELS", "999")], 64),
        (vec![("NCCL_MIN_NCHANNELS", "4K")], 4),
    ] {
        assert_eq!(communicator_of(&topology, &pairs, V2_28_9).channels(), channels, "{pairs:?}");
    }
}

#[test]
fn peer_access_is_used_as_far_as_level_driver_and_release_say() {
    let of = |topology: &Topology, pairs: &[(&str, &str)], version| {
        let communicator = communicator_of(topology, pairs, version);
        (communicator.transport(0, 1).expect("a pair"), communicator.transport(0, 7).expect("a pair"))
    };
    let two_sockets = eight(Layout::Pix2, [8, 9], 4, "amd");
    assert_eq!(of(&two_sockets, &[], V2_28_9), (Transport::P2p, Transport::Shm));
    // Before 2.23 AMD's CPUs were trusted with everything.
    assert_eq!(of(&two_sockets, &[], NcclVersion::v2(22, 3)), (Transport::P2p, Transport::P2p));
    assert_eq!(of(&two_sockets, &[("NCCL_P2P_LEVEL", "SYS")], V2_28_9), (Transport::P2p, Transport::P2p));
    assert_eq!(of(&two_sockets, &[("NCCL_P2P_LEVEL", "sys")], V2_28_9), (Transport::P2p, Transport::Shm));
    assert_eq!(
        of(&two_sockets, &[("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "SYS")], V2_28_9),
        (Transport::Shm, Transport::Shm)
    );
    let mut geforce = two_sockets.clone();
    geforce.peer_access = PeerAccess::None;
    assert_eq!(of(&geforce, &[("NCCL_P2P_LEVEL", "SYS")], V2_28_9), (Transport::Shm, Transport::Shm));
    let told = communicator_of(&geforce, &[("NCCL_P2P_LEVEL", "SYS")], V2_28_9);
    assert!(told.findings().contains(&Finding::PeerAccessDenied { pairs: 28 }), "{:?}", told.findings());
    let unused = communicator_of(&two_sockets, &[], V2_28_9);
    assert!(
        unused.findings().contains(&Finding::PeerAccessUnused { pairs: 16, path: PathKind::Sys, level: PathKind::Pxb }),
        "{:?}",
        unused.findings()
    );
    assert_eq!(
        try_communicator(&geforce, &[("NCCL_SHM_DISABLE", "1")], V2_28_9).unwrap_err(),
        ModelError::Network { ranks: [0, 1] }
    );
}

// NCCL's own code, run without a GPU.

/// A table that NCCL's own code made. How it shows what it claims: every line was printed by graph/*.cc and
/// enqueue.cc of the release it names, compiled for a program without a GPU.
#[test]
fn what_nccls_own_code_comes_to_offline() {
    let text = include_str!("nccl_model/offline.tsv");
    let sizes: Vec<u64> = text
        .lines()
        .find_map(|line| line.strip_prefix("# sizes "))
        .expect("sizes")
        .split(' ')
        .map(|size| size.parse().expect("a size"))
        .collect();
    let mut cases = 0;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        let (topology, pairs, version) = offline_case(&fields);
        let communicator = communicator_of(&topology, &pairs, version);
        let graphs = communicator.graphs();
        let graph = |name: &str, graph: &nccltune::nccl_model::Graph| {
            format!(
                "{name} {}:{}x{}:{}:{}",
                graph.pattern.number(),
                graph.orders.len(),
                rounded(graph.channel_bandwidth_gbps),
                graph.path_kind,
                u32::from(graph.same_channels)
            )
        };
        let nvls = graphs.nvls.as_ref().map_or_else(|| "nvls -".to_owned(), |nvls| graph("nvls", nvls));
        let head = [graph("ring", &graphs.ring), graph("tree", &graphs.tree), nvls];
        assert_eq!(fields[8..11], head, "{line}");
        assert_eq!(fields[11], format!("{}/{}", communicator.channels(), communicator.nvls_channels()), "{line}");
        for field in &fields[12..] {
            check_offline_choices(&communicator, field, &sizes, line);
        }
        assert_eq!(fields.len(), 12 + COLLECTIVES.len(), "{line}");
        cases += 1;
    }
    assert_eq!(cases, 76, "cases");
}

fn offline_case<'a>(fields: &[&'a str]) -> (Topology, Vec<(&'a str, &'a str)>, NcclVersion) {
    let layout: Layout = serde_json::from_value(fields[0].into()).expect("a layout");
    let number = |text: &str| text.parse::<u32>().unwrap_or_else(|_| panic!("{text:?} is no number"));
    let (major, minor) = fields[2].split_once('.').expect("a capability");
    let (generation, now) =
        fields[3].split_once('@').map_or((fields[3], None), |(most, now)| (most, Some(number(now))));
    let link = PcieLink { generation_now: now, ..PcieLink::x16(number(generation)) };
    let gpus = number(fields[1]) as usize;
    let mut topology =
        Topology::of_layout(layout, gpus, [number(major), number(minor)], link, &cpu(fields[4])).expect("a topology");
    // A link's slowness is the GPU's alone; that of a switch is not known.
    topology.switches.iter_mut().for_each(|switch| switch.link.generation_now = None);
    topology.peer_access = if fields[5] == "none" { PeerAccess::None } else { PeerAccess::All };
    let version: Vec<u32> = fields[6].split('.').map(number).collect();
    let pairs = if fields[7] == "-" {
        Vec::new()
    } else {
        // A blank inside a value stands before a digit, one between variables before a name.
        split_variables(fields[7])
    };
    (topology, pairs, NcclVersion::v2(version[1], version[2]))
}

fn split_variables(text: &str) -> Vec<(&str, &str)> {
    let starts: Vec<usize> = text.match_indices("NCCL_").map(|(at, _)| at).collect();
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    starts
        .iter()
        .zip(ends)
        .map(|(start, end)| text[*start..end].trim_end().split_once('=').expect("a variable and its value"))
        .collect()
}

fn check_offline_choices(communicator: &Communicator, field: &str, sizes: &[u64], line: &str) {
    let (name, changes) = field.split_once(' ').expect("a collective");
    let collective = COLLECTIVES.into_iter().find(|one| one.log_name() == name).expect("a collective");
    let changes: BTreeMap<u64, &str> = changes
        .split(' ')
        .map(|change| change.split_once('=').expect("a change"))
        .map(|(size, what)| (size.parse().expect("a size"), what))
        .collect();
    let ranks = u64::from(communicator.ranks());
    let parts = if matches!(collective, Collective::AllGather | Collective::ReduceScatter) { ranks } else { 1 };
    let mut checked = BTreeSet::new();
    for bytes in sizes.iter().map(|bytes| bytes / 2 / parts * 2 * parts).filter(|bytes| *bytes > 0) {
        let wanted = changes.range(..=bytes).next_back().expect("a choice").1;
        let found = match communicator.choose(collective, bytes) {
            Ok(chosen) => format!("{},{},{},{}", chosen.algorithm, chosen.protocol, chosen.channels, chosen.threads),
            Err(_) => "fails".to_owned(),
        };
        assert_eq!(&found, wanted, "{name} {bytes}: {line}");
        checked.insert(bytes);
    }
    assert!(changes.keys().all(|bytes| checked.contains(bytes)), "{line}");
}

// Real GPUs.

/// The virtual machine with two H200 that the logs and the runs come from: both below one Intel CPU, on an
/// NVSwitch.
fn two_h200() -> Topology {
    let gpu = |number: u32| GpuNode {
        pci_bus_id: format!("0000:00:0{number}.0"),
        compute_capability: [9, 0],
        upstream: Upstream::Cpu(0),
        link: PcieLink::x16(5),
        nvlinks: vec![NvLink { to: NvLinkEnd::Switch, links: 18 }],
    };
    Topology {
        cpus: vec![CpuNode::intel(0, 0x8F)],
        switches: Vec::new(),
        gpus: vec![gpu(6), gpu(7)],
        peer_access: PeerAccess::All,
        has_multicast: true,
    }
}

/// Variables as a log says they were read.
fn logged_variables(log: &str) -> Vec<(&str, &str)> {
    log.lines()
        .filter_map(|line| line.split_once("NCCL INFO ")?.1.split_once(" set by environment to "))
        .filter(|(name, _)| name.starts_with("NCCL_"))
        .map(|(name, value)| (name, value.trim_end_matches('.')))
        .collect()
}

#[test]
fn tables_thresholds_channels_and_choices_of_real_logs() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-gpu/recordings");
    let mut logs = 0;
    let mut choices = 0;
    for entry in fs::read_dir(&folder).expect("recordings") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).expect("a log");
        let pairs = logged_variables(&text);
        logs += 1;
        if name.contains("badalgo") {
            let error = try_communicator(&two_h200(), &pairs, V2_28_9).unwrap_err();
            assert!(matches!(&error, ModelError::Refused { variable, .. } if variable == "NCCL_ALGO"), "{error}");
            assert!(error.to_string().contains("Rinng"), "{error}");
            continue;
        }
        let communicator = communicator_of(&two_h200(), &pairs, V2_28_9);
        let is_host = name.contains("-host-");
        assert_eq!(communicator.transport(0, 1), Some(if is_host { Transport::Shm } else { Transport::P2p }), "{name}");
        check_tables(&communicator, &text, &name);
        for line in text.lines() {
            let Some((_, line)) = line.split_once("NCCL INFO ") else { continue };
            if let Some((channels, _)) = line.split_once(" coll channels") {
                assert_eq!(communicator.channels().to_string(), channels, "{name}");
            }
            if let Some(rest) = line.strip_prefix("threadThresholds ") {
                let wanted = rest.split(" | ").take(2).collect::<Vec<_>>().join(" | ");
                let of = |a| Protocol::ALL.map(|p| communicator.threshold(a, p).to_string()).join("/");
                assert_eq!(format!("{} | {}", of(Algorithm::Tree), of(Algorithm::Ring)), wanted, "{name}");
            }
            if let Some((head, kernel)) = line.split_once(" Bytes -> Algo ") {
                check_logged_choice(&communicator, head, kernel, &name);
                choices += 1;
            }
        }
    }
    assert!(logs >= 9 && choices >= 200, "{logs} logs, {choices} choices");
}

fn check_logged_choice(communicator: &Communicator, head: &str, kernel: &str, name: &str) {
    let (function, bytes) = head.split_once(": ").expect("a collective and a size");
    let collective = COLLECTIVES.into_iter().find(|one| one.log_name() == function).expect("a collective");
    let bytes: u64 = bytes.parse().expect("a size");
    // The log counts one rank's part where every rank has its own.
    let parts = match collective {
        Collective::AllGather | Collective::ReduceScatter => u64::from(communicator.ranks()),
        _ => 1,
    };
    let chosen = choice(communicator, collective, bytes * parts);
    let found = format!(
        "{} proto {} channel{{Lo..Hi}}={{0..{}}}",
        chosen.algorithm.name().to_uppercase(),
        chosen.protocol.name().to_uppercase(),
        chosen.channels - 1
    );
    assert_eq!(found, kernel, "{name}: {head}");
}

/// The tables of latency and bandwidth that NCCL logs when a communicator starts, as far as the model goes.
fn check_tables(communicator: &Communicator, log: &str, name: &str) {
    let mut algorithms: Vec<Option<Algorithm>> = Vec::new();
    let mut compared = 0;
    for line in log.lines().filter_map(|line| Some(line.split_once("NCCL INFO ")?.1)) {
        let mut cells = line.split('|').map(str::trim);
        let head = cells.next().unwrap_or("");
        let cells: Vec<&str> = cells.filter(|cell| !cell.is_empty()).collect();
        if head == "Algorithm" {
            let of = |cell: &&str| Algorithm::ALL.into_iter().find(|one| one.nccl_name() == *cell);
            algorithms = cells.iter().map(of).collect();
        }
        let collective = COLLECTIVES.into_iter().find(|one| one.log_name() == head);
        for (index, cell) in cells.iter().enumerate() {
            let (Some(Some(algorithm)), protocol) = (algorithms.get(index / 3), Protocol::ALL[index % 3]) else {
                continue;
            };
            if head == "Max NThreads" {
                assert_eq!(communicator.max_threads(*algorithm, protocol).to_string(), *cell, "{name} {algorithm}");
                compared += 1;
            } else if let Some(collective) = collective {
                let (latency, bandwidth) = communicator.rating(collective, *algorithm, protocol).expect("a rating");
                let (wanted, wanted_bandwidth) = cell.split_once('/').expect("latency and bandwidth");
                assert_eq!(format!("{bandwidth:.1}"), wanted_bandwidth.trim(), "{name} {collective} {algorithm}");
                // NCCL prints the latency of what is off as well.
                if bandwidth > 0.0 {
                    assert_eq!(format!("{latency:.1}"), wanted.trim(), "{name} {collective} {algorithm}");
                }
                compared += 1;
            }
        }
    }
    assert!(compared >= 3 * 3 + 3 * 3 * 5, "{name}: {compared} figures");
}

/// Every choice NCCL logged in every recorded run, at every size and arm, with the communicator's channels.
#[test]
fn choices_logged_in_recorded_runs() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/recorded");
    let mut compared = 0;
    let mut runs = 0;
    for entry in fs::read_dir(&folder).expect("recorded runs") {
        let path = entry.expect("an entry").path();
        if !path.is_dir() {
            continue;
        }
        runs += 1;
        let run = recorded(&path.file_name().expect("a name").to_string_lossy());
        let manifest = manifest_in(&run);
        let version = NcclVersion::from_code(manifest.nccl.as_ref().expect("NCCL").version);
        let pins: BTreeMap<String, String> =
            manifest.pins.iter().map(|pin| (pin.variable.clone(), pin.value.clone())).collect();
        let mut communicators: BTreeMap<String, Communicator> = BTreeMap::new();
        for line in journal_in(&run) {
            let Event::CellMeasured(cell) = line.event else { continue };
            let arm = manifest.arms.iter().find(|arm| arm.id == cell.arm).expect("an arm");
            let communicator = communicators.entry(arm.name.clone()).or_insert_with(|| {
                let mut all = pins.clone();
                all.extend(arm.env.clone());
                let settings = Settings::read(&all, version);
                let release = Release::of(version).expect("a release");
                Communicator::new(&two_h200(), &settings, release, None).expect("a communicator")
            });
            let effective = &cell.effective;
            let chosen = choice(communicator, cell.point.collective, cell.point.bytes);
            let found = (
                Some(chosen.algorithm.name().to_owned()),
                Some(chosen.protocol.name().to_owned()),
                Some(chosen.channels),
                Some(communicator.channels()),
            );
            let logged =
                (effective.algo.clone(), effective.proto.clone(), effective.channels, effective.communicator_channels);
            assert_eq!(found, logged, "{}: {} at {}", run.display(), arm.name, cell.point.bytes);
            let transport = effective.transport.as_deref().unwrap_or("");
            assert!(communicator.ring_transports().iter().all(|one| transport.starts_with(one.name())), "{transport}");
            compared += 1;
        }
    }
    assert!(runs >= 5 && compared >= 2000, "{runs} runs, {compared} choices");
}

// Graph files.

const ORDER: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

fn repaired() -> GraphFile {
    let graph = |id, pattern| FileGraph {
        id,
        pattern,
        cross_nic: 0,
        speed_intra_gbps: 24.0,
        speed_inter_gbps: 24.0,
        latency_inter_us: 0.0,
        type_intra: PathKind::Phb,
        type_inter: PathKind::Pix,
        same_channels: true,
        orders: vec![ORDER.to_vec(), ORDER.to_vec()],
    };
    GraphFile { graphs: vec![graph(0, Pattern::Ring), graph(1, Pattern::Tree)] }
}

#[test]
fn a_graph_file_cures_the_fallback() {
    let topology = eight(Layout::Sys2, [12, 0], 5, "amd");
    let settings = Settings::read(&environment(&[("NCCL_P2P_LEVEL", "SYS")]), V2_28_9);
    let release = Release::of(V2_28_9).expect("a release");
    let default = Communicator::new(&topology, &settings, release, None).expect("a communicator");
    let cured = Communicator::new(&topology, &settings, release, Some(&repaired())).expect("a communicator");
    assert!(default.graphs().ring.is_fallback && !cured.graphs().ring.is_fallback);
    assert_eq!((default.channels(), cured.channels()), (2, 4));
    assert_eq!(choice(&default, Collective::AllReduce, 32 * KIB).protocol, Protocol::Simple);
    let chosen = choice(&cured, Collective::AllReduce, 32 * KIB);
    assert_eq!((chosen.protocol, chosen.channels, chosen.threads), (Protocol::Ll, 1, 512));
    assert_eq!(cured.findings(), []);
    // A file that names only a ring leaves the tree to the search, which still finds nothing.
    let ring_alone = GraphFile { graphs: vec![repaired().graphs.remove(0)] };
    let half = Communicator::new(&topology, &settings, release, Some(&ring_alone)).expect("a communicator");
    assert!(half.graphs().tree.is_fallback);
    assert_eq!(half.channels(), 2);
}

#[test]
fn a_graph_file_that_nccl_would_stumble_over_is_refused() {
    let topology = eight(Layout::Sys2, [12, 0], 5, "amd");
    let settings = Settings::read(&BTreeMap::new(), V2_28_9);
    let refused = |change: fn(&mut FileGraph), version| {
        let mut file = repaired();
        file.graphs.iter_mut().for_each(change);
        let release = Release::of(version).expect("a release");
        Communicator::new(&topology, &settings, release, Some(&file)).unwrap_err().to_string()
    };
    assert!(refused(|graph| graph.orders[0][3] = 9, V2_28_9).contains("GPU 9"));
    assert!(refused(|graph| graph.orders[1].truncate(5), V2_28_9).contains("channel 1 has 5 of 8 GPUs"));
    assert!(refused(|graph| graph.orders[1].clear(), V2_28_9).contains("channel 1 has 0 of 8 GPUs"));
    assert!(refused(|graph| graph.orders = vec![ORDER.to_vec(); 40], V2_28_9).contains("40 channels"));
    assert!(refused(|graph| graph.type_intra = PathKind::P2c, NcclVersion::v2(26, 6)).contains("P2C"));
}

#[test]
fn graph_files_read_as_they_are_written() {
    let file = repaired();
    let text = file.write();
    assert_shown("nccl-graph-file", &text);
    assert_eq!(GraphFile::read(&text), Ok(file));
    // As NCCL dumps it: adapters at both ends, a comment, devices in hexadecimal.
    let dumped = "<graphs version=\"1\"><!-- dumped --><graph id=\"3\" pattern=\"5\" crossnic=\"0\" nchannels=\"1\" \
                  speedintra=\"20\" speedinter=\"40.1\" latencyinter=\"0\" typeintra=\"NVL\" typeinter=\"PIX\" \
                  samechannels=\"0\"><channel><net dev=\"0\"/><gpu dev=\"0xa\"/><net dev=\"0\"/></channel></graph></graphs>";
    let read = GraphFile::read(dumped).expect("a dump");
    assert_eq!((read.graphs[0].pattern, read.graphs[0].orders.clone()), (Pattern::Nvls, vec![vec![10]]));
}

#[test]
fn hostile_graph_files_are_told_where_they_are_wrong() {
    let good = repaired().write();
    let cases = [
        (String::new(), "not XML"),
        ("<graphs version=\"1\">".to_owned(), "not XML"),
        ("<system version=\"1\"/>".to_owned(), "line 1: expected <graphs"),
        ("<graphs/>".to_owned(), "no version"),
        (good.replace("version=\"1\"", "version=\"2\""), "version \"2\""),
        (good.replace("pattern=\"4\"", "pattern=\"9\""), "line 2: pattern=9"),
        (good.replace("speedintra=\"24\"", "speedintra=\"NaN\""), "speedintra=\"NaN\""),
        (good.replace("speedintra=\"24\"", "speedintra=\"-1\""), "speedintra=\"-1\""),
        (good.replace("speedintra=\"24\"", "speedintra=\"0\""), "without bandwidth"),
        (good.replace("typeintra=\"PHB\"", "typeintra=\"phb\""), "typeintra=\"phb\" is none of"),
        (good.replace("nchannels=\"2\"", "nchannels=\"3\""), "nchannels=3 with 2 channels"),
        (good.replacen("<gpu dev=\"0x1\"/>", "<gpu dev=\"0\"/>", 1), "GPU 0 stands twice"),
        (good.replacen("<gpu dev=\"0x1\"/>", "<gpu dev=\"zz\"/>", 1), "dev=\"zz\" is no GPU"),
        (good.replacen("<gpu dev=\"0x1\"/>", "<cpu dev=\"0x1\"/>", 1), "not <cpu>"),
        (good.replacen(" id=\"0\"", "", 1), "line 2: <graph> has no id"),
        (format!("<!DOCTYPE a [<!ENTITY b \"{}\">]>{good}", "x".repeat(9)), "not XML"),
    ];
    for (text, wanted) in cases {
        let error = GraphFile::read(&text).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{wanted:?}: {error}");
        assert!(error.len() < 400, "{error}");
    }
    let long = " ".repeat(5 << 20);
    assert_eq!(GraphFile::read(&long), Err(GraphFileError::Size { bytes: long.len() }));
}

// What cannot be.

#[test]
fn sizes_releases_and_collectives_out_of_range_are_refused() {
    let topology = eight(Layout::Phb1, [8, 9], 4, "amd");
    let communicator = communicator_of(&topology, &[], V2_28_9);
    for bytes in [0, MAX_BYTES + 1, u64::MAX] {
        let error = communicator.choose(Collective::AllReduce, bytes).unwrap_err();
        assert!(
            error.to_string().contains(&format!("{bytes} bytes")) && error.to_string().contains("1024 GiB"),
            "{error}"
        );
        assert!(communicator.candidates(Collective::AllGather, bytes).is_err());
    }
    assert!(communicator.choose(Collective::AllReduce, MAX_BYTES).is_ok());
    let error = communicator.choose(Collective::SendRecv, 1024).unwrap_err();
    assert!(error.to_string().contains("send-recv"), "{error}");
    for version in [NcclVersion::v2(18, 6), NcclVersion::v2(33, 0), NcclVersion { major: 3, minor: 0, patch: 0 }] {
        let error = Release::of(version).unwrap_err().to_string();
        assert!(error.contains(&version.to_string()) && error.contains("2.30.7"), "{error}");
    }
    for (minor, patch) in [(31, 0), (32, 4), (30, 9)] {
        let release = Release::of(NcclVersion::v2(minor, patch)).expect("a release");
        assert!(release.stands_in());
        let settings = Settings::read(&BTreeMap::new(), release.version());
        let communicator = Communicator::new(&topology, &settings, release, None).expect("a communicator");
        let told = communicator.findings().iter().map(ToString::to_string).collect::<String>();
        assert!(told.contains("2.30.7 is the nearest"), "{told}");
    }
}

#[test]
fn variables_that_keep_nccl_from_working_are_errors_and_older_releases_work_around_them() {
    let topology = eight(Layout::Phb1, [8, 9], 4, "amd");
    let error = try_communicator(&topology, &[("NCCL_ALGO", "Rinng")], V2_28_9).unwrap_err().to_string();
    assert!(error.contains("NCCL_ALGO=Rinng") && error.contains("fail to start"), "{error}");
    let tree = communicator_of(&topology, &[("NCCL_ALGO", "Tree")], V2_28_9);
    assert_eq!(choice(&tree, Collective::AllReduce, 4096).algorithm, Algorithm::Tree);
    let error = tree.choose(Collective::AllGather, 4096).unwrap_err().to_string();
    assert!(error.contains("first all-gather") && error.contains("NCCL_ALGO leaves no algorithm"), "{error}");
    let older = communicator_of(&topology, &[("NCCL_ALGO", "Tree")], NcclVersion::v2(23, 4));
    assert_eq!(choice(&older, Collective::AllGather, 4096).algorithm, Algorithm::Ring);
    assert!(older.is_backup(Collective::AllGather) && !older.is_backup(Collective::AllReduce));
    let mut bridged =
        Topology::of_layout(Layout::NvLinkPairs, 4, [8, 6], PcieLink::x16(4), &cpu("amd")).expect("pairs");
    bridged.peer_access = PeerAccess::None;
    assert_eq!(
        try_communicator(&bridged, &[], V2_28_9).unwrap_err(),
        ModelError::NvLinkWithoutPeerAccess { ranks: [1, 0] }
    );
    assert!(try_communicator(&bridged, &[("NCCL_IGNORE_DISABLED_P2P", "1")], V2_28_9).is_ok());
    assert!(try_communicator(&topology, &[("NCCL_NVLS_ENABLE", "1")], V2_28_9).is_err());
}

#[test]
fn topologies_that_cannot_be_are_refused() {
    type Change = fn(&mut Topology);
    let changes: [(Change, &str); 14] = [
        (|t| t.gpus.clear(), "0 GPUs"),
        (|t| t.gpus = vec![t.gpus[0].clone(); 40], "40 GPUs"),
        (|t| t.cpus.clear(), "0 CPUs"),
        (|t| t.gpus[1].pci_bus_id = t.gpus[0].pci_bus_id.clone(), "two devices have the PCI address"),
        (|t| t.gpus[1].pci_bus_id = "21:00".to_owned(), "no PCI address"),
        (|t| t.gpus[1].upstream = Upstream::Cpu(7), "gpus[1]: there is no CPU 7"),
        (|t| t.gpus[1].upstream = Upstream::Switch(9), "there is no switch 9"),
        (|t| t.switches[0].upstream = Upstream::Switch(0), "switches[0]: more than 8 switches above it, or a circle"),
        (|t| t.gpus[2].link.generation = 9, "PCIe generation 9"),
        (|t| t.gpus[2].link.width = 3, "3 lanes"),
        (|t| t.gpus[2].link.generation_now = Some(5), "cannot run at PCIe generation 5 if 4"),
        (|t| t.gpus[2].compute_capability = [99, 0], "99.0"),
        (
            |t| t.gpus[2].nvlinks = vec![NvLink { to: NvLinkEnd::Gpu(3), links: 4 }],
            "4 NVLinks lead to GPU 3, and 0 back",
        ),
        (|t| t.peer_access = PeerAccess::Pairs(vec![[1, 1]]), "[1, 1] is no pair"),
    ];
    for (change, wanted) in changes {
        let mut topology = eight(Layout::Pix2, [8, 9], 4, "amd");
        change(&mut topology);
        let error = try_communicator(&topology, &[], V2_28_9).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{wanted:?}: {error}");
    }
    let one = Topology::of_layout(Layout::Phb1, 1, [9, 0], PcieLink::x16(5), &cpu("amd")).expect("one GPU");
    assert_eq!(try_communicator(&one, &[], V2_28_9).unwrap_err(), ModelError::OneRank);
    let uneven = Topology::of_layout(Layout::Sys4, 6, [9, 0], PcieLink::x16(5), &cpu("amd"));
    assert!(uneven.unwrap_err().to_string().contains("4 NUMA nodes"));
}

/// The most GPUs there may be, on the layouts that take a search farthest.
#[test]
fn the_largest_machines_are_answered() {
    for layout in [Layout::NvSwitch, Layout::Sys4] {
        let topology = Topology::of_layout(layout, 32, [9, 0], PcieLink::x16(5), &cpu("spr")).expect("a topology");
        let communicator = communicator_of(&topology, &[("NCCL_MIN_NCHANNELS", "64")], V2_28_9);
        let chosen = choice(&communicator, Collective::AllReduce, MAX_BYTES);
        assert!((1..=64).contains(&chosen.channels) && chosen.predicted_us.is_finite(), "{layout:?}: {chosen:?}");
    }
}

/// A topology that people write: TOML, with everything it may leave out left out.
#[test]
fn a_topology_reads_from_toml() {
    let text = r#"
        cpus = [{ numa_node = 0, architecture = "x86_64", vendor = "amd" }]
        peer_access = "none"
        [[switches]]
        pci_bus_id = "0000:01:00.0"
        upstream = { cpu = 0 }
        link = { generation = 5, width = 16 }
        [[gpus]]
        pci_bus_id = "0000:02:00.0"
        compute_capability = [12, 0]
        upstream = { switch = 0 }
        link = { generation = 5, width = 16 }
        [[gpus]]
        pci_bus_id = "0000:03:00.0"
        compute_capability = [12, 0]
        upstream = { switch = 0 }
        link = { generation = 5, width = 16, generation_now = 1 }
    "#;
    let topology: Topology = toml::from_str(text).expect("a topology");
    topology.validate().expect("a machine that can be");
    let again: Topology = toml::from_str(&toml::to_string(&topology).expect("TOML")).expect("a topology");
    assert_eq!(again, topology);
    assert!(toml::from_str::<Topology>(&text.replace("width = 16", "widht = 16")).is_err());
}
