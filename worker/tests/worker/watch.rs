//! An engine that is watched, and that fails on demand.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use laser_engine::{Allowed, Engine, EngineError, EngineInfo, MaskedNode, Scores, Segment, Slot};
use rayon::ThreadPool;
use tokio_util::sync::CancellationToken;

/// What to do wrong, and when; steps and commits are counted from 0.
#[derive(Debug, Clone, Default)]
pub(crate) struct Mischief {
    pub(crate) panic_on_step: Option<usize>,
    pub(crate) panic_on_close: bool,
    pub(crate) fail_from_step: Option<usize>,
    pub(crate) fail_on_commit: Option<usize>,
    /// The step that loses all keys and values; every step fails from then on until no slot is open.
    pub(crate) lose_on_step: Option<usize>,
    /// Cancelled with the first step.
    pub(crate) cancel: Vec<CancellationToken>,
    /// Slots that may be open at once.
    pub(crate) slots_max: Option<usize>,
}

/// What the engine was asked for.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Open slots, each with its place in `fed`.
    pub(crate) open: BTreeMap<Slot, usize>,
    /// For every sequence ever opened all tokens that were fed to it, drafts included.
    pub(crate) fed: Vec<Vec<u32>>,
    /// The tokens of each step's segments.
    pub(crate) steps: Vec<Vec<usize>>,
    commits: usize,
}

pub(crate) struct Watched<E> {
    inner: E,
    mischief: Mischief,
    log: Arc<Mutex<Log>>,
    is_lost: bool,
}

impl<E: Engine> Watched<E> {
    pub(crate) fn new(inner: E, mischief: Mischief) -> (Self, Arc<Mutex<Log>>) {
        let log = Arc::<Mutex<Log>>::default();
        (Self { inner, mischief, log: log.clone(), is_lost: false }, log)
    }

    fn opened(&self, slot: Slot, tokens: Vec<u32>) -> Slot {
        let mut log = self.log.lock().unwrap();
        let place = log.fed.len();
        log.fed.push(tokens);
        assert!(log.open.insert(slot, place).is_none(), "slot {slot} was open");
        slot
    }

    fn refuse_without_room(&self) -> Result<(), EngineError> {
        let open = self.log.lock().unwrap().open.len();
        match self.mischief.slots_max {
            Some(max) if open >= max => Err(injected("no room")),
            _ => Ok(()),
        }
    }
}

fn injected(what: &str) -> EngineError {
    EngineError::Mistralrs { message: format!("injected: {what}") }
}

impl<E: Engine> Engine for Watched<E> {
    fn info(&self) -> &EngineInfo {
        self.inner.info()
    }

    fn threads(&self) -> Option<Arc<ThreadPool>> {
        self.inner.threads()
    }

    fn keep_features(&mut self) {
        self.inner.keep_features();
    }

    fn keep_logits(&mut self) {
        self.inner.keep_logits();
    }

    fn masked(&mut self, nodes: &[MaskedNode<'_>], top_k: usize) -> Result<Vec<Allowed>, EngineError> {
        self.inner.masked(nodes, top_k)
    }

    fn open(&mut self, capacity: usize) -> Result<Slot, EngineError> {
        self.refuse_without_room()?;
        let slot = self.inner.open(capacity)?;
        Ok(self.opened(slot, Vec::new()))
    }

    fn fork(&mut self, from: Slot, length: usize, capacity: usize) -> Result<Slot, EngineError> {
        self.refuse_without_room()?;
        let slot = self.inner.fork(from, length, capacity)?;
        let prefix = {
            let log = self.log.lock().unwrap();
            log.fed[log.open[&from]][..length].to_vec()
        };
        Ok(self.opened(slot, prefix))
    }

    fn step(&mut self, segments: &[Segment<'_>], top_k: usize) -> Result<Vec<Scores>, EngineError> {
        let step = {
            let mut log = self.log.lock().unwrap();
            for segment in segments {
                let place = log.open[&segment.slot];
                log.fed[place].extend_from_slice(segment.tokens);
            }
            log.steps.push(segments.iter().map(|s| s.tokens.len()).collect());
            log.steps.len() - 1
        };
        self.mischief.cancel.iter().for_each(CancellationToken::cancel);
        assert_ne!(self.mischief.panic_on_step, Some(step), "injected panic of step {step}");
        if self.mischief.fail_from_step.is_some_and(|from| step >= from) {
            return Err(injected("step"));
        }
        self.is_lost |= self.mischief.lose_on_step == Some(step);
        if self.is_lost {
            return Err(injected("lost"));
        }
        self.inner.step(segments, top_k)
    }

    fn commit(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        let commit = {
            let mut log = self.log.lock().unwrap();
            log.commits += 1;
            log.commits - 1
        };
        if self.mischief.fail_on_commit == Some(commit) {
            return Err(injected("commit"));
        }
        self.inner.commit(slot, keep)
    }

    fn hold(&mut self, slot: Slot, keep: &[usize]) -> Result<(), EngineError> {
        self.inner.hold(slot, keep)
    }

    fn close(&mut self, slot: Slot) {
        assert!(!self.mischief.panic_on_close, "injected panic of a close");
        let mut log = self.log.lock().unwrap();
        log.open.remove(&slot);
        self.is_lost &= !log.open.is_empty();
        self.inner.close(slot);
    }

    fn cached(&self, slot: Slot) -> usize {
        self.inner.cached(slot)
    }
}
