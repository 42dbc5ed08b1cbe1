//! Attention of the trees of many sequences over panels of keys and values.

use std::ops::Range;

use rayon::prelude::*;

use crate::{
    batch::{Batch, Span},
    cache::{CpuCache, HeadCache, LEAST},
    shape::ModelShape,
    skinny::{Rows, vectorized},
    vector::{WIDE, by_lane, exp, exp_fused, halved, max, narrow, norm_in_place},
};

/// Nodes that attend at once: their scores (nodes × heads of a group × context) stay in the second-level cache.
const BLOCK: usize = 32;

/// The intermediate results of one key head of one sequence.
#[derive(Debug, Default)]
struct HeadBuffers {
    queries: Rows,
    scores: Rows,
    sums: Rows,
    sums_of_weights: Vec<f32>,
    tails: Tails,
    /// `[nodes, heads of the group · head_dim]`
    attended: Rows,
}

/// What is added row by row where positions are summed in pairs or blocks: the last ones of nodes that do not lie at
/// their positions.
#[derive(Debug, Default)]
struct Tails {
    /// Where the positions of such a block and of all behind it lie, and what they weigh.
    slots: Vec<usize>,
    weights: Vec<f32>,
    /// Rows that have some, and how many.
    rows: Vec<(usize, usize)>,
}

/// The intermediate results of attention; their memory is kept for the next step.
#[derive(Debug, Default)]
pub(crate) struct AttentionBuffers {
    heads: Vec<HeadBuffers>,
    /// `[rows of the batch, heads · head_dim]`
    pub(crate) attended: Rows,
}

impl AttentionBuffers {
    /// Appends the keys and values of one layer to the caches, and attends over them: every key head of every sequence
    /// on one thread, into `attended`.
    pub(crate) fn attend(
        &mut self,
        shape: &ModelShape,
        batch: &Batch<'_>,
        (layer, caches): (usize, &mut [CpuCache]),
        qkv: &Rows,
    ) {
        let (heads, dim) = (shape.kv_heads, shape.head_dim);
        let group = shape.heads / heads * dim;
        self.heads.resize_with(batch.spans.len() * heads, HeadBuffers::default);
        let spans = batch.spans.iter().zip(caches);
        let tasks = spans.flat_map(|(span, cache)| {
            let rows = cache.heads(layer);
            rows.enumerate().map(move |(head, rows)| (span, head, rows))
        });
        let mut tasks: Vec<_> = tasks.zip(&mut self.heads).collect();
        tasks.par_iter_mut().for_each(|((span, head, rows), own)| {
            attend_head(shape, span, *head, rows, qkv, own);
        });
        self.attended.reshape(qkv.rows(), shape.query_width());
        for (index, own) in self.heads.iter().enumerate() {
            let (span, head) = (&batch.spans[index / heads], index % heads);
            for node in 0..span.parents.len() {
                let to = self.attended.row_mut(span.offset + node);
                to[head * group..][..group].copy_from_slice(own.attended.row(node));
            }
        }
    }
}

/// Norms of single heads, and rotation of queries (also scaled by 1/√d) and keys of one row of q, k and v.
pub(crate) fn position_row(
    shape: &ModelShape,
    norms: Option<&(Vec<f32>, Vec<f32>)>,
    (cos, sin): (&[f32], &[f32]),
    row: &mut [f32],
) {
    let dim = shape.head_dim;
    let scale = 1.0 / (dim as f32).sqrt();
    let heads = row.chunks_exact_mut(dim).enumerate();
    for (head, data) in heads.take(shape.heads + shape.kv_heads) {
        let is_query = head < shape.heads;
        if let Some((query, key)) = norms {
            norm_in_place(data, if is_query { query } else { key }, shape.norm_eps);
        }
        let scale = if is_query { scale } else { 1.0 };
        let (low, high) = data.split_at_mut(dim / 2);
        for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let (cos, sin) = (cos * scale, sin * scale);
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// Appends the keys and values of the span's nodes to the cache of one key head, and attends over it.
fn attend_head(
    shape: &ModelShape,
    span: &Span<'_>,
    head: usize,
    cache: &mut HeadCache<'_>,
    qkv: &Rows,
    own: &mut HeadBuffers,
) {
    let (dim, nodes) = (shape.head_dim, span.parents.len());
    let group = shape.heads / shape.kv_heads;
    for node in 0..nodes {
        let row = &qkv.row(span.offset + node)[shape.heads * dim..];
        let (keys, values) = row.split_at(shape.kv_heads * dim);
        let position = span.cached + span.held + node;
        cache.write(position, &keys[head * dim..][..dim], &values[head * dim..][..dim]);
    }
    own.attended.reshape(nodes, group * dim);
    for start in (0..nodes).step_by(BLOCK) {
        let block = start..nodes.min(start + BLOCK);
        own.queries.reshape(block.len() * group, dim);
        for (index, node) in block.clone().enumerate() {
            let queries = &qkv.row(span.offset + node)[head * group * dim..];
            for (member, query) in queries.chunks_exact(dim).take(group).enumerate() {
                let to = own.queries.row_mut(index * group + member);
                to.copy_from_slice(query);
            }
        }
        attend_block(span, block, cache, group, own);
    }
}

/// Softmax attention of the queries of a block of nodes.
fn attend_block(span: &Span<'_>, block: Range<usize>, cache: &HeadCache<'_>, group: usize, own: &mut HeadBuffers) {
    let total = span.cached + span.held + block.end;
    cache.scores(total, &own.queries, &mut own.scores);
    own.sums_of_weights.clear();
    own.tails.clear();
    let together = cache.together();
    for row in 0..own.scores.rows() {
        let node = block.start + row / group;
        let sum = weigh(span, node, own.scores.row_mut(row), together > 1);
        own.sums_of_weights.push(sum);
        if together > 1 && !span.is_straight(node) {
            let first = span.cached - span.cached % together;
            own.tails.take(row, (first..span.cached).chain(span.path(node)), own.scores.row_mut(row));
            own.scores.row_mut(row)[first..].fill(0.0);
        }
    }
    cache.sums(total, &own.scores, &mut own.sums);
    own.tails.add(&mut own.sums, cache);
    for (row, weight) in own.sums_of_weights.iter().enumerate() {
        let sums = own.sums.row(row);
        let to = own.attended.row_mut(block.start + row / group);
        let to = to[row % group * sums.len()..].iter_mut();
        to.zip(sums).for_each(|(to, sum)| *to = sum / weight);
    }
}

impl Tails {
    fn clear(&mut self) {
        self.slots.clear();
        self.weights.clear();
        self.rows.clear();
    }

    /// Notes what the values in these slots weigh, which are in the order of their positions.
    fn take(&mut self, row: usize, slots: impl Iterator<Item = usize>, weights: &[f32]) {
        let before = self.slots.len();
        self.slots.extend(slots);
        self.weights.extend(self.slots[before..].iter().map(|slot| weights[*slot]));
        self.rows.push((row, self.slots.len() - before));
    }

    /// Adds them to the sums of what is before them.
    fn add(&self, sums: &mut Rows, cache: &HeadCache<'_>) {
        let mut first = 0;
        for &(row, count) in &self.rows {
            let own = first..first + count;
            cache.add_moved(&self.slots[own.clone()], &self.weights[own], sums.panels_mut(row));
            first += count;
        }
    }
}

/// Scores to softmax weights before the division by their sum, which is returned. What the node does not see has
/// weight 0.
fn weigh(span: &Span<'_>, node: usize, scores: &mut [f32], rounded: bool) -> f32 {
    let end = span.cached + span.held + node + 1;
    scores[end..].fill(0.0);
    let scores = &mut scores[..end];
    if !span.is_straight(node) {
        let hidden = span.hidden(node);
        for (node, score) in scores[span.cached..].iter_mut().enumerate() {
            if hidden[node / 64] >> (node % 64) & 1 == 1 {
                *score = f32::NEG_INFINITY;
            }
        }
    }
    if rounded { exponentials::<true>(scores) } else { exponentials::<false>(scores) }
}

vectorized! {
    /// Of each score the exponential of how much it is above the greatest, to bf16 if it is `ROUNDED`; returns their
    /// sum.
    fn exponentials[const ROUNDED: bool][ROUNDED] = row_exponentials(scores: &mut [f32]) -> f32;
}

#[inline(always)]
fn row_exponentials<const ROUNDED: bool>(scores: &mut [f32]) -> f32 {
    let max = max(scores);
    for score in scores.iter_mut() {
        *score = if ROUNDED { rounded(exp_fused(*score - max)) } else { exp(*score - max) };
    }
    let sums = by_lane(scores, [0.0_f64; WIDE / 2], |sum, weight| *sum += f64::from(weight));
    narrow(halved(sums, |sum, other| *sum += other))
}

/// The nearest bf16 of a number from 0 to 1, ties to even; nothing below [`LEAST`].
#[inline(always)]
fn rounded(weight: f32) -> f32 {
    let bits = weight.to_bits();
    let nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    if weight < LEAST { 0.0 } else { f32::from_bits(nearest) }
}

#[cfg(test)]
mod tests {
    use laser_decode::{ROOT_PARENT, chain_parents};
    use proptest::prelude::*;

    use super::*;
    use crate::{
        batch::{Asked, Tree},
        cache::CacheShape,
        shape::tests::tiny,
        skinny::{Format, Order},
    };

    /// Numbers of one row of q, k and v.
    fn row(seed: u64, shape: &ModelShape) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        // Scores differ by some ten: weights of all sizes.
        let width = shape.query_width() + 2 * shape.key_width();
        (0..width).map(|at| if at < shape.query_width() { 4.0 * next() } else { next() }).collect()
    }

    /// What tokens of these numbers attend to in a step behind `held` nodes.
    fn step(
        shape: &ModelShape,
        cache: &mut CpuCache,
        tree: Tree<'_>,
        (seeds, parents): (&[u64], &[u32]),
    ) -> Vec<Vec<f32>> {
        let mut batch = Batch::default();
        batch.push((&vec![0; seeds.len()], parents), 0, tree, (None, Asked::default()));
        let mut qkv = Rows::default();
        qkv.reshape(seeds.len(), shape.query_width() + 2 * shape.key_width());
        (seeds.iter().enumerate()).for_each(|(at, seed)| qkv.row_mut(at).copy_from_slice(&row(*seed, shape)));
        let mut buffers = AttentionBuffers::default();
        buffers.attend(shape, &batch, (0, std::slice::from_mut(cache)), &qkv);
        (0..seeds.len()).map(|at| buffers.attended.row(at).to_vec()).collect()
    }

    /// A cache that has these tokens, fed in chunks.
    fn context(shape: &ModelShape, cache: CacheShape, seeds: &[u64], chunk: usize) -> CpuCache {
        let mut cache = CpuCache::new(cache, 400);
        for (index, seeds) in seeds.chunks(chunk).enumerate() {
            let tree = Tree { cached: index * chunk, held: &[] };
            step(shape, &mut cache, tree, (seeds, &chain_parents(seeds.len()).collect::<Vec<_>>()));
        }
        cache
    }

    fn shapes() -> impl Strategy<Value = ModelShape> {
        let of = |(head_dim, group)| ModelShape { head_dim, heads: 2 * group, layers: 1, ..tiny() };
        (prop_oneof![Just(4), Just(32), Just(64)], 1..3_usize).prop_map(of)
    }

    /// A cache multiplied in each of the orders that it can be.
    fn orders(shape: CacheShape) -> impl Iterator<Item = CacheShape> + Clone {
        [Order::Single, Order::Pairs, Order::Tiles].into_iter().filter_map(move |order| shape.multiplied(order))
    }

    /// What the last of some tokens attends to, in f64.
    fn oracle(shape: &ModelShape, seeds: &[u64]) -> Vec<f64> {
        let (dim, group) = (shape.head_dim, shape.heads / shape.kv_heads);
        let rows: Vec<Vec<f64>> =
            seeds.iter().map(|seed| row(*seed, shape).into_iter().map(f64::from).collect()).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let last = rows.last().unwrap();
        let attended = (0..shape.heads).flat_map(|head| {
            let query = &last[head * dim..][..dim];
            let key = shape.query_width() + head / group * dim;
            let weights: Vec<f64> = rows.iter().map(|row| dot(query, &row[key..][..dim]).exp()).collect();
            let all: f64 = weights.iter().sum();
            let value = key + shape.key_width();
            let of = |at| rows.iter().zip(&weights).map(|(row, weight)| row[value + at] * weight).sum::<f64>() / all;
            (0..dim).map(of).collect::<Vec<_>>()
        });
        attended.collect()
    }

    #[test]
    fn attention_is_the_mean_of_values_by_their_weights() {
        for (head_dim, group) in [(4, 1), (32, 1), (64, 2)] {
            let shape = ModelShape { head_dim, heads: 2 * group, layers: 1, ..tiny() };
            let (wide, narrow) = (CacheShape::new(&shape, Format::F32), CacheShape::new(&shape, Format::Bf16));
            for (of_cache, most) in orders(narrow).map(|narrow| (narrow, 0.1)).chain([(wide, 1e-5)]) {
                for tokens in [1, 2, 31, 32, 33, 100, 161] {
                    let seeds: Vec<u64> = (0..tokens).collect();
                    let mut cache = context(&shape, of_cache, &seeds[..seeds.len() - 1], 50);
                    let tree = Tree { cached: seeds.len() - 1, held: &[] };
                    let got = step(&shape, &mut cache, tree, (&seeds[seeds.len() - 1..], &[ROOT_PARENT]));
                    for (got, expected) in got[0].iter().zip(oracle(&shape, &seeds)) {
                        let error = (f64::from(*got) - expected).abs();
                        assert!(error < most, "{tokens} tokens, heads of {head_dim}: off by {error}");
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_node_attends_like_the_last_token_of_its_path(
            shape in shapes(),
            format in prop_oneof![Just(Format::F32), Just(Format::Bf16)],
            order in 0..3_usize,
            (cached, chunk) in (1..130_usize, 1..50_usize),
            links in prop::collection::vec(prop_oneof![Just(None), Just(Some(1)), (1..40_u32).prop_map(Some)], 1..80),
            held in 0..40_usize,
        ) {
            let of_cache = CacheShape::new(&shape, format);
            let of_cache = orders(of_cache).cycle().nth(order).unwrap();
            let seeds: Vec<u64> = (0..300).collect();
            // A link is how far back the parent is.
            let parent = |(node, link): (u32, &Option<u32>)| link.and_then(|by| node.checked_sub(by));
            let parents: Vec<u32> = (0..).zip(&links).map(|at| parent(at).unwrap_or(ROOT_PARENT)).collect();
            let held = held.min(parents.len() - 1);
            let mut cache = context(&shape, of_cache, &seeds[..cached], chunk);
            let nodes = &seeds[cached..][..parents.len()];
            let tree = |held| Tree { cached, held };
            let mut got = match held {
                0 => vec![],
                _ => step(&shape, &mut cache, tree(&[]), (&nodes[..held], &parents[..held])),
            };
            got.extend(step(&shape, &mut cache, tree(&parents[..held]), (&nodes[held..], &parents[held..])));
            for (node, got) in got.iter().enumerate() {
                let mut path = vec![nodes[node]];
                let mut at = parents[node];
                while at != ROOT_PARENT {
                    path.push(nodes[at as usize]);
                    at = parents[at as usize];
                }
                path.reverse();
                let text = [&seeds[..cached], &path[..path.len() - 1]].concat();
                let mut plain = context(&shape, of_cache, &text, text.len());
                let tree = Tree { cached: text.len(), held: &[] };
                let expected = step(&shape, &mut plain, tree, (&path[path.len() - 1..], &[ROOT_PARENT]));
                // But for the rounding of the sum of all weights.
                let same = got.iter().zip(&expected[0]).all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs());
                prop_assert!(same, "node {node}: {got:?}, not {:?}", expected[0]);
                let equal = got.iter().zip(&expected[0]).filter(|(a, b)| a == b).count();
                prop_assert!(2 * equal >= got.len(), "node {node}: {equal} numbers of {} are the same", got.len());
            }
        }
    }
}
