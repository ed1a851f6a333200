//! What an arm must get right beside what it is tuned for: the collectives a server issues.
//!
//! A setting that is best for all-reduce is of no use where it breaks another collective: `NCCL_ALGO=Tree`
//! leaves all others without an algorithm, and NCCL says so only when one of them is called. What is in the
//! plan does not follow from the workload alone, since a server also broadcasts its requests, gathers its
//! samples and moves what no table of sizes names.

use std::collections::BTreeMap;

use itertools::Itertools;

use crate::collective::{Collective, DataType, Form, Issue, Placement};
use crate::record::{FORMAT, GatePlan, GatePoint, LongCheck, Point, PointKey, Workload};

/// Bytes of a short and of a longer message: NCCL chooses another algorithm or protocol for each.
const SIZES: [u64; 2] = [16 << 10, 2 << 20];

/// Bytes and repeats of the long check of LL128. On a link that does not keep its stores in order, a flag
/// may arrive before the data it stands for; how often depends on size and load, so both are tried.
const LL128_SIZES: [(u64, u32); 5] = [(4 << 10, 32), (60 << 10, 32), (512 << 10, 32), (4 << 20, 8), (32 << 20, 2)];

/// What servers issue whatever their model: requests and their metadata are broadcast as bytes, samples and
/// counts are gathered and added up in single precision or as bytes.
const ALWAYS: [(Collective, DataType); 5] = [
    (Collective::Broadcast, DataType::Int8),
    (Collective::AllGather, DataType::Int8),
    (Collective::AllGather, DataType::Fp32),
    (Collective::AllReduce, DataType::Fp32),
    (Collective::AllReduce, DataType::Int8),
];

/// The gate for a workload on `ranks` ranks: every collective in the workload's types, what servers issue
/// anyway, and both over every group of fewer ranks that the workload names.
pub fn gate_plan(workload: &Workload, ranks: u32) -> GatePlan {
    let named = || workload.points.iter().chain(&workload.guard);
    let dtypes: Vec<DataType> = named().map(|point| point.dtype).sorted().dedup().collect();
    let usual = Collective::ALL.into_iter().cartesian_product(&dtypes).map(|(collective, dtype)| (collective, *dtype));
    let mut kinds: BTreeMap<Collective, Vec<DataType>> = BTreeMap::new();
    for (collective, dtype) in usual.chain(ALWAYS).sorted().dedup() {
        kinds.entry(collective).or_default().push(dtype);
    }
    let groups = named().map(|point| point.ranks).chain([ranks]).filter(|size| fits(*size, ranks));
    let (bytes, repeats) = LL128_SIZES.into_iter().unzip();
    GatePlan {
        format: FORMAT,
        kinds,
        ranks: groups.sorted_unstable_by_key(|size| std::cmp::Reverse(*size)).dedup().collect(),
        bytes: SIZES.to_vec(),
        ll128: LongCheck { dtype: dtypes.first().copied().unwrap_or(DataType::Bf16), bytes, repeats },
    }
}

/// A plan, point by point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatePoints {
    /// What every arm must get right, each captured and call by call.
    pub all: Vec<GatePoint>,
    /// What arms that enable LL128 must get right beside that.
    pub ll128: Vec<GatePoint>,
}

/// The points of a plan, all ranks first.
pub fn gate_points(plan: &GatePlan) -> GatePoints {
    let sized = |collective: Collective, dtype, ranks, bytes: u64, form| {
        let bytes = bytes.next_multiple_of(collective.granularity_bytes(dtype, ranks).max(1));
        PointKey { collective, dtype, bytes, ranks, form }
    };
    let mut all = Vec::new();
    for (ranks, (collective, dtypes)) in plan.ranks.iter().cartesian_product(&plan.kinds) {
        let captured = Form::usual(*collective);
        for ((dtype, bytes), form) in
            dtypes.iter().cartesian_product(&plan.bytes).cartesian_product([captured, captured.eager()])
        {
            all.push(GatePoint { point: sized(*collective, *dtype, *ranks, *bytes, form), repeats: 1 });
        }
    }
    let most = plan.ranks.first().copied().unwrap_or(1);
    // Send and receive choose no protocol by list.
    let ll128 = Collective::ALL
        .into_iter()
        .filter(|collective| *collective != Collective::SendRecv)
        .cartesian_product([Placement::InPlace, Placement::OutOfPlace])
        .cartesian_product(plan.ll128.bytes.iter().zip(&plan.ll128.repeats))
        .map(|((collective, placement), (bytes, repeats))| GatePoint {
            point: sized(collective, plan.ll128.dtype, most, *bytes, Form { issue: Issue::Captured, placement }),
            repeats: *repeats,
        })
        .collect();
    GatePoints { all, ll128 }
}

/// Whether so many ranks form a group of their own among all.
fn fits(size: u32, ranks: u32) -> bool {
    size >= 2 && size <= ranks && ranks.is_multiple_of(size)
}

/// Takes out of a workload what a launch of so many ranks cannot measure: groups that do not divide it.
pub fn measured_by(workload: &mut Workload, ranks: u32) {
    let mut check = |point: &mut Point| point.measured &= fits(point.ranks, ranks);
    workload.points.iter_mut().for_each(&mut check);
    workload.guard.iter_mut().for_each(&mut check);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::wording::fixtures;
    use crate::workload::measurable;

    #[test]
    fn a_gate_holds_what_a_server_issues_each_way() {
        let plan = gate_points(&gate_plan(&fixtures::workload(), 8)).all;
        let kinds: BTreeSet<_> = plan.iter().map(|gate| (gate.point.collective, gate.point.dtype)).collect();
        for collective in Collective::ALL {
            assert!(kinds.contains(&(collective, DataType::Bf16)), "{collective}");
        }
        assert!(kinds.contains(&(Collective::Broadcast, DataType::Int8)));
        assert!(kinds.contains(&(Collective::AllReduce, DataType::Fp32)));
        assert_eq!(plan.len(), kinds.len() * 4, "two sizes, captured and eager");
        assert!(plan.iter().all(|gate| gate.point.ranks == 8 && gate.repeats == 1));
        let eager = plan.iter().filter(|gate| gate.point.form.issue == Issue::Eager).count();
        assert_eq!(2 * eager, plan.len());
    }

    #[test]
    fn groups_and_types_of_the_workload_are_in_it() {
        let mut workload = fixtures::workload();
        let mut of_four = workload.points[0].clone();
        (of_four.ranks, of_four.dtype, of_four.collective) = (4, DataType::Fp16, Collective::ReduceScatter);
        workload.guard.push(of_four.clone());
        workload.guard.push(Point { ranks: 3, ..of_four });
        let plan = gate_points(&gate_plan(&workload, 8)).all;
        let groups: BTreeSet<u32> = plan.iter().map(|gate| gate.point.ranks).collect();
        assert_eq!(groups, BTreeSet::from([4, 8]), "three ranks do not divide eight");
        assert_eq!(plan[0].point.ranks, 8, "all ranks come first");
        assert!(plan.iter().any(|gate| gate.point.dtype == DataType::Fp16 && gate.point.ranks == 8));
        measured_by(&mut workload, 8);
        assert_eq!(workload.guard.iter().filter(|point| !point.measured).count(), 1);
    }

    #[test]
    fn every_point_can_be_run() {
        for ranks in [2, 3, 6, 8, 16] {
            let plan = gate_points(&gate_plan(&fixtures::workload(), ranks));
            for gate in plan.all.iter().chain(&plan.ll128) {
                let point = Point { form: gate.point.form, ..fixtures::workload().points[0].clone() };
                let PointKey { collective, dtype, bytes, ranks, form } = gate.point;
                assert!(measurable(&Point { collective, dtype, bytes, ranks, form, ..point }), "{}", gate.point);
            }
            let placements: BTreeSet<_> = plan.ll128.iter().map(|gate| gate.point.form.placement).collect();
            assert_eq!(placements.len(), 2);
            assert!(plan.ll128.iter().map(|gate| gate.repeats).sum::<u32>() > 1000 - 1);
        }
    }
}
