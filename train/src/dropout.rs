//! Dropout (Srivastava et al. 2014) that a seed decides.

use candle_core::{Result, Tensor};
use rand::{RngCore as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256PlusPlus;

/// What is dropped in one forward.
#[derive(Debug)]
pub(crate) struct Dropout {
    share: f64,
    rng: Xoshiro256PlusPlus,
}

impl Dropout {
    /// This share of the numbers, and the seed that says which.
    pub(crate) fn new((share, seed): (f64, u64)) -> Self {
        Self { share, rng: Xoshiro256PlusPlus::seed_from_u64(seed) }
    }

    /// Nothing.
    pub(crate) fn none() -> Self {
        Self::new((0.0, 0))
    }

    /// Sets the share of the numbers to 0, and scales the others so that sums stay what they are.
    pub(crate) fn apply(&mut self, x: &Tensor) -> Result<Tensor> {
        if self.share == 0.0 {
            return Ok(x.clone());
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of 65,536")]
        let (dropped, kept) = ((self.share * 65_536.0) as u16, (1.0 / (1.0 - self.share)) as f32);
        let mut mask = vec![0.0f32; x.elem_count()];
        for numbers in mask.chunks_mut(4) {
            let bits = self.rng.next_u64();
            for (number, shift) in numbers.iter_mut().zip([0, 16, 32, 48]) {
                let draw = u16::try_from(bits >> shift & 0xFFFF).unwrap_or(u16::MAX);
                *number = if draw < dropped { 0.0 } else { kept };
            }
        }
        let mask = Tensor::from_vec(mask, x.shape(), x.device())?;
        x * mask
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn the_share_is_dropped_and_the_mean_stays() {
        let ones = Tensor::ones((100, 1001), DType::F32, &Device::Cpu).unwrap();
        let of = |share, seed| {
            let dropped = Dropout::new((share, seed)).apply(&ones).unwrap();
            dropped.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let values = of(0.2, 1);
        let zeros = values.iter().filter(|&&value| value == 0.0).count() as f64 / values.len() as f64;
        assert!((zeros - 0.2).abs() < 0.01, "{zeros}");
        assert!(values.iter().all(|&value| value == 0.0 || value == 1.25));
        assert!(values == of(0.2, 1) && values != of(0.2, 2));
        assert!(of(0.0, 1).iter().all(|&value| value == 1.0));
    }
}
