//! The bipartite graph of users and items, and LightGCN's propagation over it.
//!
//! With degrees `D` and adjacency `A` the normalised adjacency is `Â = D^-½ A D^-½`, which is symmetric. A propagation
//! is the mean of the layers, `P = (I + Â + … + Â^L) / (L + 1)` (He et al. 2020, equations 7 and 8). `P` is linear and
//! symmetric too, so the gradient of any loss of `P E` with respect to `E` is `P` times its gradient with respect to `P
//! E`: the backward pass is the same product as the forward pass.

use rayon::prelude::*;

use crate::Edge;

/// Neighbours of all nodes in compressed rows: users first, then items.
#[derive(Debug)]
pub(crate) struct Graph {
    users: usize,
    /// The neighbours of node `v` are `neighbours[starts[v]..starts[v + 1]]`, in ascending order.
    starts: Vec<usize>,
    neighbours: Vec<u32>,
    /// `1 / √degree`, 0 for a node without neighbours.
    scale: Vec<f32>,
}

impl Graph {
    /// Creates the graph of distinct edges. Memory is 8 bytes per edge and 12 per node.
    pub(crate) fn new(users: usize, items: usize, edges: &[Edge]) -> Self {
        let nodes = users + items;
        let mut starts = vec![0; nodes + 1];
        let ends = |&(user, item): &Edge| (user as usize, users + item as usize);
        for (user, item) in edges.iter().map(ends) {
            starts[user + 1] += 1;
            starts[item + 1] += 1;
        }
        for node in 0..nodes {
            starts[node + 1] += starts[node];
        }
        let mut next = starts.clone();
        let mut neighbours = vec![0; 2 * edges.len()];
        for &(user, item) in edges {
            for (from, to) in [(user as usize, item), (users + item as usize, user)] {
                neighbours[next[from]] = to;
                next[from] += 1;
            }
        }
        for node in 0..nodes {
            neighbours[starts[node]..starts[node + 1]].sort_unstable();
        }
        let degree = |node: usize| starts[node + 1] - starts[node];
        let scale = (0..nodes)
            .map(|node| match degree(node) {
                0 => 0.0,
                degree => 1.0 / (degree as f32).sqrt(),
            })
            .collect();
        Self { users, starts, neighbours, scale }
    }

    /// Number of users.
    pub(crate) fn users(&self) -> usize {
        self.users
    }

    /// Number of users and items.
    pub(crate) fn nodes(&self) -> usize {
        self.scale.len()
    }

    /// Returns the items of a user, in ascending order.
    pub(crate) fn items_of(&self, user: u32) -> &[u32] {
        let user = user as usize;
        &self.neighbours[self.starts[user]..self.starts[user + 1]]
    }

    /// Computes `P x` for a row-major matrix `x` with one row per node, in twice `layers · edges · dimension`
    /// multiply-adds.
    pub(crate) fn propagate(&self, x: &[f32], dimension: usize, layers: usize) -> Vec<f32> {
        // Horner's scheme: x + Â(x + Â(x + …)).
        let mut sum = x.to_vec();
        let mut scaled = vec![0.0; if layers > 0 { x.len() } else { 0 }];
        for _ in 0..layers {
            let rows = scaled.par_chunks_mut(dimension).zip(sum.par_chunks(dimension));
            rows.zip(&self.scale).for_each(|((scaled, row), &scale)| {
                for (scaled, value) in scaled.iter_mut().zip(row) {
                    *scaled = scale * value;
                }
            });
            let rows = sum.par_chunks_mut(dimension).zip(x.par_chunks(dimension));
            rows.enumerate().for_each(|(node, (sum, own))| {
                self.add_neighbours(node, own, &scaled, sum);
            });
        }
        let mean = 1.0 / (layers + 1) as f32;
        sum.par_iter_mut().for_each(|value| *value *= mean);
        sum
    }

    /// Computes `sum = own + scale · Σ scaled rows of the neighbours`, in their order.
    fn add_neighbours(&self, node: usize, own: &[f32], scaled: &[f32], sum: &mut [f32]) {
        let dimension = own.len();
        let offset = if node < self.users { self.users } else { 0 };
        sum.fill(0.0);
        for &neighbour in &self.neighbours[self.starts[node]..self.starts[node + 1]] {
            let start = (offset + neighbour as usize) * dimension;
            for (sum, value) in sum.iter_mut().zip(&scaled[start..start + dimension]) {
                *sum += value;
            }
        }
        let scale = self.scale[node];
        for (sum, own) in sum.iter_mut().zip(own) {
            *sum = own + scale * *sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `P x` by dense matrices.
    fn dense(users: usize, items: usize, edges: &[Edge], x: &[f32], layers: usize) -> Vec<f64> {
        let nodes = users + items;
        let mut adjacency = vec![0.0; nodes * nodes];
        for &(user, item) in edges {
            let (user, item) = (user as usize, users + item as usize);
            adjacency[user * nodes + item] = 1.0;
            adjacency[item * nodes + user] = 1.0;
        }
        let degree: Vec<f64> = adjacency.chunks(nodes).map(|row| row.iter().sum()).collect();
        let mut layer: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        let mut mean = layer.clone();
        for _ in 0..layers {
            let next = (0..nodes).map(|row| {
                let cells = (0..nodes).filter(|column| adjacency[row * nodes + column] > 0.0);
                cells.map(|column| layer[column] / (degree[row] * degree[column]).sqrt()).sum()
            });
            layer = next.collect();
            mean.iter_mut().zip(&layer).for_each(|(m, l)| *m += l);
        }
        mean.iter().map(|m| m / (layers + 1) as f64).collect()
    }

    proptest! {
        #[test]
        fn propagation_is_that_of_dense_matrices(
            edges in proptest::collection::btree_set((0u32..5, 0u32..6), 0..20),
            x in proptest::collection::vec(-1f32..1.0, 11),
            layers in 0usize..4,
        ) {
            let edges: Vec<Edge> = edges.into_iter().collect();
            let found = Graph::new(5, 6, &edges).propagate(&x, 1, layers);
            let expected = dense(5, 6, &edges, &x, layers);
            for (found, expected) in found.iter().zip(expected) {
                prop_assert!((f64::from(*found) - expected).abs() < 1e-5);
            }
        }

        #[test]
        fn propagation_is_symmetric(
            edges in proptest::collection::btree_set((0u32..5, 0u32..6), 0..20),
            x in proptest::collection::vec(-1f32..1.0, 22),
            y in proptest::collection::vec(-1f32..1.0, 22),
        ) {
            let edges: Vec<Edge> = edges.into_iter().collect();
            let graph = Graph::new(5, 6, &edges);
            let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
            let left = dot(&y, &graph.propagate(&x, 2, 3));
            let right = dot(&graph.propagate(&y, 2, 3), &x);
            prop_assert!((left - right).abs() < 1e-4);
        }
    }
}
