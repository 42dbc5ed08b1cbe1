//! What tree attention is worth to beam search: the forwards of a search whose beams are one tree behind the prompt,
//! and of one that has a cache for each beam, as engines without tree attention do.

use std::time::Instant;

use laser_decode::{ROOT_PARENT, chain_parents};
use laser_engine::{Engine, EngineError, Segment, Slot};

/// Searches of each kind, in turns.
const ROUNDS: usize = 5;

/// The token of all nodes.
const TOKEN: u32 = 0;

/// The size of a search.
#[derive(Debug, Clone, Copy)]
pub(super) struct Search {
    /// Users that are searched for at a time.
    pub(super) batch: usize,
    /// Tokens of their prompts.
    pub(super) prompt: usize,
    /// Beams.
    pub(super) width: usize,
    /// Forwards behind the prompt's.
    pub(super) steps: usize,
}

impl Search {
    /// How fast a search with a cache for each beam is relative to one with a tree: the ratio of the least seconds.
    ///
    /// # Errors
    /// The engine's.
    pub(super) fn apart(self, engine: &mut dyn Engine) -> Result<f64, EngineError> {
        let (mut as_tree, mut as_caches) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..ROUNDS {
            let start = Instant::now();
            self.with_trees(engine)?;
            let middle = Instant::now();
            self.with_caches(engine)?;
            as_tree = as_tree.min((middle - start).as_secs_f64());
            as_caches = as_caches.min(middle.elapsed().as_secs_f64());
        }
        Ok(as_tree / as_caches)
    }

    fn with_trees(self, engine: &mut dyn Engine) -> Result<(), EngineError> {
        let Self { width, steps, .. } = self;
        let slots = self.prompts(engine, steps * width)?;
        for step in 0..steps {
            let held = step * width;
            // Each beam continues the one of its rank; the first ones continue the prompt.
            let parents: Vec<u32> = match held.checked_sub(width) {
                Some(before) => (0..).skip(before).take(width).collect(),
                None => vec![ROOT_PARENT; width],
            };
            self.step(engine, &slots, &parents)?;
            let all: Vec<usize> = (0..held + width).collect();
            slots.iter().try_for_each(|&slot| engine.hold(slot, &all))?;
        }
        slots.into_iter().for_each(|slot| engine.close(slot));
        Ok(())
    }

    fn with_caches(self, engine: &mut dyn Engine) -> Result<(), EngineError> {
        let Self { prompt, width, steps, .. } = self;
        let mut from = self.prompts(engine, 0)?;
        for step in 0..steps {
            // Beams continue any of those before them, so each begins with a copy.
            let copies = if step == 0 { width } else { 1 };
            let mut slots = Vec::new();
            for &slot in from.iter().flat_map(|slot| std::iter::repeat_n(slot, copies)) {
                slots.push(engine.fork(slot, prompt + step, prompt + steps)?);
            }
            from.into_iter().for_each(|slot| engine.close(slot));
            self.step(engine, &slots, &[ROOT_PARENT])?;
            slots.iter().try_for_each(|&slot| engine.commit(slot, &[0]))?;
            from = slots;
        }
        from.into_iter().for_each(|slot| engine.close(slot));
        Ok(())
    }

    /// Caches with the prompts, and room for so many nodes.
    fn prompts(self, engine: &mut dyn Engine, room: usize) -> Result<Vec<Slot>, EngineError> {
        let slots: Vec<Slot> =
            (0..self.batch).map(|_| engine.open(self.prompt + room)).collect::<Result<_, EngineError>>()?;
        let (tokens, parents) = (vec![TOKEN; self.prompt], chain_parents(self.prompt).collect::<Vec<_>>());
        let segment = |&slot: &Slot| Segment {
            slot,
            tokens: &tokens,
            parents: &parents,
            scored_from: self.prompt - 1,
            ..Segment::default()
        };
        engine.step(&slots.iter().map(segment).collect::<Vec<_>>(), 1)?;
        let all: Vec<usize> = (0..self.prompt).collect();
        slots.iter().try_for_each(|&slot| engine.commit(slot, &all))?;
        Ok(slots)
    }

    /// A forward of the same nodes in each slot, all of them scored.
    fn step(self, engine: &mut dyn Engine, slots: &[Slot], parents: &[u32]) -> Result<(), EngineError> {
        let tokens = vec![TOKEN; parents.len()];
        let segment = |&slot: &Slot| Segment { slot, tokens: &tokens, parents, ..Segment::default() };
        engine.step(&slots.iter().map(segment).collect::<Vec<_>>(), 1).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use laser_engine::{FakeEngine, FakeOptions};

    use super::*;

    #[test]
    fn both_searches_run_through_and_leave_no_cache_open() {
        // Six beams that are copied to six others.
        let cache_tokens = 2 * 6 * 12;
        let mut engine = FakeEngine::new(FakeOptions { cache_tokens, ..FakeOptions::default() });
        let search = Search { batch: 2, prompt: 9, width: 3, steps: 3 };
        for _ in 0..3 {
            assert!(search.apart(&mut engine).unwrap() > 0.0);
        }
    }
}
