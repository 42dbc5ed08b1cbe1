//! Rotary position embeddings: cosines and sines by position, including the scaled variants.
//!
//! Tables are computed here and not by mistralrs because its scaled types cannot be built from a
//! configuration we can name. Angles are f32 products of position and inverse frequency, as in the
//! models' own training code, so tables agree with theirs to the bit. Memory: 4 bytes × head
//! dimension for every position up to the largest one seen, doubled when it grows.

use std::f32::consts::PI;

/// How inverse frequencies were changed to reach a longer context.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// They were not.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f32,
        /// Rotations within the original context below which a wavelength is long.
        low_freq_factor: f32,
        /// Rotations above which one is short.
        high_freq_factor: f32,
        /// The original context.
        original_positions: f32,
    },
    /// A divisor per frequency, as GGUF files store it.
    Factors(Vec<f32>),
}

/// The inverse frequencies θ^(-2i/d), scaled.
fn inverse_frequencies(head_dim: usize, theta: f32, scaling: &RopeScaling) -> Vec<f32> {
    (0..head_dim)
        .step_by(2)
        .enumerate()
        .map(|(index, i)| {
            let frequency = 1.0 / theta.powf(i as f32 / head_dim as f32);
            match scaling {
                RopeScaling::None => frequency,
                RopeScaling::Linear { factor } => frequency / factor,
                RopeScaling::Factors(factors) => frequency / factors[index],
                &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                    // Rotations within the original context decide; see the reference
                    // implementation `_compute_llama3_parameters` of transformers.
                    let rotations = original_positions * frequency / (2.0 * PI);
                    let ramp = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = ramp.clamp(0.0, 1.0);
                    (1.0 - kept) * frequency / factor + kept * frequency
                }
            }
        })
        .collect()
}

/// Growing cosine and sine tables of one model.
#[derive(Debug)]
pub struct Rope {
    inverse_frequencies: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    /// Empty tables.
    #[must_use]
    pub fn new(head_dim: usize, theta: f32, scaling: &RopeScaling) -> Self {
        let inverse_frequencies = inverse_frequencies(head_dim, theta, scaling);
        Self { inverse_frequencies, cos: Vec::new(), sin: Vec::new() }
    }

    /// Extends the tables to hold `positions` rows, and as many again.
    fn grow(&mut self, positions: usize) {
        let width = self.inverse_frequencies.len();
        let rows = self.cos.len() / width;
        if positions <= rows {
            return;
        }
        for position in rows..positions.next_power_of_two() {
            for frequency in &self.inverse_frequencies {
                let angle = position as f32 * frequency;
                self.cos.push(angle.cos());
                self.sin.push(angle.sin());
            }
        }
    }

    /// Makes the rows of `positions` readable by [`position`](Self::position).
    pub fn reserve(&mut self, positions: &[usize]) {
        self.grow(positions.iter().max().map_or(0, |last| last + 1));
    }

    /// Cosines and sines of a position, `head_dim / 2` each.
    #[must_use]
    pub fn position(&self, position: usize) -> (&[f32], &[f32]) {
        let width = self.inverse_frequencies.len();
        let row = position * width..(position + 1) * width;
        (&self.cos[row.clone()], &self.sin[row])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_and_linear_frequencies_follow_the_formula() {
        let plain = inverse_frequencies(8, 10_000.0, &RopeScaling::None);
        for (got, expected) in plain.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((got - expected).abs() < 1e-7 * expected.max(1e-3), "{got} {expected}");
        }
        let linear = inverse_frequencies(8, 10_000.0, &RopeScaling::Linear { factor: 4.0 });
        let quarter: Vec<f32> = plain.iter().map(|frequency| frequency / 4.0).collect();
        assert_eq!(linear, quarter);
    }

    /// By wavelength, as the Llama 3.1 reference code writes it.
    fn llama3_reference(frequency: f64) -> f64 {
        let (factor, low, high, original) = (8.0, 1.0, 4.0, 8192.0);
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        if wavelength < original / high {
            frequency
        } else if wavelength > original / low {
            frequency / factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
    }

    #[test]
    fn llama3_scaling_follows_the_reference_in_all_three_bands() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8192.0,
        };
        let plain = inverse_frequencies(128, 500_000.0, &RopeScaling::None);
        let scaled = inverse_frequencies(128, 500_000.0, &scaling);
        let mut bands = [0; 3];
        for (&plain, &scaled) in plain.iter().zip(&scaled) {
            let expected = llama3_reference(f64::from(plain));
            assert!((f64::from(scaled) - expected).abs() < 1e-6 * expected, "{scaled} {expected}");
            let ratio = scaled / plain;
            bands[usize::from(ratio <= 0.999) + usize::from(ratio < 0.126)] += 1;
        }
        assert!(bands.iter().all(|&count| count > 3), "{bands:?}");
    }

    #[test]
    fn tables_grow_without_changing_earlier_rows() {
        let mut rope = Rope::new(4, 10_000.0, &RopeScaling::None);
        let row = |rope: &mut Rope, position: usize| {
            rope.reserve(&[position]);
            rope.position(position).0.to_vec()
        };
        let before = row(&mut rope, 3);
        let far = row(&mut rope, 1000);
        assert_eq!(row(&mut rope, 3), before);
        assert_eq!(far, [1000.0_f32.cos(), (1000.0_f32 * 0.01).cos()]);
    }
}
