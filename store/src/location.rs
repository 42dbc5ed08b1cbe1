//! Places by local path or object-store URL, behind one type.
//!
//! `data/users.parquet`, `s3://bucket/key`, `gs://…`, `az://…` all read and write alike; credentials
//! come from the usual environment of each cloud. Local writes are synced to disk, and
//! [`Location::create`] has exactly one winner on every store: it is how Laser commits.

mod remote;

use std::fs::File;
use std::io::Seek;
use std::path::{Component, Path as FsPath, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use object_store::buffered::BufWriter;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutMode};
use tokio::io::AsyncWriteExt;

pub use object_store::Error as StoreError;

use laser_schema::digest::Digest;

/// Why a place could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// The text is neither a path nor a URL of a supported store.
    #[error("{url}: not a local path or a URL of a supported store (s3, gs, az, file): {reason}")]
    Unsupported {
        /// The text as given.
        url: String,
        /// The store library's message.
        reason: String,
    },
    /// Nothing is there.
    #[error("{url}: no such file or object")]
    NotFound {
        /// The place.
        url: String,
    },
    /// The store refused or failed.
    #[error("{url}: cannot {action}: {source}")]
    Store {
        /// The place.
        url: String,
        /// The attempted action: `read`, `write`, `list` or `remove`.
        action: &'static str,
        /// The store's error.
        source: object_store::Error,
    },
}

impl LocationError {
    /// Whether the store does not let us in: credentials are wrong or lack a right, so trying again does not help.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Store { source, .. } if is_refusal(source))
    }
}

/// Whether a store does not let us in; see [`LocationError::is_refusal`].
pub fn is_refusal(error: &StoreError) -> bool {
    use object_store::Error::{PermissionDenied, Unauthenticated};
    matches!(error, PermissionDenied { .. } | Unauthenticated { .. })
}

/// Whether a create-only write won.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// The object is ours.
    Won,
    /// Somebody wrote it first; nothing was changed.
    Exists,
}

/// One listed object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name below the listed location, with `/` between folders.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// When it was last written, by the store's clock.
    pub modified: Timestamp,
}

/// A file, object or folder in some store.
#[derive(Debug, Clone)]
pub struct Location {
    store: Arc<dyn ObjectStore>,
    path: Path,
    url: String,
    local: bool,
}

impl Location {
    /// Parses a local path or a URL. Nothing is touched yet.
    ///
    /// # Errors
    /// [`LocationError::Unsupported`] if the text names no store that Laser knows.
    pub fn parse(text: &str) -> Result<Self, LocationError> {
        let unsupported = |reason: String| LocationError::Unsupported { url: text.to_owned(), reason };
        if let Some(path) = text.strip_prefix("file://") {
            return Self::local(FsPath::new(path)).map_err(|e| unsupported(e.to_string()));
        }
        if !text.contains("://") {
            return Self::local(FsPath::new(text)).map_err(|e| unsupported(e.to_string()));
        }
        let url = url::Url::parse(text).map_err(|e| unsupported(e.to_string()))?;
        let (store, path) = remote::store(&url).map_err(|e| unsupported(e.to_string()))?;
        let url = text.trim_end_matches('/').to_owned();
        Ok(Self { store, path, url, local: false })
    }

    fn local(path: &FsPath) -> Result<Self, Box<dyn std::error::Error>> {
        let store = LocalFileSystem::new().with_fsync(true);
        Ok(Self {
            store: Arc::new(store),
            path: Path::from_absolute_path(normalise(path)?)?,
            url: path.display().to_string(),
            local: true,
        })
    }

    /// The place `relative` (with `/` between folders) below this one.
    pub fn join(&self, relative: &str) -> Self {
        let mut path = self.path.clone();
        for part in relative.split('/').filter(|p| !p.is_empty()) {
            path = path.join(part);
        }
        let url = format!("{}/{relative}", self.url.trim_end_matches('/'));
        Self { store: self.store.clone(), path, url, local: self.local }
    }

    /// The place that `text` names: a URL by itself, anything else below this one.
    ///
    /// # Errors
    /// [`LocationError::Unsupported`].
    pub fn resolve(&self, text: &str) -> Result<Self, LocationError> {
        match text.contains("://") {
            true => Self::parse(text),
            false => Ok(self.join(text)),
        }
    }

    /// The path or URL as the user wrote it, for messages and jobs.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A URL that names the place from any folder and, for a shared store, from any machine.
    pub fn absolute_url(&self) -> String {
        match self.local_path() {
            Some(path) => format!("file://{}", path.display()),
            None => self.url.clone(),
        }
    }

    /// The place that an absolute URL names, relative to this one; `None` if it is not below.
    pub fn relative<'a>(&self, url: &'a str) -> Option<&'a str> {
        url.strip_prefix(self.absolute_url().trim_end_matches('/'))?.strip_prefix('/')
    }

    /// The store and the path inside it, for readers that take both.
    pub fn store(&self) -> (Arc<dyn ObjectStore>, Path) {
        (self.store.clone(), self.path.clone())
    }

    /// The path in the file system, if this is a local place.
    pub fn local_path(&self) -> Option<PathBuf> {
        let path = || normalise(FsPath::new(&self.url)).unwrap_or_else(|_| PathBuf::from(&self.url));
        self.local.then(path)
    }

    /// The last extension of the name in lower case (`parquet`, `csv`, `jsonl`), or empty.
    pub fn extension(&self) -> String {
        self.path.extension().unwrap_or_default().to_ascii_lowercase()
    }

    fn error(&self, action: &'static str, source: object_store::Error) -> LocationError {
        match source {
            object_store::Error::NotFound { .. } => LocationError::NotFound { url: self.url.clone() },
            source => LocationError::Store { url: self.url.clone(), action, source },
        }
    }

    fn local_error(&self, action: &'static str, error: std::io::Error) -> LocationError {
        match error.kind() {
            std::io::ErrorKind::NotFound => LocationError::NotFound { url: self.url.clone() },
            _ => self.error(action, StoreError::Generic { store: "local", source: Box::new(error) }),
        }
    }

    /// Reads the whole object.
    ///
    /// # Errors
    /// [`LocationError::NotFound`] or the store's error.
    pub async fn read(&self) -> Result<Bytes, LocationError> {
        let got = self.store.get(&self.path).await.map_err(|e| self.error("read", e))?;
        got.bytes().await.map_err(|e| self.error("read", e))
    }

    /// Writes the object's bytes to `to` as they come.
    ///
    /// # Errors
    /// [`LocationError::NotFound`], the store's error, or the writer's.
    pub async fn download(&self, to: &mut impl std::io::Write) -> Result<(), LocationError> {
        let failed = |e| self.error("read", e);
        let got = self.store.get(&self.path).await.map_err(failed)?;
        let mut chunks = got.into_stream();
        while let Some(chunk) = chunks.try_next().await.map_err(failed)? {
            to.write_all(&chunk).map_err(|e| self.local_error("copy to the local disk", e))?;
        }
        Ok(())
    }

    /// Opens the object to be read in pieces: a remote one is copied to the local disk first, into a file without a
    /// name that goes when it is closed.
    ///
    /// # Errors
    /// [`LocationError::NotFound`], the store's error, or the local disk's.
    pub async fn open(&self) -> Result<File, LocationError> {
        let failed = |e| self.local_error("open", e);
        if let Some(path) = self.local_path() {
            return File::open(path).map_err(failed);
        }
        let mut copy = tempfile::tempfile().map_err(failed)?;
        self.download(&mut copy).await?;
        copy.rewind().map_err(failed)?;
        Ok(copy)
    }

    /// Reads the whole object, or `None` if there is none.
    pub async fn read_optional(&self) -> Result<Option<Bytes>, LocationError> {
        match self.read().await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(LocationError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether an object is there.
    pub async fn exists(&self) -> Result<bool, LocationError> {
        match self.store.head(&self.path).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(self.error("read", error)),
        }
    }

    /// When the object was last written, by the store's clock.
    ///
    /// # Errors
    /// [`LocationError::NotFound`] or the store's error.
    pub async fn modified(&self) -> Result<Timestamp, LocationError> {
        let meta = self.store.head(&self.path).await;
        meta.map(|meta| timestamp(&meta)).map_err(|e| self.error("read", e))
    }

    /// Writes the object whole, replacing what was there. Readers see the old or the new one, never a part.
    pub async fn write(&self, bytes: Bytes) -> Result<(), LocationError> {
        self.store.put(&self.path, bytes.into()).await.map_err(|e| self.error("write", e))?;
        Ok(())
    }

    /// Writes the object in pieces, replacing what was there once the writer is shut down.
    pub fn writer(&self) -> BufWriter {
        BufWriter::new(self.store.clone(), self.path.clone())
    }

    /// Writes text as an object, piece by piece; memory is that of ten megabytes.
    pub fn object_writer(&self) -> ObjectWriter {
        ObjectWriter { writer: self.writer(), location: self.clone() }
    }

    /// Writes the object whole if there is none: of any number of writers exactly one wins.
    ///
    /// # Errors
    /// The store's error; losing is not one.
    pub async fn create(&self, bytes: Bytes) -> Result<Created, LocationError> {
        match self.store.put_opts(&self.path, bytes.into(), PutMode::Create.into()).await {
            Ok(_) => Ok(Created::Won),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(Created::Exists),
            Err(error) => Err(self.error("write", error)),
        }
    }

    /// Removes the object; that there is none is no error.
    pub async fn remove(&self) -> Result<(), LocationError> {
        match self.store.delete(&self.path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.error("write", error)),
        }
    }

    /// Removes objects below this folder, in no particular order, with as few requests as the store allows; then, on a
    /// local disk, the folders that are empty. What is gone already is no error.
    pub async fn remove_below(&self, names: Vec<String>) -> Result<(), LocationError> {
        let paths: Vec<_> = names.iter().map(|name| Ok(self.join(name).path)).collect();
        let mut removed = self.store.delete_stream(futures::stream::iter(paths).boxed());
        while let Some(removed) = removed.next().await {
            match removed {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(self.error("remove", error)),
            }
        }
        if let Some(path) = self.local_path() {
            remove_empty_folders(&path);
        }
        Ok(())
    }

    /// A digest that changes whenever the object does: of its bytes, or of what a remote store says
    /// about its version, so that no table is fetched twice.
    ///
    /// # Errors
    /// [`LocationError::NotFound`] or the store's error.
    pub async fn fingerprint(&self) -> Result<Digest, LocationError> {
        if self.local {
            let got = self.store.get(&self.path).await.map_err(|e| self.error("read", e))?;
            let mut hasher = blake3::Hasher::new();
            let mut chunks = got.into_stream();
            while let Some(chunk) = chunks.try_next().await.map_err(|e| self.error("read", e))? {
                hasher.update(&chunk);
            }
            return Ok(Digest::from_bytes(*hasher.finalize().as_bytes()));
        }
        let meta = self.store.head(&self.path).await.map_err(|e| self.error("read", e))?;
        let modified = meta.last_modified.to_rfc3339();
        Ok(Digest::of_json(&(self.url.as_str(), meta.size, meta.e_tag, meta.version, modified)))
    }

    /// The names of the folders right below this one.
    ///
    /// # Errors
    /// The store's error; a missing folder lists nothing.
    pub async fn folders(&self) -> Result<Vec<String>, LocationError> {
        let listed = self.store.list_with_delimiter(Some(&self.path)).await;
        let listed = listed.map(|listed| listed.common_prefixes);
        let folders = self.listed(listed)?;
        Ok(folders.iter().filter_map(|folder| folder.filename().map(str::to_owned)).collect())
    }

    /// The names of the objects below this folder that come after one, in any order; all if none is given. Stores
    /// skip the others without reading them.
    ///
    /// # Errors
    /// The store's error; a missing folder lists nothing.
    pub async fn names_after(&self, after: Option<&str>) -> Result<Vec<String>, LocationError> {
        let listed = match after {
            Some(after) => {
                let after = self.join(after).path;
                self.store.list_with_offset(Some(&self.path), &after)
            }
            None => self.store.list(Some(&self.path)),
        };
        self.listed(listed.map_ok(|object| self.name_below(&object)).try_collect().await)
    }

    /// The object's name below this folder.
    fn name_below(&self, object: &ObjectMeta) -> String {
        let prefix = self.path.as_ref().len() + usize::from(!self.path.as_ref().is_empty());
        object.location.as_ref()[prefix..].to_owned()
    }

    /// What a store lists; nothing for a missing folder.
    fn listed<T>(&self, listed: object_store::Result<Vec<T>>) -> Result<Vec<T>, LocationError> {
        match listed {
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            listed => listed.map_err(|e| self.error("list", e)),
        }
    }

    /// All objects below this folder, by name.
    ///
    /// # Errors
    /// The store's error; a missing folder lists nothing.
    pub async fn list(&self) -> Result<Vec<Listed>, LocationError> {
        let objects = self.store.list(Some(&self.path));
        let objects = objects.map_ok(|o| Listed { name: self.name_below(&o), size: o.size, modified: timestamp(&o) });
        let mut listed: Vec<Listed> = self.listed(objects.try_collect().await)?;
        listed.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(listed)
    }
}

/// An object that is being written. Readers see nothing of it before [`Self::finish`].
#[derive(Debug)]
pub struct ObjectWriter {
    location: Location,
    writer: BufWriter,
}

impl ObjectWriter {
    /// Appends text.
    pub async fn write(&mut self, text: &str) -> Result<(), LocationError> {
        let written = self.writer.write_all(text.as_bytes()).await;
        written.map_err(|e| self.error(e))
    }

    /// Ends the object, which replaces what was there.
    pub async fn finish(mut self) -> Result<(), LocationError> {
        let ended = self.writer.shutdown().await;
        ended.map_err(|e| self.error(e))
    }

    /// Leaves what was there as it is.
    pub async fn abort(mut self) {
        // A store drops uploads that were begun and never ended.
        let _ = self.writer.abort().await;
    }

    fn error(&self, error: std::io::Error) -> LocationError {
        let source = error.downcast::<StoreError>();
        self.location
            .error("write", source.unwrap_or_else(|e| StoreError::Generic { store: "writer", source: e.into() }))
    }
}

fn timestamp(meta: &ObjectMeta) -> Timestamp {
    Timestamp::from_microsecond(meta.last_modified.timestamp_micros()).unwrap_or_default()
}

/// Removes a folder and those in it, as far as they are empty: object stores have none.
fn remove_empty_folders(path: &FsPath) {
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty_folders(&entry.path());
        }
    }
    let _ = std::fs::remove_dir(path);
}

/// The absolute path without `.` and `..`, by its text alone: what is there may not exist yet.
fn normalise(path: &FsPath) -> std::io::Result<PathBuf> {
    let mut normal = PathBuf::new();
    for component in std::path::absolute(path)?.components() {
        match component {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            component => normal.push(component),
        }
    }
    Ok(normal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_in_a_path_are_resolved() {
        let location = Location::parse("a/../b/./c").unwrap();
        let expected = std::env::current_dir().unwrap().join("b/c");
        assert_eq!(location.local_path().unwrap(), expected);
        assert_eq!(location.url(), "a/../b/./c");
    }

    fn temporary() -> (tempfile::TempDir, Location) {
        let dir = tempfile::tempdir().unwrap();
        let location = Location::parse(dir.path().to_str().unwrap()).unwrap();
        (dir, location)
    }

    #[tokio::test]
    async fn create_has_one_winner() {
        let (_dir, root) = temporary();
        let object = root.join("a/b.txt");
        assert_eq!(object.create(Bytes::from("first")).await.unwrap(), Created::Won);
        assert_eq!(object.create(Bytes::from("second")).await.unwrap(), Created::Exists);
        assert_eq!(object.read().await.unwrap(), "first");
    }

    #[tokio::test]
    async fn only_named_objects_and_empty_folders_are_removed() {
        let (dir, root) = temporary();
        for name in ["a/x", "a/sub/y", "b/z", "b/foreign"] {
            root.join(name).write(Bytes::from("1")).await.unwrap();
        }
        for (folder, names) in [("a", ["x", "sub/y", "gone"]), ("b", ["z", "gone", "gone"])] {
            let names = names.map(str::to_owned).to_vec();
            root.join(folder).remove_below(names).await.unwrap();
        }
        assert!(!dir.path().join("a").exists());
        assert_eq!(root.list().await.unwrap()[0].name, "b/foreign");
    }

    #[tokio::test]
    async fn list_names_are_relative_and_sorted() {
        let (_dir, root) = temporary();
        for name in ["x/b", "x/a", "y"] {
            root.join(name).write(Bytes::from("1")).await.unwrap();
        }
        let names: Vec<String> = root.list().await.unwrap().into_iter().map(|l| l.name).collect();
        assert_eq!(names, ["x/a", "x/b", "y"]);
        assert!(root.join("missing").list().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_missing_object_is_named() {
        let (_dir, root) = temporary();
        let error = root.join("no.parquet").read().await.unwrap_err().to_string();
        assert!(error.ends_with("no.parquet: no such file or object"), "{error}");
        assert!(root.join("no.parquet").read_optional().await.unwrap().is_none());
    }

    #[test]
    fn an_unknown_scheme_is_refused() {
        let error = Location::parse("ftp://host/file").unwrap_err().to_string();
        assert!(error.contains("ftp://host/file") && error.contains("s3, gs, az"), "{error}");
    }
}
