//! Records in partitions: in memory as long as they fit, on the local disk from then on.
//!
//! Whoever reads a partition gets its records in the order in which they were written, whether they were spilled or
//! not. Memory: the budget, and one partition while it is read. Disk: the records, LZ4-compressed, in a folder of
//! `TMPDIR` that goes with the value.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::PathBuf;

use bytes::Bytes;
use tempfile::TempDir;

/// How many partitions there are. A partition of a terabyte is a gigabyte, which still fits in memory, and a budget
/// of 512 MiB is written in pieces of half a megabyte, which disks like.
pub const PARTITIONS: usize = 1024;

/// Bytes compressed at a time: far below LZ4's limit of 2 GiB.
const BLOCK: usize = 1 << 26;

/// The local disk failed.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}; what does not fit in memory_mb is kept there, TMPDIR names another place", path.display())]
pub struct SpillError {
    path: PathBuf,
    source: io::Error,
}

/// The partition that a key belongs to.
pub fn partition_of(key: &[u8]) -> usize {
    let hash = blake3::hash(key);
    let [low, high, ..] = *hash.as_bytes();
    usize::from(u16::from_le_bytes([low, high])) % PARTITIONS
}

/// Partitions of keyed records.
#[derive(Debug)]
pub struct Spill {
    memory: usize,
    /// Allocated by all buffers.
    held: usize,
    buffers: Vec<Vec<u8>>,
    folder: Option<TempDir>,
}

impl Spill {
    /// Empty partitions that hold at most about `memory` bytes in memory.
    pub fn new(memory: usize) -> Self {
        Self { memory, held: 0, buffers: vec![Vec::new(); PARTITIONS], folder: None }
    }

    /// Whether anything is on disk.
    pub fn has_spilled(&self) -> bool {
        self.folder.is_some()
    }

    /// Appends a record to a partition. Key and value may have up to 4 GiB.
    pub fn push(&mut self, partition: usize, key: &[u8], value: &[&[u8]]) -> Result<(), SpillError> {
        let buffer = &mut self.buffers[partition];
        let before = buffer.capacity();
        let length: usize = value.iter().map(|part| part.len()).sum();
        for length in [key.len(), length] {
            buffer.extend(u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        }
        buffer.extend_from_slice(key);
        value.iter().for_each(|part| buffer.extend_from_slice(part));
        self.held += buffer.capacity() - before;
        if self.held > self.memory {
            return self.flush();
        }
        Ok(())
    }

    /// Ends writing: what has spilled holds no memory any more.
    pub fn finish(&mut self) -> Result<(), SpillError> {
        if self.has_spilled() {
            return self.flush();
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), SpillError> {
        if self.folder.is_none() {
            let folder = tempfile::Builder::new().prefix("laser-").tempdir();
            self.folder = Some(folder.map_err(|source| SpillError { path: std::env::temp_dir(), source })?);
        }
        for partition in 0..PARTITIONS {
            let buffer = std::mem::take(&mut self.buffers[partition]);
            if !buffer.is_empty() {
                let path = self.path(partition);
                append(&path, &buffer).map_err(|source| SpillError { path, source })?;
            }
        }
        self.held = 0;
        Ok(())
    }

    fn path(&self, partition: usize) -> PathBuf {
        let folder = self.folder.as_ref().map(TempDir::path);
        folder.unwrap_or("".as_ref()).join(partition.to_string())
    }

    /// The records of a partition.
    pub fn read(&self, partition: usize) -> Result<Records, SpillError> {
        let mut bytes = Vec::new();
        if self.has_spilled() {
            let path = self.path(partition);
            read_blocks(&path, &mut bytes).map_err(|source| SpillError { path, source })?;
        }
        bytes.extend_from_slice(&self.buffers[partition]);
        Ok(Records(bytes.into()))
    }

    /// The records of a partition, which is empty from then on.
    pub fn take(&mut self, partition: usize) -> Result<Records, SpillError> {
        if !self.has_spilled() {
            let buffer = std::mem::take(&mut self.buffers[partition]);
            self.held -= buffer.capacity();
            return Ok(Records(buffer.into()));
        }
        let records = self.read(partition)?;
        self.buffers[partition].clear();
        let path = self.path(partition);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(SpillError { path, source }),
            _ => Ok(records),
        }
    }
}

fn append(path: &PathBuf, buffer: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    for chunk in buffer.chunks(BLOCK) {
        let block = lz4_flex::block::compress_prepend_size(chunk);
        let length = u32::try_from(block.len()).map_err(io::Error::other)?;
        file.write_all(&length.to_le_bytes())?;
        file.write_all(&block)?;
    }
    Ok(())
}

fn read_blocks(path: &PathBuf, into: &mut Vec<u8>) -> io::Result<()> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    let mut block = Vec::new();
    let mut length = [0; 4];
    while file.read(&mut length[..1])? == 1 {
        file.read_exact(&mut length[1..])?;
        block.resize(u32::from_le_bytes(length) as usize, 0);
        file.read_exact(&mut block)?;
        let chunk = lz4_flex::block::decompress_size_prepended(&block).map_err(io::Error::other)?;
        into.extend_from_slice(&chunk);
    }
    Ok(())
}

/// The records of a partition: pairs of key and value, in the order of writing.
#[derive(Debug)]
pub struct Records(Bytes);

impl Iterator for Records {
    type Item = (Bytes, Bytes);

    fn next(&mut self) -> Option<Self::Item> {
        let length = |at: usize| {
            let bytes = self.0.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_le_bytes(bytes) as usize)
        };
        let (key, value) = (length(0)?, length(4)?);
        let mut record = self.0.split_to(8 + key + value);
        let value = record.split_off(8 + key);
        Some((record.split_off(8), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spilled_or_not_a_partition_reads_as_it_was_written() {
        for memory in [0, 3000, 1 << 20] {
            let mut spill = Spill::new(memory);
            for i in 0..500u32 {
                let value: &[&[u8]] = &[b"value ", &i.to_le_bytes()];
                spill.push(i as usize % 3, &i.to_be_bytes(), value).unwrap();
            }
            spill.finish().unwrap();
            assert_eq!(spill.has_spilled(), memory < 1 << 20);
            for partition in 0..3u32 {
                let expected: Vec<u32> = (partition..500).step_by(3).collect();
                let keys = |records: Records| -> Vec<u32> {
                    let key = |(key, value): (Bytes, Bytes)| {
                        assert_eq!((value.len(), &value[..6]), (10, b"value ".as_slice()));
                        u32::from_be_bytes(key[..].try_into().unwrap())
                    };
                    records.map(key).collect()
                };
                let at = partition as usize;
                assert_eq!(keys(spill.read(at).unwrap()), expected);
                assert_eq!(keys(spill.take(at).unwrap()), expected);
                assert!(keys(spill.read(at).unwrap()).is_empty());
            }
        }
    }

    #[test]
    fn the_files_go_with_the_value() {
        let mut spill = Spill::new(0);
        spill.push(1, b"key", &[]).unwrap();
        let folder = spill.path(1).parent().unwrap().to_owned();
        assert!(folder.exists());
        drop(spill);
        assert!(!folder.exists());
    }
}
