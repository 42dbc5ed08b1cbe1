//! What Laser's immutable files have in common: a preamble of 16 bytes, the header's checksum behind it, and a content
//! whose checksum is part of the header. They are read in place.

use bytes::Bytes;

/// Read as a native integer, any other value means that the machine's byte order is not the file's.
pub(crate) const BYTE_ORDER: u32 = 0x0102_0304;
/// Start of the header checksum's range, which covers everything after itself. What precedes it is compared for
/// equality.
pub(crate) const CHECKED_FROM: usize = 48;

/// What the first bytes of a file say.
pub(crate) enum Preamble {
    /// The file is of another kind, and starts like this.
    Magic([u8; 8]),
    /// It is shorter than a header.
    Short,
    /// It has another byte order than this machine.
    ByteOrder,
    /// It is of this version of its format.
    Version(u32),
}

impl Preamble {
    /// Reads the preamble of a file whose header has at least `header` bytes.
    pub(crate) fn of(bytes: &[u8], magic: [u8; 8], header: usize) -> Self {
        let mut found = [0; 8];
        let there = bytes.len().min(8);
        found[..there].copy_from_slice(&bytes[..there]);
        if found != magic {
            return Self::Magic(found);
        }
        if bytes.len() < header {
            return Self::Short;
        }
        // The sections are read as native integers, so this mark must be too.
        if bytemuck::pod_read_unaligned::<u32>(&bytes[12..16]) != BYTE_ORDER {
            return Self::ByteOrder;
        }
        Self::Version(word_at(bytes, 8))
    }

    /// Begins a file; [`seal`] fills in the checksum.
    pub(crate) fn write(bytes: &mut Vec<u8>, magic: [u8; 8], version: u32) {
        bytes.extend(magic);
        bytes.extend(version.to_le_bytes());
        bytes.extend(BYTE_ORDER.to_le_bytes());
        bytes.extend([0; 32]);
    }
}

/// Two checksums that should be equal, in hexadecimal.
pub(crate) struct Mismatch {
    pub(crate) expected: String,
    pub(crate) found: String,
}

/// Returns the hash of these bytes if it is the expected one.
pub(crate) fn check_hash(bytes: &[u8], expected: &[u8]) -> Result<[u8; 32], Mismatch> {
    let found = blake3::hash(bytes);
    if found.as_bytes() == expected {
        return Ok(*found.as_bytes());
    }
    let expected = expected.iter().map(|byte| format!("{byte:02x}")).collect();
    Err(Mismatch { expected, found: found.to_hex().to_string() })
}

/// Writes the checksums: the content's to its place in the header, then the header's.
pub(crate) fn seal(bytes: &mut [u8], content_hash: usize, sections_at: usize) {
    let content = blake3::hash(&bytes[sections_at..]);
    bytes[content_hash..content_hash + 32].copy_from_slice(content.as_bytes());
    let header = blake3::hash(&bytes[CHECKED_FROM..sections_at]);
    bytes[16..CHECKED_FROM].copy_from_slice(header.as_bytes());
}

/// The little-endian word at `at`, which must be within the bytes.
pub(crate) fn word_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// Returns the bytes at a multiple of 4, copying them only if necessary.
pub(crate) fn aligned(bytes: Bytes) -> Bytes {
    struct Words(Vec<u32>, usize);
    impl AsRef<[u8]> for Words {
        fn as_ref(&self) -> &[u8] {
            &bytemuck::cast_slice(&self.0)[..self.1]
        }
    }
    if bytes.as_ptr().addr().is_multiple_of(4) {
        return bytes;
    }
    let mut words = vec![0u32; bytes.len().div_ceil(4)];
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(&bytes);
    Bytes::from_owner(Words(words, bytes.len()))
}
