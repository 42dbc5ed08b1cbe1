//! What the kernel of [tree attention](crate::attention) works on, as `engine/cuda/tree.cu` reads it.

use laser_cpu::{Batch, Span};

use crate::arena::number;

/// Queries of a tile, as in tree.cu.
pub(super) const QUERIES: usize = 8;

/// Words of a tile: those of `Tile` in tree.cu.
const TILE: usize = 6;

/// The tiles of all blocks, then row numbers and ancestors' bits of each sequence; and how many tiles.
///
/// `committed` are the rows of each sequence of the batch, whose nodes have the rows from `start` on. `shared` heads
/// have one key head: a sequence's queries are its nodes times these.
pub(super) fn tree_plan<'a>(
    batch: &Batch<'_>,
    committed: impl Iterator<Item = &'a [u32]>,
    (start, shared): (usize, usize),
) -> (Vec<u32>, usize) {
    let queries = |span: &Span<'_>| span.parents.len() * shared;
    let tiles = batch.spans.iter().map(|span| queries(span).div_ceil(QUERIES)).sum();
    let (mut plan, mut words) = (Vec::new(), Vec::new());
    for (span, committed) in batch.spans.iter().zip(committed) {
        let nodes = span.parents.len();
        let rows = TILE * tiles + words.len();
        words.extend_from_slice(&committed[..span.cached]);
        words.extend((number(start + span.offset)..).take(nodes));
        let bits = TILE * tiles + words.len();
        (0..nodes).for_each(|node| words.extend(seen(span, node)));
        for first in (0..queries(span)).step_by(QUERIES) {
            plan.extend([span.offset, nodes, span.cached, rows, bits, first].map(number));
        }
    }
    plan.append(&mut words);
    (plan, tiles)
}

/// The nodes of a sequence that a node sees, in words of 32.
#[expect(clippy::cast_possible_truncation, reason = "a word is half of one of 64 bits")]
fn seen(span: &Span<'_>, node: usize) -> impl Iterator<Item = u32> {
    let hidden = span.hidden(node);
    let nodes = span.parents.len();
    (0..nodes.div_ceil(32)).map(move |word| {
        let bits = (hidden[word / 2] >> (word % 2 * 32)) as u32;
        let exist = u32::MAX >> (32 - (nodes - 32 * word).min(32));
        !bits & exist
    })
}

#[cfg(test)]
mod tests {
    use laser_decode::ROOT_PARENT;
    use proptest::prelude::*;

    use super::*;

    /// A sequence: its committed rows, and its nodes' parents.
    type Tree = (Vec<u32>, Vec<u32>);

    fn tree() -> impl Strategy<Value = Tree> {
        let parents = proptest::collection::vec(any::<u32>(), 1..150).prop_map(|picks| {
            let parent =
                |(node, pick): (usize, u32)| (pick as usize % (node + 1)).checked_sub(1).map_or(ROOT_PARENT, number);
            picks.into_iter().enumerate().map(parent).collect()
        });
        (proptest::collection::vec(0..9_000_u32, 0..90), parents)
    }

    /// What a query of tree.cu sees: the node and head that it is, and rows.
    fn queries_of(plan: &[u32], tile: usize, shared: usize) -> Vec<(usize, usize, Vec<u32>)> {
        let [offset, nodes, cached, rows, bits, first] = std::array::from_fn(|word| plan[TILE * tile + word] as usize);
        let count = QUERIES.min(nodes * shared - first);
        (first..first + count)
            .map(|query| {
                let (node, words) = (query / shared, nodes.div_ceil(32));
                let sees = |other: &usize| plan[bits + node * words + other / 32] >> (other % 32) & 1 == 1;
                let seen = (0..cached).chain((0..nodes).filter(sees).map(|other| cached + other));
                (offset + node, query % shared, seen.map(|position| plan[rows + position]).collect())
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_query_is_in_one_tile_and_sees_its_context_and_ancestors(
            trees in proptest::collection::vec(tree(), 1..6),
            start in 0..500_usize,
            shared in 1..9_usize,
        ) {
            let mut batch = Batch::default();
            for (committed, parents) in &trees {
                batch.push(&vec![0; parents.len()], parents, 0, committed.len(), None);
            }
            // Rows of a sequence may go on behind what is cached for this step.
            let rows: Vec<Vec<u32>> = trees.iter().map(|tree| [tree.0.as_slice(), &[77]].concat()).collect();
            let (plan, tiles) = tree_plan(&batch, rows.iter().map(Vec::as_slice), (start, shared));
            let mut found = (0..tiles).flat_map(|tile| queries_of(&plan, tile, shared));
            let mut offset = 0;
            for (committed, parents) in &trees {
                for node in 0..parents.len() {
                    let mut expected = vec![number(start + offset + node)];
                    let mut at = parents[node];
                    while at != ROOT_PARENT {
                        expected.push(number(start + offset) + at);
                        at = parents[at as usize];
                    }
                    expected.extend(committed.iter().rev());
                    expected.reverse();
                    for head in 0..shared {
                        prop_assert_eq!(found.next(), Some((offset + node, head, expected.clone())));
                    }
                }
                offset += parents.len();
            }
            prop_assert_eq!(found.next(), None);
        }
    }
}
