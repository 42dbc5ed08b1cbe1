//! One engine for many generators that work in turns: a large model is loaded once, and all of them find it as warm.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use laser_engine::{Allowed, Engine, EngineError, EngineInfo, MaskedNode, Scores, Segment, Slot};
use rayon::ThreadPool;

/// A handle of an engine. Who has ended its sequences leaves the engine to others.
#[derive(Clone)]
pub(super) struct SharedEngine {
    engine: Arc<Mutex<Box<dyn Engine>>>,
    info: EngineInfo,
}

impl SharedEngine {
    pub(super) fn new(engine: Box<dyn Engine>) -> Self {
        Self { info: engine.info().clone(), engine: Arc::new(Mutex::new(engine)) }
    }

    fn engine(&self) -> MutexGuard<'_, Box<dyn Engine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine for SharedEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn threads(&self) -> Option<Arc<ThreadPool>> {
        self.engine().threads()
    }

    fn keep_features(&mut self) {
        self.engine().keep_features();
    }

    fn keep_logits(&mut self) {
        self.engine().keep_logits();
    }

    fn open(&mut self, capacity: usize) -> Result<Slot, EngineError> {
        self.engine().open(capacity)
    }

    fn fork(&mut self, from: Slot, length: usize, capacity: usize) -> Result<Slot, EngineError> {
        self.engine().fork(from, length, capacity)
    }

    fn step(&mut self, segments: &[Segment<'_>], top_k: usize) -> Result<Vec<Scores>, EngineError> {
        self.engine().step(segments, top_k)
    }

    fn masked(&mut self, nodes: &[MaskedNode<'_>], top_k: usize) -> Result<Vec<Allowed>, EngineError> {
        self.engine().masked(nodes, top_k)
    }

    fn commit(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        self.engine().commit(slot, keep)
    }

    fn hold(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        self.engine().hold(slot, keep)
    }

    fn close(&mut self, slot: Slot) {
        self.engine().close(slot);
    }

    fn cached(&self, slot: Slot) -> usize {
        self.engine().cached(slot)
    }
}
