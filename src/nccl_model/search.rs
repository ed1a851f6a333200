//! The search for rings and trees, after `graph/search.cc`, as far as one machine needs it.
//!
//! It tries a speed, a kind of path and equal or different channels; a channel takes its speed off
//! every link it crosses, and the best graph of all tries is kept. Steps are counted as NCCL counts
//! them, because a search that runs out of steps ends with what it has.

use crate::machine::{MAX_GPUS, PathKind};

use super::constants::{self, FALLBACK_GBPS, NVLS_HEADS, Rules};
use super::system::{NodeKind, Path, System};
use super::{Graph, Pattern};

/// A graph while it is searched, or the best so far.
#[derive(Debug, Clone)]
struct Draft {
    pattern: Pattern,
    least_channels: usize,
    most_channels: usize,
    intra_gbps: f32,
    inter_gbps: f32,
    kind: PathKind,
    same_channels: bool,
    hops: i64,
    channels: usize,
    /// GPUs by place, channel after channel.
    orders: Vec<Vec<usize>>,
}

impl Draft {
    fn order(&mut self, channel: usize, gpus: usize) -> &mut Vec<usize> {
        while self.orders.len() <= channel {
            self.orders.push(vec![0; gpus]);
        }
        &mut self.orders[channel]
    }
}

/// Which GPU comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Free,
    /// As NCCL lists them.
    Listed,
    /// As in the channel before.
    Replayed,
}

/// What a search was asked for and went through.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub pattern: Pattern,
    pub least_channels: u32,
    pub most_channels: u32,
}

/// Searches a graph. Nothing where an NVLS graph cannot be had.
pub(super) fn search(system: &System, rules: Rules, asked: Asked) -> Option<Graph> {
    Search::new(system, rules).run(asked)
}

/// The speeds a search tries, fastest first, from the first that the machine could have.
pub(super) fn speeds_tried(system: &System, rules: Rules) -> &'static [f32] {
    let ladder = rules.ladder(system.least_sm);
    let first = ladder.iter().position(|speed| *speed <= system.most_gbps).unwrap_or(ladder.len() - 1);
    &ladder[first..]
}

/// A path as a search counts it.
#[derive(Debug, Clone)]
struct Way {
    kind: PathKind,
    /// Whether an Intel host bridge makes PCI links dearer.
    crosses_intel: bool,
    /// Links by number, and whether each is PCI.
    links: Vec<(usize, bool)>,
}

struct Search<'a> {
    system: &'a System,
    rules: Rules,
    /// What is left of each link, in GB/s.
    left: Vec<f32>,
    /// From each GPU to each, by place: `from * GPUs + to`.
    ways: Vec<Way>,
    to_switch: Vec<Way>,
    from_switch: Vec<Way>,
    /// Other GPUs of each, the best next one first.
    nearest: Vec<Vec<usize>>,
    /// By GPU and channel: whether the channel has it already.
    used: Vec<u64>,
    steps_left: i64,
    draft: Draft,
    best: Draft,
}

impl<'a> Search<'a> {
    fn new(system: &'a System, rules: Rules) -> Self {
        let draft = Draft {
            pattern: Pattern::Ring,
            least_channels: 1,
            most_channels: 1,
            intra_gbps: 0.0,
            inter_gbps: 0.0,
            kind: PathKind::Loc,
            same_channels: true,
            hops: 0,
            channels: 0,
            orders: Vec::new(),
        };
        let mut first_link = Vec::with_capacity(system.nodes.len());
        let mut left = Vec::new();
        for node in &system.nodes {
            first_link.push(left.len());
            left.extend(node.links.iter().map(|link| link.gbps));
        }
        let way = |path: &Path, starts_at_gpu: bool| {
            let link = |(node, at): &(usize, usize)| &system.nodes[*node].links[*at];
            let is_intel = |step: &(usize, usize)| {
                let far = &system.nodes[link(step).to];
                far.kind == NodeKind::Cpu && far.is_intel
            };
            Way {
                kind: path.kind,
                crosses_intel: starts_at_gpu && path.kind == PathKind::Phb && path.steps.iter().any(is_intel),
                links: path
                    .steps
                    .iter()
                    .map(|step| (first_link[step.0] + step.1, link(step).kind == PathKind::Pix))
                    .collect(),
            }
        };
        let gpus = system.gpus.len();
        Self {
            system,
            rules,
            left,
            ways: system.paths.iter().flatten().map(|path| way(path, true)).collect(),
            to_switch: system.to_switch.iter().map(|path| way(path, true)).collect(),
            from_switch: system.from_switch.iter().map(|path| way(path, false)).collect(),
            nearest: (0..gpus).map(|gpu| nearest(system, gpu)).collect(),
            used: vec![0; gpus],
            steps_left: 0,
            best: draft.clone(),
            draft,
        }
    }

    fn gpus(&self) -> usize {
        self.system.gpus.len()
    }

    #[expect(clippy::too_many_lines, reason = "one decision after the other, in the order that decides the outcome")]
    fn run(mut self, asked: Asked) -> Option<Graph> {
        let gpus = self.gpus();
        let system = self.system;
        let kinds = self.rules.kinds();
        let (nearest, farthest) = self.kinds_to_try();
        let tries_same = asked.pattern != Pattern::Nvls;
        self.best.pattern = asked.pattern;
        self.best.least_channels = asked.least_channels as usize;
        self.best.most_channels = asked.most_channels as usize;
        self.best.kind = nearest;
        self.best.same_channels = tries_same;
        if asked.pattern == Pattern::Nvls {
            if system.nv_switch.is_none() || system.least_sm < 90 {
                return None;
            }
            self.best.most_channels = if self.rules.limits_nvls_heads() { gpus.min(NVLS_HEADS) } else { gpus };
            self.best.least_channels = self.best.most_channels;
        }
        if gpus == 1 && asked.pattern != Pattern::Ring {
            self.best.pattern = Pattern::Tree;
        }
        if asked.pattern == Pattern::Ring
            && self.rules.doubles_rings_over_islands()
            && system.has_two_islands()
            && self.best.most_channels >= 2
            && self.best.least_channels == 1
        {
            self.best.least_channels = 2;
        }
        self.draft = self.best.clone();

        let ladder = self.rules.ladder(system.least_sm);
        let last = ladder.len() - 1;
        let mut total = system.total_gbps;
        if gpus > 1 && asked.pattern != Pattern::Ring {
            total = (f64::from(total) * (gpus as f64 / (gpus - 1) as f64)) as f32;
        }
        let mut speed = 0;
        let least = self.draft.least_channels as f32;
        while speed < last && (ladder[speed] > system.most_gbps || ladder[speed] * least > total) {
            speed += 1;
        }
        self.set_speed(ladder[speed]);
        let mut left_in_all = constants::SEARCH_STEPS_IN_ALL;
        let mut is_second_pass = false;
        loop {
            let steps =
                if self.draft.same_channels { constants::SEARCH_STEPS_SAME_CHANNELS } else { constants::SEARCH_STEPS };
            self.steps_left = steps;
            self.draft.channels = 0;
            left_in_all -= steps;
            self.extend();
            let found_all =
                self.steps_left == -1 || self.best.channels as f32 * self.best.inter_gbps >= system.total_gbps;

            if !found_all && !is_second_pass {
                if self.draft.same_channels && !(system.is_amd && self.draft.kind == PathKind::Sys) {
                    self.draft.same_channels = false;
                    continue;
                }
                self.draft.same_channels = tries_same;
                left_in_all += self.steps_left;
                let out_of_steps = left_in_all < 0 && self.best.channels > 0;
                if !out_of_steps {
                    if system.least_sm >= 90 && self.draft.pattern == Pattern::BalancedTree {
                        self.draft.pattern = Pattern::Tree;
                        continue;
                    }
                    self.draft.pattern = self.best.pattern;
                    let may_widen = self.best.channels == 0 || self.draft.kind < self.best.kind;
                    if self.draft.kind < farthest && may_widen {
                        let wider = kinds.iter().copied().find(|kind| *kind > self.draft.kind);
                        self.draft.kind = wider.unwrap_or(PathKind::Net);
                        continue;
                    }
                    self.draft.kind = nearest;
                    let may_slow = self.best.channels == 0
                        || speed < last && f64::from(ladder[speed + 1] / self.best.inter_gbps) > 0.49;
                    if speed < last && may_slow {
                        speed += 1;
                        self.set_speed(ladder[speed]);
                        continue;
                    }
                }
            }
            if !is_second_pass {
                // There is a solution, or there will be none: see whether it can go faster.
                self.steps_left = -1;
                self.duplicate();
                self.draft = self.best.clone();
                speed = 0;
                while speed < last && ladder[speed] > self.best.inter_gbps {
                    speed += 1;
                }
                self.set_speed(ladder[speed]);
                self.draft.least_channels = self.best.channels;
                is_second_pass = true;
            }
            if self.steps_left != 0 && speed > 0 {
                if self.best.pattern == Pattern::Ring {
                    speed -= 1;
                    self.set_speed(ladder[speed]);
                    continue;
                }
                let is_level = |a: f32, b: f32| (a - b).abs() <= 0.0;
                if self.best.pattern == Pattern::Nvls
                    && is_level(self.draft.inter_gbps, self.best.inter_gbps)
                    && self.draft.inter_gbps < self.draft.intra_gbps * 2.0
                {
                    self.draft.least_channels = self.best.channels;
                    self.draft.most_channels = self.best.channels;
                    speed -= 1;
                    self.draft.inter_gbps = ladder[speed];
                    continue;
                }
                if is_level(self.draft.intra_gbps, self.best.intra_gbps)
                    && self.draft.intra_gbps < self.draft.inter_gbps * 2.0
                {
                    speed -= 1;
                    self.draft.intra_gbps = ladder[speed];
                    continue;
                }
            }
            break;
        }
        self.finish()
    }

    fn kinds_to_try(&self) -> (PathKind, PathKind) {
        let gpus = self.gpus();
        if !self.rules.searches_between_kinds_present() {
            return (if gpus == 1 { PathKind::Loc } else { PathKind::Nvl }, PathKind::Sys);
        }
        if gpus == 1 {
            return (PathKind::Loc, PathKind::Sys);
        }
        let pairs = || (0..gpus).flat_map(move |a| (0..gpus).filter(move |b| a != *b).map(move |b| (a, b)));
        let kinds = || pairs().map(|(a, b)| self.system.paths[a][b].kind);
        (kinds().min().unwrap_or(PathKind::Sys).min(PathKind::Sys), kinds().max().unwrap_or(PathKind::Loc))
    }

    fn set_speed(&mut self, gbps: f32) {
        self.draft.intra_gbps = gbps;
        self.draft.inter_gbps = gbps;
    }

    /// Fast graphs are split into twice the channels at half the speed.
    fn duplicate(&mut self) {
        let best = &mut self.best;
        if best.channels == 0 || best.pattern == Pattern::Nvls || best.intra_gbps < 25.0 {
            return;
        }
        if self.system.least_sm > 80 && best.intra_gbps < 50.0 && best.channels > 4 {
            return;
        }
        let channels = (best.channels * 2).min(best.most_channels);
        best.orders.truncate(best.channels);
        for channel in best.channels..channels {
            let order = best.orders[channel - best.channels].clone();
            best.orders.push(order);
        }
        let times = channels.div_ceil(best.channels) as f32;
        best.intra_gbps /= times;
        best.inter_gbps /= times;
        best.channels = channels;
    }

    fn finish(self) -> Option<Graph> {
        let ranks = &self.system.ranks;
        let best = self.best;
        if best.channels == 0 {
            if best.pattern == Pattern::Nvls {
                return None;
            }
            return Some(Graph {
                pattern: best.pattern,
                channels: 1,
                channel_bandwidth_gbps: f64::from(FALLBACK_GBPS),
                outward_bandwidth_gbps: f64::from(FALLBACK_GBPS),
                path_kind: PathKind::Sys,
                same_channels: best.same_channels,
                is_fallback: true,
                orders: vec![ranks.clone()],
            });
        }
        let orders = best.orders.iter().take(best.channels).map(|order| order.iter().map(|gpu| ranks[*gpu]).collect());
        Some(Graph {
            pattern: best.pattern,
            channels: best.channels as u32,
            channel_bandwidth_gbps: f64::from(best.intra_gbps),
            outward_bandwidth_gbps: f64::from(best.inter_gbps),
            path_kind: best.kind,
            same_channels: best.same_channels,
            is_fallback: false,
            orders: orders.collect(),
        })
    }

    /// Looks for one more channel.
    fn extend(&mut self) {
        let channels = self.draft.channels;
        if self.draft.pattern == Pattern::Nvls {
            self.enter(None, channels, 0, Order::Free);
            return;
        }
        if channels == 0 {
            self.enter(None, 0, 0, Order::Listed);
        } else {
            let first = self.draft.orders[channels - 1][0];
            self.enter(None, first, 0, Order::Replayed);
        }
        if !self.draft.same_channels || self.draft.channels == 0 {
            for gpu in 0..self.gpus() {
                self.enter(None, gpu, 0, Order::Free);
            }
        }
    }

    /// Goes to a GPU, if the links on the way have enough left, looks on from there, and comes back.
    fn enter(&mut self, from: Option<usize>, to: usize, step: usize, order: Order) {
        if from.is_some_and(|from| !self.take(Hop::Gpus(from, to), 1)) {
            return;
        }
        let flag = 1_u64 << (self.draft.channels % 64);
        self.used[to] ^= flag;
        self.visit(to, step, order);
        self.used[to] ^= flag;
        if let Some(from) = from {
            self.take(Hop::Gpus(from, to), -1);
        }
    }

    fn visit(&mut self, gpu: usize, step: usize, order: Order) {
        if self.steps_left <= 0 {
            return;
        }
        self.steps_left -= 1;
        let gpus = self.gpus();
        let channel = self.draft.channels;
        self.draft.order(channel, gpus)[step] = gpu;
        if self.draft.pattern == Pattern::Nvls {
            self.try_switch(gpu);
        } else if step < gpus - 1 {
            let mut next = [0_usize; MAX_GPUS];
            let count = self.next_gpus(gpu, step, order, &mut next);
            for next in &next[..count] {
                self.enter(Some(gpu), *next, step + 1, order);
            }
        } else if self.draft.pattern == Pattern::Ring {
            let first = self.draft.orders[channel][0];
            if self.take(Hop::Gpus(gpu, first), 1) {
                self.complete();
                self.take(Hop::Gpus(gpu, first), -1);
            }
        } else {
            self.complete();
        }
    }

    /// A channel is whole: keeps it if it is the best, and looks for the next.
    fn complete(&mut self) {
        if self.steps_left <= 0 {
            return;
        }
        self.steps_left -= 1;
        self.draft.channels += 1;
        if self.is_better() {
            self.best = self.draft.clone();
            if self.draft.channels == self.draft.most_channels {
                self.steps_left = -1;
            }
        }
        if self.draft.channels < self.draft.most_channels {
            self.extend();
        }
        self.draft.channels -= 1;
    }

    fn is_better(&self) -> bool {
        let (draft, best) = (&self.draft, &self.best);
        if draft.channels < draft.least_channels {
            return false;
        }
        let times = |channels: usize, gbps: f32| channels as f32 * gbps;
        if draft.pattern == Pattern::Nvls {
            return (draft.channels > best.channels && draft.channels <= self.gpus())
                || times(draft.channels, draft.inter_gbps) > times(best.channels, best.inter_gbps);
        }
        let (new, old) = (times(draft.channels, draft.intra_gbps), times(best.channels, best.intra_gbps));
        new > old || (new >= old && draft.pattern == best.pattern && draft.hops < best.hops)
    }

    /// Writes the GPUs to try next, best first, and says how many there are.
    fn next_gpus(&self, gpu: usize, step: usize, order: Order, next: &mut [usize; MAX_GPUS]) -> usize {
        match order {
            Order::Listed => {
                next[0] = step + 1;
                return 1;
            }
            Order::Replayed => {
                next[0] = self.draft.orders[self.draft.channels - 1][step + 1];
                return 1;
            }
            Order::Free => {}
        }
        let flag = 1_u64 << (self.draft.channels % 64);
        let mut count = 0;
        for other in &self.nearest[gpu] {
            if self.used[*other] & flag == 0 {
                next[count] = *other;
                count += 1;
            }
        }
        if self.system.nv_switch.is_none() {
            return count;
        }
        let gpus = self.gpus();
        let (before, after) = ((gpu + gpus - 1) % gpus, (gpu + 1) % gpus);
        let first: &[usize] = match self.draft.pattern {
            Pattern::Ring => &[after, before],
            Pattern::SplitTree | Pattern::BalancedTree => &[before, after],
            Pattern::Tree | Pattern::Nvls => &[after],
        };
        let are_one = self.rules.looks_at_neighbours_alone() && before == after;
        let mut found = 0;
        for wanted in first.iter().take(if are_one { 1 } else { 2 }) {
            if let Some(at) = next[..count].iter().position(|other| other == wanted) {
                next[..=at].rotate_right(1);
                found += 1;
            }
        }
        if self.rules.looks_at_neighbours_alone() { found } else { count }
    }

    /// NVLS: every GPU to and from the switch, the head twice.
    fn try_switch(&mut self, head: usize) {
        let gpus = self.gpus();
        let times = |gpu: usize| if gpu == head { 2 } else { 1 };
        let mut down = 0;
        while down < gpus && self.take(Hop::FromSwitch(down), times(down)) {
            down += 1;
        }
        if down == gpus {
            let mut up = 0;
            while up < gpus && self.take(Hop::ToSwitch(up), times(up)) {
                up += 1;
            }
            if up == gpus {
                self.complete();
            }
            for gpu in (0..up).rev() {
                self.take(Hop::ToSwitch(gpu), -times(gpu));
            }
        }
        for gpu in (0..down).rev() {
            self.take(Hop::FromSwitch(gpu), -times(gpu));
        }
    }

    /// Takes the draft's speed off the links of a path so many times, or puts it back. Whether it could.
    fn take(&mut self, hop: Hop, times: i32) -> bool {
        let gpus = self.gpus();
        let way = match hop {
            Hop::Gpus(from, to) => &self.ways[from * gpus + to],
            Hop::ToSwitch(gpu) => &self.to_switch[gpu],
            Hop::FromSwitch(gpu) => &self.from_switch[gpu],
        };
        if way.kind >= PathKind::Dis {
            return false;
        }
        if times == 1 {
            let is_tree = matches!(self.draft.pattern, Pattern::BalancedTree | Pattern::SplitTree | Pattern::Tree);
            let back = match hop {
                Hop::Gpus(from, to) if is_tree => self.ways[to * gpus + from].kind,
                _ => way.kind,
            };
            if way.kind.max(back) > self.draft.kind {
                return false;
            }
        }
        let gbps = self.draft.intra_gbps * times as f32;
        let pci_gbps = if way.crosses_intel { constants::intel_overhead(gbps) } else { gbps };
        for (done, (link, is_pci)) in way.links.iter().enumerate() {
            let wanted = if *is_pci { pci_gbps } else { gbps };
            if self.left[*link] < wanted {
                for (link, is_pci) in &way.links[..done] {
                    self.left[*link] = rounded(self.left[*link] + if *is_pci { pci_gbps } else { gbps });
                }
                return false;
            }
            self.left[*link] = rounded(self.left[*link] - wanted);
        }
        self.draft.hops += i64::from(times) * way.links.len() as i64;
        true
    }
}

/// The other GPUs that one has a path to, by whole GB/s, then links, then place.
fn nearest(system: &System, gpu: usize) -> Vec<usize> {
    let gpus = system.gpus.len();
    let mut others: Vec<(i64, usize, usize, usize)> = (1..gpus)
        .map(|distance| (distance, (gpu + distance) % gpus))
        .map(|(distance, other)| (distance, other, &system.paths[gpu][other]))
        .filter(|(_, _, path)| !path.steps.is_empty())
        .map(|(distance, other, path)| (-(path.gbps as i64), path.steps.len(), distance, other))
        .collect();
    others.sort_unstable();
    others.into_iter().map(|(_, _, _, other)| other).collect()
}

#[derive(Debug, Clone, Copy)]
enum Hop {
    Gpus(usize, usize),
    ToSwitch(usize),
    FromSwitch(usize),
}

/// To a thousandth: what NCCL does against errors that add up.
fn rounded(gbps: f32) -> f32 {
    (gbps * 1000.0).round() / 1000.0
}
