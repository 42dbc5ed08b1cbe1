//! Attention of the trees of many sequences, on a device.
//!
//! Sequences attend in groups, each padded to the most nodes and the longest context in it: a layer costs a few kernels
//! for each group, not for each sequence. What a step needs of row numbers and masks is made once, before its first
//! layer; nothing comes back to the host.

use candle_core::{DType, Device, Result, Tensor};
use laser_cpu::{Batch, Span};

use crate::{
    arena::{Arena, SequenceId, number},
    workspace::Workspace,
};

/// Nodes up to which sequences attend together however many theirs are: draft trees do, chunks of prompts stay apart.
const TREE: usize = 32;

/// Scores of one head of a group, at most: for 32 heads in f16 64 MiB. A single sequence may need more.
const SCORES_MAX: usize = 1 << 20;

/// How the nodes of a step attend; the same for all layers.
#[derive(Debug)]
pub(super) enum Attention {
    /// By candle's kernels.
    Groups {
        groups: Vec<Group>,
        /// The place of every node of the batch among those of all groups.
        places: Tensor,
    },
    /// By one of our own, on a GPU.
    #[cfg(feature = "cuda")]
    Kernel(crate::cuda::attend::TreeAttend),
}

#[derive(Debug)]
pub(super) struct Group {
    sequences: usize,
    nodes: usize,
    total: usize,
    /// Nodes of the batch, `[sequences · nodes]`.
    queries: Tensor,
    /// Rows of the arena, `[sequences · total]`.
    context: Tensor,
    /// Added to the scores, `[sequences, 1, nodes, total]`: 0 for the committed context, the node itself and its
    /// ancestors, -∞ for the rest. None where every node sees everything.
    mask: Option<Tensor>,
}

impl Attention {
    /// For a step whose nodes have the arena's rows from `start` on, and heads of which `shared` have one key head.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a GPU has a workspace"))]
    pub(super) fn plan(
        batch: &Batch<'_>,
        (arena, sequences): (&Arena, &[SequenceId]),
        (start, shared): (usize, usize),
        place: (DType, &Device),
        workspace: &mut Workspace,
    ) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if place.1.is_cuda() {
            let (rows, place) = ((start, shared), (place.1, &mut workspace.splits));
            let plan = crate::cuda::attend::TreeAttend::plan(batch, (arena, sequences), rows, place)?;
            return Ok(Self::Kernel(plan));
        }
        Self::groups(batch, (arena, sequences), start, place)
    }

    fn groups(
        batch: &Batch<'_>,
        (arena, sequences): (&Arena, &[SequenceId]),
        start: usize,
        (dtype, device): (DType, &Device),
    ) -> Result<Self> {
        let spans = &batch.spans;
        let shapes: Vec<_> = spans.iter().map(shape).collect();
        let mut groups = Vec::new();
        let mut places = vec![0; batch.tokens.len()];
        let mut place = 0;
        for members in grouped(&shapes) {
            let nodes = members.iter().map(|&span| shapes[span].0).max();
            let total = members.iter().map(|&span| shapes[span].1).max();
            let mut rows = GroupRows::new(nodes.unwrap_or(0), total.unwrap_or(0));
            for span in members {
                let committed = arena.rows_of(sequences[span]);
                rows.push(&spans[span], committed, start);
                let own = &mut places[spans[span].offset..][..shapes[span].0];
                own.iter_mut().zip(place..).for_each(|(to, at)| *to = at);
                place += number(rows.nodes);
            }
            groups.push(rows.group(dtype, device)?);
        }
        Ok(Self::Groups { groups, places: Tensor::new(places, device)? })
    }

    /// Rows `[nodes, heads · head_dim]` for scaled queries `[nodes, heads, head_dim]` over all keys and values of a
    /// layer, `[kv_heads, rows, head_dim]`.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a GPU has a workspace"))]
    pub(super) fn attend(
        &self,
        queries: &Tensor,
        layer: &(Tensor, Tensor),
        workspace: &mut Workspace,
    ) -> Result<Tensor> {
        match self {
            Self::Groups { groups, places } => {
                let attended = groups.iter().map(|group| group.attend(queries, layer)).collect::<Result<Vec<_>>>()?;
                Tensor::cat(&attended, 0)?.index_select(places, 0)
            }
            #[cfg(feature = "cuda")]
            Self::Kernel(kernel) => kernel.attend(queries, layer, workspace),
        }
    }
}

impl Group {
    /// Rows `[sequences · nodes, heads · head_dim]`. Query heads that share a key head are more rows of one product, so
    /// that keys are not repeated.
    fn attend(&self, queries: &Tensor, (keys, values): &(Tensor, Tensor)) -> Result<Tensor> {
        let &Self { sequences, nodes, total, .. } = self;
        let (_, heads, dim) = queries.dims3()?;
        let kv_heads = keys.dim(0)?;
        let shared = heads / kv_heads;
        let context = |all: &Tensor| {
            let rows = all.index_select(&self.context, 1)?;
            rows.reshape((kv_heads, sequences, total, dim))
        };
        let queries = queries
            .index_select(&self.queries, 0)?
            .reshape((sequences, nodes, kv_heads, shared, dim))?
            .permute((2, 0, 3, 1, 4))?
            .reshape((kv_heads, sequences, shared * nodes, dim))?;
        let scores = queries.matmul(&context(keys)?.transpose(2, 3)?)?;
        let by_node = (kv_heads, sequences, shared, nodes, total);
        let scores = match &self.mask {
            Some(mask) => {
                let mask = mask.broadcast_as(by_node)?;
                (scores.reshape(by_node)? + mask)?.reshape(scores.shape())?
            }
            None => scores,
        };
        candle_nn::ops::softmax_last_dim(&scores)?
            .matmul(&context(values)?)?
            .reshape((kv_heads, sequences, shared, nodes, dim))?
            .permute((1, 3, 0, 2, 4))?
            .reshape((sequences * nodes, heads * dim))
    }
}

/// A group while sequences are added to it.
struct GroupRows {
    nodes: usize,
    total: usize,
    queries: Vec<u32>,
    context: Vec<u32>,
    mask: Vec<f32>,
}

impl GroupRows {
    fn new(nodes: usize, total: usize) -> Self {
        Self { nodes, total, queries: Vec::new(), context: Vec::new(), mask: Vec::new() }
    }

    /// Padding repeats a node, whose result nobody asks for, and a row, which is masked.
    fn push(&mut self, span: &Span<'_>, committed: &[u32], start: usize) {
        let (nodes, total) = shape(span);
        let (first, written) = (number(span.offset), number(start + span.offset));
        self.queries.extend((first..).take(nodes));
        self.queries.resize(self.queries.len() + self.nodes - nodes, first);
        self.context.extend_from_slice(&committed[..span.cached + span.held]);
        self.context.extend((written..).take(nodes));
        self.context.resize(self.context.len() + self.total - total, written);
        for node in 0..self.nodes {
            let hidden = span.hidden(node.min(nodes - 1));
            let is_hidden = |other: usize| hidden[other / 64] >> (other % 64) & 1 == 1;
            let value = |hidden| if hidden { f32::NEG_INFINITY } else { 0.0 };
            self.mask.extend(std::iter::repeat_n(0.0, span.cached));
            self.mask.extend((0..span.tree()).map(|other| value(is_hidden(other))));
            self.mask.extend(std::iter::repeat_n(f32::NEG_INFINITY, self.total - total));
        }
    }

    fn group(self, dtype: DType, device: &Device) -> Result<Group> {
        let Self { nodes, total, .. } = self;
        let sequences = self.queries.len() / nodes;
        let mask = match self.mask.iter().all(|value| *value == 0.0) {
            true => None,
            false => {
                let mask = Tensor::from_vec(self.mask, (sequences, 1, nodes, total), device)?;
                Some(mask.to_dtype(dtype)?)
            }
        };
        Ok(Group {
            sequences,
            nodes,
            total,
            queries: Tensor::new(self.queries, device)?,
            context: Tensor::new(self.context, device)?,
            mask,
        })
    }
}

/// Nodes, and these with the committed context and held nodes.
fn shape(span: &Span<'_>) -> (usize, usize) {
    (span.parents.len(), span.cached + span.tree())
}

/// Sequences that attend together, of their nodes and totals: of like numbers of nodes, so that padding is at most as
/// much as there is beyond [`TREE`] nodes, and of [`SCORES_MAX`] scores.
fn grouped(shapes: &[(usize, usize)]) -> Vec<Vec<usize>> {
    let mut by_size: Vec<usize> = (0..shapes.len()).collect();
    by_size.sort_by_key(|&span| shapes[span]);
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let (mut least, mut longest) = (0, 0);
    for span in by_size {
        let (nodes, total) = shapes[span];
        longest = total.max(longest);
        let fits =
            |group: &&mut Vec<usize>| nodes <= TREE.max(2 * least) && (group.len() + 1) * nodes * longest <= SCORES_MAX;
        match groups.last_mut().filter(fits) {
            Some(group) => group.push(span),
            None => {
                (least, longest) = (nodes, total);
                groups.push(vec![span]);
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_sequence_is_in_one_group_of_its_like(
            shapes in proptest::collection::vec((1..600_usize, 0..3000_usize), 1..80),
        ) {
            let shapes: Vec<_> = shapes.iter().map(|(nodes, cached)| (*nodes, nodes + cached)).collect();
            let groups = grouped(&shapes);
            let mut all = groups.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..shapes.len()).collect::<Vec<_>>());
            for group in groups {
                let of: Vec<_> = group.iter().map(|&span| shapes[span]).collect();
                let nodes = of.iter().map(|shape| shape.0).max().unwrap();
                let longest = of.iter().map(|shape| shape.1).max().unwrap();
                let least = of.iter().map(|shape| shape.0).min().unwrap();
                prop_assert!(nodes <= 2 * least || nodes <= TREE);
                prop_assert!(group.len() == 1 || group.len() * nodes * longest <= SCORES_MAX);
            }
        }
    }
}
