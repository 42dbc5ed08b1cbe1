//! How a draft recommender learns from the lists of its target.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// How much of a target's lists is learned from, and how much it counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alignment {
    /// K: items of a list. Losses on distributions look at the K most probable codes.
    pub lists: usize,
    /// Items of each list that are learned from per epoch, drawn anew each time. An epoch costs the draft as many
    /// further passes over the last windows of all histories, and the target as well unless the loss is `seq-kd`.
    pub list_items: usize,
    /// The share of the loss on lists; the rest is the cross-entropy on the histories. 0.5 is AtSpeed's (section 4.1).
    pub alpha: f64,
    /// Whether distributions are compared among the codes that the catalogue allows behind a prefix, as in AtSpeed, or
    /// among all tokens.
    pub constrained: bool,
}

impl Alignment {
    /// Checks what the types leave open.
    ///
    /// # Errors
    /// The first key whose value makes no sense.
    pub fn validate(&self) -> Result<()> {
        let Self { lists, list_items, alpha, .. } = self;
        ensure!(*lists > 0, "lists = 0: expected at least 1 item");
        ensure!((1..=*lists).contains(list_items), "list_items = {list_items}: expected 1 to lists = {lists}");
        ensure!(*alpha > 0.0 && *alpha <= 1.0, "alpha = {alpha}: expected a share above 0 and up to 1");
        Ok(())
    }
}
