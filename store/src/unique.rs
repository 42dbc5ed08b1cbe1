//! Ids of which each must be there once, checked in memory that does not grow with them.

use std::collections::HashSet;

use laser_schema::EntityId;

use crate::spill::{self, PARTITIONS, Spill, SpillError};

/// Bytes of ids that are held before they are spilled: two million ids.
const MEMORY: usize = 64 << 20;

/// An id that is there more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repeated {
    /// The later file.
    pub file: String,
    /// The id.
    pub id: EntityId,
}

/// Ids with the files that they are in.
#[derive(Debug)]
pub struct UniqueIds {
    spill: Spill,
    files: Vec<String>,
}

impl Default for UniqueIds {
    fn default() -> Self {
        Self { spill: Spill::new(MEMORY), files: Vec::new() }
    }
}

impl UniqueIds {
    /// Adds the ids of a file.
    pub fn add<'a>(&mut self, file: &str, ids: impl Iterator<Item = &'a EntityId>) -> Result<(), SpillError> {
        let number = (self.files.len() as u64).to_le_bytes();
        self.files.push(file.to_owned());
        for id in ids {
            let mut integer = [b'i'; 9];
            match id {
                EntityId::Int(id) => {
                    integer[1..].copy_from_slice(&id.to_le_bytes());
                    self.spill.push(spill::partition_of(&integer), &integer, &[&number])?;
                }
                EntityId::Text(id) => {
                    let key = [b"s", id.as_bytes()].concat();
                    self.spill.push(spill::partition_of(&key), &key, &[&number])?;
                }
            }
        }
        Ok(())
    }

    /// The ids that are there more than once, at most `limit` of them, by file.
    pub fn repeated(mut self, limit: usize) -> Result<Vec<Repeated>, SpillError> {
        self.spill.finish()?;
        let mut repeated = Vec::new();
        for partition in 0..PARTITIONS {
            let mut seen = HashSet::new();
            for (key, file) in self.spill.take(partition)? {
                if seen.insert(key.clone()) {
                    continue;
                }
                if repeated.len() == limit {
                    break;
                }
                repeated.push((number(&file), decode(&key)));
            }
        }
        repeated.sort_unstable();
        let named = |(file, id): (u64, EntityId)| {
            let file = usize::try_from(file).ok().and_then(|file| self.files.get(file));
            Repeated { file: file.cloned().unwrap_or_default(), id }
        };
        Ok(repeated.into_iter().map(named).collect())
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).unwrap_or_default()
}

fn decode(key: &[u8]) -> EntityId {
    match key.split_first() {
        Some((b'i', id)) => EntityId::Int(number(id).cast_signed()),
        Some((_, id)) => EntityId::Text(String::from_utf8_lossy(id).into_owned()),
        None => EntityId::Text(String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_ids_are_named_with_the_later_file_whether_spilled_or_not() {
        for memory in [0, 1 << 20] {
            let mut ids = UniqueIds { spill: Spill::new(memory), files: Vec::new() };
            let numbers: Vec<_> = (-50..50).map(EntityId::Int).collect();
            let texts: Vec<_> = (0..50).map(|id| EntityId::Text(id.to_string())).collect();
            ids.add("a", numbers.iter()).unwrap();
            ids.add("b", texts.iter()).unwrap();
            ids.add("c", [&numbers[3], &texts[7]].into_iter()).unwrap();
            ids.add("d", [&EntityId::Int(99), &numbers[3]].into_iter()).unwrap();
            let repeated = ids.repeated(9).unwrap();
            let found: Vec<_> = repeated.iter().map(|r| (r.file.as_str(), &r.id)).collect();
            assert_eq!(found.len(), 3);
            assert!(found.contains(&("c", &numbers[3])) && found.contains(&("c", &texts[7])), "{found:?}");
            assert_eq!(found[2], ("d", &numbers[3]));
        }
    }
}
