//! What the commands `laser` and `laser-bench` show: progress, tables, and text on standard output.

mod progress;
mod table;

use std::io::Write as _;

use anyhow::{Context, Result};

pub use progress::Display;
pub use table::{Style, Table};

/// Writes to standard output; a closed pipe is an error like any other.
///
/// # Errors
/// If it cannot be written to.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")
}
