//! Damaged, cut, foreign and hostile files.

use super::*;

/// Returns the file with its checksums corrected after a change.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let content = content_at().min(bytes.len());
    seal(&mut bytes, CONTENT_HASH, content);
    bytes
}

/// Offset of the content of [`small_trie`].
fn content_at() -> usize {
    sections()[0]
}

/// Where the sections of [`small_trie`] begin.
fn sections() -> [usize; 7] {
    Trie::open(small_trie().into()).unwrap().header.sections
}

#[test]
fn unaligned_bytes_are_read_as_well() {
    let file = small_trie();
    for shift in 0..4 {
        let mut bytes = vec![0; shift];
        bytes.extend(&file);
        let trie = Trie::open(Bytes::from(bytes).slice(shift..)).unwrap();
        assert_eq!((trie.verify(), trie.children(2)), (Ok(()), 4..6));
    }
}

#[test]
fn every_flipped_bit_is_refused_and_reads_no_worse_than_wrongly_until_then() {
    let (file, content_at) = (small_trie(), content_at());
    for (at, bit) in (0..file.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        let mut bytes = file.clone();
        bytes[at] ^= 1 << bit;
        let opened = Trie::open(bytes.into());
        assert_eq!(opened.is_ok(), at >= content_at, "byte {at}");
        if let Ok(trie) = opened {
            assert!(matches!(trie.verify(), Err(TrieError::Checksum { .. })), "byte {at}");
            open_and_read::read(&trie);
        }
    }
}

#[test]
fn every_truncation_and_a_tail_are_refused() {
    let file = small_trie();
    let whole = file.len() as u64;
    for len in 0..file.len() {
        assert!(Trie::open(file[..len].to_vec().into()).is_err(), "{len} bytes");
        if len >= header::HEADER {
            let cut = Trie::open(sealed(file[..len].to_vec()).into()).unwrap_err();
            assert_eq!(cut, TrieError::Length { expected: whole, found: len as u64 });
        }
    }
    let long = Trie::open(sealed([file, vec![0; 4]].concat()).into()).unwrap_err();
    assert_eq!(long, TrieError::Length { expected: whole, found: whole + 4 });
}

#[test]
fn foreign_files_are_refused_for_what_they_are() {
    let with = |at: usize, new: &[u8]| {
        let mut bytes = small_trie();
        bytes[at..at + new.len()].copy_from_slice(new);
        Trie::open(sealed(bytes).into()).unwrap_err()
    };
    assert_eq!(with(0, b"LASRPOOL"), TrieError::Magic(*b"LASRPOOL"));
    assert_eq!(with(8, &[9]), TrieError::Version(9));
    assert_eq!(with(12, &BYTE_ORDER.to_be_bytes()), TrieError::ByteOrder);
    assert_eq!(Trie::open(Bytes::new()).unwrap_err(), TrieError::Magic([0; 8]));
    assert_eq!(
        Trie::open(small_trie()[..50].to_vec().into()).unwrap_err(),
        TrieError::Length { expected: 108, found: 50 }
    );
}

#[test]
fn hostile_headers_under_a_right_checksum_are_refused() {
    let name = header::HEADER;
    let level = name + 4 + small_table().meta().name.len();
    // What the words mean is in docs/formats.md.
    let cases: [(usize, u32, &str); 15] = [
        (80, 1, "expected 1"),
        (84, 1, "expected 42949"),
        (88, u32::MAX, "expected 4294967295"),
        (92, 0, "does not end after the code tables"),
        (92, 1, "does not end after the code tables"),
        (92, 3, "ends within the code tables"),
        (92, 17, "17 levels"),
        (96, 2, "integer ids 2"),
        (100, 2, "[2, 3] nodes and 2 items"),
        (100, 5, "its sections end at"),
        (100, u32::MAX, "nodes and 4294967295 items"),
        (104, 6, "its sections end at"),
        (name, u32::MAX, "ends within the code tables"),
        (level, 0, "[0, 3] nodes"),
        (level, u32::MAX, "[4294967295, 3] nodes"),
    ];
    for (at, word, expected) in cases {
        let mut bytes = small_trie();
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        let error = Trie::open(sealed(bytes).into()).unwrap_err().to_string();
        assert!(error.contains(expected), "{at}: {error}");
    }
    let mut short = small_trie();
    short[88] = 100;
    seal(&mut short, CONTENT_HASH, header::HEADER);
    let error = Trie::open(short.into()).unwrap_err().to_string();
    assert!(error.contains("a header of 100 bytes"), "{error}");
    for (at, byte, expected) in [
        (name + 4, 0xff, "not UTF-8"),
        (level + 8 + 7, b'1', "the code \"<a_1>\" twice"),
        (content_at() - 1, 1, "does not end after the code tables"),
    ] {
        let mut bytes = small_trie();
        bytes[at] = byte;
        let error = Trie::open(sealed(bytes).into()).unwrap_err().to_string();
        assert!(error.contains(expected), "{at}: {error}");
    }
}

#[test]
fn hostile_content_under_a_right_checksum_is_refused() {
    let [firsts, items, starts, by_id, codes, ids, _] = sections();
    let cases: [(usize, u16, &str); 17] = [
        (firsts, 2, "the children of node 0 do not begin at node 1"),
        (firsts + 4, 4, "the children of node 1 do not begin at node 3"),
        (firsts + 8, 3, "a node above the leaves has no children"),
        (firsts + 12, 5, "the children of node 3 do not begin at node 6"),
        (items, 1, "the leaves do not share out the 4 items"),
        (items + 4, 2, "the leaves do not share out the 4 items"),
        (items + 12, 3, "the leaves do not share out the 4 items"),
        (starts, 1, "the ids do not share out their 5 bytes"),
        (starts + 4, 3, "the ids do not share out their 5 bytes"),
        (starts + 16, 4, "the ids do not share out their 5 bytes"),
        (by_id, 4, "the index of ids is not in order"),
        (by_id, 2, "the index of ids is not in order"),
        (codes, 1, "the root has a code"),
        (codes + 2, 1, "siblings are not in the order of their codes"),
        (codes + 10, 3, "a node has code 3 at level 2, whose table has 3 codes"),
        (ids, 0x7780, "the id of item 0 is not UTF-8"),
        (ids, 0x7777, "the index of ids is not in order, or an id is there twice"),
    ];
    for (at, word, expected) in cases {
        let mut bytes = small_trie();
        bytes[at..at + 2].copy_from_slice(&word.to_le_bytes());
        let trie = Trie::open(sealed(bytes).into()).unwrap();
        let error = trie.verify().unwrap_err().to_string();
        assert!(error.contains(expected), "{at}: {error}");
        open_and_read::read(&trie);
    }
}

#[test]
fn ids_that_should_be_integers_are_checked() {
    let mut bytes = small_trie();
    bytes[96] = 1;
    let error = checked(sealed(bytes)).unwrap_err().to_string();
    assert!(error.contains("the id of item 0 is not an integer"), "{error}");
}
