//! The threads that work on all sequences of a step is divided among.

use std::sync::Arc;

use laser_engine::Engine;
use rayon::ThreadPool;
use rayon::prelude::*;

/// From so many sequences on their drafts are made in parallel: a draft takes some 20 us, as long as waking a thread.
/// On a GPU a batch of 256 would otherwise wait 5 ms of every step.
pub(super) const PARALLEL_DRAFTS_MIN: usize = 16;

/// The engine's threads, which wait while nothing is forwarded: others would compete with them for the processor, and
/// would be more than `[model] threads` allows. Those of the process if the engine has none of its own.
#[derive(Clone)]
pub(super) struct Threads(Option<Arc<ThreadPool>>);

impl Threads {
    pub(super) fn of(engine: &dyn Engine) -> Self {
        Self(engine.threads())
    }

    /// Does what takes as long as a draft for all sequences, each with its place.
    pub(super) fn each<T: Send>(&self, sequences: &mut [T], work: impl Fn(usize, &mut T) + Send + Sync) {
        if sequences.len() < PARALLEL_DRAFTS_MIN {
            return sequences.iter_mut().enumerate().for_each(|(at, sequence)| work(at, sequence));
        }
        let parts = sequences.par_iter_mut().enumerate();
        let divide = || parts.for_each(|(at, sequence)| work(at, sequence));
        match &self.0 {
            Some(threads) => threads.install(divide),
            None => divide(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rayon::ThreadPoolBuilder;

    use super::*;

    #[test]
    fn much_work_is_divided_among_the_given_threads_and_little_is_not() {
        for count in [1, 3] {
            let pool = ThreadPoolBuilder::new().num_threads(count).build().unwrap();
            let threads = Threads(Some(Arc::new(pool)));
            for sequences in [0, PARALLEL_DRAFTS_MIN - 1, PARALLEL_DRAFTS_MIN, 100] {
                let mut seen = vec![(usize::MAX, None); sequences];
                threads.each(&mut seen, |at, seen| {
                    *seen = (at, rayon::current_thread_index().map(|_| rayon::current_num_threads()));
                });
                let on = (sequences >= PARALLEL_DRAFTS_MIN).then_some(count);
                assert_eq!(seen, (0..sequences).map(|at| (at, on)).collect::<Vec<_>>());
            }
        }
    }
}
