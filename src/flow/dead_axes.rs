//! Axes of a space that do nothing on this machine, as far as NCCL's rules are known: arms that have them are left
//! out, but for one each, which is measured to see whether the rule holds.

use std::collections::BTreeMap;
use std::path::Path;

use super::explain::{moved, outside, same};
use crate::discovery::{self, wiring_of};
use crate::evidence::Evidence;
use crate::knob::{self, ReadValue};
use crate::machine::{Gpu, NcclVersion, Topology};
use crate::nccl_model::{Choice, Communicator, Release, Settings};
use crate::probe::Question;
use crate::process::Supervisor;
use crate::record::{Arm, ArmId, DeadAxis, EffectKind, PointKey};
use crate::search::{SearchContext, spot_check};
use crate::units::format_size;
use crate::wording::plural;

/// Arms of a space that is looked at: each may cost the model two communicators, and a space beyond that is cut by
/// whoever writes it.
const MOST_ARMS: usize = 4096;

/// What the rules are asked about.
pub(super) struct Field<'a> {
    /// The GPUs that are measured, in ranks' order.
    pub(super) topology: &'a Topology,
    /// Whose rules.
    pub(super) version: NcclVersion,
    /// What holds in every arm.
    pub(super) pins: &'a BTreeMap<String, String>,
    /// Every point, guard points included.
    pub(super) points: &'a [PointKey],
}

/// How the GPUs here are wired; none where that is not known.
pub(super) fn wiring(
    supervisor: &Supervisor,
    environment: &BTreeMap<String, String>,
    gpus: &[Gpu],
) -> Option<Topology> {
    let report = discovery::ask(supervisor, &Question::Wiring, environment).ok()?;
    wiring_of(Path::new("/"), gpus, &report).topology.ok()
}

/// A communicator and what it chooses at each point.
struct Answer {
    communicator: Communicator,
    choices: Vec<Choice>,
}

/// Answers by environment; none where the model has none.
struct Model<'a> {
    field: &'a Field<'a>,
    release: Release,
    answers: BTreeMap<BTreeMap<String, String>, Option<Answer>>,
}

impl Model<'_> {
    fn learn(&mut self, environment: &BTreeMap<String, String>) {
        if self.answers.contains_key(environment) {
            return;
        }
        let field = self.field;
        let whole: BTreeMap<String, String> = field.pins.iter().chain(environment).map(owned).collect();
        let settings = Settings::read(&whole, field.version);
        let answer = Communicator::new(field.topology, &settings, self.release, None).ok().and_then(|communicator| {
            let choose = |point: &PointKey| communicator.choose(point.collective, point.bytes).ok();
            let choices = field.points.iter().map(choose).collect::<Option<Vec<Choice>>>()?;
            Some(Answer { communicator, choices })
        });
        self.answers.insert(environment.clone(), answer);
    }

    /// Why a variable of an arm does nothing at any point; none where it may do something.
    fn rule(&mut self, arm: &Arm, name: &str) -> Option<String> {
        let value = arm.env.get(name)?;
        match knob::read_as_nccl(name, value, self.field.version).value {
            ReadValue::NotRead { reason } | ReadValue::Ignored { reason } => return Some(reason),
            _ => {}
        }
        let mut without = arm.env.clone();
        without.remove(name);
        self.learn(&arm.env);
        self.learn(&without);
        let now = self.answers.get(&arm.env)?.as_ref()?;
        let before = self.answers.get(&without)?.as_ref()?;
        if knob::changes_transport(name) {
            // How GPUs meet weighs most, and follows from more of the machine than its wiring: what stands against
            // trying it is for the test of peer access to say.
            return None;
        }
        if Settings::is_modelled(name) {
            let is_same = now.choices.iter().zip(&before.choices).all(|(now, before)| same(now, before));
            // What a file changes is more than what is asked of it here.
            let is_idle = is_same && moved(&before.communicator, &now.communicator).is_none() && arm.files.is_empty();
            let sizes: Vec<String> = self.field.points.iter().map(|point| format_size(point.bytes)).collect();
            return is_idle
                .then(|| format!("NCCL {} runs {} alike with and without it", self.field.version, list(&sizes)));
        }
        let reasons = self.field.points.iter().zip(&now.choices).map(|(point, choice)| {
            match outside(point.collective, name, Some(choice), point.bytes) {
                (EffectKind::None, reason) => Some(reason),
                _ => None,
            }
        });
        reasons.collect::<Option<Vec<String>>>()?.into_iter().last()
    }
}

fn owned((name, value): (&String, &String)) -> (String, String) {
    (name.clone(), value.clone())
}

/// "14 KB, 43 KB and 1 MB", each once.
fn list(sizes: &[String]) -> String {
    let mut known: Vec<&str> = Vec::new();
    for size in sizes {
        if !known.contains(&size.as_str()) {
            known.push(size);
        }
    }
    match known.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => "nothing".to_owned(),
    }
}

/// Leaves out the arms of dead axes, all but one each, and says which axes those are.
pub(super) fn prune(field: &Field<'_>, arms: &mut Vec<Arm>) -> Vec<DeadAxis> {
    let Ok(release) = Release::of(field.version) else { return Vec::new() };
    // Of groups of some of the GPUs nothing is known: which of them is for the server to say.
    let ranks = field.topology.gpus.len() as u32;
    let is_known = !field.points.is_empty() && field.points.iter().all(|point| point.ranks == ranks);
    if !is_known || arms.len() > MOST_ARMS {
        return Vec::new();
    }
    let mut model = Model { field, release, answers: BTreeMap::new() };
    let mut names: Vec<String> = arms.iter().flat_map(|arm| arm.env.keys().cloned()).collect();
    names.sort();
    names.dedup();
    let mut dead = Vec::new();
    for name in names {
        let mut having: Vec<&Arm> = arms.iter().filter(|arm| arm.env.contains_key(&name)).collect();
        // The simplest first: it is the one that is measured, and most axes act there already.
        having.sort_by_key(|arm| (arm.env.len() + arm.files.len(), arm.id.clone()));
        let (Some(simplest), true) = (having.first().copied().cloned(), having.len() > 1) else { continue };
        let mut rule = None;
        let is_dead = having.iter().all(|arm| {
            let found = model.rule(arm, &name);
            let holds = found.is_some();
            rule = rule.take().or(found);
            holds
        });
        if let (Some(rule), true) = (rule, is_dead) {
            let left_out = having.len() as u32 - 1;
            dead.push(DeadAxis { variable: name, rule, spot_check: simplest.id, left_out });
        }
    }
    leave_out(&dead, arms);
    dead
}

/// Leaves out the arms of these axes, but for those that check them.
pub(super) fn leave_out(dead: &[DeadAxis], arms: &mut Vec<Arm>) {
    let is_kept = |arm: &Arm| dead.iter().any(|axis| axis.spot_check == arm.id);
    let is_dead = |arm: &Arm| dead.iter().any(|axis| arm.env.contains_key(&axis.variable));
    arms.retain(|arm| is_kept(arm) || !is_dead(arm));
}

/// What is said of an axis before anything is measured.
pub(super) fn notice(axis: &DeadAxis, arms: &[Arm]) -> String {
    let left_out = axis.left_out;
    let check = name_of(&axis.spot_check, arms);
    format!(
        "{} does nothing here ({}): {left_out} {} left out, and {check} is measured to see whether that holds \
         (--keep-dead-axes measures all)",
        axis.variable,
        axis.rule,
        plural(left_out, "arm is", "arms are"),
    )
}

fn name_of<'a>(id: &'a ArmId, arms: &'a [Arm]) -> &'a str {
    arms.iter().find(|arm| arm.id == *id).map_or(id.0.as_str(), |arm| arm.name.as_str())
}

/// What the spot checks showed.
pub(super) fn findings(dead: &[DeadAxis], context: &SearchContext, evidence: &Evidence) -> Vec<String> {
    dead.iter()
        .map(|axis| {
            let name = name_of(&axis.spot_check, &context.arms);
            let variable = &axis.variable;
            let Some((log, half_width)) = spot_check(context, evidence, &axis.spot_check) else {
                return format!("whether {variable} does nothing here was not seen: {name} was not measured");
            };
            let ratio = log.exp();
            if log.abs() > half_width.max(context.settings.min_gain) {
                format!(
                    "{variable} was taken for an axis that does nothing, and {name} takes {ratio:.3} of the default's \
                     time: the rule does not hold here, and arms that were left out may be better \
                     (--keep-dead-axes measures all)"
                )
            } else if half_width.is_finite() {
                format!("{variable} does nothing here: {name} takes {ratio:.3} of the default's time, as expected")
            } else {
                format!("whether {variable} does nothing here was not seen: too few launches tell the noise")
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Collective, DataType};
    use crate::machine::{CpuNode, Layout, PcieLink, PeerAccess};
    use crate::space::arm_of;

    fn point(bytes: u64) -> PointKey {
        PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes, 8)
    }

    fn arms(all: &[&[(&str, &str)]]) -> Vec<Arm> {
        let env = |pairs: &&[(&str, &str)]| {
            arm_of(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
        };
        all.iter().map(env).collect()
    }

    fn pruned(layout: Layout, bytes: &[u64], all: &[&[(&str, &str)]]) -> (Vec<DeadAxis>, Vec<String>) {
        let topology = Topology::of_layout(layout, 8, [12, 0], PcieLink::x16(5), &CpuNode::amd(0)).unwrap();
        let topology = Topology { peer_access: PeerAccess::None, ..topology };
        let points: Vec<PointKey> = bytes.iter().map(|bytes| point(*bytes)).collect();
        let pins = BTreeMap::new();
        let field = Field { topology: &topology, version: NcclVersion::v2(28, 9), pins: &pins, points: &points };
        let mut arms = arms(all);
        let dead = prune(&field, &mut arms);
        (dead, arms.into_iter().map(|arm| arm.name).collect())
    }

    #[test]
    fn the_buffer_of_a_protocol_that_never_runs_is_dead_and_one_arm_checks_that() {
        let space: &[&[(&str, &str)]] = &[
            &[],
            &[("NCCL_LL128_BUFFSIZE", "1048576")],
            &[("NCCL_LL128_BUFFSIZE", "2097152")],
            &[("NCCL_LL128_BUFFSIZE", "1048576"), ("NCCL_MIN_NCHANNELS", "16")],
            &[("NCCL_MIN_NCHANNELS", "16")],
        ];
        let (dead, left) = pruned(Layout::Sys2, &[57_344, 1 << 20], space);
        assert_eq!(dead.len(), 1, "{dead:?}");
        assert_eq!((dead[0].variable.as_str(), dead[0].left_out), ("NCCL_LL128_BUFFSIZE", 2));
        assert!(dead[0].rule.contains("LL128"), "{}", dead[0].rule);
        let notice = notice(&dead[0], &arms(space));
        assert!(
            notice.contains("NCCL_LL128_BUFFSIZE does nothing here") && notice.contains("2 arms are left out"),
            "{notice}"
        );
        assert_eq!(left.len(), 3, "the default, the check and channels: {left:?}");
    }

    #[test]
    fn an_axis_that_acts_in_one_arm_or_at_one_point_lives() {
        let buffers: &[&[(&str, &str)]] = &[
            &[],
            &[("NCCL_BUFFSIZE", "1048576")],
            &[("NCCL_BUFFSIZE", "1048576"), ("NCCL_PROTO", "allreduce:Simple")],
            &[("NCCL_PROTO", "allreduce:Simple")],
        ];
        // At this size NCCL takes LL by itself: what acts is the other arm.
        let (dead, left) = pruned(Layout::Phb1, &[8192], buffers);
        assert_eq!((dead.len(), left.len()), (0, 4), "{dead:?}");
        let alone = &buffers[..2];
        let (dead, _) = pruned(Layout::Phb1, &[8192, 64 << 20], &[alone[0], alone[1], &[("NCCL_BUFFSIZE", "2097152")]]);
        assert_eq!(dead, [], "a guard point runs Simple");
    }

    #[test]
    fn how_gpus_meet_is_never_left_to_a_rule() {
        let levels: &[&[(&str, &str)]] = &[&[], &[("NCCL_P2P_LEVEL", "PHB")], &[("NCCL_P2P_LEVEL", "SYS")]];
        let (dead, left) = pruned(Layout::Phb1, &[57_344], levels);
        assert_eq!((dead.len(), left.len()), (0, 3), "{dead:?}");
    }

    #[test]
    fn an_axis_that_a_release_does_not_read_is_dead_by_that_rule() {
        // Read since 2.23.
        let (dead, _) =
            pruned(Layout::Phb1, &[57_344], &[&[], &[("NCCL_NOT_A_NAME", "1")], &[("NCCL_NOT_A_NAME", "2")]]);
        assert_eq!(dead.len(), 1);
        assert_eq!(dead[0].left_out, 1);
    }
}
