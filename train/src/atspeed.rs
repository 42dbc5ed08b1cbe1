//! The losses of AtSpeed (arXiv:2410.05165), which align a draft recommender q with its target p.
//!
//! They are functions of logits at N prefixes over V codes, which may be the codes of a level or the whole vocabulary:
//! a code that the prefix does not allow has the logit [`FORBIDDEN`] in both. Each loss is the mean over the prefixes,
//! in nats or as a probability; gradients flow into the draft's logits alone. The caller decides which prefixes there
//! are: AtSpeed takes those of top-K lists that both models make, a training here those of the target's lists.

use candle_core::{Result, Tensor};

use crate::softmax::log_softmax;

/// The logit of a code that a prefix does not allow: its probability is 0, its logarithm finite.
pub const FORBIDDEN: f32 = -1e9;

/// The share of the alignment in [`combined`], as published.
pub const ALPHA: f64 = 0.5;

/// AtSpeed-S, for strict verification, as printed: Σ q ln(q / p) − Σ q ln(q / p_K) over the draft's `k` most probable
/// codes. The entropies cancel, so it is Σ q ln(p_K / p): mass of the draft costs where the target is less sure than of
/// its K-th best sequence, and pays where it is surer. `log_p_k`, `[N, 1]`, is what the target gives the code of that
/// sequence at the prefix's place. `draft` and `target` are `[N, V]`; probabilities are normalised over all V.
///
/// # Errors
/// Shapes that do not fit.
pub fn strict(draft: &Tensor, target: &Tensor, log_p_k: &Tensor, k: usize) -> Result<Tensor> {
    let codes = most_probable(draft, k)?;
    let q = log_softmax(draft)?.gather(&codes, 1)?.exp()?;
    let log_p = log_softmax(&target.detach())?.gather(&codes, 1)?;
    (q * log_p.neg()?.broadcast_add(&log_p_k.detach())?)?.sum(1)?.mean_all()
}

/// AtSpeed-S as its authors' code has it: Σ q ln(q / p) − p_K Σ q ln q over the draft's `k` most probable codes, over
/// which p and q are normalised; p_K is what the target gives the last of them. So the draft's entropy costs p_K times
/// itself, where in the printed form the terms cancel. `draft` and `target` are `[N, V]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn strict_with_entropy(draft: &Tensor, target: &Tensor, k: usize) -> Result<Tensor> {
    let [log_q, log_p] = of_drafted(draft, target, k)?;
    let (q, last) = (log_q.exp()?, log_q.dim(1)? - 1);
    let divergence = (&q * (&log_q - &log_p)?)?.sum_keepdim(1)?;
    let entropy = (q * log_q)?.sum_keepdim(1)?.neg()?;
    (divergence + (entropy * log_p.narrow(1, last, 1)?.exp()?)?)?.mean_all()
}

/// AtSpeed-S without its density term (its ablation): Σ q ln(q / p) over the draft's `k` most probable codes, over
/// which p and q are normalised. `draft` and `target` are `[N, V]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn reverse_divergence(draft: &Tensor, target: &Tensor, k: usize) -> Result<Tensor> {
    let [log_q, log_p] = of_drafted(draft, target, k)?;
    (log_q.exp()? * (&log_q - &log_p)?)?.sum(1)?.mean_all()
}

/// ln q and ln p over the draft's `k` most probable codes, normalised over these.
fn of_drafted(draft: &Tensor, target: &Tensor, k: usize) -> Result<[Tensor; 2]> {
    let codes = most_probable(draft, k)?;
    Ok([log_softmax(&draft.gather(&codes, 1)?)?, log_softmax(&target.detach().gather(&codes, 1)?)?])
}

/// AtSpeed-R, for relaxed verification: the total variation distance ½ Σ |p − q| over the target's `k` most probable
/// codes, over which p and q are normalised. `draft` and `target` are `[N, V]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn relaxed(draft: &Tensor, target: &Tensor, k: usize) -> Result<Tensor> {
    let codes = most_probable(target, k)?;
    let q = log_softmax(&draft.gather(&codes, 1)?)?.exp()?;
    let p = log_softmax(&target.detach().gather(&codes, 1)?)?.exp()?;
    (p - q)?.abs()?.sum(1)?.mean_all()? * 0.5
}

/// What is minimised: α of the alignment and 1 − α of the cross-entropy on the data. [`ALPHA`] is the published share.
///
/// # Errors
/// Shapes that do not fit.
pub fn combined(alignment: &Tensor, cross_entropy: &Tensor, alpha: f64) -> Result<Tensor> {
    (alignment * alpha)? + (cross_entropy * (1.0 - alpha))?
}

/// `[N, K]`: of each row the codes of the largest logits, falling; as many as there are if K is more.
fn most_probable(logits: &Tensor, k: usize) -> Result<Tensor> {
    let sorted = logits.detach().contiguous()?.arg_sort_last_dim(false)?;
    sorted.narrow(1, 0, k.min(sorted.dim(1)?))?.contiguous()
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    const N: usize = 4;
    const V: usize = 7;
    const LOG_P_K: [f32; N] = [-1.5, -0.3, -2.0, -4.0];

    /// Logits no two of which are alike in a row, with two codes that are forbidden at the second prefix.
    fn logits(step: usize) -> Vec<f32> {
        let mut values: Vec<f32> = (0..N * V).map(|at| ((at * step + 5) % 29) as f32 / 9.0 - 1.5).collect();
        values[V + 2] = FORBIDDEN;
        values[V + 5] = FORBIDDEN;
        values
    }

    fn tensor(values: &[f32], columns: usize) -> Tensor {
        Tensor::from_slice(values, (N, columns), &Device::Cpu).unwrap()
    }

    fn softmax(logits: &[f64]) -> Vec<f64> {
        let most = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = logits.iter().map(|x| (x - most).exp()).sum();
        logits.iter().map(|x| (x - most).exp() / sum).collect()
    }

    /// The k largest.
    fn top(logits: &[f64], k: usize) -> Vec<usize> {
        let mut codes: Vec<usize> = (0..logits.len()).collect();
        codes.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        codes.truncate(k);
        codes
    }

    fn at(values: &[f64], codes: &[usize]) -> Vec<f64> {
        codes.iter().map(|&code| values[code]).collect()
    }

    #[derive(Debug, Clone, Copy)]
    enum Case {
        Strict,
        WithEntropy,
        Reverse,
        Relaxed,
    }

    /// The losses by their definitions, as they are printed: the terms of the strict one apart.
    fn naive(case: Case, draft: &[f32], target: &[f32], k: usize) -> f64 {
        let of_prefix = |row: usize| -> f64 {
            let [draft, target] =
                [draft, target].map(|all| all[row * V..][..V].iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
            match case {
                Case::Strict => {
                    let codes = top(&draft, k);
                    let [q, p] = [softmax(&draft), softmax(&target)].map(|all| at(&all, &codes));
                    let pairs = || q.iter().zip(&p).filter(|(q, _)| **q > 0.0);
                    let divergence: f64 = pairs().map(|(q, p)| q * (q / p).ln()).sum();
                    let density: f64 = pairs().map(|(q, _)| q * (q.ln() - f64::from(LOG_P_K[row]))).sum();
                    divergence - density
                }
                Case::WithEntropy | Case::Reverse => {
                    let codes = top(&draft, k);
                    let [q, p] = [&draft, &target].map(|all| softmax(&at(all, &codes)));
                    let pairs = || q.iter().zip(&p).filter(|(q, _)| **q > 0.0);
                    let divergence: f64 = pairs().map(|(q, p)| q * (q / p).ln()).sum();
                    let weight = if matches!(case, Case::Reverse) { 0.0 } else { *p.last().unwrap() };
                    divergence - weight * pairs().map(|(q, _)| q * q.ln()).sum::<f64>()
                }
                Case::Relaxed => {
                    let codes = top(&target, k);
                    let [q, p] = [&draft, &target].map(|all| softmax(&at(all, &codes)));
                    q.iter().zip(&p).map(|(q, p)| 0.5 * (p - q).abs()).sum()
                }
            }
        };
        (0..N).map(of_prefix).sum::<f64>() / N as f64
    }

    fn own(case: Case, draft: &Tensor, target: &Tensor, k: usize) -> Tensor {
        match case {
            Case::Strict => strict(draft, target, &tensor(&LOG_P_K, 1), k),
            Case::WithEntropy => strict_with_entropy(draft, target, k),
            Case::Reverse => reverse_divergence(draft, target, k),
            Case::Relaxed => relaxed(draft, target, k),
        }
        .unwrap()
    }

    #[test]
    fn losses_and_their_gradients_are_those_of_the_definitions() {
        let (draft, target) = (logits(11), logits(17));
        for case in [Case::Strict, Case::WithEntropy, Case::Reverse, Case::Relaxed] {
            for k in [1, 3, V, 2 * V] {
                let (q, p) =
                    (Var::from_tensor(&tensor(&draft, V)).unwrap(), Var::from_tensor(&tensor(&target, V)).unwrap());
                let found = own(case, &q, &p, k);
                let expected = naive(case, &draft, &target, k);
                let difference = f64::from(found.to_scalar::<f32>().unwrap()) - expected;
                assert!(difference.abs() < 2e-5, "{case:?}, {k}: {expected} {difference}");
                let gradients = found.backward().unwrap();
                assert!(gradients.get(&p).is_none(), "the target learns");
                let gradient = gradients.get(&q).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                for at in 0..draft.len() {
                    let moved = |by: f32| {
                        let mut draft = draft.clone();
                        draft[at] += by;
                        naive(case, &draft, &target, k)
                    };
                    let slope = (moved(1e-3) - moved(-1e-3)) / 2e-3;
                    assert!((f64::from(gradient[at]) - slope).abs() < 1e-4, "{case:?}, {k}, {at}: {slope}");
                }
            }
        }
    }

    #[test]
    fn two_that_agree_are_at_the_least_of_the_symmetric_losses() {
        let same = tensor(&logits(11), V);
        for case in [Case::Relaxed, Case::Reverse] {
            assert!(own(case, &same, &same, 3).to_scalar::<f32>().unwrap().abs() < 1e-6, "{case:?}");
        }
        // The printed form has its least where the draft puts all on the target's best: it is no divergence.
        let sharper = (&same * 4.0).unwrap().clamp(FORBIDDEN, f32::MAX).unwrap();
        let [even, sharp] =
            [&same, &sharper].map(|draft| own(Case::Strict, draft, &same, 3).to_scalar::<f32>().unwrap());
        assert!(sharp < even, "{sharp} {even}");
    }

    #[test]
    fn the_combination_weighs_both() {
        let of = |x: f32| Tensor::new(x, &Device::Cpu).unwrap();
        let sum = combined(&of(3.0), &of(1.0), ALPHA).unwrap().to_scalar::<f32>().unwrap();
        assert_eq!(sum, 2.0);
        assert_eq!(combined(&of(3.0), &of(1.0), 0.25).unwrap().to_scalar::<f32>().unwrap(), 1.5);
    }
}
