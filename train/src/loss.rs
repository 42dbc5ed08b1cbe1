//! What is minimised, and what is measured.
//!
//! Of the target's distribution p only the likely tokens are known one by one; all others count as one token more, in
//! both distributions. That bounds the divergence from below and the overlap from above, by less than what p leaves to
//! the others; where the overlap is reported, theirs is left out, so it is a lower bound. A likely token that the draft
//! model does not know has p = 0 here, and what the target gives it is in neither part.

use candle_core::{Result, Tensor};

use crate::batch::{Labels, others};
use crate::config::Loss;
use crate::softmax::log_probabilities;

/// Added to overlaps before their logarithm.
const OVERLAP_MIN: f64 = 1e-6;

impl Loss {
    /// The mean of the loss over `[N, V]` logits.
    pub(crate) fn of(self, logits: &Tensor, labels: &Labels) -> Result<Tensor> {
        if self == Self::CrossEntropy {
            return log_probabilities(logits, &labels.text)?.mean_all()?.neg();
        }
        let (p, p_others) = (&labels.probabilities, &labels.others);
        let log_q = log_probabilities(logits, &labels.likely)?;
        let q = (log_q.exp()? * p.gt(0.0)?.to_dtype(p.dtype())?)?;
        let q_others = others(&q)?;
        let of_places = match self {
            Self::Kl | Self::CrossEntropy => {
                let likely = (p * (p.maximum(f64::from(f32::MIN_POSITIVE))?.log()? - log_q)?)?.sum_keepdim(1)?;
                (likely + (p_others * (p_others.log()? - q_others.log()?)?)?)?
            }
            Self::Overlap => {
                let overlap = (p.minimum(&q)?.sum_keepdim(1)? + p_others.minimum(&q_others)?)?;
                (overlap + OVERLAP_MIN)?.log()?.neg()?
            }
        };
        of_places.mean_all()
    }
}

/// The mean of x² / 2 where |x| < 1 and of |x| - 1/2 elsewhere, x being the difference.
pub(crate) fn smooth_l1(found: &Tensor, expected: &Tensor) -> Result<Tensor> {
    let distance = (found - expected)?.abs()?;
    let small = distance.minimum(1.0)?;
    ((small.sqr()? * 0.5)? + (distance - small)?)?.mean_all()
}

/// How well a draft model foresees the target, as means over the places of texts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Foresight {
    /// Σ min(p, q) over the target's likely tokens.
    pub(crate) overlap: f64,
    /// The share of places where both put the same token first: what a greedy target accepts.
    pub(crate) first: f64,
}

impl Foresight {
    /// Sums over the places of `[N, V]` logits.
    pub(crate) fn sums(logits: &Tensor, labels: &Labels) -> Result<Self> {
        let q = log_probabilities(logits, &labels.likely)?.exp()?;
        let overlap = labels.probabilities.minimum(&q)?.sum_all()?;
        let first = logits.argmax_keepdim(1)?.eq(&labels.likely.narrow(1, 0, 1)?)?;
        let is_known = labels.probabilities.narrow(1, 0, 1)?.gt(0.0)?;
        let first = (first * is_known)?.to_dtype(overlap.dtype())?.sum_all()?;
        let value = |sum: &Tensor| Ok::<_, candle_core::Error>(f64::from(sum.to_scalar::<f32>()?));
        Ok(Self { overlap: value(&overlap)?, first: value(&first)? })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::batch::OTHERS_MIN;

    const V: usize = 6;
    const N: usize = 3;

    /// The target's probabilities of the first three tokens it holds likely, and the text's tokens. One of the likely
    /// ones, of probability 0.1, is unknown to the model.
    fn labels() -> Labels {
        let cpu = &Device::Cpu;
        let probabilities = Tensor::new(&[[0.7f32, 0.2, 0.05], [0.5, 0.3, 0.2], [0.0, 0.4, 0.3]], cpu).unwrap();
        Labels {
            text: Tensor::new(&[[4u32], [0], [5]], cpu).unwrap(),
            likely: Tensor::new(&[[4u32, 1, 0], [0, 2, 3], [0, 1, 5]], cpu).unwrap(),
            others: Tensor::new(&[[0.05f32], [1e-6], [0.2]], cpu).unwrap(),
            probabilities,
        }
    }

    fn logits() -> Vec<f32> {
        (0..N * V).map(|at| ((at * 7 + 3) % 11) as f32 / 4.0 - 1.0).collect()
    }

    /// The losses by their definitions, in f64.
    fn naive(loss: Loss, logits: &[f32]) -> f64 {
        let labels = labels();
        let text = labels.text.to_vec2::<u32>().unwrap();
        let likely = labels.likely.to_vec2::<u32>().unwrap();
        let p = labels.probabilities.to_vec2::<f32>().unwrap();
        let p_others = labels.others.to_vec2::<f32>().unwrap();
        let of_place = |place: usize| {
            let row: Vec<f64> = logits[place * V..][..V].iter().map(|&x| f64::from(x)).collect();
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            let q: Vec<f64> = row.iter().map(|x| x.exp() / sum).collect();
            let rest = |sum: f64| (1.0 - sum).max(OTHERS_MIN);
            let known = likely[place].iter().zip(&p[place]).filter(|(_, p)| **p > 0.0);
            let mut pairs: Vec<(f64, f64)> = known.map(|(&x, &p)| (f64::from(p), q[x as usize])).collect();
            pairs.push((p_others[place][0].into(), rest(pairs.iter().map(|pair| pair.1).sum())));
            match loss {
                Loss::CrossEntropy => -q[text[place][0] as usize].ln(),
                Loss::Kl => pairs.iter().map(|(p, q)| p * (p / q).ln()).sum(),
                Loss::Overlap => -(pairs.iter().map(|(p, q)| p.min(*q)).sum::<f64>() + OVERLAP_MIN).ln(),
            }
        };
        (0..N).map(of_place).sum::<f64>() / N as f64
    }

    #[test]
    fn losses_and_their_gradients_are_those_of_the_definitions() {
        for loss in [Loss::CrossEntropy, Loss::Kl, Loss::Overlap] {
            let values = logits();
            let var = Var::from_vec(values.clone(), (N, V), &Device::Cpu).unwrap();
            let found = loss.of(&var, &labels()).unwrap();
            let expected = naive(loss, &values);
            assert!((f64::from(found.to_scalar::<f32>().unwrap()) - expected).abs() < 1e-5, "{loss:?}: {expected}");
            let gradients = found.backward().unwrap();
            let gradient = gradients.get(&var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for at in 0..N * V {
                let moved = |by: f32| {
                    let mut values = values.clone();
                    values[at] += by;
                    naive(loss, &values)
                };
                let slope = (moved(1e-3) - moved(-1e-3)) / 2e-3;
                assert!((f64::from(gradient[at]) - slope).abs() < 1e-4, "{loss:?} at {at}: {slope}, {gradient:?}");
            }
        }
    }

    #[test]
    fn small_differences_count_by_their_square_and_large_ones_by_their_size() {
        let of = |x: &[f32]| Tensor::new(x, &Device::Cpu).unwrap();
        let loss = smooth_l1(&of(&[0.5, -3.0, 1.0]), &of(&[0.0, 0.0, 1.0])).unwrap().to_scalar::<f32>().unwrap();
        assert!((loss - (0.125 + 2.5) / 3.0).abs() < 1e-6, "{loss}");
    }

    #[test]
    fn foresight_counts_what_both_expect() {
        let sums = Foresight::sums(&Tensor::from_vec(logits(), (N, V), &Device::Cpu).unwrap(), &labels()).unwrap();
        // The most probable tokens of the logits' rows.
        let first = [0, 1, 2].map(|place| {
            let row = &logits()[place * V..][..V];
            (0..V).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap()
        });
        let expected = first.iter().zip([4, 0, V]).filter(|(a, b)| **a == *b).count();
        assert_eq!(sums.first, expected as f64);
        assert!(sums.overlap > 0.3 && sums.overlap < 2.0, "{sums:?}");
    }
}
