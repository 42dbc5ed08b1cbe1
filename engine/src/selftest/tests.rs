//! The self-test passes what is right and finds what is wrong.

use std::path::PathBuf;

use laser_cpu::{Allowed, Predictions};

use super::*;
use crate::{
    engine::EngineInfo,
    scores::Scores,
    segment::{MaskedNode, Slot},
};

/// A fault of a device.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Wrong scores where a step has more rows than one tile, as of a kernel that did not run.
    WideSteps,
    /// Not a number, once.
    NotANumber,
    /// Entropies of the tokens that are returned alone.
    Entropy,
    /// Samples are drawn with the noise of the next place.
    Noise,
    /// Samples are drawn from all tokens.
    TopP,
    /// A node sees its siblings: trees are taken for chains.
    Mask,
    /// A commit keeps the nodes as they lie, and not the path.
    Commit,
    /// A fork begins one token short.
    Fork,
    /// Scores of one sequence go to another.
    Rows,
    /// Wrong scores behind many rows, as of blocks that share a context and miss a part.
    LongContext,
    /// What is held of a growing tree are its first nodes.
    Hold,
    /// What is asked of one token is told of the next.
    Asked,
    /// Tokens are chosen from all, whatever the mask.
    Masked,
}

/// An engine with a fault.
struct Faulty {
    engine: Box<dyn Engine>,
    fault: Fault,
    steps: usize,
}

impl Engine for Faulty {
    fn info(&self) -> &EngineInfo {
        self.engine.info()
    }

    fn keep_features(&mut self) {
        self.engine.keep_features();
    }

    fn keep_logits(&mut self) {
        self.engine.keep_logits();
    }

    fn masked(&mut self, nodes: &[MaskedNode<'_>], top_k: usize) -> Result<Vec<Allowed>, EngineError> {
        let mut nodes = nodes.to_vec();
        if matches!(self.fault, Fault::Masked) {
            nodes.iter_mut().for_each(|node| node.mask = &[u32::MAX; VOCABULARY / 32]);
        }
        self.engine.masked(&nodes, top_k)
    }

    fn open(&mut self, capacity: usize) -> Result<Slot, EngineError> {
        self.engine.open(capacity)
    }

    fn fork(&mut self, from: Slot, length: usize, capacity: usize) -> Result<Slot, EngineError> {
        match self.fault {
            Fault::Fork => self.engine.fork(from, length.saturating_sub(1), capacity),
            _ => self.engine.fork(from, length, capacity),
        }
    }

    fn step(&mut self, segments: &[Segment<'_>], top_k: usize) -> Result<Vec<Scores>, EngineError> {
        self.steps += 1;
        let chains: Vec<Vec<u32>> =
            segments.iter().map(|segment| chain_parents(segment.tokens.len()).collect()).collect();
        let mut segments = segments.to_vec();
        if matches!(self.fault, Fault::Mask) {
            segments.iter_mut().zip(&chains).for_each(|(segment, chain)| segment.parents = chain);
        }
        let next = |token: &u32| (token + 1) % u32::try_from(VOCABULARY).unwrap();
        let asked: Vec<Vec<u32>> =
            segments.iter().map(|segment| segment.asked.tokens.iter().map(next).collect()).collect();
        if matches!(self.fault, Fault::Asked) {
            segments.iter_mut().zip(&asked).for_each(|(segment, asked)| segment.asked.tokens = asked);
        }
        for segment in &mut segments {
            segment.draw = segment.draw.map(|draw| match self.fault {
                Fault::Noise => draw.after(1),
                Fault::TopP => {
                    let sampling = Sampling::new(draw.sampling.temperature(), None, 1.0).unwrap();
                    Draw { sampling, ..draw }
                }
                _ => draw,
            });
        }
        let mut scores = self.engine.step(&segments, top_k)?;
        let rows: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
        let spoil = |scores: &Scores, nodes: usize, by: f32| {
            let of = (0..nodes).flat_map(|node| scores.top(node).iter());
            let candidates = of.map(|c| Candidate { log_probability: c.log_probability + by, ..*c }).collect();
            let rows = (0..nodes).map(|node| scores.prediction(node)).collect();
            Scores::new((0, 1), top_k, Predictions { candidates, rows, ..Predictions::default() }, 0)
        };
        match self.fault {
            Fault::WideSteps if rows > 32 => scores[0] = spoil(&scores[0], segments[0].tokens.len(), -4.0),
            Fault::LongContext if segments.iter().any(|segment| self.engine.cached(segment.slot) > 300) => {
                scores[0] = spoil(&scores[0], segments[0].tokens.len(), -4.0);
            }
            Fault::Entropy if !segments.is_empty() => {
                let of = |scores: &Scores, node| {
                    scores.top(node).iter().map(|c| -c.log_probability.exp() * c.log_probability).sum()
                };
                let nodes = segments[0].tokens.len();
                let candidates = (0..nodes).flat_map(|node| scores[0].top(node).to_vec()).collect();
                let row = |node| Prediction { entropy: of(&scores[0], node), ..scores[0].prediction(node) };
                let rows = (0..nodes).map(row).collect();
                scores[0] = Scores::new((0, 1), top_k, Predictions { candidates, rows, ..Predictions::default() }, 0);
            }
            Fault::NotANumber if self.steps == 20 => {
                scores[0] = spoil(&scores[0], segments[0].tokens.len(), f32::NAN);
            }
            Fault::Rows if scores.len() > 2 && segments[0].tokens.len() <= segments[1].tokens.len() => {
                scores[0] = spoil(&scores[1].clone(), segments[0].tokens.len(), 0.0);
            }
            _ => {}
        }
        Ok(scores)
    }

    fn commit(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        match self.fault {
            Fault::Commit if keep.len() == 1 => self.engine.commit(slot, &[0]),
            Fault::Mask => self.engine.commit(slot, &(0..keep.len()).collect::<Vec<_>>()),
            _ => self.engine.commit(slot, keep),
        }
    }

    fn hold(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        match self.fault {
            Fault::Hold => self.engine.hold(slot, &(0..keep.len()).collect::<Vec<_>>()),
            _ => self.engine.hold(slot, keep),
        }
    }

    fn close(&mut self, slot: Slot) {
        self.engine.close(slot);
    }

    fn cached(&self, slot: Slot) -> usize {
        self.engine.cached(slot)
    }
}

fn options(dtype: DTypeOption, isq: Option<&str>) -> EngineOptions {
    let fixture = std::path::absolute("../fixtures/profile-lm").unwrap();
    EngineOptions { dtype, isq: isq.map(Into::into), ..EngineOptions::new(fixture) }
}

/// Traits of every architecture, with tied embeddings and without.
fn configs() -> Vec<ModelConfig> {
    let base = known_config();
    let of = |change: fn(&mut ModelShape)| {
        let mut config = base.clone();
        change(&mut config.shape);
        config
    };
    vec![
        of(|_| {}),
        of(|shape| (shape.tied_embeddings, shape.qkv_bias, shape.head_dim) = (true, false, 128)),
        of(|shape| (shape.head_norms, shape.kv_heads, shape.head_dim) = (true, 1, 32)),
        of(|shape| (shape.output_bias, shape.mlp_bias, shape.kv_heads) = (true, true, 4)),
        of(|shape| (shape.fused, shape.qkv_bias) = (Some(true), false)),
    ]
}

fn model(dtype: DTypeOption) -> Box<dyn Engine> {
    small_model(&options(dtype, None), &known_config()).unwrap()
}

#[test]
fn every_precision_of_a_sound_device_passes() {
    let cases = [
        (DTypeOption::F32, None),
        (DTypeOption::Bf16, None),
        (DTypeOption::F16, None),
        (DTypeOption::F32, Some("q8_0")),
        (DTypeOption::F32, Some("q4_0")),
        (DTypeOption::F32, Some("q4k")),
        (DTypeOption::F32, Some("q5k")),
        (DTypeOption::F32, Some("q6k")),
    ];
    for ((dtype, isq), config) in cases.into_iter().flat_map(|case| configs().into_iter().map(move |of| (case, of))) {
        let options = options(dtype, isq);
        let mut device = small_model(&options, &config).unwrap();
        let mut oracle = small_oracle(&options, &config).unwrap();
        let found = compare(device.as_mut(), oracle.as_mut(), SelfTest::begin(&options)).unwrap();
        assert!(found.nodes > 700 && found.largest < found.tolerance / 2.0, "{dtype} {isq:?}: {found:?}");
        // Of K types the layers on tensors round x in blocks of 256, not of 32: 52 of 1,039 nodes differ at most.
        let least = if isq.is_some_and(|isq| isq.ends_with('k')) { 10 } else { 20 };
        assert!(found.near_ties * least < found.nodes, "{dtype} {isq:?}: {found:?}");
        println!("{dtype} {isq:?}: {found:?}");
    }
    let bounded = EngineOptions { cache_mb: Some(1), ..options(DTypeOption::Bf16, None) };
    selftest(&bounded).unwrap();
}

#[test]
fn every_fault_is_found() {
    use Fault::{
        Asked, Commit, Entropy, Fork, Hold, LongContext, Mask, Masked, Noise, NotANumber, Rows, TopP, WideSteps,
    };
    for fault in
        [WideSteps, NotANumber, Mask, Commit, Fork, Rows, Entropy, Noise, TopP, LongContext, Hold, Asked, Masked]
    {
        let mut faulty = Faulty { engine: model(DTypeOption::F32), fault, steps: 0 };
        let mut oracle = model(DTypeOption::F32);
        // The widest tolerance of all.
        let widest = SelfTest { tolerance: 0.5, ..SelfTest::begin(&options(DTypeOption::F32, None)) };
        let found = compare(&mut faulty, oracle.as_mut(), widest);
        let found = found.map_err(|error| error.to_string());
        assert!(
            found.as_ref().is_err_and(|error| error.contains("device cpu fails the self-test (step ")),
            "{fault:?}: {found:?}"
        );
    }
}

#[test]
fn the_known_answer_is_that_of_the_tensors_as_well() {
    let config = known_config();
    let mut weights = RandomWeights { dtype: DType::F32, isq: None, device: Device::Cpu };
    let options = options(DTypeOption::F32, None);
    assert_eq!(small_shape(&config.shape).heads, config.shape.heads);
    let mut tensors = build(&options, (config, "f32".into()), (&mut weights, None), None, &Device::Cpu).unwrap();
    let (tokens, parents) = (Random::new("known").tokens(KNOWN.len()), chain_parents(KNOWN.len()).collect::<Vec<_>>());
    let slot = tensors.open(KNOWN.len()).unwrap();
    let segment = Segment { slot, tokens: &tokens, parents: &parents, scored_from: 0, ..Segment::default() };
    let scores = tensors.step(&[segment], 1).unwrap();
    let found: Vec<Candidate> = (0..KNOWN.len()).map(|node| scores[0].top(node)[0]).collect();
    for (found, (token, log_probability)) in found.iter().zip(KNOWN) {
        let is_known = found.token == token && (found.log_probability - log_probability).abs() < 1e-3;
        assert!(is_known, "{found:?}");
    }
    known_answer(&options).unwrap();
}

#[test]
fn a_model_that_is_not_there_is_named() {
    let error = selftest(&EngineOptions::new(PathBuf::from("nowhere"))).unwrap_err().to_string();
    assert!(error.starts_with("model path nowhere does not exist"), "{error}");
}
