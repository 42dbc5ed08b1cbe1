//! What the kernel of [tree attention](crate::attention) works on, as `engine/cuda/tree.cu` reads it.

use laser_cpu::{Batch, Span};

use crate::arena::number;

/// Words of a tile: those of `Tile` in tree.cu.
const TILE: usize = 7;

/// Blocks that a multiprocessor has room for, for the largest heads of tree_tensor.cu.
const BLOCKS: usize = 2;

/// Rows of the longest context that each block has which shares it, at least: of fewer, reading what the others found
/// would be a good part of the work.
const PART_ROWS: usize = 128;

/// Blocks that share a context, at most: one of them reads what all found.
const SPLITS_MAX: usize = 32;

/// How many blocks share each context of a step that would have `blocks` if they did not, and this longest context.
pub(super) fn splits(blocks: usize, longest: usize, multiprocessors: usize) -> usize {
    let room = split_blocks(multiprocessors) / blocks.max(1);
    room.min(longest / PART_ROWS).clamp(1, SPLITS_MAX)
}

/// Blocks of a step that share contexts, at most.
pub(super) fn split_blocks(multiprocessors: usize) -> usize {
    BLOCKS * multiprocessors
}

/// The tiles of all blocks, then row numbers and ancestors' bits of each sequence; and how many tiles.
///
/// `known` are the rows of each sequence of the batch, held nodes included, whose new nodes have the rows from `start`
/// on. `shared` heads have one key head: a sequence's queries are its nodes times these, and a tile has `width` of
/// them.
pub(super) fn tree_plan<'a>(
    batch: &Batch<'_>,
    known: impl Iterator<Item = &'a [u32]>,
    (start, shared): (usize, usize),
    width: usize,
) -> (Vec<u32>, usize) {
    let queries = |span: &Span<'_>| span.parents.len() * shared;
    let tiles = batch.spans.iter().map(|span| queries(span).div_ceil(width)).sum();
    let (mut plan, mut words) = (Vec::new(), Vec::new());
    for (span, known) in batch.spans.iter().zip(known) {
        let nodes = span.parents.len();
        let rows = TILE * tiles + words.len();
        words.extend_from_slice(&known[..span.cached + span.held]);
        words.extend((number(start + span.offset)..).take(nodes));
        let bits = TILE * tiles + words.len();
        (0..nodes).for_each(|node| words.extend(seen(span, node)));
        for first in (0..queries(span)).step_by(width) {
            plan.extend([span.offset, nodes, span.cached, span.held, rows, bits, first].map(number));
        }
    }
    plan.append(&mut words);
    (plan, tiles)
}

/// The nodes of a sequence's tree that a node sees, in words of 32.
#[expect(clippy::cast_possible_truncation, reason = "a word is half of one of 64 bits")]
fn seen(span: &Span<'_>, node: usize) -> impl Iterator<Item = u32> {
    let hidden = span.hidden(node);
    let nodes = span.tree();
    (0..nodes.div_ceil(32)).map(move |word| {
        let bits = (hidden[word / 2] >> (word % 2 * 32)) as u32;
        let exist = u32::MAX >> (32 - (nodes - 32 * word).min(32));
        !bits & exist
    })
}

#[cfg(test)]
mod tests {
    use laser_cpu::{Asked, Tree};
    use laser_decode::ROOT_PARENT;
    use proptest::prelude::*;

    use super::*;

    /// A sequence: its committed rows, its nodes' parents, and how many of these are held.
    type Sequence = (Vec<u32>, Vec<u32>, usize);

    fn tree() -> impl Strategy<Value = Sequence> {
        let parents = proptest::collection::vec(any::<u32>(), 1..150).prop_map(|picks| {
            let parent =
                |(node, pick): (usize, u32)| (pick as usize % (node + 1)).checked_sub(1).map_or(ROOT_PARENT, number);
            picks.into_iter().enumerate().map(parent).collect::<Vec<u32>>()
        });
        let tree = (proptest::collection::vec(0..9_000_u32, 0..90), parents, any::<prop::sample::Index>());
        tree.prop_map(|(committed, parents, held)| {
            let held = held.index(2 * parents.len()) % parents.len();
            (committed, parents, held)
        })
    }

    /// What a query of tree.cu sees: the node and head that it is, and rows.
    fn queries_of(plan: &[u32], (tile, width): (usize, usize), shared: usize) -> Vec<(usize, usize, Vec<u32>)> {
        let [offset, nodes, cached, held, rows, bits, first] =
            std::array::from_fn(|word| plan[TILE * tile + word] as usize);
        let count = width.min(nodes * shared - first);
        (first..first + count)
            .map(|query| {
                let (node, words) = (query / shared, (held + nodes).div_ceil(32));
                let sees = |other: &usize| plan[bits + node * words + other / 32] >> (other % 32) & 1 == 1;
                let seen = (0..cached).chain((0..held + nodes).filter(sees).map(|other| cached + other));
                (offset + node, query % shared, seen.map(|position| plan[rows + position]).collect())
            })
            .collect()
    }

    #[test]
    fn few_blocks_share_long_contexts() {
        let of_132 = |blocks, longest| splits(blocks, longest, 132);
        // A node of one sequence with 8 key heads, then 16 nodes of one with groups of four.
        assert_eq!([255, 256, 616, 3_000, 16_000].map(|longest| of_132(8, longest)), [1, 2, 4, 23, 32]);
        assert_eq!([255, 256, 616, 3_000, 16_000].map(|longest| of_132(32, longest)), [1, 2, 4, 8, 8]);
        assert_eq!([0, 1, 132, 133, 264, 265, 512].map(|blocks| of_132(blocks, 16_000)), [32, 32, 2, 1, 1, 1, 1]);
        assert_eq!(of_132(0, 0), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn blocks_that_share_contexts_have_room_and_rows(
            blocks in 1..600_usize,
            longest in 0..20_000_usize,
            multiprocessors in 1..200_usize,
        ) {
            let found = splits(blocks, longest, multiprocessors);
            let room = split_blocks(multiprocessors);
            let fits = |splits| splits <= SPLITS_MAX && blocks * splits <= room && splits * PART_ROWS <= longest;
            prop_assert!(found == 1 || fits(found));
            prop_assert!(found > 0 && !fits(found + 1));
        }

        #[test]
        fn every_query_is_in_one_tile_and_sees_its_context_and_ancestors(
            trees in proptest::collection::vec(tree(), 1..6),
            start in 0..500_usize,
            shared in 1..9_usize,
            width in 1..17_usize,
        ) {
            let mut batch = Batch::default();
            for (committed, parents, held) in &trees {
                let (held, new) = parents.split_at(*held);
                let known = Tree { cached: committed.len(), held };
                batch.push((&vec![0; new.len()], new), 0, known, (None, Asked::default()));
            }
            // Held nodes have rows of their own. Rows of a sequence may go on behind what is cached for this step.
            let held_row = |node: usize| 10_000 + number(node);
            let row_of = |(committed, _, held): &Sequence| -> Vec<u32> {
                committed.iter().copied().chain((0..*held).map(held_row)).chain([77]).collect()
            };
            let rows: Vec<Vec<u32>> = trees.iter().map(row_of).collect();
            let (plan, tiles) = tree_plan(&batch, rows.iter().map(Vec::as_slice), (start, shared), width);
            let mut found = (0..tiles).flat_map(|tile| queries_of(&plan, (tile, width), shared));
            let mut offset = 0;
            for (committed, parents, held) in &trees {
                let new_row = |new: usize| number(start + offset + new);
                let row = |node: usize| node.checked_sub(*held).map_or(held_row(node), new_row);
                for node in *held..parents.len() {
                    let mut expected = vec![row(node)];
                    let mut at = parents[node];
                    while at != ROOT_PARENT {
                        expected.push(row(at as usize));
                        at = parents[at as usize];
                    }
                    expected.extend(committed.iter().rev());
                    expected.reverse();
                    for head in 0..shared {
                        prop_assert_eq!(found.next(), Some((offset + node - held, head, expected.clone())));
                    }
                }
                offset += parents.len() - held;
            }
            prop_assert_eq!(found.next(), None);
        }
    }
}
