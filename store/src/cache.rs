//! Files of remote stores on the local disk: fetched once a machine, shared by its processes, bounded.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use tempfile::Builder;

use crate::location::{Location, LocationError};
use laser_schema::digest::Digest;

/// Why a file could not be kept.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The remote file.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The folder.
    #[error("{}: {source}; [worker] cache names the folder", path.display())]
    Folder {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl CacheError {
    fn folder(path: &Path, source: io::Error) -> Self {
        Self::Folder { path: path.to_owned(), source }
    }
}

/// How names begin of what is being fetched.
const FETCHING: &str = "fetching-";

/// What was being fetched so long ago was left by a process that was killed.
const LEFT: Duration = Duration::from_secs(24 * 60 * 60);

/// A folder of files by their digest. Processes share it without a lock: a file appears whole, by renaming, and one
/// that is removed stays readable for whoever has it mapped. What others keep there counts for nothing and stays.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
    bytes_max: u64,
}

impl Cache {
    /// A cache of at most `bytes_max` bytes, besides the file that was asked for last.
    pub fn new(folder: PathBuf, bytes_max: u64) -> Self {
        Self { folder, bytes_max }
    }

    /// The local copy of a file whose content `digest` names.
    pub async fn file(&self, from: &Location, digest: &Digest) -> Result<PathBuf, CacheError> {
        let path = self.folder.join(digest.to_string());
        if touch(&path).is_ok() {
            return Ok(path);
        }
        let failed = |source| CacheError::folder(&path, source);
        let mut file = self.temporary(|| Builder::new().prefix(FETCHING).tempfile_in(&self.folder))?;
        from.download(file.as_file_mut()).await?;
        file.persist(&path).map_err(|e| failed(e.error))?;
        self.evict(&path).map_err(failed)?;
        Ok(path)
    }

    /// The local copy of a folder, as it is listed now.
    pub async fn folder(&self, from: &Location) -> Result<PathBuf, CacheError> {
        let listed = from.list().await?;
        if listed.is_empty() {
            let url = from.url().to_owned();
            return Err(LocationError::NotFound { url }.into());
        }
        let state: Vec<_> = listed.iter().map(|l| (&l.name, l.size, l.modified)).collect();
        let path = self.folder.join(Digest::of_json(&(from.url(), state)).to_string());
        if touch(&path).is_ok() {
            return Ok(path);
        }
        let failed = |source| CacheError::folder(&path, source);
        let folder = self.temporary(|| Builder::new().prefix(FETCHING).tempdir_in(&self.folder))?;
        for file in &listed {
            let target = folder.path().join(&file.name);
            let parent = target.parent().unwrap_or(folder.path());
            std::fs::create_dir_all(parent).map_err(failed)?;
            let mut target = File::create(&target).map_err(failed)?;
            from.join(&file.name).download(&mut target).await?;
        }
        // Another process may have been quicker; its copy is as good.
        let folder = folder.keep();
        if std::fs::rename(&folder, &path).is_err() && path.is_dir() {
            std::fs::remove_dir_all(&folder).map_err(failed)?;
        }
        touch(&path).map_err(failed)?;
        self.evict(&path).map_err(failed)?;
        Ok(path)
    }

    fn temporary<T>(&self, make: impl FnOnce() -> io::Result<T>) -> Result<T, CacheError> {
        let made = std::fs::create_dir_all(&self.folder).and_then(|()| make());
        made.map_err(|source| CacheError::folder(&self.folder, source))
    }

    /// Removes what was not asked for the longest, until the rest fits, and what killed processes have left.
    fn evict(&self, newest: &Path) -> io::Result<()> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let (name, path) = (entry.file_name(), entry.path());
            let name = name.to_string_lossy();
            // Another process may be removing it.
            let Ok(data) = path.metadata() else { continue };
            if Digest::is_shown(&name) {
                entries.push((data.modified()?, size(&path), path));
            } else if name.starts_with(FETCHING) && data.modified()?.elapsed().is_ok_and(|age| age > LEFT) {
                remove(&path)?;
            }
        }
        entries.sort_unstable();
        let mut total: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in entries.iter().filter(|(_, _, path)| path != newest) {
            if total <= self.bytes_max {
                break;
            }
            remove(path)?;
            total -= bytes;
        }
        Ok(())
    }
}

/// Removes a file or a folder, unless another process has.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match path.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Bytes of a file, or of all files of a folder.
fn size(path: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(path) else {
        return path.metadata().map_or(0, |data| data.len());
    };
    entries.flatten().map(|entry| size(&entry.path())).sum()
}

fn touch(path: &Path) -> io::Result<()> {
    File::open(path)?.set_modified(Timestamp::now().into())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use std::time::SystemTime;

    use super::*;

    async fn put(store: &Location, content: &str) -> (Location, Digest) {
        let bytes = Bytes::from(content.to_owned());
        let digest = Digest::of(&bytes);
        let location = store.join(&digest.to_string());
        location.write(bytes).await.unwrap();
        (location, digest)
    }

    #[tokio::test]
    async fn a_file_is_fetched_once_and_the_oldest_leave() {
        let dir = tempfile::tempdir().unwrap();
        let store = Location::parse(dir.path().join("store").to_str().unwrap()).unwrap();
        let cache = Cache::new(dir.path().join("cache"), 10);
        let mut kept = Vec::new();
        for (i, content) in ["aaaa", "bbbb", "cccc"].iter().enumerate() {
            let (location, digest) = put(&store, content).await;
            let path = cache.file(&location, &digest).await.unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), *content);
            location.remove().await.unwrap();
            assert_eq!(cache.file(&location, &digest).await.unwrap(), path);
            let age = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(i as u64);
            let file = std::fs::File::options().append(true).open(&path).unwrap();
            file.set_modified(age).unwrap();
            kept.push((path, location, digest));
        }
        let there: Vec<bool> = kept.iter().map(|(path, ..)| path.exists()).collect();
        assert_eq!(there, [false, true, true]);
        let (_, location, digest) = &kept[0];
        let error = cache.file(location, digest).await.unwrap_err();
        assert!(error.to_string().contains("no such file"), "{error}");
    }

    #[tokio::test]
    async fn what_others_keep_in_the_folder_stays_and_what_killed_processes_left_goes() {
        let dir = tempfile::tempdir().unwrap();
        let store = Location::parse(dir.path().join("store").to_str().unwrap()).unwrap();
        let folder = dir.path().join("cache");
        let at = |name: &str| folder.join(name);
        std::fs::create_dir_all(at("models/ours")).unwrap();
        for name in ["models/ours/large", "notes", "fetching-now", "fetching-left"] {
            std::fs::write(at(name), "a hundred bytes ".repeat(7)).unwrap();
        }
        let left = File::options().append(true).open(at("fetching-left")).unwrap();
        left.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let cache = Cache::new(folder.clone(), 10);
        for content in ["aaaa", "bbbb"] {
            let (location, digest) = put(&store, content).await;
            cache.file(&location, &digest).await.unwrap();
        }
        let there = ["models/ours/large", "notes", "fetching-now", "fetching-left"].map(|name| at(name).exists());
        assert_eq!(there, [true, true, true, false]);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 5, "both files are within the bound");
    }
}
