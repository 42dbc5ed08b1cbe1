//! Histories of users, cut into windows that one forward reads.

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use crate::lesson::Lesson;
use crate::recommender::catalogue::{Catalogue, positions};

/// A user's items, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct History {
    /// Their numbers in the catalogue.
    pub items: Vec<u32>,
    /// The first one that is learned or measured; those before it are context alone.
    pub counts_from: usize,
}

/// Histories as lessons, a long one as several: every item that counts is in the text of one lesson, with up to
/// `max_items` items before it.
pub(crate) fn lessons(histories: &[History], catalogue: &Catalogue, max_items: usize) -> Result<Vec<Lesson>> {
    let mut lessons = Vec::with_capacity(histories.len());
    for (number, History { items, counts_from }) in histories.iter().enumerate() {
        ensure!(!items.is_empty(), "history {number} is empty; leave it out");
        ensure!(
            *counts_from < items.len(),
            "history {number}: counts from item {counts_from} of {} on; expected an earlier one",
            items.len()
        );
        for window in windows(items.len(), *counts_from, max_items) {
            let read = &items[window.begin..window.end];
            let tokens = catalogue.prompt(read, read.len()).with_context(|| format!("history {number}"))?;
            let prompt = positions(window.counts_from - window.begin, catalogue.vocabulary().depth());
            lessons.push(Lesson { tokens, prompt, likely: Vec::new() });
        }
    }
    Ok(lessons)
}

/// Of each history the number of the lesson, among the [`lessons`] of all, that has its last item.
pub(crate) fn last_lessons(histories: &[History], max_items: usize) -> Vec<usize> {
    let ends = histories.iter().scan(0, |end, history| {
        *end += windows(history.items.len(), history.counts_from, max_items).len();
        Some(*end - 1)
    });
    ends.collect()
}

/// A part of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Window {
    begin: usize,
    end: usize,
    counts_from: usize,
}

/// The windows of a history, of up to `max_items` + 1 items each. They overlap by half, so an item that has fewer than
/// half of `max_items` before it is one of the first of the history.
fn windows(items: usize, counts_from: usize, max_items: usize) -> Vec<Window> {
    let width = max_items + 1;
    let half = width.div_ceil(2);
    let mut windows = Vec::new();
    let mut next = counts_from;
    while next < items {
        // As much context as its last item can have.
        let begin = (next + half).saturating_sub(width).min(items.saturating_sub(width));
        let end = (begin + width).min(items);
        windows.push(Window { begin, end, counts_from: next });
        next = end;
    }
    windows
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_item_counts_once_after_enough_others(
            items in 1usize..200,
            share in 0.0f64..1.0,
            max_items in 1usize..30,
        ) {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place in the history")]
            let counts_from = (items as f64 * share) as usize;
            let mut next = counts_from;
            for Window { begin, end, counts_from } in windows(items, counts_from, max_items) {
                prop_assert_eq!(counts_from, next);
                prop_assert!(begin <= counts_from && counts_from < end && end - begin <= max_items + 1);
                prop_assert!(counts_from - begin >= counts_from.min(max_items / 2), "{} {}", begin, counts_from);
                next = end;
            }
            prop_assert_eq!(next, items);
        }
    }

    #[test]
    fn what_fits_is_one_window_and_a_single_last_item_has_all_the_context() {
        assert_eq!(windows(21, 3, 20), [Window { begin: 0, end: 21, counts_from: 3 }]);
        assert_eq!(windows(60, 59, 20), [Window { begin: 39, end: 60, counts_from: 59 }]);
        let windows = windows(32, 0, 20);
        assert_eq!(windows[0], Window { begin: 0, end: 21, counts_from: 0 });
        assert_eq!(windows[1], Window { begin: 11, end: 32, counts_from: 21 });
    }
}
