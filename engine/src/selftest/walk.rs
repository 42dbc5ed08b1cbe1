//! The schedule of a self-test.

use laser_cpu::Asked;
use laser_decode::{Draw, Prediction, ROOT_PARENT, TargetScores, chain_parents};

use super::{Random, SelfTest, TOP_K};
use crate::{
    engine::Engine,
    error::EngineError,
    scores::Scores,
    segment::{MaskedNode, Segment, Slot},
};

/// Rounds of the schedule, each with a step of all sequences.
const ROUNDS: usize = 32;

/// Most sequences at a time.
const SEQUENCES: usize = 6;

/// Tokens of a long context, and nodes of the tree behind it: few nodes and many rows, so that blocks of a GPU share
/// them.
const LONG: usize = 480;
const BEHIND: usize = 12;

/// New nodes in each step of a tree that grows, behind a context.
const GROWTH: [usize; 4] = [20, 9, 40, 5];

/// Tokens that are asked for at a node, at most, and of how many tokens one may follow where the others may not.
const ASKED: usize = 4;
const ONE_IN: usize = 8;

/// A sequence in both engines, its committed tokens and what it may grow to.
struct Sequence {
    slots: [Slot; 2],
    cached: usize,
    capacity: usize,
}

/// A step's part of one sequence.
struct Part {
    sequence: usize,
    tokens: Vec<u32>,
    /// Of the nodes that are held from steps before, and of these.
    parents: Vec<u32>,
    draw: Option<Draw>,
    before: Vec<f32>,
    /// Tokens that are asked for, and where those of each node end.
    asked: (Vec<u32>, Vec<usize>),
}

impl Part {
    /// Nodes from steps before.
    fn held(&self) -> usize {
        self.parents.len() - self.tokens.len()
    }
}

/// Walks one schedule with both engines, and compares the scores of every node in a self-test that begins.
///
/// # Errors
/// The first node that differs by more than the tolerance, and the engines'.
pub(super) fn compare(
    device: &mut dyn Engine,
    oracle: &mut dyn Engine,
    found: SelfTest,
) -> Result<SelfTest, EngineError> {
    let info = device.info();
    let hidden = if info.reads_features { info.hidden_size } else { 0 };
    let is_target = !info.reads_features && info.heads.is_none();
    let mut walk = Walk {
        hidden,
        ahead: info.ahead(),
        engines: [device, oracle],
        sequences: Vec::new(),
        random: Random::new("schedule"),
        steps: 0,
        found,
    };
    for _ in 0..ROUNDS {
        walk.change()?;
        walk.step()?;
    }
    walk.long_context()?;
    if is_target {
        walk.growing_tree()?;
    }
    Ok(walk.found)
}

struct Walk<'a> {
    engines: [&'a mut dyn Engine; 2],
    sequences: Vec<Sequence>,
    random: Random,
    /// Those that were compared.
    steps: usize,
    found: SelfTest,
    /// The width of the features that both read; 0 if they read none.
    hidden: usize,
    /// Tokens ahead that both tell of.
    ahead: usize,
}

impl Walk<'_> {
    /// Opens, forks or closes a sequence.
    fn change(&mut self) -> Result<(), EngineError> {
        let Self { engines: [device, oracle], sequences, random, .. } = self;
        match random.below(4) {
            0 | 1 if sequences.len() < SEQUENCES => {
                let capacity = 8 + random.below(150);
                self.open(capacity)?;
            }
            2 if !sequences.is_empty() && sequences.len() < SEQUENCES => {
                let &Sequence { slots: [a, b], cached, .. } = &sequences[random.below(sequences.len())];
                let cached = random.below(cached + 1);
                let capacity = cached + 1 + random.below(100);
                let slots = [device.fork(a, cached, capacity)?, oracle.fork(b, cached, capacity)?];
                sequences.push(Sequence { slots, cached, capacity });
            }
            3 if sequences.len() > SEQUENCES / 2 => {
                let sequence = sequences.swap_remove(random.below(sequences.len()));
                self.close(&sequence);
            }
            _ => {}
        }
        Ok(())
    }

    fn open(&mut self, capacity: usize) -> Result<(), EngineError> {
        let slots = [self.engines[0].open(capacity)?, self.engines[1].open(capacity)?];
        self.sequences.push(Sequence { slots, cached: 0, capacity });
        Ok(())
    }

    fn close(&mut self, sequence: &Sequence) {
        self.engines.iter_mut().zip(sequence.slots).for_each(|(engine, slot)| engine.close(slot));
    }

    /// A step of most sequences: single tokens, small trees and ones of more nodes than a tile has rows.
    fn step(&mut self) -> Result<(), EngineError> {
        let mut parts = Vec::new();
        for sequence in 0..self.sequences.len() {
            let Sequence { cached, capacity, .. } = self.sequences[sequence];
            let room = (capacity - cached).min([1, 14, 70][self.random.below(3)]);
            if room > 0 && self.random.below(4) > 0 {
                let nodes = 1 + self.random.below(room);
                let (tokens, parents) = self.random.tree(nodes);
                parts.push(self.part(sequence, tokens, parents));
            }
        }
        self.compare_step(&parts)?;
        for part in parts {
            let keep = match self.random.below(part.tokens.len() + 1) {
                0 => Vec::new(),
                node => path(&part.parents, node - 1),
            };
            self.commit(part.sequence, &keep)?;
        }
        Ok(())
    }

    /// A sequence alone, whose tree follows a long context.
    fn long_context(&mut self) -> Result<(), EngineError> {
        self.alone(LONG, BEHIND)?;
        self.tree_behind()
    }

    /// A tree behind the first sequence.
    fn tree_behind(&mut self) -> Result<(), EngineError> {
        let (tokens, parents) = self.random.tree(BEHIND);
        let tree = self.part(0, tokens, parents);
        self.compare_step(&[tree])
    }

    /// A sequence alone, whose tree grows and is pruned, as the beams of a list are. What is asked for must agree, and
    /// what may follow where a mask says so.
    fn growing_tree(&mut self) -> Result<(), EngineError> {
        self.engines.iter_mut().for_each(|engine| engine.keep_logits());
        self.alone(LONG / 4, GROWTH.iter().sum())?;
        let mut held = Vec::new();
        for nodes in GROWTH {
            let (tokens, mut parents) = (self.random.tokens(nodes), held);
            for node in parents.len()..parents.len() + nodes {
                parents.push(self.random.parent(node));
            }
            let mut part = self.part(0, tokens, parents);
            part.asked = self.random.asked(nodes, ASKED);
            self.compare_step(std::slice::from_ref(&part))?;
            self.compare_masked(&part)?;
            held = self.prune(&part.parents)?;
        }
        self.commit(0, &path(&held, held.len() - 1))?;
        self.tree_behind()
    }

    /// Holds about three of four nodes, each with its parent; the parents of what is held.
    fn prune(&mut self, parents: &[u32]) -> Result<Vec<u32>, EngineError> {
        let (mut keep, mut held): (Vec<usize>, Vec<u32>) = Default::default();
        for (node, &parent) in parents.iter().enumerate() {
            let place = keep.iter().position(|&kept| kept == parent as usize);
            if node == 0 || (self.random.below(4) > 0 && (parent == ROOT_PARENT || place.is_some())) {
                keep.push(node);
                held.push(place.map_or(ROOT_PARENT, |place| u32::try_from(place).unwrap_or(ROOT_PARENT)));
            }
        }
        let [a, b] = self.sequences[0].slots;
        self.engines[0].hold(a, &keep)?;
        self.engines[1].hold(b, &keep)?;
        Ok(held)
    }

    /// Begins a sequence that has the engines for itself, with room for so many nodes behind its context.
    fn alone(&mut self, context: usize, nodes: usize) -> Result<(), EngineError> {
        for sequence in std::mem::take(&mut self.sequences) {
            self.close(&sequence);
        }
        self.open(context + nodes)?;
        let (tokens, chain) = (self.random.tokens(context), chain_parents(context).collect());
        let chunk = self.part(0, tokens, chain);
        self.compare_step(&[chunk])?;
        self.commit(0, &(0..context).collect::<Vec<_>>())
    }

    fn part(&mut self, sequence: usize, tokens: Vec<u32>, parents: Vec<u32>) -> Part {
        let before = self.random.feature(tokens.len() * self.hidden);
        Part { sequence, tokens, parents, draw: self.random.draw(), before, asked: Default::default() }
    }

    fn commit(&mut self, sequence: usize, keep: &[usize]) -> Result<(), EngineError> {
        let sequence = &mut self.sequences[sequence];
        sequence.cached += keep.len();
        for (engine, slot) in self.engines.iter_mut().zip(sequence.slots) {
            engine.commit(slot, keep)?;
        }
        Ok(())
    }

    fn compare_step(&mut self, parts: &[Part]) -> Result<(), EngineError> {
        let step = self.steps;
        let scores = [self.scores(0, parts)?, self.scores(1, parts)?];
        for (at, part) in parts.iter().enumerate() {
            for node in 0..part.tokens.len() {
                let place = || format!("step {step}, sequence {at} of {}, node {node}", parts.len());
                for further in 0..self.ahead {
                    self.found.add(scores[0][at].ahead(node, further), scores[1][at].ahead(node, further), place)?;
                }
                let (got, expected) = (scores[0][at].prediction(node), scores[1][at].prediction(node));
                self.found.add_prediction(got, expected, place)?;
                let draw = self.draw(part, node);
                self.found.add_choice(got.choice.token, scores[1][at].top(node), (expected, draw), place)?;
                self.found.add_asked(scores[0][at].asked(node), scores[1][at].asked(node), place)?;
            }
        }
        self.steps += 1;
        Ok(())
    }

    /// How the token after a node is drawn.
    fn draw(&self, part: &Part, node: usize) -> Option<Draw> {
        let depth = path(&part.parents, part.held() + node).len() - 1;
        part.draw.map(|draw| draw.after(self.sequences[part.sequence].cached + depth))
    }

    /// What may follow each node of the last step, where only some tokens may.
    fn compare_masked(&mut self, part: &Part) -> Result<(), EngineError> {
        let step = self.steps - 1;
        let masks: Vec<Vec<u32>> = part.tokens.iter().map(|_| self.random.mask(ONE_IN)).collect();
        let slots = self.sequences[part.sequence].slots;
        let mut told = Vec::new();
        for ((engine, slot), top_k) in self.engines.iter_mut().zip(slots).zip(TOP_K) {
            let of = |(node, mask)| MaskedNode { slot, node, mask, draw: part.draw };
            let nodes: Vec<MaskedNode<'_>> = masks.iter().map(Vec::as_slice).enumerate().map(of).collect();
            told.push(engine.masked(&nodes, top_k)?);
        }
        for (node, mask) in masks.iter().enumerate() {
            let place = || format!("step {step}, node {node}, with a mask");
            let (got, expected) = (&told[0][node], &told[1][node]);
            self.found.add(&got.candidates, &expected.candidates, place)?;
            let found = got.candidates.iter().chain([&got.choice]).map(|candidate| candidate.token);
            self.found.add_allowed(found, mask, place)?;
            let sharpness = part.draw.map_or(1.0, |draw| 1.0 / draw.sampling.temperature());
            let scale = Prediction { sharpness, ..Prediction::default() };
            self.found.add_choice(got.choice.token, &expected.candidates, (scale, part.draw), place)?;
        }
        Ok(())
    }

    fn scores(&mut self, engine: usize, parts: &[Part]) -> Result<Vec<Scores>, EngineError> {
        let slots: Vec<Slot> = parts.iter().map(|part| self.sequences[part.sequence].slots[engine]).collect();
        let segments: Vec<Segment<'_>> = parts
            .iter()
            .zip(slots)
            .map(|(part, slot)| Segment {
                slot,
                tokens: &part.tokens,
                parents: &part.parents[part.held()..],
                scored_from: 0,
                draw: part.draw,
                before: &part.before,
                asked: Asked { tokens: &part.asked.0, ends: &part.asked.1 },
            })
            .collect();
        self.engines[engine].step(&segments, TOP_K[engine])
    }
}

/// Nodes from the context to `node`.
fn path(parents: &[u32], node: usize) -> Vec<usize> {
    let up = |node: &usize| (parents[*node] != ROOT_PARENT).then(|| parents[*node] as usize);
    let mut path: Vec<usize> = std::iter::successors(Some(node), up).collect();
    path.reverse();
    path
}
