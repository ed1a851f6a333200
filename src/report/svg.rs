//! Small pictures: a handful of shapes, text beside what it names, and nothing that needs colour.
//!
//! Colours are classes that the page defines for light and dark; series differ by dashes and markers
//! as well, so that print in grey and eyes without red or green lose nothing.

use std::fmt::Write as _;

use crate::wording::printable;

/// Longest text in a picture.
const LIMIT: usize = 200;

/// How a point of a series looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Marker {
    Circle,
    Square,
    Triangle,
    Diamond,
}

impl Marker {
    /// The marker of the series with this number.
    pub(super) const fn of(series: usize) -> Self {
        match series % 4 {
            0 => Self::Circle,
            1 => Self::Square,
            2 => Self::Triangle,
            _ => Self::Diamond,
        }
    }
}

/// Where a text stands from its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// A picture.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Svg {
    width: f64,
    height: f64,
    title: String,
    description: String,
    body: String,
}

/// Text for HTML and SVG alike; what would steer a reader is taken out before.
pub(super) fn escaped(text: &str, limit: usize) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in printable(text, limit).chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(character),
        }
    }
    escaped
}

impl Svg {
    /// An empty picture; title and description are for those who cannot see it.
    pub(super) fn new(width: f64, height: f64, title: &str, description: &str) -> Self {
        Self { width, height, title: title.to_owned(), description: description.to_owned(), body: String::new() }
    }

    pub(super) fn line(&mut self, class: &str, from: [f64; 2], to: [f64; 2]) {
        let ([x1, y1], [x2, y2]) = (from, to);
        let _ = writeln!(self.body, r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#);
    }

    pub(super) fn polyline(&mut self, class: &str, points: &[[f64; 2]]) {
        let points: Vec<String> = points.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(self.body, r#"<polyline class="{class}" points="{}"/>"#, points.join(" "));
    }

    pub(super) fn rect(&mut self, class: &str, at: [f64; 2], size: [f64; 2]) {
        let ([x, y], [width, height]) = (at, size);
        let _ = writeln!(
            self.body,
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}"/>"#
        );
    }

    pub(super) fn marker(&mut self, marker: Marker, class: &str, at: [f64; 2]) {
        let [x, y] = at;
        let shape = |points: &[[f64; 2]]| {
            let points: Vec<String> = points.iter().map(|[dx, dy]| format!("{:.1},{:.1}", x + dx, y + dy)).collect();
            format!(r#"<polygon class="{class}" points="{}"/>"#, points.join(" "))
        };
        let drawn = match marker {
            Marker::Circle => format!(r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="4"/>"#),
            Marker::Square => shape(&[[-4.0, -4.0], [4.0, -4.0], [4.0, 4.0], [-4.0, 4.0]]),
            Marker::Triangle => shape(&[[0.0, -5.0], [5.0, 4.0], [-5.0, 4.0]]),
            Marker::Diamond => shape(&[[0.0, -5.5], [5.5, 0.0], [0.0, 5.5], [-5.5, 0.0]]),
        };
        self.body.push_str(&drawn);
        self.body.push('\n');
    }

    pub(super) fn text(&mut self, class: &str, anchor: Anchor, at: [f64; 2], text: &str) {
        let [x, y] = at;
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.body,
            r#"<text class="{class}" text-anchor="{anchor}" x="{x:.1}" y="{y:.1}">{}</text>"#,
            escaped(text, LIMIT)
        );
    }

    /// The picture as part of a page, where `number` tells it from the others.
    pub(super) fn finish(&self, number: usize) -> String {
        let (width, height) = (self.width, self.height);
        format!(
            "<svg viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
             aria-labelledby=\"figure-{number}-title figure-{number}-desc\">\n\
             <title id=\"figure-{number}-title\">{}</title>\n<desc id=\"figure-{number}-desc\">{}</desc>\n{}</svg>",
            escaped(&self.title, LIMIT),
            escaped(&self.description, 10 * LIMIT),
            self.body
        )
    }
}

/// A logarithmic scale from values to places.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LogScale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl LogScale {
    /// Values from `low` to `high`, both above zero, onto `from` to `to`; a single value gets room.
    pub(super) fn new([low, high]: [f64; 2], [from, to]: [f64; 2]) -> Self {
        let (low, high) = if low < high { (low, high) } else { (low / 2.0, low * 2.0) };
        Self { low: low.ln(), high: high.ln(), from, to }
    }

    pub(super) fn at(self, value: f64) -> f64 {
        self.from + (value.ln() - self.low) / (self.high - self.low) * (self.to - self.from)
    }
}

/// A linear scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    pub(super) fn new([low, high]: [f64; 2], [from, to]: [f64; 2]) -> Self {
        let high = if low < high { high } else { low + 1.0 };
        Self { low, high, from, to }
    }

    pub(super) fn at(self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }
}

/// Round values from `low` to `high`, about `count` of them.
pub(super) fn ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let range = high - low;
    if !(range > 0.0 && range.is_finite()) || count == 0 {
        return vec![low];
    }
    let rough = range / count as f64;
    let decade = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * decade).find(|step| *step >= rough);
    let step = step.unwrap_or(decade * 10.0);
    let first = (low / step).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last.min(first + 100)).map(|index| index as f64 * step).collect()
}

/// 1, 2 and 5 of every decade between two values; the decades alone where those would crowd, and more
/// where there would be two of them.
pub(super) fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    if !(low > 0.0 && high >= low && high.is_finite()) {
        return Vec::new();
    }
    let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
    let factors: &[f64] = match (high / low).log10() {
        range if range > 3.0 => &[1.0],
        range if range < 0.9 => &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
        _ => &[1.0, 2.0, 5.0],
    };
    decades
        .flat_map(|decade| factors.iter().map(move |factor| factor * 10_f64.powi(decade)))
        .filter(|value| *value >= low * 0.999 && *value <= high * 1.001)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_element() {
        let mut svg = Svg::new(10.0, 10.0, "a<b>", "\"c\" & 'd'");
        svg.text("label", Anchor::End, [1.0, 2.0], "</text><script>alert(1)</script>\u{202e}");
        let drawn = svg.finish(3);
        assert!(!drawn.contains("<script>") && !drawn.contains('\u{202e}'), "{drawn}");
        assert!(drawn.contains("<title id=\"figure-3-title\">a&lt;b&gt;</title>"), "{drawn}");
        assert!(drawn.contains("&quot;c&quot; &amp; &#39;d&#39;"), "{drawn}");
    }

    #[test]
    fn scales_reach_both_ends_and_survive_a_single_value() {
        let scale = LogScale::new([1.0, 100.0], [0.0, 200.0]);
        assert!((scale.at(1.0)).abs() < 1e-9 && (scale.at(10.0) - 100.0).abs() < 1e-9);
        assert!(LogScale::new([5.0, 5.0], [0.0, 10.0]).at(5.0).is_finite());
        assert!(Scale::new([5.0, 5.0], [0.0, 10.0]).at(5.0).is_finite());
    }

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(-3.0, 7.0, 5), [-2.0, 0.0, 2.0, 4.0, 6.0]);
        assert_eq!(ticks(1.0, 1.0, 5), [1.0]);
        assert_eq!(ticks(0.0, f64::INFINITY, 5), [0.0]);
        assert_eq!(log_ticks(8.0, 130.0), [10.0, 20.0, 50.0, 100.0]);
        assert_eq!(log_ticks(1.0, 1e6).len(), 7);
        assert_eq!(log_ticks(17.0, 55.0), [20.0, 30.0, 40.0, 50.0]);
        assert!(log_ticks(0.0, 1.0).is_empty() && log_ticks(f64::NAN, 1.0).is_empty());
    }
}
