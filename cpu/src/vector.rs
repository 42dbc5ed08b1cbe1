//! Functions of rows that the compiler turns into vectors, in functions that [`vectorized!`](crate::skinny::vectorized)
//! defines.

use crate::skinny::vectorized;

/// Folds each value into the lane of its place, modulo `N`: lanes do not wait for each other, and whole arrays of them
/// are what the compiler turns into vectors. It does not with `chunks`, whose last one is shorter, nor with a single
/// fold: the softmax of 600 scores takes 3.5 times as long so.
#[inline(always)]
pub(crate) fn by_lane<T, const N: usize>(values: &[f32], mut lanes: [T; N], fold: impl Fn(&mut T, f32)) -> [T; N] {
    let (parts, rest) = values.as_chunks::<N>();
    for part in parts {
        (lanes.iter_mut().zip(part)).for_each(|(lane, value)| fold(lane, *value));
    }
    (lanes.iter_mut().zip(rest)).for_each(|(lane, value)| fold(lane, *value));
    lanes
}

/// Lanes of [`by_lane`] for f32.
pub(crate) const LANES: usize = 16;

/// Lanes of four registers, which do not wait for each other either.
pub(crate) const WIDE: usize = 4 * LANES;

/// Folds lanes, a power of two of them, into one: half onto half, where one after the other waits for each.
#[inline(always)]
pub(crate) fn halved<T: Copy, const N: usize>(mut lanes: [T; N], fold: impl Fn(&mut T, T)) -> T {
    let mut width = N / 2;
    while width > 0 {
        let (low, high) = lanes.split_at_mut(width);
        low.iter_mut().zip(high).for_each(|(low, high)| fold(low, *high));
        width /= 2;
    }
    lanes[0]
}

/// The largest value.
#[inline(always)]
pub(crate) fn max(values: &[f32]) -> f32 {
    let raise = |max: &mut f32, value: f32| *max = if value > *max { value } else { *max };
    halved(by_lane(values, [f32::NEG_INFINITY; WIDE], raise), raise)
}

/// 1.5 · 2^23: adding it rounds to an integer, which is then found in the low bits.
const ROUND: f32 = 12_582_912.0;

/// e^x for x ≤ 0, with a relative error below 3e-7; 0 stands in for what is below e^-87. Free of
/// branches and calls, so that a loop over it is vectorised: 64 rows of 150,000 logits are 10
/// million exponentials.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    let r = clamped - power * LN_2_HIGH - power * LN_2_LOW;
    let tail = 1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0)));
    let mantissa = 1.0 + r * (1.0 + r * (0.5 + r * tail));
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if x > -87.0 { mantissa * scale } else { 0.0 }
}

/// e^x for x ≤ 0 with a relative error below 6e-5, which is little beside that of bf16, 2e-3; at most e^-60 for what is
/// below -60. Only for processors that fuse multiplications and additions: others call a function for each.
#[inline(always)]
pub(crate) fn exp_fused(x: f32) -> f32 {
    let clamped = if x > -60.0 { x } else { -60.0 };
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let r = (shifted - ROUND).mul_add(-std::f32::consts::LN_2, clamped);
    let tail = r.mul_add(1.0 / 24.0, 1.0 / 6.0).mul_add(r, 0.5);
    let mantissa = tail.mul_add(r, 1.0).mul_add(r, 1.0);
    mantissa * f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()))
}

vectorized! {
    /// `x / √(mean x² + eps) · scale`.
    pub(crate) fn norm_in_place = norm(row: &mut [f32], scale: &[f32], eps: f64);
    /// `silu(gate) · up`, where silu(x) = x / (1 + e^-x).
    pub(crate) fn silu_times = silu(gate: &[f32], up: &[f32], to: &mut [f32]);
}

#[inline(always)]
fn norm(row: &mut [f32], scale: &[f32], eps: f64) {
    let sums = by_lane(row, [0.0_f32; LANES], |sum, x| *sum += x * x);
    let mean = f64::from(sums.iter().sum::<f32>()) / row.len() as f64;
    let factor = narrow(1.0 / (mean + eps).sqrt());
    row.iter_mut().zip(scale).for_each(|(x, scale)| *x = *x * factor * scale);
}

#[inline(always)]
fn silu(gate: &[f32], up: &[f32], to: &mut [f32]) {
    for ((to, gate), up) in to.iter_mut().zip(gate).zip(up) {
        let small = exp(-gate.abs());
        let above = if *gate < 0.0 { small } else { 1.0 };
        *to = gate * above / (1.0 + small) * up;
    }
}

/// To f32.
#[expect(clippy::cast_possible_truncation, reason = "a sum of f32 in the range of f32")]
pub(crate) fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_accurate_over_its_whole_range() {
        for step in 0..870_000 {
            let x = -(step as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 3e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!([exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY)], [1.0, 0.0, 0.0]);
    }

    #[test]
    fn the_fused_exponential_is_as_accurate_as_it_says() {
        for step in 0..600_000 {
            let x = -(step as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp_fused(x)) - exact).abs() / exact;
            assert!(error < 6e-5, "exp({x}) is off by {error:e}");
        }
        assert_eq!(exp_fused(0.0), 1.0);
        assert!([-61.0, f32::MIN, f32::NEG_INFINITY].map(exp_fused).iter().all(|none| (0.0..1e-26).contains(none)));
    }
}
