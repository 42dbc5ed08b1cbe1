//! AdamW (Loshchilov and Hutter, arXiv:1711.05101) that can be stopped and taken up again: candle's keeps its moments
//! to itself.

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, Var};

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
        let scale = clip(weights, gradients)?;
        let [first, second] = [BETA_1, BETA_2].map(|beta| 1.0 / (1.0 - beta.powi(self.steps)));
        for (weight, [m, v]) in weights.iter().zip(&mut self.moments) {
            let Some(gradient) = gradients.get(weight) else {
                continue;
            };
            let gradient = (gradient * scale)?;
            *m = ((&*m * BETA_1)? + (&gradient * (1.0 - BETA_1))?)?.detach();
            *v = ((&*v * BETA_2)? + (gradient.sqr()? * (1.0 - BETA_2))?)?.detach();
            let change = ((&*m * first)? / ((&*v * second)?.sqrt()? + EPSILON)?)?;
            let decay = if weight.rank() > 1 { self.weight_decay } else { 0.0 };
            let kept = (weight.as_tensor() * (1.0 - learning_rate * decay))?;
            weight.set(&(kept - (change * learning_rate)?)?.detach())?;
        }
        Ok(())
    }
}

/// What gradients are multiplied with so that their norm keeps the bound.
fn clip(weights: &[&Var], gradients: &GradStore) -> Result<f64> {
    let mut squares = 0.0;
    for gradient in weights.iter().filter_map(|weight| gradients.get(weight)) {
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
        let (own, theirs) = (var(), var());
        let mut adam = Adam::new(&[&own], 0.1).unwrap();
        let parameters = ParamsAdamW { lr: 0.01, beta1: BETA_1, beta2: BETA_2, eps: EPSILON, weight_decay: 0.1 };
        let mut candle = AdamW::new(vec![theirs.clone()], parameters).unwrap();
        for _ in 0..20 {
            let loss = |var: &Var| (var.sqr().unwrap().sum_all().unwrap() * 0.4).unwrap();
            adam.step(&[&own], &loss(&own).backward().unwrap(), 0.01).unwrap();
            candle.backward_step(&loss(&theirs)).unwrap();
        }
        let values = |var: &Var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (own, theirs) in values(&own).iter().zip(values(&theirs)) {
            assert!((own - theirs).abs() < 1e-6, "{own} {theirs}");
        }
    }

    #[test]
    fn long_gradients_are_scaled_down() {
        let var = Var::from_vec(vec![3f32, 4.0], 2, &Device::Cpu).unwrap();
        let gradients = (var.sqr().unwrap().sum_all().unwrap() * 10.0).unwrap().backward().unwrap();
        assert!((clip(&[&var], &gradients).unwrap() - 0.01).abs() < 1e-7);
        let gradients = (var.sqr().unwrap().sum_all().unwrap() * 0.01).unwrap().backward().unwrap();
        assert!((clip(&[&var], &gradients).unwrap() - 1.0).abs() < 1e-7);
    }
}
