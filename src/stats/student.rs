//! Student's t: distribution function and quantile, for any positive degrees of freedom.
//!
//! ```text
//! P(T > t) = I_x(df/2, 1/2) / 2      for t >= 0, with x = df / (df + t^2)
//! ```
//!
//! where `I_x(a, b)` is the regularized incomplete beta function (Abramowitz & Stegun, Handbook of
//! Mathematical Functions, 26.5.27 and 26.7.1). It is evaluated by its continued fraction (A&S
//! 26.5.8) with Lentz's method as modified by Thompson and Barnett (Numerical Recipes, 3rd ed.,
//! 5.2 and 6.4). The quantile inverts the upper tail by bisection: a few dozen evaluations of a
//! function that costs about a microsecond, and no derivative to get wrong.

/// Above this many degrees of freedom the distribution is taken as this one's: the usual quantiles differ
/// by a few parts in a million from the normal limit, and the continued fraction, whose
/// length grows with the root of its parameters, stays short.
const MOST_DEGREES: f64 = 1e6;

/// Quantiles beyond this are not looked for: the square of t, on which everything rests, would overflow.
const LARGEST_QUANTILE: f64 = 1e150;

/// The probability that a t variable is at most `t`.
///
/// None where `t` is NaN or the degrees of freedom are not above 0.
pub fn student_cdf(t: f64, degrees_of_freedom: f64) -> Option<f64> {
    if t.is_nan() || degrees_of_freedom.is_nan() || degrees_of_freedom <= 0.0 {
        return None;
    }
    let tail = upper_tail(t.abs(), degrees_of_freedom);
    Some(if t < 0.0 { tail } else { 1.0 - tail })
}

/// The value that a t variable stays below with the given probability.
///
/// None where the probability is not strictly between 0 and 1, the degrees of freedom are not above
/// 0, or the quantile lies beyond 1e150.
pub fn student_quantile(probability: f64, degrees_of_freedom: f64) -> Option<f64> {
    let inside = probability > 0.0 && probability < 1.0;
    if !inside || degrees_of_freedom.is_nan() || degrees_of_freedom <= 0.0 {
        return None;
    }
    if probability < 0.5 {
        upper_tail_quantile(probability, degrees_of_freedom).map(|t| -t)
    } else {
        upper_tail_quantile(1.0 - probability, degrees_of_freedom)
    }
}

/// The half-width, in standard errors, of a two-sided t interval: the quantile at
/// `(1 + confidence) / 2`.
///
/// Infinite where the confidence is not strictly between 0 and 1 or the degrees of freedom are not
/// above 0: a caller that asks for nonsense must not be told that something was shown.
pub(crate) fn two_sided_quantile(confidence: f64, degrees_of_freedom: f64) -> f64 {
    let valid = confidence > 0.0 && confidence < 1.0 && degrees_of_freedom > 0.0;
    let quantile = if valid { upper_tail_quantile((1.0 - confidence) / 2.0, degrees_of_freedom) } else { None };
    quantile.unwrap_or(f64::INFINITY)
}

/// The t at and above which `tail` of the probability lies, for a tail of at most one half.
fn upper_tail_quantile(tail: f64, degrees_of_freedom: f64) -> Option<f64> {
    if tail >= 0.5 {
        return Some(0.0);
    }
    let (mut low, mut high) = (0.0, 1.0);
    while upper_tail(high, degrees_of_freedom) > tail {
        low = high;
        high *= 2.0;
        if high > LARGEST_QUANTILE {
            return None;
        }
    }
    // Ends at the latest when the bracket has shrunk to neighbouring numbers.
    while high - low > 1e-13 * high {
        let middle = f64::midpoint(low, high);
        if upper_tail(middle, degrees_of_freedom) > tail {
            low = middle;
        } else {
            high = middle;
        }
    }
    Some(f64::midpoint(low, high))
}

/// The probability above `t`, for `t` of at least 0.
fn upper_tail(t: f64, degrees_of_freedom: f64) -> f64 {
    let df = degrees_of_freedom.min(MOST_DEGREES);
    // (t / sqrt(df))^2 and not t^2 / df: both shares below are then sound for every finite t, and
    // each is computed directly, because 1 - x would cancel where x is close to 1.
    let square = (t / df.sqrt()).powi(2);
    let beyond = 1.0 / (1.0 + square);
    let within = if square.is_finite() { square / (1.0 + square) } else { 1.0 };
    incomplete_beta(df / 2.0, 0.5, beyond, within) / 2.0
}

/// The regularized incomplete beta function `I_x(a, b)`, given both `x` and `1 - x`.
fn incomplete_beta(a: f64, b: f64, x: f64, complement: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    if complement <= 0.0 {
        return 1.0;
    }
    let ln_front = ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * complement.ln();
    let front = ln_front.exp();
    // The fraction converges fast below the mean of the distribution; above it the symmetry
    // I_x(a, b) = 1 - I_{1-x}(b, a) (A&S 26.5.2) leads back there.
    let share = if x < (a + 1.0) / (a + b + 2.0) {
        front * beta_fraction(a, b, x) / a
    } else {
        1.0 - front * beta_fraction(b, a, complement) / b
    };
    share.clamp(0.0, 1.0)
}

/// The continued fraction of the incomplete beta function (A&S 26.5.8), by the modified Lentz method.
fn beta_fraction(a: f64, b: f64, x: f64) -> f64 {
    // Terms needed grow as the root of the larger parameter, at most MOST_DEGREES / 2.
    const MOST_TERMS: u32 = 10_000;
    // Stands in for a denominator of exactly 0.
    const TINY: f64 = 1e-300;
    let away_from_zero = |value: f64| if value.abs() < TINY { TINY } else { value };

    let mut numerator = 1.0;
    let mut denominator = 1.0 / away_from_zero(1.0 - (a + b) * x / (a + 1.0));
    let mut fraction = denominator;
    for term in 1..MOST_TERMS {
        let m = f64::from(term);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut step = 1.0;
        for coefficient in [even, odd] {
            denominator = 1.0 / away_from_zero(1.0 + coefficient * denominator);
            numerator = away_from_zero(1.0 + coefficient / numerator);
            step = numerator * denominator;
            fraction *= step;
        }
        if (step - 1.0).abs() < 1e-15 {
            break;
        }
    }
    fraction
}

/// The logarithm of the gamma function for arguments above 0 (Lanczos 1964, with Godfrey's nine
/// coefficients for g = 7; good to about 1e-14).
fn ln_gamma(x: f64) -> f64 {
    const G: f64 = 7.0;
    const FIRST: f64 = 0.999_999_999_999_809_9;
    const COEFFICIENTS: [f64; 8] = [
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    if x < 0.5 {
        // The series is made for arguments of one half and more; the recurrence leads there.
        return ln_gamma(x + 1.0) - x.ln();
    }
    let shifted = x - 1.0;
    let series = COEFFICIENTS
        .iter()
        .zip(1_u8..)
        .fold(FIRST, |sum, (coefficient, k)| sum + coefficient / (shifted + f64::from(k)));
    let base = shifted + G + 0.5;
    (std::f64::consts::TAU.ln() / 2.0) + (shifted + 0.5) * base.ln() - base + series.ln()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stats::assert_close;

    #[test]
    fn quantiles_match_published_tables() {
        // Any printed table of Student's t, for instance NIST/SEMATECH e-Handbook 1.3.6.7.2.
        let table = [
            (1.0, 12.7062, 63.6567),
            (2.0, 4.3027, 9.9248),
            (3.0, 3.1824, 5.8409),
            (4.0, 2.7764, 4.6041),
            (5.0, 2.5706, 4.0321),
            (7.0, 2.3646, 3.4995),
            (11.0, 2.2010, 3.1058),
            (15.0, 2.1314, 2.9467),
            (30.0, 2.0423, 2.7500),
            (120.0, 1.9799, 2.6174),
        ];
        for (df, at_975, at_995) in table {
            assert_close(student_quantile(0.975, df).unwrap(), at_975, 1e-4);
            assert_close(student_quantile(0.995, df).unwrap(), at_995, 1e-4);
            assert_close(two_sided_quantile(0.95, df), at_975, 1e-4);
        }
    }

    #[test]
    fn one_and_two_degrees_have_closed_forms() {
        for t in [0.0, 1e-9, 0.3, 1.0, 4.5, 200.0, 1e9_f64] {
            let cauchy = 0.5 + t.atan() / std::f64::consts::PI;
            assert_close(student_cdf(t, 1.0).unwrap(), cauchy, 1e-13);
            let two = 0.5 + t / (2.0 * (2.0 + t * t).sqrt());
            assert_close(student_cdf(t, 2.0).unwrap(), two, 1e-13);
        }
        for p in [0.6_f64, 0.9, 0.999, 1.0 - 1e-9] {
            let cauchy = (std::f64::consts::PI * (p - 0.5)).tan();
            // What 1 - p lost in rounding is lost for the closed form as well: relative 1e-6 at worst.
            assert_close(student_quantile(p, 1.0).unwrap() / cauchy, 1.0, 1e-6);
        }
    }

    #[test]
    fn many_degrees_are_normal() {
        for df in [1e6, 1e9, f64::INFINITY] {
            assert_close(student_quantile(0.975, df).unwrap(), 1.959_964, 1e-5);
            assert_close(student_quantile(0.995, df).unwrap(), 2.575_829, 1e-5);
            assert_close(student_cdf(1.0, df).unwrap(), 0.841_345, 1e-6);
        }
    }

    #[test]
    fn gamma_matches_known_values() {
        assert_close(ln_gamma(0.5), std::f64::consts::PI.sqrt().ln(), 1e-13);
        assert_close(ln_gamma(1.0), 0.0, 1e-13);
        assert_close(ln_gamma(5.0), 24.0_f64.ln(), 1e-13);
        assert_close(ln_gamma(0.25), 3.625_609_908_221_908_f64.ln(), 1e-13);
        assert_close(ln_gamma(11.0), 3_628_800.0_f64.ln(), 1e-12);
    }

    #[test]
    fn incomplete_beta_matches_known_values() {
        // I_x(1, 1) = x; I_x(2, 2) = 3x^2 - 2x^3; I_x(1/2, 1/2) = 2/pi asin(sqrt x).
        for x in [0.01, 0.2, 0.5, 0.73, 0.999_f64] {
            assert_close(incomplete_beta(1.0, 1.0, x, 1.0 - x), x, 1e-13);
            assert_close(incomplete_beta(2.0, 2.0, x, 1.0 - x), x * x * (3.0 - 2.0 * x), 1e-13);
            let arcsine = x.sqrt().asin() / std::f64::consts::FRAC_PI_2;
            assert_close(incomplete_beta(0.5, 0.5, x, 1.0 - x), arcsine, 1e-13);
        }
    }

    #[test]
    fn nonsense_is_none_or_infinitely_wide() {
        for p in [0.0, 1.0, -0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert_eq!(student_quantile(p, 5.0), None);
        }
        for df in [0.0, -1.0, f64::NAN] {
            assert_eq!(student_quantile(0.9, df), None);
            assert_eq!(student_cdf(0.9, df), None);
            assert!(two_sided_quantile(0.9, df).is_infinite());
        }
        assert_eq!(student_cdf(f64::NAN, 3.0), None);
        assert_eq!(student_cdf(f64::INFINITY, 3.0), Some(1.0));
        assert_eq!(student_cdf(f64::NEG_INFINITY, 3.0), Some(0.0));
        assert_eq!(student_quantile(1e-300, 0.001), None);
        for confidence in [0.0, 1.0, -1.0, 2.0, f64::NAN] {
            assert!(two_sided_quantile(confidence, 5.0).is_infinite());
        }
    }

    proptest! {
        #[test]
        fn the_quantile_inverts_the_distribution(p in 0.0005_f64..0.9995, df in 0.6_f64..200.0) {
            let t = student_quantile(p, df).unwrap();
            prop_assert!((student_cdf(t, df).unwrap() - p).abs() < 1e-10);
        }

        #[test]
        fn the_distribution_is_symmetric_and_rises(t in -50.0_f64..50.0, df in 0.6_f64..200.0) {
            let here = student_cdf(t, df).unwrap();
            prop_assert!((here + student_cdf(-t, df).unwrap() - 1.0).abs() < 1e-12);
            prop_assert!(student_cdf(t + 0.1, df).unwrap() >= here);
        }
    }
}
