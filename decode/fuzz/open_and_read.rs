//! The body of the fuzz target `trie_open`, which Laser's own tests run too, on inputs that proptest makes
//! (src/trie/tests.rs, src/trie/fuzz.rs). Whoever includes it imports what it uses.

use super::{Allowed, Seen, Stock, Trie};

/// Opening arbitrary bytes as a trie never panics, nor does reading a trie that opened.
///
/// Every input is tried as it is, and again behind a right preamble and with right checksums, which no fuzzer would
/// guess (docs/formats.md).
pub(crate) fn run(content: &[u8]) {
    open_and_read(content.to_vec());
    let mut file = b"LASRTRIE\x01\0\0\0\x04\x03\x02\x01".to_vec();
    // The offset of the content in the file, 48 bytes before which this input begins.
    let header = content.get(40..42).map_or(0, |at| usize::from(at[0]) + 256 * usize::from(at[1]));
    let header = header.saturating_sub(48).min(content.len());
    let mut content = content.to_vec();
    let checksum = blake3::hash(&content[header..]);
    if let Some(place) = content.get_mut(..32) {
        place.copy_from_slice(checksum.as_bytes());
    }
    file.extend(blake3::hash(&content[..header]).as_bytes());
    file.extend(content);
    open_and_read(file);
}

fn open_and_read(bytes: Vec<u8>) {
    let Ok(trie) = Trie::open(bytes.into()) else {
        return;
    };
    // Damage may or may not be found here; reading must be safe without.
    let _ = trie.verify();
    read(&trie);
}

/// Numbers below `end`, and some that are not.
fn and_beyond(end: usize) -> impl Iterator<Item = u32> {
    (0..u32::MAX).take(end + 2).chain([u32::MAX - 1, u32::MAX])
}

/// Calls every function of a trie and of filters over it. What is out of bounds must not show.
pub(crate) fn read(trie: &Trie) {
    for node in and_beyond(trie.nodes()) {
        let (children, below) = (trie.children(node), trie.level(trie.depth(node) + 1));
        assert!(children.is_empty() || below.start <= children.start && children.end <= below.end);
        assert_eq!(trie.codes_of(children.clone()).len(), children.len());
        assert!(trie.leaves_below(node).end as usize <= trie.leaves());
        assert!(trie.parent(node).is_none_or(|parent| trie.depth(parent) + 1 == trie.depth(node)));
        let _ = (trie.child(node, trie.code(node)), trie.leaf_of_node(node));
    }
    for leaf in and_beyond(trie.leaves()) {
        assert!(trie.path(leaf).iter().zip(1..).all(|(&node, depth)| trie.depth(node) == depth));
        assert!(trie.items_of(leaf).end as usize <= trie.items());
    }
    for item in and_beyond(trie.items()) {
        assert!((trie.leaf_of_item(item) as usize) < trie.leaves());
        let _ = trie.find(trie.item_id(item));
    }
    let _ = trie.find_path(&vec![0; trie.levels() + 1]);
    let half = Stock::without(trie, and_beyond(trie.items()).filter(|item| item % 2 == 0));
    for stock in [Stock::all(trie), half] {
        search(&Allowed::new(trie, &stock, &Seen::new(trie, &stock, &[u32::MAX, 2, 0, 2])));
    }
}

/// A search with a beam of four.
fn search(allowed: &Allowed<'_>) {
    let trie = allowed.trie();
    let mut beam = vec![0];
    for depth in 1..=trie.levels() {
        for node in [&beam[..], &[u32::MAX]].concat() {
            let _ = (allowed.count_below(node), allowed.only_child(node));
        }
        beam = beam.iter().flat_map(|&node| allowed.children(node)).take(4).collect();
        assert!(beam.iter().all(|&node| trie.level(depth).contains(&node)));
    }
    for leaf in and_beyond(trie.leaves()) {
        assert!(!allowed.contains(leaf) || allowed.stock().contains(leaf));
        let _ = trie.items_of(leaf).filter(|&item| allowed.stock().contains_item(trie, item)).count();
    }
}
