//! The pictures of a report.

use super::svg::{Anchor, LogScale, Marker, Scale, Svg, log_ticks, ticks};
use crate::record::Phase;
use crate::units::{format_seconds, format_size, format_us};

/// Width of every picture; the page scales it.
const WIDTH: f64 = 720.0;
/// Phases of a campaign in their order, with their names.
pub(super) const PHASES: [(Phase, &str); 4] =
    [(Phase::Search, "search"), (Phase::Gate, "smoke gate"), (Phase::Final, "final"), (Phase::Trial, "trial")];

/// One arm over message sizes.
pub(super) struct Series {
    /// What stands beside the line.
    pub(super) label: String,
    /// (bytes, median, low, high) in microseconds, by size.
    pub(super) points: Vec<(u64, f64, Option<[f64; 2]>)>,
}

/// Latency over size, both on logarithmic scales.
pub(super) fn latency(title: &str, series: &[Series]) -> Option<Svg> {
    let all = || series.iter().flat_map(|series| &series.points);
    let sizes = all().map(|(bytes, ..)| *bytes as f64);
    let ends = |(_, median, interval): &(u64, f64, Option<[f64; 2]>)| match interval {
        Some([low, high]) => [low.min(*median), high.max(*median)],
        None => [*median; 2],
    };
    let [least, most] = [sizes.clone().fold(f64::INFINITY, f64::min), sizes.fold(0.0, f64::max)];
    let fastest = all().map(|point| ends(point)[0]).fold(f64::INFINITY, f64::min);
    let slowest = all().map(|point| ends(point)[1]).fold(0.0, f64::max);
    if !(least > 0.0 && fastest > 0.0 && slowest.is_finite() && most >= least) {
        return None;
    }
    let described: Vec<String> = series
        .iter()
        .map(|series| {
            let points: Vec<String> = series
                .points
                .iter()
                .map(|(bytes, us, _)| format!("{} {} us", format_size(*bytes), format_us(*us)))
                .collect();
            format!("{}: {}", series.label, points.join(", "))
        })
        .collect();
    let (left, right, top, bottom) = (62.0, WIDTH - 172.0, 14.0, 330.0);
    let mut svg = Svg::new(WIDTH, 384.0, title, &described.join(". "));
    let x = LogScale::new([least / 1.15, most * 1.15], [left, right]);
    let y = LogScale::new([fastest / 1.15, slowest * 1.15], [bottom, top]);
    for us in log_ticks(fastest / 1.15, slowest * 1.15) {
        svg.line("grid", [left, y.at(us)], [right, y.at(us)]);
        svg.text("tick", Anchor::End, [left - 8.0, y.at(us) + 4.0], &plain(us));
    }
    let powers: Vec<u32> = (0..40)
        .filter(|power| {
            let bytes = 2_f64.powi(*power);
            bytes >= least / 1.16 && bytes <= most * 1.16
        })
        .map(|power| power as u32)
        .collect();
    let every = powers.len().div_ceil(8).max(1);
    for power in powers.iter().step_by(every) {
        let bytes = 1_u64 << power;
        svg.line("grid", [x.at(bytes as f64), top], [x.at(bytes as f64), bottom]);
        svg.text("tick", Anchor::Middle, [x.at(bytes as f64), bottom + 18.0], &format_size(bytes));
    }
    svg.line("axis", [left, bottom], [right, bottom]);
    svg.line("axis", [left, top], [left, bottom]);
    svg.text("name", Anchor::Middle, [f64::midpoint(left, right), bottom + 42.0], "message size");
    svg.text("name", Anchor::Start, [left + 6.0, top + 4.0], "us per call");
    let mut ends: Vec<(usize, f64)> = Vec::new();
    for (index, one) in series.iter().enumerate() {
        let places: Vec<[f64; 2]> = one.points.iter().map(|(bytes, us, _)| [x.at(*bytes as f64), y.at(*us)]).collect();
        if places.len() > 1 {
            svg.polyline(&format!("stroke s{index}"), &places);
        }
        for ((_, _, interval), [at, _]) in one.points.iter().zip(&places) {
            if let Some([low, high]) = interval {
                let (low, high) = (y.at(*low), y.at(*high));
                svg.line(&format!("whisker s{index}"), [*at, low], [*at, high]);
                for end in [low, high] {
                    svg.line(&format!("whisker s{index}"), [at - 4.0, end], [at + 4.0, end]);
                }
            }
        }
        for place in &places {
            svg.marker(Marker::of(index), &format!("mark s{index}"), *place);
        }
        if let Some([_, end]) = places.last() {
            ends.push((index, *end));
        }
    }
    // Labels at the end of the lines, kept apart.
    ends.sort_by(|left, right| left.1.total_cmp(&right.1));
    let mut lowest = f64::NEG_INFINITY;
    for (index, end) in ends {
        let at = (end + 4.0).max(lowest + 17.0);
        lowest = at;
        svg.marker(Marker::of(index), &format!("mark s{index}"), [right + 16.0, at - 4.0]);
        svg.text("label", Anchor::Start, [right + 26.0, at], &clip(&series[index].label, 18));
    }
    Some(svg)
}

/// One line of the picture of gains.
pub(super) struct Gain {
    /// The point.
    pub(super) label: String,
    /// Ratio to the default.
    pub(super) ratio: f64,
    /// Its interval.
    pub(super) interval: Option<[f64; 2]>,
    /// Whether a regression beyond the threshold is ruled out.
    pub(super) safe: bool,
}

/// Change at each point, with what would have been enough and what would have been too much.
pub(super) fn gains(title: &str, gains: &[Gain], min_gain: f64, max_regression: f64) -> Option<Svg> {
    const ROW: f64 = 24.0;
    let share = |ratio: f64| (ratio - 1.0) * 100.0;
    let ends = |gain: &Gain| gain.interval.map_or([share(gain.ratio); 2], |[low, high]| [share(low), share(high)]);
    if gains.is_empty() || gains.iter().any(|gain| ends(gain).iter().any(|end| !end.is_finite())) {
        return None;
    }
    let low = gains.iter().map(|gain| ends(gain)[0]).fold(-min_gain * 100.0, f64::min).min(0.0) - 1.0;
    let high = gains.iter().map(|gain| ends(gain)[1]).fold(max_regression * 100.0, f64::max).max(0.0) + 1.0;
    let described: Vec<String> = gains
        .iter()
        .map(|gain| {
            format!("{} {:+.1} % ({:+.1} to {:+.1})", gain.label, share(gain.ratio), ends(gain)[0], ends(gain)[1])
        })
        .collect();
    let (left, right, top) = (252.0, WIDTH - 130.0, 34.0);
    let bottom = top + ROW * gains.len() as f64;
    let mut svg = Svg::new(WIDTH, bottom + 48.0, title, &described.join(". "));
    let x = Scale::new([low, high], [left, right]);
    for change in ticks(low, high, 7) {
        svg.line("grid", [x.at(change), top], [x.at(change), bottom]);
        svg.text("tick", Anchor::Middle, [x.at(change), bottom + 18.0], &signed(change, 0));
    }
    for (change, words, anchor) in
        [(-min_gain * 100.0, "enough to adopt", Anchor::End), (max_regression * 100.0, "too slow", Anchor::Start)]
    {
        svg.line("limit", [x.at(change), top - 6.0], [x.at(change), bottom]);
        svg.text("note", anchor, [x.at(change), top - 12.0], words);
    }
    svg.line("axis", [x.at(0.0), top - 6.0], [x.at(0.0), bottom]);
    svg.text(
        "name",
        Anchor::Middle,
        [f64::midpoint(left, right), bottom + 40.0],
        "time against the default: left is faster",
    );
    for (index, gain) in gains.iter().enumerate() {
        let at = top + ROW * (index as f64 + 0.5);
        let [low, high] = ends(gain);
        svg.text("label", Anchor::End, [left - 12.0, at + 4.0], &clip(&gain.label, 38));
        svg.line("whisker s1", [x.at(low), at], [x.at(high), at]);
        for end in [low, high] {
            svg.line("whisker s1", [x.at(end), at - 4.0], [x.at(end), at + 4.0]);
        }
        // Hollow where a regression is not ruled out.
        let class = if gain.safe { "solid s1" } else { "hollow s1" };
        svg.marker(Marker::Square, class, [x.at(share(gain.ratio)), at]);
        svg.text(
            "label",
            Anchor::Start,
            [right + 12.0, at + 4.0],
            &format!("{:+.1} %{}", share(gain.ratio), if gain.safe { "" } else { " open" }),
        );
    }
    Some(svg)
}

/// A launch of the default: when it came, which phase it was of, and how far it was from the medians.
pub(super) struct Departure {
    /// Its phase.
    pub(super) phase: Phase,
    /// Mean over points of the deviation from the point's median, as a share.
    pub(super) mean: f64,
    /// Smallest and largest deviation.
    pub(super) range: [f64; 2],
}

/// How the launches of the default scatter, in the order in which they ran.
pub(super) fn scatter(title: &str, launches: &[Departure]) -> Option<Svg> {
    let ends = || launches.iter().flat_map(|launch| launch.range).map(|share| share * 100.0);
    if launches.len() < 2 || ends().any(|end| !end.is_finite()) {
        return None;
    }
    let reach = ends().map(f64::abs).fold(1.0, f64::max) * 1.1;
    let described: Vec<String> = launches.iter().map(|launch| format!("{:+.1} %", launch.mean * 100.0)).collect();
    let (left, right, top, bottom) = (62.0, WIDTH - 150.0, 14.0, 214.0);
    let mut svg = Svg::new(WIDTH, 268.0, title, &format!("Launch by launch: {}", described.join(", ")));
    let x = Scale::new([0.0, launches.len() as f64 - 1.0], [left + 14.0, right - 14.0]);
    let y = Scale::new([-reach, reach], [bottom, top]);
    for share in ticks(-reach, reach, 6) {
        svg.line("grid", [left, y.at(share)], [right, y.at(share)]);
        svg.text("tick", Anchor::End, [left - 8.0, y.at(share) + 4.0], &signed(share, 1));
    }
    svg.line("axis", [left, y.at(0.0)], [right, y.at(0.0)]);
    svg.text("label", Anchor::Start, [right + 12.0, y.at(0.0) + 4.0], "median");
    for (index, launch) in launches.iter().enumerate() {
        let at = x.at(index as f64);
        let [low, high] = launch.range.map(|share| y.at(share * 100.0));
        svg.line("whisker s0", [at, low], [at, high]);
        let (marker, class) = match launch.phase {
            Phase::Search => (Marker::Circle, "hollow s0"),
            Phase::Gate | Phase::Final => (Marker::Circle, "solid s0"),
            Phase::Trial => (Marker::Diamond, "solid s0"),
        };
        svg.marker(marker, class, [at, y.at(launch.mean * 100.0)]);
    }
    for (row, (words, class)) in [("search", "hollow s0"), ("final", "solid s0")].into_iter().enumerate() {
        let at = top + 10.0 + 20.0 * row as f64;
        svg.marker(Marker::Circle, class, [right + 18.0, at - 4.0]);
        svg.text("label", Anchor::Start, [right + 28.0, at], words);
    }
    svg.text(
        "name",
        Anchor::Middle,
        [f64::midpoint(left, right), bottom + 40.0],
        "launches of the default, in the order they ran",
    );
    Some(svg)
}

/// A block on the run's clock.
pub(super) struct Span {
    /// What it was for.
    pub(super) phase: Phase,
    /// Seconds at its begin and end.
    pub(super) seconds: [f64; 2],
    /// Seconds at which something failed in it.
    pub(super) failures: Vec<f64>,
}

/// The campaign: one row a phase, one bar a block, a cross where something failed.
pub(super) fn timeline(title: &str, spans: &[Span], resumes: &[f64]) -> Option<Svg> {
    const ROW: f64 = 44.0;
    let end = spans.iter().map(|span| span.seconds[1]).fold(0.0, f64::max);
    if spans.is_empty() || !(end > 0.0 && end.is_finite()) {
        return None;
    }
    let phases: Vec<(Phase, &str)> =
        PHASES.into_iter().filter(|(phase, _)| spans.iter().any(|span| span.phase == *phase)).collect();
    let count = |phase: Phase| spans.iter().filter(|span| span.phase == phase).count();
    let described: Vec<String> = phases
        .iter()
        .map(|(phase, name)| {
            let of = || spans.iter().filter(|span| span.phase == *phase);
            let from = of().map(|span| span.seconds[0]).fold(f64::INFINITY, f64::min);
            let to = of().map(|span| span.seconds[1]).fold(0.0, f64::max);
            let failures: usize = of().map(|span| span.failures.len()).sum();
            format!(
                "{name}: {} blocks from {} to {}, {failures} failures",
                count(*phase),
                format_seconds(from),
                format_seconds(to)
            )
        })
        .collect();
    let (left, right, top) = (84.0, WIDTH - 100.0, 24.0);
    let bottom = top + ROW * phases.len() as f64;
    let mut svg = Svg::new(WIDTH, bottom + 48.0, title, &described.join(". "));
    let x = Scale::new([0.0, end], [left, right]);
    for seconds in clock_ticks(end) {
        svg.line("grid", [x.at(seconds), top], [x.at(seconds), bottom]);
        svg.text("tick", Anchor::Middle, [x.at(seconds), bottom + 18.0], &format_seconds(seconds));
    }
    svg.line("axis", [left, bottom], [right, bottom]);
    for (row, (phase, name)) in phases.iter().enumerate() {
        let at = top + ROW * row as f64;
        svg.text("label", Anchor::End, [left - 10.0, at + 27.0], name);
        for span in spans.iter().filter(|span| span.phase == *phase) {
            let [from, to] = span.seconds.map(|seconds| x.at(seconds));
            // A gap of a pixel tells two blocks apart without colour.
            svg.rect(&format!("block s{row}"), [from, at + 10.0], [(to - from - 1.0).max(1.0), 24.0]);
        }
        for failure in spans.iter().filter(|span| span.phase == *phase).flat_map(|span| &span.failures).take(500) {
            let at = [x.at(*failure), at + 22.0];
            svg.line("cross", [at[0] - 4.0, at[1] - 4.0], [at[0] + 4.0, at[1] + 4.0]);
            svg.line("cross", [at[0] - 4.0, at[1] + 4.0], [at[0] + 4.0, at[1] - 4.0]);
        }
        let blocks = count(*phase);
        svg.text(
            "note",
            Anchor::Start,
            [right + 10.0, at + 27.0],
            &format!("{blocks} block{}", if blocks == 1 { "" } else { "s" }),
        );
    }
    for resume in resumes.iter().take(100) {
        svg.line("limit", [x.at(*resume), top - 4.0], [x.at(*resume), bottom]);
        svg.text("note", Anchor::Middle, [x.at(*resume), top - 8.0], "resumed");
    }
    Some(svg)
}

/// Round times up to the end of a run.
fn clock_ticks(end: f64) -> Vec<f64> {
    const STEPS: [f64; 14] =
        [1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0];
    match STEPS.into_iter().find(|step| end / step <= 7.0) {
        Some(step) if end >= step => (0..=(end / step) as u32).map(|index| f64::from(index) * step).collect(),
        _ => ticks(0.0, end, 5),
    }
}

/// A value of an axis, without digits that say nothing.
fn plain(value: f64) -> String {
    if value >= 1.0 { format!("{value:.0}") } else { format!("{value}") }
}

/// A change in per cent; none has no sign.
fn signed(change: f64, digits: usize) -> String {
    if change.abs() < 1e-9 { "0 %".to_owned() } else { format!("{change:+.digits$} %") }
}

fn clip(text: &str, limit: usize) -> String {
    if text.chars().count() <= limit {
        return text.to_owned();
    }
    let kept: String = text.chars().take(limit.saturating_sub(1)).collect();
    format!("{kept}\u{2026}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_drawn_of_nothing() {
        assert!(latency("t", &[]).is_none());
        assert!(latency("t", &[Series { label: "a".to_owned(), points: vec![(0, 0.0, None)] }]).is_none());
        assert!(gains("t", &[], 0.02, 0.02).is_none());
        assert!(scatter("t", &[]).is_none() && timeline("t", &[], &[]).is_none());
        let none = Span { phase: Phase::Search, seconds: [0.0, 0.0], failures: Vec::new() };
        assert!(timeline("t", &[none], &[]).is_none(), "an imported run has no times");
    }

    #[test]
    fn series_differ_by_more_than_colour_and_say_their_figures() {
        let series = |label: &str, us: f64| Series {
            label: label.to_owned(),
            points: vec![(4096, us, Some([us * 0.9, us * 1.1])), (65_536, us * 2.0, None)],
        };
        let drawn = latency("Latency", &[series("default", 10.0), series("tuned", 9.9)]).unwrap().finish(1);
        assert!(drawn.contains("<circle class=\"mark s0\"") && drawn.contains("<polygon class=\"mark s1\""), "{drawn}");
        assert!(!drawn.contains("<circle class=\"mark s1\""), "{drawn}");
        assert!(drawn.contains("default: 4 KiB 10.00 us, 64 KiB 20.00 us"), "{drawn}");
        let labels: Vec<f64> = drawn
            .lines()
            .filter(|line| line.contains("class=\"label\""))
            .map(|line| line.split("y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
            .collect();
        assert!((labels[0] - labels[1]).abs() >= 16.0, "labels lie upon each other: {labels:?}");
    }

    #[test]
    fn long_runs_have_few_ticks() {
        for end in [0.5, 3.0, 59.0, 61.0, 3599.0, 80_000.0] {
            let ticks = clock_ticks(end);
            assert!((1..=12).contains(&ticks.len()) && ticks.iter().all(|tick| *tick <= end), "{end}: {ticks:?}");
        }
    }
}
