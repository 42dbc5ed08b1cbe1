//! The fuzz target's body on random bytes and on pools that were changed, other ones in every run: what a fuzzer does,
//! without its compiler and its feedback.

use proptest::prelude::*;
use proptest::sample::Index;

use super::tests::{any_texts, meta, open_and_draft};
use crate::build_pool;

/// Where the target's input stands in a file: behind preamble and header checksum.
const INPUT: usize = 48;

/// Bytes of a pool, some of them changed, cut short or followed by others.
fn changed_pool() -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<Index>(), any::<u8>()), 0..8);
    let tail = prop::collection::vec(any::<u8>(), 0..8);
    (any_texts(4, 6, 24), changes, prop::option::weighted(0.2, any::<Index>()), tail).prop_map(
        |(texts, changes, cut, tail)| {
            let mut input = build_pool(&meta(), texts).unwrap().split_off(INPUT);
            for (at, byte) in changes {
                let at = at.index(input.len());
                input[at] = byte;
            }
            input.truncate(cut.map_or(input.len(), |cut| cut.index(input.len())));
            if tail.len() > 5 {
                input.extend(tail);
            }
            input
        },
    )
}

proptest! {
    // About a second each.
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200_000, ..Default::default() })]

    #[test]
    fn the_fuzz_target_survives_changed_pools(input in changed_pool()) {
        open_and_draft::run(&input);
    }

    #[test]
    fn the_fuzz_target_survives_random_bytes(input in prop::collection::vec(any::<u8>(), 0..600)) {
        open_and_draft::run(&input);
    }
}

#[test]
fn an_unchanged_pool_reaches_the_drafting() {
    let file = build_pool(&meta(), [vec![1, 2, 3], vec![1, 2, 4]]).unwrap();
    let name = file[INPUT + 104];
    assert_eq!(usize::from(name), meta().name.len(), "the word that the target takes for the name's length");
    open_and_draft::run(&file[INPUT..]);
}
