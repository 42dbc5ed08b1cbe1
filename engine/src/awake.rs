//! Threads that do not sleep while a forward runs.

use std::hint::spin_loop;
use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};
use std::time::{Duration, Instant};

use rayon::{ThreadPool, Yield};

/// How long a thread waits for work before it may sleep: longer than serial parts are. Where other processes want the
/// processor, waiting longer, or giving it up for a moment at a time, leaves them most of it: beside two compilers a
/// night of the demo took ten times as long.
const PATIENCE: Duration = Duration::from_micros(200);

/// Pauses of the processor between two looks for work, each of some 50 ns.
const PAUSES: usize = 8;

/// Runs `work` on a thread of the pool while the others stay ready to take parts of it.
///
/// A forward forks and joins six times a layer, and its serial parts in between, tens of microseconds, are long enough
/// for rayon's threads to fall asleep: waking them took a seventh of the forward of 16 tokens of a 68M model.
pub(super) fn awake<R: Send>(pool: &ThreadPool, work: impl FnOnce() -> R + Send) -> R {
    let (work, done) = (Mutex::new(Some(work)), AtomicBool::new(false));
    let results = pool.broadcast(|thread| {
        if thread.index() > 0 {
            help(&done);
            return None;
        }
        let _done = SetOnDrop(&done);
        let work = work.lock().ok().and_then(|mut work| work.take());
        work.map(|work| work())
    });
    let result = results.into_iter().flatten().next();
    result.expect("a pool has a first thread, and a panic of its work goes on from the broadcast")
}

/// Does parts of the others' work until all is done, or there was none for too long.
fn help(done: &AtomicBool) {
    let mut since = Instant::now();
    while !done.load(Ordering::Acquire) && since.elapsed() < PATIENCE {
        match rayon::yield_now() {
            Some(Yield::Executed) => since = Instant::now(),
            _ => (0..PAUSES).for_each(|_| spin_loop()),
        }
    }
}

/// Ends the others' wait, also when the work panics.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use rayon::prelude::*;

    use super::*;

    #[test]
    fn work_runs_once_its_parts_on_all_threads_and_its_panic_goes_on() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for count in 0..200_u64 {
                let mut runs = 0;
                let sum = awake(&pool, || {
                    runs += 1;
                    assert_eq!(rayon::current_num_threads(), threads);
                    (0..count).into_par_iter().map(|i| rayon::join(|| i, || i).0).sum::<u64>()
                });
                assert_eq!((runs, sum), (1, count * count.saturating_sub(1) / 2));
            }
            let panics = || awake(&pool, || (0..9).into_par_iter().for_each(|i| assert!(i < 5)));
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
            assert_eq!(awake(&pool, || 7), 7);
        }
    }
}
