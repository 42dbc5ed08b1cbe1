//! Causal attention of whole sequences, with its rotation.
//!
//! On a CPU one operation does all of it, a sequence at a time: of histories and texts of a few dozen tokens, candle's
//! operations spend most of their time between products that are tiny. Elsewhere, and where a pass attends to earlier
//! ones, [`Layer`](crate::layer::Layer) puts it together from candle's.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use crate::fused::{exp, numbers, sum_of_products};

/// Queries, keys and values side by side, and the angles of positions.
#[derive(Debug, Clone)]
pub(crate) struct Causal {
    /// Heads of the queries.
    pub(crate) heads: usize,
    /// Heads of keys and values.
    pub(crate) kv_heads: usize,
    /// Width of a head.
    pub(crate) dim: usize,
    /// `[T, dim / 2]`: cosines and sines.
    pub(crate) rotation: Arc<[Vec<f32>; 2]>,
}

impl Causal {
    /// `[B, T, H · D]` of `[B, T, (H + 2 · KV) · D]`, queries before keys before values; on a CPU alone.
    pub(crate) fn of(self, projected: &Tensor) -> Result<Tensor> {
        projected.contiguous()?.apply_op1(self)
    }

    /// Numbers of a token: in, and out.
    fn widths(&self) -> [usize; 2] {
        [(self.heads + 2 * self.kv_heads) * self.dim, self.heads * self.dim]
    }

    /// Turns a head at a position by its angles, or back.
    fn rotate(&self, head: &mut [f32], position: usize, is_back: bool) {
        let half = self.dim / 2;
        let [cosines, sines] = [0, 1].map(|at| &self.rotation[at][position * half..][..half]);
        let (low, high) = head.split_at_mut(half);
        for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(cosines.iter().zip(sines)) {
            let sin = if is_back { -sin } else { *sin };
            (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
        }
    }

    /// The queries and keys of a sequence, rotated, with the values as they are.
    fn rotated(&self, projected: &[f32]) -> Vec<f32> {
        let mut all = projected.to_vec();
        for (position, token) in all.chunks_exact_mut(self.widths()[0]).enumerate() {
            let rotated = (self.heads + self.kv_heads) * self.dim;
            token[..rotated].chunks_exact_mut(self.dim).for_each(|head| self.rotate(head, position, false));
        }
        all
    }

    /// Where query, key and value of a head begin in a token.
    fn offsets(&self, head: usize) -> [usize; 3] {
        let shared = head / (self.heads / self.kv_heads);
        [head, self.heads + shared, self.heads + self.kv_heads + shared].map(|at| at * self.dim)
    }

    /// The weights of a query over the keys up to its own.
    fn weights(&self, all: &[f32], [query, key]: [usize; 2], position: usize, weights: &mut Vec<f32>) {
        let (width, dim) = (self.widths()[0], self.dim);
        let scale = 1.0 / (dim as f32).sqrt();
        let query = &all[position * width + query..][..dim];
        weights.clear();
        weights.extend((0..=position).map(|at| sum_of_products(query, &all[at * width + key..][..dim]) * scale));
        let most = weights.iter().copied().fold(f32::MIN, f32::max);
        weights.iter_mut().for_each(|weight| *weight = exp(*weight - most));
        let sum: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }

    /// One sequence.
    fn forward(&self, projected: &[f32], found: &mut [f32]) {
        let (all, [width, out], dim) = (self.rotated(projected), self.widths(), self.dim);
        let mut weights = Vec::new();
        for head in 0..self.heads {
            let [query, key, value] = self.offsets(head);
            for (position, found) in found.chunks_exact_mut(out).enumerate() {
                self.weights(&all, [query, key], position, &mut weights);
                let found = &mut found[head * dim..][..dim];
                for (at, weight) in weights.iter().enumerate() {
                    add(found, &all[at * width + value..][..dim], *weight);
                }
            }
        }
    }

    /// The gradient of one sequence.
    fn backward(&self, projected: &[f32], gradient: &[f32], found: &mut [f32]) {
        let (all, [width, out], dim) = (self.rotated(projected), self.widths(), self.dim);
        let scale = 1.0 / (dim as f32).sqrt();
        let mut weights = Vec::new();
        for head in 0..self.heads {
            let [query, key, value] = self.offsets(head);
            for (position, gradient) in gradient.chunks_exact(out).enumerate() {
                let gradient = &gradient[head * dim..][..dim];
                self.weights(&all, [query, key], position, &mut weights);
                let of = |at: usize| sum_of_products(gradient, &all[at * width + value..][..dim]);
                let mean: f32 = weights.iter().enumerate().map(|(at, weight)| weight * of(at)).sum();
                for (at, weight) in weights.iter().enumerate() {
                    let slope = weight * (of(at) - mean) * scale;
                    add(&mut found[at * width + value..][..dim], gradient, *weight);
                    add(&mut found[position * width + query..][..dim], &all[at * width + key..][..dim], slope);
                    add(&mut found[at * width + key..][..dim], &all[position * width + query..][..dim], slope);
                }
            }
        }
        for (position, token) in found.chunks_exact_mut(width).enumerate() {
            let rotated = (self.heads + self.kv_heads) * dim;
            token[..rotated].chunks_exact_mut(dim).for_each(|head| self.rotate(head, position, true));
        }
    }
}

/// Adds so many times `x`.
fn add(sum: &mut [f32], x: &[f32], times: f32) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += times * x);
}

impl CustomOp1 for Causal {
    fn name(&self) -> &'static str {
        "causal-attention"
    }

    fn cpu_fwd(&self, projected: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, length, _) = layout.shape().dims3()?;
        let (projected, [width, out]) = (numbers(projected, layout)?, self.widths());
        let mut found = vec![0.0; rows * length * out];
        let all = found.par_chunks_exact_mut(length * out).zip(projected.par_chunks_exact(length * width));
        all.for_each(|(found, projected)| self.forward(projected, found));
        Ok((CpuStorage::F32(found), Shape::from((rows, length, out))))
    }

    fn bwd(&self, projected: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        projected.apply_op2_no_bwd(&gradient.contiguous()?, &CausalGradient(self.clone())).map(Some)
    }
}

struct CausalGradient(Causal);

impl CustomOp2 for CausalGradient {
    fn name(&self) -> &'static str {
        "gradient-of-causal-attention"
    }

    fn cpu_fwd(
        &self,
        projected: &CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        of_gradient: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let length = layout.shape().dims3()?.1;
        let (projected, gradient) = (numbers(projected, layout)?, numbers(gradient, of_gradient)?);
        let [width, out] = self.0.widths();
        let mut found = vec![0.0; projected.len()];
        let all = found.par_chunks_exact_mut(length * width).zip(projected.par_chunks_exact(length * width));
        all.zip(gradient.par_chunks_exact(length * out))
            .for_each(|((found, projected), gradient)| self.0.backward(projected, gradient, found));
        Ok((CpuStorage::F32(found), layout.shape().clone()))
    }
}
