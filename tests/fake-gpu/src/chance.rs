//! Chance from a seed: a named algorithm (SplitMix64), so that virtual times never change by themselves.

/// A number that depends on all parts and looks like chance.
pub(crate) fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x6a09_e667_f3bc_c909, |state, part| {
        let mut z = state.rotate_left(23) ^ part.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// Evenly spread in [0, 1).
pub(crate) fn unit(parts: &[u64]) -> f64 {
    (mix(parts) >> 11) as f64 / (1_u64 << 53) as f64
}

/// Normally spread around 0 with deviation 1, cut at 3 (Box and Muller).
pub(crate) fn normal(parts: &[u64]) -> f64 {
    let radius = (1.0 - unit(&[mix(parts), 1])).ln() * -2.0;
    let angle = unit(&[mix(parts), 2]) * std::f64::consts::TAU;
    (radius.sqrt() * angle.cos()).clamp(-3.0, 3.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_as_they_should() {
        let count = 20_000;
        let mean = (0..count).map(|i| unit(&[7, i])).sum::<f64>() / count as f64;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let normals: Vec<f64> = (0..count).map(|i| normal(&[7, i])).collect();
        let mean = normals.iter().sum::<f64>() / count as f64;
        let variance = normals.iter().map(|value| value * value).sum::<f64>() / count as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.06, "{mean} {variance}");
    }

    #[test]
    fn every_part_counts() {
        assert_ne!(mix(&[1, 2]), mix(&[2, 1]));
        assert_ne!(mix(&[1]), mix(&[1, 0]));
    }
}
