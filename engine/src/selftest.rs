//! The self-test: the device against the CPU, and the CPU against a known answer.
//!
//! A device can return garbage without an error: kernels compiled for another GPU, a driver that does not fit, damaged
//! memory. Its texts would only look like those of a bad model. So before a model is loaded, a small one of the same
//! traits (head width, grouped heads, biases, norms of heads, positions) gets seeded random weights twice: as
//! configured, and in f32 on the CPU. Both go through one schedule of opens, forks, closes and steps with chunks, trees
//! and commits, as nights of texts do, and a tree that grows from step to step, as the beams of a list do. The scores
//! of every node must agree, and so must what is asked of some tokens and among some tokens alone. Takes a tenth of a
//! second on a CPU.

use std::{collections::BTreeSet, fmt::Display};

use candle_core::{DType, Device, Tensor};
use laser_cpu::{Format, ModelShape, RopeScaling, is_allowed};
use laser_decode::{Candidate, Draw, Noise, Prediction, ROOT_PARENT, Sampling, TargetScores, arrival, chain_parents};
use laser_schema::{DeviceOption, sample::priority};
use mistralrs_quant::IsqType;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{RngCore, SeedableRng},
};

use crate::{
    architecture::Architecture,
    config::ModelConfig,
    dense::DenseTensors,
    engine::Engine,
    error::EngineError,
    options::{DTypeOption, EngineOptions, name_of},
    segment::Segment,
    tree::{build, format, gguf_types, model_config},
};

mod walk;
use walk::compare;

/// Candidates compared per node. Of the oracle all are known, by which draws are judged.
const TOP_K: [usize; 2] = [8, VOCABULARY];

/// Width of the residual stream. K-quants want multiples of 256 inputs.
const HIDDEN: usize = 256;
const VOCABULARY: usize = 512;
const POSITIONS: usize = 512;

/// What a self-test found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SelfTest {
    /// The device that was tested.
    pub device: DeviceOption,
    /// Nodes whose scores were compared.
    pub nodes: usize,
    /// Nodes whose most probable token differs: near-ties, which "strict" can decide either way there.
    pub near_ties: usize,
    /// Largest difference of a log probability.
    pub largest: f32,
    /// The largest difference that the precision explains.
    pub tolerance: f32,
}

/// Tests the device that `options` name in their precision, on a model of the traits of theirs.
///
/// # Errors
/// [`EngineError::SelfTest`] if the device's results are wrong; otherwise those of loading a model.
pub fn selftest(options: &EngineOptions) -> Result<SelfTest, EngineError> {
    let config = model_config(options)?;
    // The bound on keys and values is for the model's own.
    let options = EngineOptions { cache_mb: None, ..options.clone() };
    let on_cpu = EngineOptions { device: DeviceOption::Cpu, dtype: DTypeOption::F32, ..options.clone() };
    known_answer(&EngineOptions { isq: None, ..on_cpu })?;
    let mut found = SelfTest::begin(&options);
    for isq in quantisations(&options)? {
        let options = EngineOptions { isq, ..options.clone() };
        let (mut device, mut oracle) = (small_model(&options, &config)?, small_oracle(&options, &config)?);
        found.tolerance = tolerance(&options);
        found = compare(device.as_mut(), oracle.as_mut(), found)?;
    }
    Ok(found)
}

/// What to quantise the small model to: what the options name. A GGUF file has no option, and on a GPU a kernel for
/// each type of its blocks.
fn quantisations(options: &EngineOptions) -> Result<Vec<Option<String>>, EngineError> {
    if options.path.is_dir() || options.device == DeviceOption::Cpu {
        return Ok(vec![options.isq.clone()]);
    }
    let names: BTreeSet<_> = gguf_types(&options.path)?.into_iter().map(name_of).collect();
    Ok(names.into_iter().map(|name| name.map(Into::into)).collect())
}

/// The largest difference of log probabilities that rounding explains: far more than two implementations on CPUs show
/// (5e-6 in f32, 0.008 in f16, 0.023 in bf16, 0.07 in q8_0, 0.12 in q6k), since sums run in another order elsewhere,
/// and less than what a fault makes of this model.
fn tolerance(options: &EngineOptions) -> f32 {
    match (&options.isq, options.dtype) {
        (Some(_), _) => 0.5,
        (None, DTypeOption::F32) => 2e-3,
        (None, DTypeOption::F16) => 0.05,
        (None, DTypeOption::Bf16) => 0.25,
    }
}

/// The CPU in f32 against what another implementation computed (the layers on tensors, by a test).
fn known_answer(options: &EngineOptions) -> Result<(), EngineError> {
    let mut engine = small_model(options, &known_config())?;
    let (tokens, parents) = (Random::new("known").tokens(KNOWN.len()), chain_parents(KNOWN.len()).collect::<Vec<_>>());
    let slot = engine.open(tokens.len())?;
    let scores = engine
        .step(&[Segment { slot, tokens: &tokens, parents: &parents, scored_from: 0, ..Segment::default() }], 1)?;
    let mut found = SelfTest::begin(options);
    for (node, (token, log_probability)) in KNOWN.into_iter().enumerate() {
        let known = Candidate { token, log_probability };
        found.add(scores[0].top(node), &[known], || format!("known answer, node {node}"))?;
    }
    Ok(())
}

/// Most probable token and its log probability after each node of the known chain.
const KNOWN: [(u32, f32); 6] =
    [(254, -3.6044), (306, -3.8858), (485, -4.0144), (355, -3.7656), (370, -3.4260), (497, -3.9255)];

fn known_config() -> ModelConfig {
    let shape = ModelShape {
        vocab_size: VOCABULARY,
        hidden_size: HIDDEN,
        intermediate_size: 2 * HIDDEN,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        tied_embeddings: false,
        qkv_bias: true,
        output_bias: false,
        mlp_bias: false,
        head_norms: false,
        fused: None,
        medusa: None,
    };
    let architecture = Architecture::Qwen2;
    ModelConfig { architecture, architecture_name: "self-test".into(), max_positions: POSITIONS, shape }
}

/// A model of the traits of `config`, made small, on the device and in the precision of `options`.
fn small_model(options: &EngineOptions, config: &ModelConfig) -> Result<Box<dyn Engine>, EngineError> {
    let isq = options.isq_type(&options.device()?)?;
    small_model_on(options, config, format(options.dtype, isq, &small_shape(&config.shape)))
}

/// The same in f32 on the CPU, by the other of the two implementations: on tensors if the device runs our own kernels.
fn small_oracle(options: &EngineOptions, config: &ModelConfig) -> Result<Box<dyn Engine>, EngineError> {
    let device = options.device()?;
    let isq = options.isq_type(&device)?;
    let shape = small_shape(&config.shape);
    let on_kernels = device.is_cpu() && format(options.dtype, isq, &shape).is_some();
    let on_cpu = EngineOptions { device: DeviceOption::Cpu, dtype: DTypeOption::F32, ..options.clone() };
    small_model_on(&on_cpu, config, format(DTypeOption::F32, isq, &shape).filter(|_| !on_kernels))
}

fn small_model_on(
    options: &EngineOptions,
    config: &ModelConfig,
    kernels: Option<Format>,
) -> Result<Box<dyn Engine>, EngineError> {
    let shape = small_shape(&config.shape);
    let device = options.device()?;
    let isq = options.isq_type(&device)?;
    let mut weights = RandomWeights { dtype: options.dtype.dtype(), isq, device: device.clone() };
    let config = ModelConfig { shape, max_positions: POSITIONS, ..config.clone() };
    build(options, (config, options.dtype.to_string()), (&mut weights, None), kernels, &device)
}

fn small_shape(shape: &ModelShape) -> ModelShape {
    let group = shape.heads / shape.kv_heads;
    // Inputs of the output projection are a multiple of 256, as K-quants want them.
    let kv_heads =
        (1..=256).find(|heads| (heads * group * shape.head_dim).is_multiple_of(256)).unwrap_or(shape.kv_heads);
    ModelShape {
        vocab_size: VOCABULARY,
        hidden_size: HIDDEN,
        intermediate_size: 2 * HIDDEN,
        layers: 2,
        heads: kv_heads * group,
        kv_heads,
        ..shape.clone()
    }
}

/// Weights that are a function of their name and place, and exact in bf16.
struct RandomWeights {
    dtype: DType,
    isq: Option<IsqType>,
    device: Device,
}

impl DenseTensors for RandomWeights {
    /// Uniform numbers; those of a matrix as large as keeps activations and logits near 1.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, EngineError> {
        let (scale, shift) = match shape {
            [_] if name.ends_with("bias") => (0.5, 0.0),
            [_] => (0.2, 1.0),
            [.., inputs] => (1.7 / (*inputs as f32).sqrt(), 0.0),
            [] => (1.0, 0.0),
        };
        let mut random = Random::new(name);
        let mut value = || {
            let uniform = random.below(1 << 16) as f32 / f32::from(1_u16 << 15) - 1.0;
            f32::from_bits((shift + scale * uniform).to_bits() & 0xffff_0000)
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| value()).collect();
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(self.dtype)?)
    }

    fn place(&self) -> (Option<IsqType>, &Device) {
        (self.isq, &self.device)
    }

    fn count(&self) -> u64 {
        0
    }
}

/// Random numbers by name: the same everywhere.
struct Random(Xoshiro256PlusPlus);

impl Random {
    fn new(name: &str) -> Self {
        let seed = priority(0, &[name.as_bytes()]) & u128::from(u64::MAX);
        Self(Xoshiro256PlusPlus::seed_from_u64(u64::try_from(seed).unwrap_or(0)))
    }

    fn below(&mut self, end: usize) -> usize {
        let drawn = self.0.next_u64() % end.max(1) as u64;
        usize::try_from(drawn).unwrap_or(0)
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| u32::try_from(self.below(VOCABULARY)).unwrap_or(0)).collect()
    }

    /// None, one from all tokens, or one from few of them.
    fn draw(&mut self) -> Option<Draw> {
        let of = |temperature, top_k, top_p| Sampling::new(temperature, top_k, top_p).ok();
        let sampling = [None, of(0.7, None, 1.0), of(1.3, Some(10), 0.6)][self.below(3)]?;
        Some(Draw { sampling, noise: Noise::new(self.0.next_u64()) })
    }

    /// Numbers of about the size of features.
    fn feature(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.below(1 << 8) as f32 / 128.0 - 1.0).collect()
    }

    /// A tree whose nodes continue any earlier node or the context.
    fn tree(&mut self, nodes: usize) -> (Vec<u32>, Vec<u32>) {
        let parents = (0..nodes).map(|node| self.parent(node)).collect();
        (self.tokens(nodes), parents)
    }

    /// Any node before this one, or the context.
    fn parent(&mut self, node: usize) -> u32 {
        match self.below(node + 1) {
            0 => ROOT_PARENT,
            earlier => u32::try_from(earlier - 1).unwrap_or(ROOT_PARENT),
        }
    }

    /// Tokens to ask for, up to `most` at each of so many nodes, and where those of each node end.
    fn asked(&mut self, nodes: usize, most: usize) -> (Vec<u32>, Vec<usize>) {
        let ends: Vec<usize> = (0..nodes)
            .scan(0, |end, _| {
                *end += self.below(most + 1);
                Some(*end)
            })
            .collect();
        (self.tokens(ends.last().copied().unwrap_or(0)), ends)
    }

    /// A mask of about one token in so many, and of one at least.
    fn mask(&mut self, one_in: usize) -> Vec<u32> {
        let bits = |_| (0..32).filter(|_| self.below(one_in) == 0).fold(0, |word, bit| word | 1 << bit);
        let mut mask: Vec<u32> = (0..VOCABULARY / 32).map(bits).collect();
        mask[self.below(VOCABULARY / 32)] |= 1 << self.below(32);
        mask
    }
}

impl SelfTest {
    /// Nothing is compared yet.
    fn begin(options: &EngineOptions) -> Self {
        Self { device: options.device, nodes: 0, near_ties: 0, largest: 0.0, tolerance: tolerance(options) }
    }

    fn failed(&self, message: String) -> EngineError {
        EngineError::SelfTest { device: self.device, message }
    }

    /// Compares what both say about one node. A token that only the oracle lists is at most as probable for the device
    /// as its last.
    fn add(
        &mut self,
        got: &[Candidate],
        expected: &[Candidate],
        place: impl Fn() -> String,
    ) -> Result<(), EngineError> {
        let least = got.last().map_or(f32::NEG_INFINITY, |candidate| candidate.log_probability);
        for &Candidate { token, log_probability } in expected {
            let found = got.iter().find(|candidate| candidate.token == token);
            let difference = match found {
                Some(found) => (found.log_probability - log_probability).abs(),
                None => (log_probability - least).max(0.0),
            };
            if difference.is_nan() || difference > self.tolerance {
                let found = found.map_or(least, |found| found.log_probability);
                let numbers = format!("log probability {found:.3}, on the CPU {log_probability:.3}");
                return Err(self.failed(format!("{}: token {token} has {numbers}", place())));
            }
            self.largest = self.largest.max(difference);
        }
        self.nodes += 1;
        let best = |of: &[Candidate]| of.first().map(|candidate| candidate.token);
        self.near_ties += usize::from(best(got) != best(expected));
        Ok(())
    }

    /// Compares the choice at one node with all `candidates` of the oracle: nothing that surely may be drawn arrives
    /// before it, and it may be drawn itself. Rounding changes a weight by e to the `tolerance` times the sharpness.
    fn add_choice(
        &self,
        choice: u32,
        candidates: &[Candidate],
        (expected, draw): (Prediction, Option<Draw>),
        place: impl Fn() -> String,
    ) -> Result<(), EngineError> {
        let slack = (2.0 * self.tolerance * expected.sharpness).exp();
        let weight = |candidate: &Candidate| expected.probability(*candidate);
        let chosen = candidates.iter().find(|candidate| candidate.token == choice).map_or(0.0, weight);
        let most = candidates.first().map_or(0.0, weight);
        let is_right = match draw {
            None => chosen * slack >= most,
            Some(Draw { sampling, noise }) => {
                let least = least_weight(candidates, &sampling, weight);
                let time = |candidate: &Candidate| arrival(noise.word(candidate.token), weight(candidate));
                let surely = candidates.iter().filter(|candidate| weight(candidate) >= least * slack);
                let first = surely.map(time).fold(f64::INFINITY, f64::min);
                let chosen_at = arrival(noise.word(choice), chosen);
                chosen * slack >= least && chosen_at <= first * f64::from(slack)
            }
        };
        match is_right {
            true => Ok(()),
            false => Err(self.failed(format!("{}: draws token {choice}", place()))),
        }
    }

    /// Compares the log probabilities of the tokens that were asked for at one node.
    fn add_asked(&mut self, got: &[f32], expected: &[f32], place: impl Fn() -> String) -> Result<(), EngineError> {
        for (at, &expected) in expected.iter().enumerate() {
            let got = got.get(at).copied().unwrap_or(f32::NAN);
            let name = format_args!("log probability {at} that was asked for");
            self.largest = self.largest.max(self.difference([got, expected], name, &place)?);
        }
        Ok(())
    }

    /// Checks that a mask has every one of these tokens.
    fn add_allowed(
        &self,
        mut found: impl Iterator<Item = u32>,
        mask: &[u32],
        place: impl Fn() -> String,
    ) -> Result<(), EngineError> {
        match found.find(|&token| !is_allowed(mask, token)) {
            Some(token) => Err(self.failed(format!("{}: token {token} may not follow", place()))),
            None => Ok(()),
        }
    }

    /// Compares what both say about one node beside its candidates.
    fn add_prediction(
        &self,
        got: Prediction,
        expected: Prediction,
        place: impl Fn() -> String,
    ) -> Result<(), EngineError> {
        let numbers = |of: Prediction| [of.entropy, of.sharpness, of.log_normaliser];
        let names = ["entropy", "sharpness", "normaliser"];
        for ((got, expected), name) in numbers(got).into_iter().zip(numbers(expected)).zip(names) {
            self.difference([got, expected], name, &place)?;
        }
        Ok(())
    }

    /// How far a number of this name is from the oracle's, if the precision explains it.
    fn difference(
        &self,
        [got, expected]: [f32; 2],
        name: impl Display,
        place: impl Fn() -> String,
    ) -> Result<f32, EngineError> {
        let difference = (got - expected).abs();
        match difference <= self.tolerance {
            true => Ok(difference),
            // Also what is not a number.
            false => Err(self.failed(format!("{}: the {name} is {got:.3}, on the CPU {expected:.3}", place()))),
        }
    }
}

/// The weight of the last candidate that may be drawn.
fn least_weight(candidates: &[Candidate], sampling: &Sampling, weight: impl Fn(&Candidate) -> f32) -> f32 {
    let kept = &candidates[..candidates.len().min(sampling.top_k().map_or(usize::MAX, |top_k| top_k as usize))];
    let mut left = kept.iter().map(&weight).sum::<f32>() * sampling.top_p();
    let last = kept.iter().find(|candidate| {
        left -= weight(candidate);
        left <= 0.0
    });
    last.or(kept.last()).map_or(0.0, weight)
}

#[cfg(test)]
mod tests;
