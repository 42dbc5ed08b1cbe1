//! Results of work on all threads.

use rayon::prelude::*;

/// Collects results in order. Of several errors the first one is told, whichever thread was done first, so that the
/// same input fails with the same words; rayon's own way returns any of them.
pub fn try_collect<T: Send, E: Send>(results: impl IndexedParallelIterator<Item = Result<T, E>>) -> Result<Vec<T>, E> {
    let all: Vec<Result<T, E>> = results.collect();
    all.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_errors_the_first_is_told() {
        for first in (0..100).map(|step| step * 7) {
            let results = (0..1000).into_par_iter().map(|at| if at < first { Ok(at) } else { Err(at) });
            assert_eq!(try_collect(results), Err(first));
        }
        assert_eq!(try_collect((0..1000).into_par_iter().map(Ok::<_, ()>)), Ok((0..1000).collect()));
    }
}
