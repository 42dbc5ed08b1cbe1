//! How rows of x lie in memory for a product that does not take them as they are.
//!
//! The rows of a tile lie side by side: word by word, each of all rows. So a tile is read from front to back, whatever
//! its rows, and has one address. Rows at their own distance, often a multiple of 4 kB, fall into one set of the cache:
//! 16 rows of 2,048 inputs took twice as long.

use std::{cell::Cell, ops::Range};

use rayon::prelude::*;

use super::{
    kernel::{Task, row_tiles},
    rows::Rows,
};

/// A layout of rows of x.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    /// Words that a row of so many inputs takes.
    pub(super) words: fn(usize) -> usize,
    /// The tiles of so many rows.
    pub(super) tiles: fn(usize) -> Vec<Range<usize>>,
    /// Writes so many inputs of the rows of a tile.
    pub(super) write: fn(&Rows, Range<usize>, usize, &mut [u32]),
}

/// Where lines of the cache begin, in words.
const LINE: usize = 16;

/// Elements of x from which on a second thread pays.
const PARALLEL_ELEMENTS: usize = 1 << 16;

impl Layout {
    /// Calls `work` with a task over the rows in this layout, from the beginning of a line of the cache.
    pub(super) fn lay_out(self, x: &Rows, task: Task, work: impl FnOnce(&Task)) {
        thread_local! {
            // A product a layer and step: its memory is kept.
            static WORDS: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
        }
        let mut words = WORDS.take();
        let stride = (self.words)(task.inputs);
        words.resize((x.rows * stride + LINE).max(words.len()), 0);
        let start = words.as_ptr().align_offset(LINE * size_of::<u32>());
        let aligned = &mut words[start..][..x.rows * stride];
        self.write_tiles(x, task.inputs, aligned);
        work(&task.over(aligned, stride));
        WORDS.set(words);
    }

    fn write_tiles(self, x: &Rows, inputs: usize, to: &mut [u32]) {
        let mut rest = to;
        let tiles = (self.tiles)(x.rows).into_iter().map(|rows| {
            let (tile, behind) = std::mem::take(&mut rest).split_at_mut(rows.len() * (self.words)(inputs));
            rest = behind;
            (rows, tile)
        });
        match x.rows * inputs > PARALLEL_ELEMENTS {
            false => tiles.for_each(|(rows, tile)| (self.write)(x, rows, inputs, tile)),
            true => {
                let tiles: Vec<_> = tiles.collect();
                tiles.into_par_iter().for_each(|(rows, tile)| (self.write)(x, rows, inputs, tile));
            }
        }
    }
}

/// [Tiles](row_tiles) of at most `MOST` rows.
pub(super) fn tiles<const MOST: usize>(rows: usize) -> Vec<Range<usize>> {
    row_tiles(rows, MOST).collect()
}
