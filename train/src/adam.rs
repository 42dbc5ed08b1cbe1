//! AdamW (Loshchilov and Hutter, arXiv:1711.05101) that can be stopped and taken up again: candle's keeps its moments
//! to itself.

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, Device, InplaceOp2, InplaceOp3, Layout, Result, Tensor, Var};
use rayon::prelude::*;

use crate::fused::{PART, numbers, numbers_mut};

const BETA_1: f64 = 0.9;
const BETA_2: f64 = 0.95;
const EPSILON: f64 = 1e-8;

/// The largest norm of a step's gradients, all weights together; longer ones are scaled down to it.
const NORM_MAX: f64 = 1.0;

/// The optimiser's state.
#[derive(Debug)]
pub(crate) struct Adam {
    /// The means of the gradients and of their squares, of each weight.
    pub(crate) moments: Vec<[Tensor; 2]>,
    /// Steps so far.
    pub(crate) steps: i32,
    weight_decay: f64,
}

impl Adam {
    /// No step so far.
    pub(crate) fn new(weights: &[&Var], weight_decay: f64) -> Result<Self> {
        let moments = weights.iter().map(|weight| Ok([weight.zeros_like()?, weight.zeros_like()?]));
        Ok(Self { moments: moments.collect::<Result<_>>()?, steps: 0, weight_decay })
    }

    /// Moves the weights against their gradients; only matrices decay.
    pub(crate) fn step(&mut self, weights: &[&Var], gradients: &GradStore, learning_rate: f64) -> Result<()> {
        self.steps += 1;
        // That of a matrix that was transposed is transposed itself.
        let of = |weight: &&Var| gradients.get(weight).map(Tensor::contiguous).transpose();
        let gradients: Vec<Option<Tensor>> = weights.iter().map(of).collect::<Result<_>>()?;
        let scale = clip(&gradients)?;
        let [first, second] = [BETA_1, BETA_2].map(|beta| 1.0 / (1.0 - beta.powi(self.steps)));
        for ((weight, moments), gradient) in weights.iter().zip(&mut self.moments).zip(gradients) {
            let Some(gradient) = gradient else {
                continue;
            };
            let decay = if weight.rank() > 1 { self.weight_decay } else { 0.0 };
            let change = Change { scale, first, second, learning_rate, kept: 1.0 - learning_rate * decay };
            match weight.device() {
                Device::Cpu => change.in_place(weight, moments, &gradient)?,
                _ => change.by_tensors(weight, moments, &gradient)?,
            }
        }
        Ok(())
    }
}

/// The factors of one step for one weight.
struct Change {
    /// Of the gradient.
    scale: f64,
    /// Of the moments, which begin at 0.
    first: f64,
    second: f64,
    learning_rate: f64,
    /// Of the weight.
    kept: f64,
}

impl Change {
    fn by_tensors(&self, weight: &Var, [m, v]: &mut [Tensor; 2], gradient: &Tensor) -> Result<()> {
        let gradient = (gradient * self.scale)?;
        *m = ((&*m * BETA_1)? + (&gradient * (1.0 - BETA_1))?)?.detach();
        *v = ((&*v * BETA_2)? + (gradient.sqr()? * (1.0 - BETA_2))?)?.detach();
        let change = ((&*m * self.first)? / ((&*v * self.second)?.sqrt()? + EPSILON)?)?;
        weight.set(&((weight.as_tensor() * self.kept)? - (change * self.learning_rate)?)?.detach())
    }

    /// The same without new memory: there are more weights than anything else.
    fn in_place(&self, weight: &Var, [m, v]: &[Tensor; 2], gradient: &Tensor) -> Result<()> {
        #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
        let number = |factor: f64| factor as f32;
        let scale = number(self.scale);
        for (moment, beta, is_square) in [(m, BETA_1, false), (v, BETA_2, true)] {
            moment.inplace_op2(gradient, &Moment { scale, beta: number(beta), is_square })?;
        }
        let [first, second, rate, kept, epsilon] =
            [self.first, self.second, self.learning_rate, self.kept, EPSILON].map(number);
        weight.inplace_op3(m, v, &Move { first, second, rate, kept, epsilon })
    }
}

struct Moment {
    scale: f32,
    beta: f32,
    is_square: bool,
}

impl InplaceOp2 for Moment {
    fn name(&self) -> &'static str {
        "moment"
    }

    fn cpu_fwd(
        &self,
        moment: &mut CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        of_gradient: &Layout,
    ) -> Result<()> {
        let (moment, gradient) = (numbers_mut(moment, layout)?, numbers(gradient, of_gradient)?);
        let &Self { scale, beta, is_square } = self;
        moment.par_chunks_mut(PART).zip(gradient.par_chunks(PART)).for_each(|(moment, gradient)| {
            for (moment, gradient) in moment.iter_mut().zip(gradient) {
                let gradient = gradient * scale;
                let new = if is_square { gradient * gradient } else { gradient };
                *moment = *moment * beta + new * (1.0 - beta);
            }
        });
        Ok(())
    }
}

struct Move {
    first: f32,
    second: f32,
    rate: f32,
    kept: f32,
    epsilon: f32,
}

impl InplaceOp3 for Move {
    fn name(&self) -> &'static str {
        "move"
    }

    fn cpu_fwd(
        &self,
        weight: &mut CpuStorage,
        layout: &Layout,
        m: &CpuStorage,
        of_m: &Layout,
        v: &CpuStorage,
        of_v: &Layout,
    ) -> Result<()> {
        let (weight, m, v) = (numbers_mut(weight, layout)?, numbers(m, of_m)?, numbers(v, of_v)?);
        let parts = weight.par_chunks_mut(PART).zip(m.par_chunks(PART)).zip(v.par_chunks(PART));
        parts.for_each(|((weight, m), v)| {
            for ((weight, m), v) in weight.iter_mut().zip(m).zip(v) {
                let change = m * self.first / ((v * self.second).sqrt() + self.epsilon);
                *weight = *weight * self.kept - change * self.rate;
            }
        });
        Ok(())
    }
}

/// What gradients are multiplied with so that their norm keeps the bound.
fn clip(gradients: &[Option<Tensor>]) -> Result<f64> {
    let mut squares = 0.0;
    for gradient in gradients.iter().flatten() {
        squares += f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?);
    }
    Ok((NORM_MAX / squares.sqrt().max(NORM_MAX)).min(1.0))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_nn::{AdamW, Optimizer as _, ParamsAdamW};

    use super::*;

    #[test]
    fn steps_are_those_of_candles_where_nothing_is_clipped() {
        let start = [0.3f32, -0.2, 0.05, 0.4];
        let var = || Var::from_vec(start.to_vec(), (2, 2), &Device::Cpu).unwrap();
        let (own, theirs, by_tensors) = (var(), var(), var());
        let mut adam = Adam::new(&[&own], 0.1).unwrap();
        let mut moments = [by_tensors.zeros_like().unwrap(), by_tensors.zeros_like().unwrap()];
        let parameters = ParamsAdamW { lr: 0.01, beta1: BETA_1, beta2: BETA_2, eps: EPSILON, weight_decay: 0.1 };
        let mut candle = AdamW::new(vec![theirs.clone()], parameters).unwrap();
        for step in 1..=20 {
            let loss = |var: &Var| (var.sqr().unwrap().sum_all().unwrap() * 0.4).unwrap();
            adam.step(&[&own], &loss(&own).backward().unwrap(), 0.01).unwrap();
            candle.backward_step(&loss(&theirs)).unwrap();
            let [first, second] = [BETA_1, BETA_2].map(|beta| 1.0 / (1.0 - beta.powi(step)));
            let change = Change { scale: 1.0, first, second, learning_rate: 0.01, kept: 1.0 - 0.01 * 0.1 };
            let gradients = loss(&by_tensors).backward().unwrap();
            change.by_tensors(&by_tensors, &mut moments, gradients.get(&by_tensors).unwrap()).unwrap();
        }
        let values = |var: &Var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for ((own, theirs), other) in values(&own).iter().zip(values(&theirs)).zip(values(&by_tensors)) {
            assert!((own - theirs).abs() < 1e-6 && (own - other).abs() < 1e-6, "{own} {theirs} {other}");
        }
    }

    #[test]
    fn long_gradients_are_scaled_down() {
        let var = Var::from_vec(vec![3f32, 4.0], 2, &Device::Cpu).unwrap();
        for (times, expected) in [(10.0, 0.01), (0.01, 1.0)] {
            let gradients = (var.sqr().unwrap().sum_all().unwrap() * times).unwrap().backward().unwrap();
            let gradients = [gradients.get(&var).cloned(), None];
            assert!((clip(&gradients).unwrap() - expected).abs() < 1e-7);
        }
    }
}
