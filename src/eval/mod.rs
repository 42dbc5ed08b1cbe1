//! `laser eval`: what embeddings and texts are worth to recommender models, on the user's own interactions.

mod ctr;
mod embed;
mod knowledge;
mod leak;
mod report;

use laser_terminal::Style;

pub(crate) use ctr::ctr;
pub(crate) use embed::embed;

/// How findings are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Tables.
    Tables(Style),
    /// JSON.
    Json,
}
