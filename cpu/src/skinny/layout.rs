//! How rows of x lie in memory for a product that does not take them as they are.

use std::cell::Cell;

use super::{kernel::Task, processor::vectorized, rows::Rows};

/// A layout of rows of x.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    /// Words that a row of so many inputs takes.
    pub(super) words: fn(usize) -> usize,
    /// Writes so many inputs of all rows.
    pub(super) write: fn(&Rows, usize, &mut [u32]),
}

/// Where lines of the cache begin, in words.
const LINE: usize = 16;

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
        vectorized(|| (self.write)(x, task.inputs, aligned));
        work(&task.over(aligned, stride));
        WORDS.set(words);
    }
}
