//! Attention of the trees of many sequences over panels of keys and values.

use std::ops::Range;

use rayon::prelude::*;

use crate::{
    batch::{Batch, Span},
    cache::{CpuCache, HeadCache},
    shape::ModelShape,
    skinny::{Rows, vectorized},
    vector::{by_lane, exp, max, narrow, norm_in_place},
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
    /// `[nodes, heads of the group · head_dim]`
    attended: Rows,
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
    cache.keys(total).multiply(&own.queries, &mut own.scores);
    own.sums_of_weights.clear();
    for row in 0..own.scores.rows() {
        let hidden = span.hidden(block.start + row / group);
        let scores = &mut own.scores.row_mut(row);
        let sum = exponentials(scores, span.cached, hidden);
        own.sums_of_weights.push(sum);
    }
    cache.values(total).multiply(&own.scores, &mut own.sums);
    for (row, weight) in own.sums_of_weights.iter().enumerate() {
        let sums = own.sums.row(row);
        let to = own.attended.row_mut(block.start + row / group);
        let to = to[row % group * sums.len()..].iter_mut();
        to.zip(sums).for_each(|(to, sum)| *to = sum / weight);
    }
}

vectorized! {
    /// Scores to softmax weights before the division by their sum, which is returned. Columns from `cached` on whose
    /// bit is set in `hidden` get weight 0.
    fn exponentials = row_exponentials(scores: &mut [f32], cached: usize, hidden: &[u64]) -> f32;
}

#[inline(always)]
fn row_exponentials(scores: &mut [f32], cached: usize, hidden: &[u64]) -> f32 {
    for (node, score) in scores[cached..].iter_mut().enumerate() {
        if hidden[node / 64] >> (node % 64) & 1 == 1 {
            *score = f32::NEG_INFINITY;
        }
    }
    let max = max(scores);
    scores.iter_mut().for_each(|score| *score = exp(*score - max));
    let sums = by_lane(scores, [0.0_f64; 8], |sum, weight| *sum += f64::from(weight));
    narrow(sums.iter().sum())
}
