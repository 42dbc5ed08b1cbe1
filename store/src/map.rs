//! Files mapped into memory: the only `unsafe` of this crate.

use std::fs::File;
use std::io;

use bytes::Bytes;

/// The content of a file, without a copy; pages are shared between processes.
///
/// The file must not change while the bytes are in use. Laser's own files never do: they are written whole under a
/// temporary name and renamed, and a replacement leaves the mapped file as it is. Of a user's file the same is
/// expected while a command reads it.
///
/// # Errors
/// If the file cannot be mapped.
#[expect(unsafe_code, reason = "a mapping is memory that another process could change")]
pub fn map(file: &File) -> io::Result<Bytes> {
    // SAFETY: see above; nobody changes the file while it is mapped.
    let mapping = unsafe { memmap2::Mmap::map(file)? };
    Ok(Bytes::from_owner(mapping))
}
