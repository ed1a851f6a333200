//! Statistics: f64 in, numbers out.
//!
//! The unit of repetition is a launch (fresh processes); what is repeated inside one is summarised
//! before it comes here, normally by its [`median`]. The chain that a verdict rests on is
//!
//! ```text
//! (arm, default) per launch --paired_log_ratios--> log ratios --trimmed--> 20 % trimmed mean,
//!     winsorized spread --Yuen's t interval--> exp --> RatioEstimate { ratio, low, high }
//! ```
//!
//! Logs, because a ratio and its inverse must count the same; trimmed means, because a few launches
//! in a hundred are slow for reasons of their own; a t interval, because a percentile bootstrap over
//! so few launches promises more than it keeps.
//!
//! Nothing here panics, reads, writes or draws. Input that carries no answer (empty, NaN, infinite,
//! a ratio of something not positive) is `None`, never NaN; an intermediate result too large for a
//! finite number is `None` too.

#[cfg(test)]
mod calibration;
mod drift;
mod planning;
mod ratio;
mod student;
mod summary;
mod trimmed;
mod weighted;

pub use drift::{DRIFT_CONFIDENCE, Drift, drift};
pub use planning::{launches_needed, noise_floor, planned_half_width, sequential_confidence};
pub use ratio::{RatioEstimate, log_ratio_estimate, paired_log_ratios, paired_ratio};
pub use student::{student_cdf, student_quantile};
pub use summary::{mean, median, quantile, standard_deviation};
pub use trimmed::{Interval, Trimmed, trimmed};
pub use weighted::{objective_log_ratios, weighted_geometric_mean};

#[cfg(test)]
fn assert_close(actual: f64, expected: f64, tolerance: f64) {
    assert!((actual - expected).abs() <= tolerance, "{actual} is not within {tolerance} of {expected}");
}
