//! Seeded sampling that does not depend on the order of its input.
//!
//! Every item has a priority, a hash of the seed and of what identifies it; the sample is the items of
//! lowest priority. So the same set gives the same sample however it is ordered or batched, a smaller
//! sample is the beginning of a larger one, and memory is bounded by the sample. O(log n) an item.

use std::collections::BTreeMap;

/// A uniform 128-bit hash of `parts` under `seed`, each part framed by its length.
pub fn priority(seed: u64, parts: &[&[u8]]) -> u128 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let mut low = [0; 16];
    low.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    u128::from_le_bytes(low)
}

/// The items of lowest priority among all that were offered. Equal priorities are the same item.
#[derive(Debug, Clone)]
pub struct Sample<T> {
    capacity: usize,
    items: BTreeMap<u128, T>,
}

impl<T> Sample<T> {
    /// An empty sample of at most `capacity` items.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, items: BTreeMap::new() }
    }

    /// Takes the item if its priority is among the lowest so far; `item` is called only then.
    pub fn offer(&mut self, priority: u128, item: impl FnOnce() -> T) {
        let full = self.items.len() >= self.capacity;
        if full && self.items.last_key_value().is_none_or(|(&worst, _)| priority >= worst) {
            return;
        }
        self.items.insert(priority, item());
        if self.items.len() > self.capacity {
            self.items.pop_last();
        }
    }

    /// The item of a priority, if it is in the sample.
    pub fn get(&self, priority: u128) -> Option<&T> {
        self.items.get(&priority)
    }

    /// The most items it takes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Its items so far.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether nothing was offered.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The items, lowest priority first.
    pub fn into_items(self) -> impl Iterator<Item = T> {
        self.items.into_values()
    }

    /// The items with their priorities, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = (u128, &T)> {
        self.items.iter().map(|(&priority, item)| (priority, item))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn priorities_depend_on_the_seed_and_on_where_parts_end() {
        assert_eq!(priority(1, &[b"ab", b"c"]), priority(1, &[b"ab", b"c"]));
        assert_ne!(priority(1, &[b"ab", b"c"]), priority(2, &[b"ab", b"c"]));
        assert_ne!(priority(1, &[b"ab", b"c"]), priority(1, &[b"a", b"bc"]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn sample_is_the_lowest_priorities_whatever_the_order(
            items in prop::collection::vec(0u128..64, 0..80),
            capacity in 0usize..20,
        ) {
            let sample = |items: &[u128]| {
                let mut sample = Sample::new(capacity);
                for &item in items {
                    sample.offer(item, || item);
                }
                sample.iter().map(|(_, &item)| item).collect::<Vec<_>>()
            };
            let reversed: Vec<u128> = items.iter().rev().copied().collect();
            let mut expected = items.clone();
            expected.sort_unstable();
            expected.dedup();
            expected.truncate(capacity);
            prop_assert_eq!(sample(&items), expected.clone());
            prop_assert_eq!(sample(&reversed), expected);
        }
    }
}
