//! Pool files and their search, against naive counts; damage is refused.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::frequent::{FREQUENT, NONE};
use crate::sealed::BYTE_ORDER;
use crate::suffix::{Match, Matches};
use crate::{DraftContext, DraftTree, Drafter, build_pool};

#[path = "../../fuzz/open_and_draft.rs"]
pub(crate) mod open_and_draft;

use open_and_draft::draft;

/// The token that ends a text in all tests.
pub(crate) const END: Token = 0;

pub(crate) fn meta() -> PoolMeta {
    PoolMeta { name: "films".to_owned(), tokenizer: [7; 32], vocab_size: 100, end_of_text: END }
}

pub(crate) fn pool_of(texts: &[Vec<Token>]) -> Pool {
    checked(build_pool(&meta(), texts.to_vec()).unwrap()).unwrap()
}

/// Texts over the tokens 1..=alphabet.
pub(crate) fn any_texts(alphabet: Token, texts: usize, len: usize) -> impl Strategy<Value = Vec<Vec<Token>>> {
    let text = prop::collection::vec(1..=alphabet, 0..len);
    prop::collection::vec(text, 0..texts)
}

/// Counts how often each token follows `context` in texts that end with `END`.
pub(crate) fn continuations(texts: &[Vec<Token>], context: &[Token]) -> BTreeMap<Token, usize> {
    let mut found = BTreeMap::new();
    for text in texts {
        for window in text.windows(context.len() + 1) {
            if let Some(next) = window.strip_prefix(context) {
                *found.entry(next[0]).or_insert(0) += 1;
            }
        }
    }
    found
}

pub(crate) fn ended(texts: &[Vec<Token>]) -> Vec<Vec<Token>> {
    texts.iter().map(|text| text.iter().copied().chain([END]).collect()).collect()
}

/// Offset of the content of a file with the name of [`meta`].
const CONTENT: usize = 164;

/// Tokens to draft after: of [`small_pool`] and others.
const TAIL: [Token; 11] = [1, 2, 3, 1, 2, END, 1, 2, 3, 1, 99];

/// Opens and verifies.
fn checked(bytes: Vec<u8>) -> Result<Pool, PoolError> {
    let pool = Pool::open(bytes.into())?;
    pool.verify().map(|()| pool)
}

/// Returns the file with its checksums corrected after a change.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let content = bytes.len().min(CONTENT);
    crate::sealed::seal(&mut bytes, CONTENT_HASH, content);
    bytes
}

fn small_pool() -> Vec<u8> {
    build_pool(&meta(), [vec![1, 2, 3, 1, 2], vec![1, 2, 4]]).unwrap()
}

#[test]
fn what_was_built_is_what_opens() {
    let pool = Pool::open(small_pool().into()).unwrap();
    assert_eq!(pool.meta(), &meta());
    assert_eq!((pool.name(), pool.texts(), pool.tokens()), ("films", 2, 10));
    assert_eq!(pool.suffixes().tokens, [1, 2, 3, 1, 2, END, 1, 2, 4, END]);
    // Five distinct tokens and the end of the list in 12 bytes each, 2 buckets of 64 tokens,
    // no frequent context.
    assert_eq!(pool.size_bytes(), CONTENT + 8 * 10 + 12 * 6 + 4 * 2 + 16);
    assert_eq!(small_pool(), small_pool());
    assert_eq!(pool.digest(), Pool::open(small_pool().into()).unwrap().digest());
    assert_ne!(pool.digest(), pool_of(&[vec![1]]).digest());
}

#[test]
fn empty_pools_build_open_and_draft_nothing() {
    for texts in [vec![], vec![vec![]]] {
        let pool = pool_of(&texts);
        assert_eq!((pool.texts(), pool.tokens()), (texts.len(), texts.len()));
        draft(&pool, &TAIL);
    }
}

#[test]
fn texts_are_cut_after_an_end_of_text_of_their_own() {
    let cut = build_pool(&meta(), [vec![1, 2, END], vec![3, END, 4]]).unwrap();
    assert_eq!(cut, build_pool(&meta(), [vec![1, 2], vec![3]]).unwrap());
}

#[test]
fn unaligned_bytes_are_read_as_well() {
    let file = small_pool();
    for shift in 0..4 {
        let mut bytes = vec![0; shift];
        bytes.extend(&file);
        let pool = Pool::open(Bytes::from(bytes).slice(shift..)).unwrap();
        assert_eq!(pool.suffixes().ranks, Pool::open(file.clone().into()).unwrap().suffixes().ranks);
    }
}

#[test]
fn every_flipped_byte_is_refused_and_drafts_no_worse_than_badly_until_then() {
    let file = small_pool();
    for at in 0..file.len() {
        let mut bytes = file.clone();
        bytes[at] ^= 0x10;
        let opened = Pool::open(bytes.into());
        assert_eq!(opened.is_ok(), at >= CONTENT, "byte {at}");
        if let Ok(pool) = opened {
            assert!(matches!(pool.verify(), Err(PoolError::Checksum { .. })), "byte {at}");
            draft(&pool, &TAIL);
        }
    }
}

#[test]
fn every_truncation_and_a_tail_are_refused() {
    let file = small_pool();
    let whole = file.len() as u64;
    for len in 0..file.len() {
        assert!(Pool::open(file[..len].to_vec().into()).is_err(), "{len} bytes");
        if len >= HEADER {
            let cut = Pool::open(sealed(file[..len].to_vec()).into()).unwrap_err();
            assert!(matches!(cut, PoolError::Length { expected, .. } if expected == whole), "{len} bytes: {cut}");
        }
    }
    let long = Pool::open(sealed([file, vec![0; 4]].concat()).into()).unwrap_err();
    assert_eq!(long, PoolError::Length { expected: whole, found: whole + 4 });
}

#[test]
fn foreign_files_are_refused_for_what_they_are() {
    let with = |at: usize, new: &[u8]| {
        let mut bytes = small_pool();
        bytes[at..at + new.len()].copy_from_slice(new);
        Pool::open(sealed(bytes).into()).unwrap_err()
    };
    let magic = with(0, b"PAR1");
    assert_eq!(magic, PoolError::Magic(*b"PAR1POOL"));
    assert_eq!(with(8, &[9]), PoolError::Version(9));
    assert_eq!(with(12, &BYTE_ORDER.to_be_bytes()), PoolError::ByteOrder);
    let empty = Pool::open(Bytes::new()).unwrap_err();
    assert_eq!(empty, PoolError::Magic([0; 8]));
}

#[test]
fn hostile_content_under_a_right_checksum_is_refused() {
    let cases: [(usize, u32, &str); 8] = [
        (112, 0, "expected 336"),
        (112, 200, "expected 348"),
        (CONTENT, 100, "not below the vocabulary's 100"),
        (116, 2, "3 end-of-text tokens for 2"),
        (116, 100, "end-of-text token 100"),
        (120, 3, "2 end-of-text tokens for 3"),
        (152, u32::MAX, "expected 4294967628"),
        (CONTENT + 76, 10, "at or beyond the 10"),
    ];
    for (at, word, expected) in cases {
        let mut bytes = small_pool();
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        let error = checked(sealed(bytes)).unwrap_err().to_string();
        assert!(error.contains(expected), "{at}: {error}");
    }
}

#[test]
fn unsorted_suffixes_draft_without_panic() {
    for seed in 0..10 {
        let mut bytes = small_pool();
        for (i, word) in (0u32..).zip(bytes[CONTENT + 40..CONTENT + 80].chunks_exact_mut(4)) {
            word.copy_from_slice(&((i * 7 + seed) % 10).to_le_bytes());
        }
        draft(&Pool::open(sealed(bytes).into()).unwrap(), &TAIL);
    }
}

#[test]
fn another_tokenizer_is_refused_by_name() {
    let pool = pool_of(&[]);
    assert_eq!(pool.expect_tokenizer(&[7; 32]), Ok(()));
    let error = pool.expect_tokenizer(&[8; 32]).unwrap_err().to_string();
    for part in ["pool films", &"07".repeat(32), &"08".repeat(32)] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn tokens_and_vocabularies_out_of_range_are_not_built() {
    let error = build_pool(&meta(), [vec![1], vec![2, 100]]).unwrap_err().to_string();
    assert!(error.contains("text 1 has token 100 at index 1"), "{error}");
    for (vocab_size, end_of_text) in [(0, 0), (10, 10), (VOCABULARY_MAX + 1, 0)] {
        let meta = PoolMeta { vocab_size, end_of_text, ..meta() };
        let error = build_pool(&meta, Vec::<Vec<Token>>::new()).unwrap_err().to_string();
        assert!(error.contains(&format!("vocabulary of {vocab_size} tokens")), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn matches_equal_naive_counts(
        texts in any_texts(3, 6, 30),
        context in prop::collection::vec(1..=4u32, 1..20),
        order in 1..10usize,
    ) {
        let pool = pool_of(&texts);
        let texts = ended(&texts);
        let suffixes = pool.suffixes();
        let (mut arena, mut known) = (Vec::new(), Matches::default());
        for end in 1..=context.len() {
            known = suffixes.advance(&mut arena, &known, context[end - 1], order);
            let matches = &arena[known.at.clone()];
            prop_assert!(matches.windows(2).all(|m| m[0].len < m[1].len && m[0].count() > m[1].count()));
            for len in 1..=order.min(end) {
                let expected = continuations(&texts, &context[end - len..end]);
                let total: usize = expected.values().sum();
                prop_assert_eq!(total > 0, len <= known.longest);
                let Some(found) = matches.iter().rev().find(|m| m.len <= len) else { continue };
                if total == 0 {
                    continue;
                }
                prop_assert_eq!(found.count(), total);
                let mut children = BTreeMap::new();
                let mut read = Vec::new();
                let listed = suffixes.children(*found, 0.0, &mut read);
                for (at, &[token, _, count]) in listed.branches.iter().enumerate() {
                    children.insert(token, count as usize);
                    prop_assert_eq!(Some(listed.found(*found, at)), suffixes.child(*found, token));
                }
                prop_assert_eq!(&children, &expected);
                for (&token, &count) in &expected {
                    prop_assert_eq!(suffixes.child(*found, token).map(|child| child.count()), Some(count));
                }
            }
        }
    }

    // Long texts of few tokens, so that most short contexts have tables.
    #[test]
    fn tables_list_every_frequent_child_with_its_matches(
        texts in any_texts(3, 8, 200),
        least in 2..20u32,
    ) {
        let pool = pool_of(&texts);
        let (suffixes, texts) = (pool.suffixes(), ended(&texts));
        let mut open: Vec<(Vec<Token>, Match)> = Vec::new();
        open.extend((1..=3).filter_map(|token| Some((vec![token], suffixes.single(token)?))));
        while let Some((context, found)) = open.pop() {
            let expected = continuations(&texts, &context);
            let (most, distinct) = suffixes.most(found);
            prop_assert!(expected.values().all(|&count| count <= most as usize));
            prop_assert!(distinct as usize <= expected.len());
            prop_assert_eq!(found.table == NONE, found.count < FREQUENT);
            let mut read = Vec::new();
            let children = suffixes.children(found, least as f32, &mut read);
            for (at, &[token, _, count]) in children.branches.iter().enumerate() {
                prop_assert_eq!(expected[&token], count as usize);
                let child = children.found(found, at);
                prop_assert_eq!(suffixes.child(found, token), Some(child));
                if token != END && context.len() < 5 {
                    open.push(([&context[..], &[token]].concat(), child));
                }
            }
            let listed = |token: &Token| children.branches.iter().any(|branch| branch[0] == *token);
            let total: usize = expected.values().sum();
            let enough = |count: usize| count >= least as usize && count * 128 >= total;
            let frequent = expected.iter().filter(|&(_, &count)| enough(count));
            prop_assert!(frequent.into_iter().all(|(token, _)| listed(token)));
        }
    }

    #[test]
    fn top_branches_equal_naive_counts(texts in any_texts(3, 6, 20), len in 1..5usize) {
        let pool = pool_of(&texts);
        let mut counts: BTreeMap<Vec<Token>, u32> = BTreeMap::new();
        for text in ended(&texts) {
            for branch in text.windows(len) {
                *counts.entry(branch.to_vec()).or_default() += 1;
            }
        }
        let mut expected: Vec<_> = counts.into_iter().collect();
        expected.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        expected.truncate(5);
        prop_assert_eq!(pool.top_branches(len, 5), expected);
    }
}
