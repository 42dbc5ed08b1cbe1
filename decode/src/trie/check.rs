//! What a trie's content must be, beyond its checksum.

use super::{Trie, TrieError, is_integer};

impl Trie {
    /// Checks every rule of the content.
    pub(super) fn check_content(&self) -> Result<(), TrieError> {
        let rule = self.broken_rule_of_nodes().or_else(|| self.broken_rule_of_ids());
        rule.map_or(Ok(()), |rule| Err(TrieError::Malformed(rule)))
    }

    /// That children follow each other level by level, and siblings by code; and leaves' items likewise.
    fn broken_rule_of_nodes(&self) -> Option<String> {
        let (firsts, first_items) = (self.firsts(), self.first_items());
        let starts = &self.header.starts[..self.levels() + 2];
        if let Some(level) = starts.windows(2).find(|level| firsts.get(level[0] as usize) != Some(&level[1])) {
            return Some(format!("the children of node {} do not begin at node {}", level[0], level[1]));
        }
        if !ascending(firsts) {
            return Some("a node above the leaves has no children".to_owned());
        }
        if first_items.first() != Some(&0) || first_items.last() != Some(&self.header.items) || !ascending(first_items)
        {
            return Some(format!("the leaves do not share out the {} items", self.header.items));
        }
        if self.code(0) != 0 {
            return Some("the root has a code".to_owned());
        }
        if !firsts.windows(2).all(|siblings| ascending(self.codes_of(siblings[0]..siblings[1]))) {
            return Some("siblings are not in the order of their codes".to_owned());
        }
        (1..).zip(&self.meta.codes).find_map(|(depth, table)| {
            let largest = *self.codes_of(self.level(depth)).iter().max()?;
            let rule = || format!("a node has code {largest} at level {depth}, whose table has {} codes", table.len());
            (usize::from(largest) >= table.len()).then(rule)
        })
    }

    /// That ids are text (or integers), and that the index has each of them once and in order.
    fn broken_rule_of_ids(&self) -> Option<String> {
        let starts = self.id_starts();
        let bytes = self.header.section(&self.bytes, 5);
        let ends = starts.first() == Some(&0) && starts.last().is_some_and(|&end| end as usize == bytes.len());
        if !ends || starts.windows(2).any(|pair| pair[0] > pair[1]) {
            return Some(format!("the ids do not share out their {} bytes", bytes.len()));
        }
        for item in 0..self.header.items {
            let id = std::str::from_utf8(self.id_bytes(item)).ok();
            if id.is_none_or(|id| self.meta.integer_ids && !is_integer(id)) {
                let what = if self.meta.integer_ids { "an integer" } else { "UTF-8" };
                return Some(format!("the id of item {item} is not {what}"));
            }
        }
        let by_id = self.by_id();
        // As many ids as items, and none twice: the index is a permutation.
        let in_order = |pair: &[u32]| self.id_bytes(pair[0]) < self.id_bytes(pair[1]);
        if by_id.iter().any(|&item| item >= self.header.items) || !by_id.windows(2).all(in_order) {
            return Some("the index of ids is not in order, or an id is there twice".to_owned());
        }
        None
    }
}

fn ascending<T: PartialOrd>(values: &[T]) -> bool {
    values.windows(2).all(|pair| pair[0] < pair[1])
}
