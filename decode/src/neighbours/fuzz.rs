//! Files that were changed and random bytes, other ones in every run: none makes opening, checking or scoring panic.

use proptest::prelude::*;
use proptest::sample::Index;

use super::build::write_header;
use super::tests::{any_histories, built, file_of};
use super::*;

/// Opens bytes as they are, and again behind a right preamble and with right checksums, which chance would not find.
fn open_and_score(bytes: Vec<u8>) {
    let sealed = (bytes.len() >= HEADER).then(|| {
        let mut bytes = bytes.clone();
        let header = Header::read(&bytes);
        write_header(&mut bytes, &header);
        bytes
    });
    for bytes in std::iter::once(bytes).chain(sealed) {
        let Ok(neighbours) = Neighbours::open(bytes.into()) else { continue };
        // Damage may or may not be found here; scoring must be safe without.
        let _ = neighbours.verify();
        score(&neighbours);
    }
}

/// Scores in every way. Files of a few hundred bytes hold few items.
pub(super) fn score(neighbours: &Neighbours) {
    let items = neighbours.items();
    let history = [0, 1, 1, items.saturating_sub(1), items, u32::MAX, 2, 0];
    let mut scores = Vec::new();
    for method in Method::ALL {
        for end in 0..history.len() {
            neighbours.score(method, &history[..end], &mut scores);
            assert!(scores.iter().all(|&(item, score)| item < items && score.is_finite()));
            neighbours.best(method, &history[..end], &[], 2, &mut scores);
            assert!(scores.len() <= 2);
        }
    }
}

/// Bytes of a file, some of them changed, cut short or followed by others.
fn changed_file() -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<Index>(), any::<u8>()), 0..8);
    let tail = prop::collection::vec(any::<u8>(), 0..8);
    (any_histories(5, 6, 8), changes, prop::option::weighted(0.2, any::<Index>()), tail).prop_map(
        |(histories, changes, cut, tail)| {
            let mut bytes = file_of(5, &histories);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(cut.map_or(bytes.len(), |cut| cut.index(bytes.len())));
            if tail.len() > 5 {
                bytes.extend(tail);
            }
            bytes
        },
    )
}

/// Random content behind a header that fits it.
fn random_content() -> impl Strategy<Value = Vec<u8>> {
    (0..6u32, 0..8u32, 0..12u32, 0..12u32).prop_flat_map(|(items, most, successors, neighbours)| {
        let header = Header { items, most, recency: 0.7, successors, neighbours, ..Header::default() };
        let words = usize::try_from(header.file_bytes()).unwrap() / 4 - HEADER / 4;
        // Most words are small, as items and starts are.
        prop::collection::vec(prop_oneof![3 => 0..14u32, 1 => any::<u32>()], words).prop_map(move |words| {
            let mut bytes = [vec![0; HEADER], words.iter().flat_map(|word| word.to_le_bytes()).collect()].concat();
            write_header(&mut bytes, &header);
            assert!(Neighbours::open(bytes.clone().into()).is_ok());
            bytes
        })
    })
}

proptest! {
    // About a second each.
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 50_000, ..Default::default() })]

    #[test]
    fn changed_files_are_refused_or_safe(bytes in changed_file()) {
        open_and_score(bytes);
    }

    #[test]
    fn random_bytes_are_refused_or_safe(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        open_and_score(bytes);
    }

    #[test]
    fn random_content_is_refused_or_safe(bytes in random_content()) {
        open_and_score(bytes);
    }
}

#[test]
fn an_unchanged_file_reaches_the_scoring() {
    let bytes = file_of(5, &[vec![1, 2, 3], vec![1, 2, 4]]);
    let header = Header::read(&bytes);
    let mut again = bytes.clone();
    write_header(&mut again, &header);
    assert_eq!(again, bytes);
    score(&built(5, &[vec![1, 2, 3], vec![1, 2, 4]]));
}
