//! The operations of a layer between its products: the norm and the gate of the MLP.
//!
//! On a CPU each number is read once forward and once backward, on all threads; candle's operations make a dozen passes
//! on one, each into new memory, and were as long as the products. Elsewhere those are what runs.

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Tensor, bail};
use candle_nn::ops::rms_norm_slow;
use rayon::prelude::*;

/// Rows whose part of a sum over all rows is one thread's: fixed, so that sums do not depend on threads.
const ROWS: usize = 128;

/// Numbers of one thread at a time.
pub(crate) const PART: usize = 16_384;

/// x / √(mean x² + `eps`) · `scale` over the last dimension.
pub(crate) fn rms_norm(x: &Tensor, scale: &Tensor, eps: f32) -> Result<Tensor> {
    match x.device() {
        Device::Cpu => x.contiguous()?.apply_op2(scale, Norm { eps }),
        _ => rms_norm_slow(x, scale, eps),
    }
}

/// silu(`gate`) · `up`.
pub(crate) fn gated(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    match gate.device() {
        Device::Cpu => gate.contiguous()?.apply_op2(&up.contiguous()?, Gate),
        _ => gate.silu()? * up,
    }
}

/// The numbers of a contiguous tensor in f32.
pub(crate) fn numbers<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(all), Some((start, end))) => Ok(&all[start..end]),
        _ => bail!("expected a contiguous tensor in f32"),
    }
}

/// The same to be changed in place.
pub(crate) fn numbers_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(all), Some((start, end))) => Ok(&mut all[start..end]),
        _ => bail!("expected a contiguous tensor in f32"),
    }
}

#[derive(Clone, Copy)]
struct Norm {
    eps: f32,
}

impl Norm {
    /// 1 / √(mean x² + eps).
    fn inverse(self, x: &[f32]) -> f32 {
        1.0 / (sum_of_products(x, x) / x.len() as f32 + self.eps).sqrt()
    }
}

/// Σ a · b in eight sums, which the processor adds at once.
pub(crate) fn sum_of_products(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 8];
    let (a, b) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum::<f32>() + rest
}

impl CustomOp2 for Norm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        of_x: &Layout,
        scale: &CpuStorage,
        of_scale: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, scale) = (numbers(x, of_x)?, numbers(scale, of_scale)?);
        let mut found = vec![0.0; x.len()];
        let rows = found.par_chunks_exact_mut(scale.len()).zip(x.par_chunks_exact(scale.len()));
        rows.for_each(|(found, x)| {
            let inverse = self.inverse(x);
            found.iter_mut().zip(x.iter().zip(scale)).for_each(|(found, (x, scale))| *found = x * inverse * scale);
        });
        Ok((CpuStorage::F32(found), of_x.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        scale: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let of_scale = x.apply_op2_no_bwd(&gradient, &NormScaleGradient(*self))?;
        Ok((Some(x.apply_op3_no_bwd(scale, &gradient, &NormGradient(*self))?), Some(of_scale)))
    }
}

/// The gradient by x.
struct NormGradient(Norm);

impl CustomOp3 for NormGradient {
    fn name(&self) -> &'static str {
        "gradient-of-rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        of_x: &Layout,
        scale: &CpuStorage,
        of_scale: &Layout,
        gradient: &CpuStorage,
        of_gradient: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, scale, gradient) = (numbers(x, of_x)?, numbers(scale, of_scale)?, numbers(gradient, of_gradient)?);
        let width = scale.len();
        let mut found = vec![0.0; x.len()];
        let rows = found.par_chunks_exact_mut(width).zip(x.par_chunks_exact(width));
        rows.zip(gradient.par_chunks_exact(width)).for_each(|((found, x), gradient)| {
            found.iter_mut().zip(gradient.iter().zip(scale)).for_each(|(found, (g, scale))| *found = g * scale);
            let inverse = self.0.inverse(x);
            let along = sum_of_products(found, x) / width as f32 * inverse * inverse;
            found.iter_mut().zip(x).for_each(|(found, x)| *found = inverse * (*found - along * x));
        });
        Ok((CpuStorage::F32(found), of_x.shape().clone()))
    }
}

/// The gradient by the scale: a sum over all rows.
struct NormScaleGradient(Norm);

impl CustomOp2 for NormScaleGradient {
    fn name(&self) -> &'static str {
        "gradient-of-rms-norm-by-scale"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        of_x: &Layout,
        gradient: &CpuStorage,
        of_gradient: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let width = of_x.shape().dims().last().copied().unwrap_or(1);
        let (x, gradient) = (numbers(x, of_x)?, numbers(gradient, of_gradient)?);
        let parts = x.par_chunks(ROWS * width).zip(gradient.par_chunks(ROWS * width)).map(|(x, gradient)| {
            let mut sums = vec![0.0; width];
            for (x, gradient) in x.chunks_exact(width).zip(gradient.chunks_exact(width)) {
                let inverse = self.0.inverse(x);
                sums.iter_mut().zip(x.iter().zip(gradient)).for_each(|(sum, (x, g))| *sum += x * g * inverse);
            }
            sums
        });
        let mut found = vec![0.0; width];
        for part in parts.collect::<Vec<_>>() {
            found.iter_mut().zip(part).for_each(|(found, part)| *found += part);
        }
        Ok((CpuStorage::F32(found), Shape::from(width)))
    }
}

/// silu(x) · up, where x is the gate.
struct Gate;

impl CustomOp2 for Gate {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        of_gate: &Layout,
        up: &CpuStorage,
        of_up: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (gate, up) = (numbers(gate, of_gate)?, numbers(up, of_up)?);
        let mut found = vec![0.0; gate.len()];
        let parts = found.par_chunks_mut(PART).zip(gate.par_chunks(PART));
        parts.zip(up.par_chunks(PART)).for_each(|((found, gate), up)| {
            found.iter_mut().zip(gate.iter().zip(up)).for_each(|(found, (x, up))| *found = x * sigmoid(*x) * up);
        });
        Ok((CpuStorage::F32(found), of_gate.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let both = gate.apply_op3_no_bwd(up, &gradient.contiguous()?, &GateGradient)?;
        Ok((Some(both.get(0)?), Some(both.get(1)?)))
    }
}

/// The gradients by gate and up, one after the other.
struct GateGradient;

impl CustomOp3 for GateGradient {
    fn name(&self) -> &'static str {
        "gradient-of-gate"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        of_gate: &Layout,
        up: &CpuStorage,
        of_up: &Layout,
        gradient: &CpuStorage,
        of_gradient: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (gate, up, gradient) = (numbers(gate, of_gate)?, numbers(up, of_up)?, numbers(gradient, of_gradient)?);
        let mut found = vec![0.0; 2 * gate.len()];
        let (by_gate, by_up) = found.split_at_mut(gate.len());
        let parts = by_gate.par_chunks_mut(PART).zip(by_up.par_chunks_mut(PART)).zip(gate.par_chunks(PART));
        parts.zip(up.par_chunks(PART).zip(gradient.par_chunks(PART))).for_each(
            |(((by_gate, by_up), gate), (up, gradient))| {
                let pairs = by_gate.iter_mut().zip(by_up).zip(gate);
                for (((by_gate, by_up), x), (up, gradient)) in pairs.zip(up.iter().zip(gradient)) {
                    let open = sigmoid(*x);
                    *by_gate = gradient * up * open * (1.0 + x * (1.0 - open));
                    *by_up = gradient * x * open;
                }
            },
        );
        let shape = [&[2], of_gate.shape().dims()].concat();
        Ok((CpuStorage::F32(found), Shape::from(shape)))
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// eˣ to the last two digits, without a branch or a call: eight at once where the library's is one at a time.
pub(crate) fn exp(x: f32) -> f32 {
    // Added and taken away again, it leaves the integer, which stands in the lowest bits meanwhile.
    const ROUNDS: f32 = 12_582_912.0;
    // ln 2 in two parts, of which the first has few digits.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUNDS;
    let whole = shifted - ROUNDS;
    let rest = x - whole * LN_2[0] - whole * LN_2[1];
    // Taylor's series as Cephes fits it to ± ln 2 / 2.
    let series = [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5];
    let tail = series.into_iter().fold(0.0, |sum, factor| sum * rest + factor);
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUNDS.to_bits()).wrapping_add(127) << 23);
    (tail * rest * rest + rest + 1.0) * power
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;

    fn values(count: u16, step: u16) -> Vec<f32> {
        (0..count).map(|at| f32::from(at * step % 101) / 17.0 - 3.0).collect()
    }

    /// What an operation of two tensors finds, and its gradients by both where each number counts another weight.
    fn both(shapes: [&[usize]; 2], operation: impl Fn(&Tensor, &Tensor) -> Result<Tensor>) -> Vec<f32> {
        let [a, b] = [(0, 37), (1, 23)].map(|(at, step)| {
            let shape: &[usize] = shapes[at];
            let count = u16::try_from(shape.iter().product::<usize>()).unwrap();
            Var::from_vec(values(count, step), shape, &Device::Cpu).unwrap()
        });
        let found = operation(&a, &b).unwrap();
        let weights = values(u16::try_from(found.elem_count()).unwrap(), 41);
        let weights = Tensor::from_vec(weights, found.shape(), &Device::Cpu).unwrap();
        let gradients = (&found * weights).unwrap().sum_all().unwrap().backward().unwrap();
        let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        [flat(&found), flat(gradients.get(&a).unwrap()), flat(gradients.get(&b).unwrap())].concat()
    }

    fn assert_close(own: &[f32], theirs: &[f32]) {
        assert_eq!(own.len(), theirs.len());
        for (own, theirs) in own.iter().zip(theirs) {
            assert!((own - theirs).abs() < 1e-5 * (1.0 + theirs.abs()), "{own} {theirs}");
        }
    }

    #[test]
    fn values_and_gradients_are_those_of_candles_operations() {
        for rows in [1, 3, ROWS, 2 * ROWS + 5] {
            let shapes: [&[usize]; 2] = [&[rows, 1, 20], &[20]];
            assert_close(
                &both(shapes, |x, scale| rms_norm(x, scale, 1e-5)),
                &both(shapes, |x, scale| rms_norm_slow(x, scale, 1e-5)),
            );
        }
        let shapes: [&[usize]; 2] = [&[7, 2, 30], &[7, 2, 30]];
        assert_close(&both(shapes, gated), &both(shapes, |gate, up| gate.silu()? * up));
    }

    #[test]
    fn exponentials_are_those_of_the_library() {
        for at in -8700..8800_i16 {
            let x = f32::from(at) / 100.0;
            assert!((exp(x) / x.exp() - 1.0).abs() < 3e-7, "{x}: {} {}", exp(x), x.exp());
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(0.0) == 1.0);
    }
}
