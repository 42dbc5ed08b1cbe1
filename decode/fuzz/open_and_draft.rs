//! The body of the fuzz target `pool_open`, which Laser's own tests run too, on inputs that proptest makes
//! (src/pool/tests.rs, src/pool/fuzz.rs). Whoever includes it imports what it uses.

use super::{DraftContext, DraftTree, Drafter, Pool};

/// Opening arbitrary bytes as a pool never panics, nor does drafting from a pool that opened.
///
/// Every input is tried as it is, and again behind a right preamble and with right checksums, which no fuzzer would
/// guess (docs/formats.md).
pub(crate) fn run(content: &[u8]) {
    open_and_draft(content.to_vec());
    let mut file = b"LASRPOOL\x03\0\0\0\x04\x03\x02\x01".to_vec();
    // The header ends after the name, whose length is its last word.
    let name = content.get(104..108).map_or(0, |word| word[0] as usize);
    let header = (108 + name).next_multiple_of(4).min(content.len());
    let mut content = content.to_vec();
    let checksum = blake3::hash(&content[header..]);
    if let Some(place) = content.get_mut(32..64) {
        place.copy_from_slice(checksum.as_bytes());
    }
    file.extend(blake3::hash(&content[..header]).as_bytes());
    file.extend(content);
    open_and_draft(file);
}

fn open_and_draft(bytes: Vec<u8>) {
    let tail: Vec<u32> = bytes.iter().rev().take(16).map(|&byte| byte.into()).collect();
    let Ok(pool) = Pool::open(bytes.into()) else {
        return;
    };
    // Damage may or may not be found here; drafting must be safe without.
    let _ = pool.verify();
    draft(&pool, &tail);
}

/// Drafts from a pool in every way after these tokens.
pub(crate) fn draft(pool: &Pool, tail: &[u32]) {
    let end_of_text = pool.meta().end_of_text;
    let mut tree = DraftTree::new();
    for drafter in [Drafter::default(), Drafter::RawFrequency { max_ngram: 4 }] {
        let mut context = DraftContext::new(drafter, Some(pool.clone()), end_of_text);
        for token in tail {
            context.extend(&[*token % pool.meta().vocab_size]);
            context.draft(16, &mut tree);
            assert!(tree.tokens()[1..].iter().all(|&token| token < pool.meta().vocab_size));
        }
    }
    assert!(pool.top_branches(2, 4).len() <= 4);
}
