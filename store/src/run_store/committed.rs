//! The shards of a run whose output exists.

use std::collections::BTreeMap;

use super::PlannedRun;
use crate::location::{Location, LocationError};

/// The shards whose output was seen, for whoever polls: shards are done about in their order, so each listing begins
/// after the last shard before which none is missing. What is removed in the meantime is not noticed.
#[derive(Debug)]
pub struct Committed {
    output: Location,
    folders: Vec<Folder>,
    done: Vec<bool>,
}

/// The outputs of one folder.
#[derive(Debug)]
struct Folder {
    path: String,
    /// Names with their shards, by name.
    outputs: Vec<(String, u32)>,
    /// How many of the first are all there.
    whole: usize,
}

impl Committed {
    /// Nothing seen yet.
    pub fn new(run: &PlannedRun) -> Self {
        let mut folders: BTreeMap<&str, Vec<(String, u32)>> = BTreeMap::new();
        for job in &run.plan.shards {
            let (folder, name) = job.output.rsplit_once('/').unwrap_or(("", &job.output));
            let outputs = folders.entry(folder).or_default();
            outputs.push((name.to_owned(), job.shard));
        }
        let folder = |(path, mut outputs): (&str, Vec<(String, u32)>)| {
            outputs.sort_unstable();
            Folder { path: path.to_owned(), outputs, whole: 0 }
        };
        Self {
            output: run.store.output().clone(),
            folders: folders.into_iter().map(folder).collect(),
            done: vec![false; run.plan.shards.len()],
        }
    }

    /// Lists what may have come since.
    pub async fn poll(&mut self) -> Result<(), LocationError> {
        for folder in &mut self.folders {
            let (whole, missing) = folder.outputs.split_at(folder.whole);
            if missing.is_empty() {
                continue;
            }
            let last = whole.last().map(|(name, _)| name.as_str());
            for name in self.output.join(&folder.path).names_after(last).await? {
                if let Ok(at) = missing.binary_search_by(|(other, _)| other.cmp(&name)) {
                    self.done[missing[at].1 as usize] = true;
                }
            }
            let there = missing.iter().take_while(|o| self.done[o.1 as usize]);
            folder.whole += there.count();
        }
        Ok(())
    }

    /// The shards by number.
    pub fn shards(&self) -> Vec<u32> {
        let done = (0..).zip(&self.done).filter(|(_, done)| **done);
        done.map(|(shard, _)| shard).collect()
    }
}
