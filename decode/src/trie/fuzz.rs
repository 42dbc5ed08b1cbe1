//! The fuzz target's body on random bytes and on tries that were changed, other ones in every run: what a fuzzer does,
//! without its compiler and its feedback.

use proptest::prelude::*;
use proptest::sample::Index;

use super::tests::{any_table, open_and_read, small_trie};

/// Where the target's input stands in a file: behind preamble and header checksum.
const INPUT: usize = 48;

/// Bytes of a trie, some of them changed, cut short or followed by others.
fn changed_trie() -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<Index>(), any::<u8>()), 0..8);
    let tail = prop::collection::vec(any::<u8>(), 0..8);
    (any_table(12), changes, prop::option::weighted(0.2, any::<Index>()), tail).prop_map(
        |(table, changes, cut, tail)| {
            let mut input = table.build().split_off(INPUT);
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
    // Some seconds each.
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 100_000, ..Default::default() })]

    #[test]
    fn the_fuzz_target_survives_changed_tries(input in changed_trie()) {
        open_and_read::run(&input);
    }

    #[test]
    fn the_fuzz_target_survives_random_bytes(input in prop::collection::vec(any::<u8>(), 0..600)) {
        open_and_read::run(&input);
    }
}

#[test]
fn an_unchanged_trie_reaches_the_reading() {
    let file = small_trie();
    let content_at = u16::from_le_bytes([file[INPUT + 40], file[INPUT + 41]]);
    let content = super::Trie::open(file.clone().into()).unwrap().header.content_at();
    assert_eq!(usize::from(content_at), content, "the bytes that the target takes for the content's offset");
    open_and_read::run(&file[INPUT..]);
}
