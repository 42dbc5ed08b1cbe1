//! Rows of f32, padded to whole panels.

use rayon::prelude::*;

use super::format::PANEL;

/// Rows of f32, each at a multiple of 16 elements, so that a product may write whole panels.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    pub(super) data: Vec<f32>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) stride: usize,
}

impl Rows {
    /// Room for `rows` of `columns`, whose content is whatever was there. Memory is kept.
    pub(crate) fn reshape(&mut self, rows: usize, columns: usize) {
        let stride = columns.next_multiple_of(PANEL);
        (self.rows, self.columns, self.stride) = (rows, columns, stride);
        self.data.resize(rows * stride, 0.0);
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.stride..][..self.columns]
    }

    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.stride..][..self.columns]
    }

    /// A row with what it is padded by.
    pub(crate) fn panels_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.stride..][..self.stride]
    }

    /// Calls `work` with every row's number and elements, on all threads if it is `heavy`.
    pub(crate) fn each(&mut self, heavy: bool, work: impl Fn(usize, &mut [f32]) + Sync) {
        let columns = self.columns;
        let rows = self.data.chunks_exact_mut(self.stride.max(1));
        match heavy {
            false => (rows.enumerate()).for_each(|(row, data)| work(row, &mut data[..columns])),
            true => (self.data.par_chunks_exact_mut(self.stride))
                .enumerate()
                .for_each(|(row, data)| work(row, &mut data[..columns])),
        }
    }

    /// The rows `keep`, ascending, moved to the front.
    pub(crate) fn retain(&mut self, keep: &[u32]) {
        for (to, from) in keep.iter().enumerate() {
            let from = *from as usize * self.stride;
            self.data.copy_within(from..from + self.stride, to * self.stride);
        }
        self.reshape(keep.len(), self.columns);
    }
}
