//! The two softmaxes of a training: over the vocabulary, of which a few tokens are asked for, and of attention.
//!
//! On a CPU each row is read once forward and once backward, on all threads; candle's operations make some twenty
//! passes on one, which were most of a step. Elsewhere those are what runs.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, D, Device, Layout, Result, Shape, Tensor, bail};
use candle_nn::ops::softmax;
use rayon::prelude::*;

use crate::fused::{exp, numbers};

/// `[N, K]`: of each row of `[N, V]` logits the log probabilities of the tokens `[N, K]`.
pub(crate) fn log_probabilities(logits: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    match logits.device() {
        Device::Cpu => logits.contiguous()?.apply_op2(&tokens.contiguous()?, Gathered),
        _ => log_softmax(logits)?.gather(tokens, 1),
    }
}

/// `[N, V]`: the log probabilities of all tokens of each row of logits.
pub(crate) fn log_softmax(logits: &Tensor) -> Result<Tensor> {
    match logits.device() {
        Device::Cpu => logits.contiguous()?.apply_op1(All),
        _ => candle_nn::ops::log_softmax(logits, D::Minus1),
    }
}

/// The logarithm of the sum of the exponentials.
fn log_sum(row: &[f32]) -> f32 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // In eight sums, which the processor adds at once.
    let mut sums = [0.0; 8];
    for part in row.chunks(8) {
        sums.iter_mut().zip(part).for_each(|(sum, logit)| *sum += exp(logit - most));
    }
    most + sums.iter().sum::<f32>().ln()
}

/// The numbers of a contiguous tensor of tokens.
fn ids<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [u32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::U32(all), Some((start, end))) => Ok(&all[start..end]),
        _ => bail!("expected a contiguous tensor of tokens"),
    }
}

struct All;

impl CustomOp1 for All {
    fn name(&self) -> &'static str {
        "log-softmax"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (logits, vocabulary) = (numbers(logits, layout)?, layout.shape().dims2()?.1);
        let mut found = vec![0.0; logits.len()];
        let rows = found.par_chunks_exact_mut(vocabulary).zip(logits.par_chunks_exact(vocabulary));
        rows.for_each(|(found, logits)| {
            let log_sum = log_sum(logits);
            found.iter_mut().zip(logits).for_each(|(found, logit)| *found = logit - log_sum);
        });
        Ok((CpuStorage::F32(found), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, found: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        found.contiguous()?.apply_op2_no_bwd(&gradient.contiguous()?, &AllGradient).map(Some)
    }
}

/// g - q Σ g, row by row: the gradient by logits of what has the gradient g by their log probabilities ln q.
struct AllGradient;

impl CustomOp2 for AllGradient {
    fn name(&self) -> &'static str {
        "gradient-of-log-softmax"
    }

    fn cpu_fwd(
        &self,
        found: &CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        of_gradient: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (log_q, gradient) = (numbers(found, layout)?, numbers(gradient, of_gradient)?);
        let vocabulary = layout.shape().dims2()?.1;
        let mut found = vec![0.0; log_q.len()];
        let rows = found.par_chunks_exact_mut(vocabulary).zip(log_q.par_chunks_exact(vocabulary));
        rows.zip(gradient.par_chunks_exact(vocabulary)).for_each(|((found, log_q), gradient)| {
            let total: f32 = gradient.iter().sum();
            let pairs = log_q.iter().zip(gradient);
            found.iter_mut().zip(pairs).for_each(|(found, (log_q, gradient))| *found = gradient - total * exp(*log_q));
        });
        Ok((CpuStorage::F32(found), layout.shape().clone()))
    }
}

struct Gathered;

impl CustomOp2 for Gathered {
    fn name(&self) -> &'static str {
        "log-probabilities"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        of_logits: &Layout,
        tokens: &CpuStorage,
        of_tokens: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (logits, tokens) = (numbers(logits, of_logits)?, ids(tokens, of_tokens)?);
        let (vocabulary, count) = (of_logits.shape().dims2()?.1, of_tokens.shape().dims2()?.1);
        let mut found = vec![0.0; tokens.len()];
        let rows = found.par_chunks_exact_mut(count).zip(logits.par_chunks_exact(vocabulary));
        rows.zip(tokens.par_chunks_exact(count)).for_each(|((found, logits), tokens)| {
            let log_sum = log_sum(logits);
            found.iter_mut().zip(tokens).for_each(|(found, &token)| *found = logits[token as usize] - log_sum);
        });
        Ok((CpuStorage::F32(found), of_tokens.shape().clone()))
    }

    fn bwd(
        &self,
        logits: &Tensor,
        tokens: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = logits.apply_op3_no_bwd(tokens, &gradient.contiguous()?, &Gradient)?;
        Ok((Some(gradient), None))
    }
}

/// `[N, V]`: the gradient by the logits of what has the gradient `[N, K]` by the log probabilities.
struct Gradient;

impl CustomOp3 for Gradient {
    fn name(&self) -> &'static str {
        "gradient-of-log-probabilities"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        of_logits: &Layout,
        tokens: &CpuStorage,
        of_tokens: &Layout,
        gradient: &CpuStorage,
        of_gradient: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (logits, tokens) = (numbers(logits, of_logits)?, ids(tokens, of_tokens)?);
        let gradient = numbers(gradient, of_gradient)?;
        let (vocabulary, count) = (of_logits.shape().dims2()?.1, of_tokens.shape().dims2()?.1);
        let mut found = vec![0.0; logits.len()];
        let rows = found.par_chunks_exact_mut(vocabulary).zip(logits.par_chunks_exact(vocabulary));
        let places = tokens.par_chunks_exact(count).zip(gradient.par_chunks_exact(count));
        rows.zip(places).for_each(|((found, logits), (tokens, gradient))| {
            let (log_sum, total) = (log_sum(logits), gradient.iter().sum::<f32>());
            found.iter_mut().zip(logits).for_each(|(found, logit)| *found = -total * exp(logit - log_sum));
            tokens.iter().zip(gradient).for_each(|(&token, gradient)| found[token as usize] += gradient);
        });
        Ok((CpuStorage::F32(found), of_logits.shape().clone()))
    }
}

/// What scores of positions that must not be seen become.
const HIDDEN: f32 = -1e9;

/// `[B, H, T, T + later]`: the weights of attention scores of that shape. The query at a row sees of the first T
/// columns those up to `later` before its own. Each other column is of one pass, and its position is another one for
/// each row: that of the first is `later - 1` rows before, of the last its own. It is seen if there is such a position.
pub(crate) fn attention_weights(scores: &Tensor, later: usize) -> Result<Tensor> {
    match scores.device() {
        Device::Cpu => scores.contiguous()?.apply_op1(Attention { later }),
        device => {
            let (_, _, rows, columns) = scores.dims4()?;
            let attention = Attention { later };
            let seen = |row, column| if attention.sees(row, column, rows) { 0.0 } else { HIDDEN };
            let mask: Vec<f32> = (0..rows).flat_map(|row| (0..columns).map(move |column| seen(row, column))).collect();
            softmax(&scores.broadcast_add(&Tensor::from_vec(mask, (rows, columns), device)?)?, D::Minus1)
        }
    }
}

#[derive(Clone, Copy)]
struct Attention {
    later: usize,
}

impl Attention {
    fn sees(self, row: usize, column: usize, rows: usize) -> bool {
        if column < rows { column + self.later <= row } else { row + column + 1 >= rows + self.later }
    }
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "attention-weights"
    }

    fn cpu_fwd(&self, scores: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, _, rows, columns) = layout.shape().dims4()?;
        let scores = numbers(scores, layout)?;
        let mut weights = vec![0.0; scores.len()];
        let all = weights.par_chunks_exact_mut(columns).zip(scores.par_chunks_exact(columns)).enumerate();
        all.for_each(|(at, (weights, scores))| {
            let row = at % rows;
            let most = (0..columns).filter(|&c| self.sees(row, c, rows)).map(|c| scores[c]).fold(f32::MIN, f32::max);
            for column in (0..columns).filter(|&column| self.sees(row, column, rows)) {
                weights[column] = exp(scores[column] - most);
            }
            let sum: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= sum);
        });
        Ok((CpuStorage::F32(weights), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, weights: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        weights.contiguous()?.apply_op2_no_bwd(&gradient.contiguous()?, &AttentionGradient).map(Some)
    }
}

/// w · (g - Σ w g), row by row: the gradient by scores of what has the gradient g by their weights w.
struct AttentionGradient;

impl CustomOp2 for AttentionGradient {
    fn name(&self) -> &'static str {
        "gradient-of-attention-weights"
    }

    fn cpu_fwd(
        &self,
        weights: &CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        of_gradient: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (weights, gradient) = (numbers(weights, layout)?, numbers(gradient, of_gradient)?);
        let columns = layout.shape().dims4()?.3;
        let mut found = vec![0.0; weights.len()];
        let rows = found.par_chunks_exact_mut(columns).zip(weights.par_chunks_exact(columns));
        rows.zip(gradient.par_chunks_exact(columns)).for_each(|((found, weights), gradient)| {
            let mean: f32 = weights.iter().zip(gradient).map(|(weight, gradient)| weight * gradient).sum();
            let pairs = weights.iter().zip(gradient);
            found.iter_mut().zip(pairs).for_each(|(found, (weight, gradient))| *found = weight * (gradient - mean));
        });
        Ok((CpuStorage::F32(found), layout.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;

    #[test]
    fn values_and_gradients_are_those_of_candles_operations() {
        let (rows, vocabulary, count) = (7_u32, 50_u32, 3_u32);
        let logits: Vec<f32> = (0..rows * vocabulary).map(|at| (at * 37 % 101) as f32 / 13.0 - 4.0).collect();
        let tokens: Vec<u32> = (0..rows * count).map(|at| at * 11 % vocabulary).collect();
        let shape = |columns: u32| (rows as usize, columns as usize);
        let tokens = Tensor::from_vec(tokens, shape(count), &Device::Cpu).unwrap();
        let of = |by: fn(&Tensor, &Tensor) -> Result<Tensor>| {
            let var = Var::from_vec(logits.clone(), shape(vocabulary), &Device::Cpu).unwrap();
            let found = by(&var, &tokens).unwrap();
            // Another weight for each.
            let weights: Vec<f32> = (0..rows * count).map(|at| (at % 5) as f32 - 1.5).collect();
            let weights = Tensor::from_vec(weights, shape(count), &Device::Cpu).unwrap();
            let gradients = (&found * weights).unwrap().sum_all().unwrap().backward().unwrap();
            let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            [flat(&found), flat(gradients.get(&var).unwrap())].concat()
        };
        let own = of(log_probabilities);
        let all = of(|logits, tokens| log_softmax(logits)?.gather(tokens, 1));
        let theirs = of(|logits, tokens| candle_nn::ops::log_softmax(logits, D::Minus1)?.gather(tokens, 1));
        for ((own, all), theirs) in own.iter().zip(&all).zip(&theirs) {
            assert!((own - theirs).abs() < 1e-5 && (all - theirs).abs() < 1e-5, "{own} {all} {theirs}");
        }
    }
    #[test]
    fn weights_of_attention_are_those_of_a_masked_softmax() {
        let (rows, shape) = (5_usize, (2, 3, 5));
        for later in 0..4 {
            let columns = rows + later;
            let count = u16::try_from(2 * 3 * rows * columns).unwrap();
            let scores: Vec<f32> = (0..count).map(|at| f32::from(at * 29 % 83) / 20.0 - 2.0).collect();
            let weights: Vec<f32> = (0..count).map(|at| f32::from(at % 7) - 3.0).collect();
            let shape = (shape.0, shape.1, shape.2, columns);
            let tensor = |values: &Vec<f32>| Tensor::from_vec(values.clone(), shape, &Device::Cpu).unwrap();
            // The position of a column, as far as a query at a row may see it.
            let is_seen = |row: usize, column: usize| match column.checked_sub(rows) {
                None => column + later <= row,
                Some(pass) => row >= later - 1 - pass,
            };
            let mask = |at: usize| if is_seen(at / columns % rows, at % columns) { 0.0 } else { HIDDEN };
            let mask: Vec<f32> = (0..usize::from(count)).map(mask).collect();
            let of = |by: &dyn Fn(&Tensor) -> Result<Tensor>| {
                let var = Var::from_tensor(&tensor(&scores)).unwrap();
                let found = by(&var).unwrap();
                let gradients = (&found * tensor(&weights)).unwrap().sum_all().unwrap().backward().unwrap();
                let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                [flat(&found), flat(gradients.get(&var).unwrap())].concat()
            };
            let own = of(&|scores| attention_weights(scores, later));
            let theirs = of(&|scores| softmax(&(scores + tensor(&mask))?, D::Minus1));
            // Where a row sees nothing of the first pass and the later ones have not begun, there is its own position.
            for (at, (own, theirs)) in own.iter().zip(&theirs).enumerate() {
                assert!((own - theirs).abs() < 1e-5, "{later}, {at}: {own} {theirs}");
            }
        }
    }
}
