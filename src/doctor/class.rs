//! What a machine takes for an all-reduce beside what machines of its class are known to take.

use serde::Deserialize;

use super::{Finding, listed};
use crate::machine::Gpu;
use crate::record::{Check, CheckVerdict};
use crate::units::format_size;
use crate::wording::plural;

/// The sizes that are sampled, in bytes: those of decode steps, and the sizes of the table.
pub const SAMPLE_BYTES: [u64; 4] = [8192, 16_384, 65_536, 262_144];
/// How many times as long as its class a machine may take: setups, releases and ways to measure differ, and a
/// machine whose peers cannot reach each other, or whose link lost its lanes, differs by more.
const SLOWER_MAX: f64 = 2.0;

/// What was measured at one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampled {
    /// Size of the message in bytes.
    pub bytes: u64,
    /// Time of one all-reduce in microseconds.
    pub latency_us: f64,
}

/// What is known of a class.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Class {
    /// The GPU's name as the driver tells it.
    gpu: String,
    ranks: u32,
    link: Link,
    /// The release that was measured with.
    nccl: String,
    /// Who published it.
    source: String,
    /// Bytes and microseconds.
    latency_us: Vec<(u64, f64)>,
}

/// What connects the GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Link {
    NvLink,
    Pcie,
}

impl Link {
    fn of(gpus: &[&Gpu]) -> Self {
        let joined = gpus.iter().all(|gpu| gpu.nvlinks.is_some_and(|links| links > 0));
        if joined { Self::NvLink } else { Self::Pcie }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Classes {
    class: Vec<Class>,
}

fn classes() -> Vec<Class> {
    toml::from_str::<Classes>(include_str!("classes.toml")).expect("the compiled-in table is tested").class
}

/// The class of these GPUs, one rank on each.
fn class_of(gpus: &[&Gpu]) -> Option<Class> {
    let name = &gpus.first()?.name;
    if gpus.iter().any(|gpu| gpu.name != *name) {
        return None;
    }
    let link = Link::of(gpus);
    classes().into_iter().find(|class| class.gpu == *name && class.ranks == gpus.len() as u32 && class.link == link)
}

/// How a sample compares with the class of the GPUs it was taken on. It warns at most: a table of others'
/// machines refuses nobody's.
fn against_class(gpus: &[&Gpu], sample: &[Sampled]) -> Finding {
    let Some(class) = class_of(gpus) else {
        let measured: Vec<String> = sample
            .iter()
            .map(|sampled| format!("{} takes {} us", format_size(sampled.bytes), rounded(sampled.latency_us)))
            .collect();
        let none = "no figures of such GPUs, so many and so connected, are in the table".to_owned();
        return Finding::unknown(listed(&[measured, vec![none]].concat(), 9, "; "));
    };
    let mut slow = Vec::new();
    let mut alike = Vec::new();
    for sampled in sample.iter().filter(|sampled| sampled.latency_us.is_finite() && sampled.latency_us > 0.0) {
        let Some((_, usual_us)) = class.latency_us.iter().find(|(bytes, _)| *bytes == sampled.bytes) else { continue };
        let words = format!(
            "{} takes {} us; this class takes {} us",
            format_size(sampled.bytes),
            rounded(sampled.latency_us),
            rounded(*usual_us)
        );
        if sampled.latency_us > usual_us * SLOWER_MAX { slow.push(words) } else { alike.push(words) }
    }
    let ranks = format!("{} {}", class.ranks, plural(class.ranks, "rank", "ranks"));
    let of = format!("({}, {ranks}, NCCL {}; {})", class.gpu, class.nccl, class.source);
    if !slow.is_empty() {
        return Finding::warn(
            format!("{} {of}", listed(&slow, 8, "; ")),
            "look at peer access, IOMMU and links first: no variable makes up for a path that is missing",
        );
    }
    if alike.is_empty() {
        return Finding::unknown("nothing was measured at a size of the table");
    }
    Finding::pass(format!("{} {of}", listed(&alike, 8, "; ")))
}

/// Three digits are what such a comparison is worth.
fn rounded(latency_us: f64) -> String {
    if latency_us < 10.0 { format!("{latency_us:.1}") } else { format!("{latency_us:.0}") }
}

fn check(finding: Finding) -> Check {
    Check {
        name: "against-class".to_owned(),
        group: "nccl".to_owned(),
        verdict: finding.verdict,
        question: "Is an all-reduce as fast as on other machines of this class?".to_owned(),
        evidence: finding.evidence,
        advice: finding.advice,
    }
}

/// The check that compares a sample with the GPUs' class; or says why there is no sample.
pub fn class_check(gpus: &[Gpu], sample: Result<&[Sampled], &str>) -> Check {
    let gpus: Vec<&Gpu> = gpus.iter().collect();
    check(match sample {
        Ok(sample) => against_class(&gpus, sample),
        Err(why) => Finding::of(CheckVerdict::Unknown, super::shown(why), ""),
    })
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::gpu;
    use super::*;
    use crate::record::CheckVerdict::{Pass, Unknown, Warn};

    const PRO: &str = "NVIDIA RTX PRO 6000 Blackwell Server Edition";

    fn gpus(name: &str, count: u32, nvlinks: Option<u32>) -> Vec<Gpu> {
        (0..count).map(|index| Gpu { name: name.to_owned(), nvlinks, ..gpu(index) }).collect()
    }

    fn said(gpus: &[Gpu], sample: &[(u64, f64)]) -> Check {
        let sample: Vec<Sampled> =
            sample.iter().map(|(bytes, latency_us)| Sampled { bytes: *bytes, latency_us: *latency_us }).collect();
        class_check(gpus, Ok(&sample))
    }

    #[test]
    fn the_table_has_its_sizes_and_sources_and_no_class_twice() {
        let classes = classes();
        assert!(classes.len() >= 6);
        for (position, class) in classes.iter().enumerate() {
            let sizes: Vec<u64> = class.latency_us.iter().map(|(bytes, _)| *bytes).collect();
            assert_eq!(sizes, SAMPLE_BYTES, "{}", class.gpu);
            assert!(class.latency_us.iter().all(|(_, latency_us)| (1.0..1000.0).contains(latency_us)), "{}", class.gpu);
            assert!(class.source.starts_with("github.com/") && !class.nccl.is_empty() && class.ranks >= 2);
            let same = |other: &&Class| (&other.gpu, other.ranks, other.link) == (&class.gpu, class.ranks, class.link);
            assert_eq!(classes[..position].iter().filter(same).count(), 0, "{}", class.gpu);
        }
    }

    #[test]
    fn a_machine_far_slower_than_its_class_is_told_where_to_look_first() {
        let check = said(&gpus(PRO, 8, None), &[(8192, 28.0), (65_536, 165.0)]);
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.starts_with("64 KiB takes 165 us; this class takes 34 us ("), "{}", check.evidence);
        assert!(check.evidence.contains("8 ranks, NCCL 2.29.2; github.com/"), "{}", check.evidence);
        assert!(check.advice.starts_with("look at peer access, IOMMU and links first"), "{}", check.advice);
    }

    #[test]
    fn twice_as_long_is_the_limit_and_faster_is_fine() {
        let eight = gpus(PRO, 8, Some(0));
        assert_eq!(said(&eight, &[(65_536, 68.42)]).verdict, Pass);
        assert_eq!(said(&eight, &[(65_536, 68.43)]).verdict, Warn);
        assert_eq!(said(&eight, &[(65_536, 3.0)]).verdict, Pass);
    }

    #[test]
    fn what_no_row_speaks_of_is_unknown() {
        let sample = [(65_536, 900.0)];
        for gpus in [
            gpus(PRO, 3, None),
            gpus(PRO, 8, Some(4)),
            gpus("NVIDIA H200", 8, None),
            gpus("NVIDIA Test", 2, None),
            [gpus(PRO, 1, None), gpus("NVIDIA L40S", 1, None)].concat(),
            Vec::new(),
        ] {
            assert_eq!(said(&gpus, &sample).verdict, Unknown);
        }
        let eight = gpus(PRO, 8, None);
        for sample in [vec![], vec![(65_537, 900.0)], vec![(65_536, f64::NAN), (8192, -1.0), (16_384, f64::INFINITY)]] {
            assert_eq!(said(&eight, &sample).verdict, Unknown);
        }
        let check = class_check(&eight, Err("the first launch hung"));
        assert_eq!((check.verdict, &*check.evidence), (Unknown, "the first launch hung"));
    }
}
