//! What the driver of tests/cuda/driver.cpp counts, and what it pretends to be.

use std::{
    collections::BTreeMap,
    env,
    fs::{File, OpenOptions},
    ops::Sub,
    os::unix::fs::FileExt,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Words of the file before the text of the last error.
const WORDS: usize = 32;
/// Bytes of that text.
const TEXT: usize = 512;
/// Kernels after it, each a name of so many bytes and a word.
const KERNELS: usize = 512;
const NAME: usize = 120;

/// Places of what a test sets.
const CAPABILITY: u64 = 16;
const MEMORY: u64 = 17;

/// Place of the freed memory that the pool keeps, at most.
const KEPT: u64 = 18;

/// Calls so far, or between two times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Kernels, with the products of cuBLAS and cublasLt.
    pub(crate) launches: i64,
    /// Copies from the host.
    pub(crate) uploads: i64,
    pub(crate) uploaded_bytes: i64,
    /// Copies to the host.
    pub(crate) downloads: i64,
    /// Copies within the device, and fills.
    pub(crate) copies: i64,
    pub(crate) allocations: i64,
    pub(crate) synchronisations: i64,
    /// Events created, recorded or waited for.
    pub(crate) events: i64,
    /// Memory in use.
    pub(crate) live_bytes: i64,
    /// Allocations for which there was no memory.
    pub(crate) refusals: i64,
    /// Of algorithms for products.
    pub(crate) lookups: i64,
}

impl Sub for Counts {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            launches: self.launches - earlier.launches,
            uploads: self.uploads - earlier.uploads,
            uploaded_bytes: self.uploaded_bytes - earlier.uploaded_bytes,
            downloads: self.downloads - earlier.downloads,
            copies: self.copies - earlier.copies,
            allocations: self.allocations - earlier.allocations,
            synchronisations: self.synchronisations - earlier.synchronisations,
            events: self.events - earlier.events,
            live_bytes: self.live_bytes - earlier.live_bytes,
            refusals: self.refusals - earlier.refusals,
            lookups: self.lookups - earlier.lookups,
        }
    }
}

/// Launches by kernel.
pub(crate) type Kernels = BTreeMap<String, i64>;

/// Kernels that were launched more often than before, and how much more.
pub(crate) fn more(mut kernels: Kernels, before: &Kernels) -> Kernels {
    for (kernel, launches) in before {
        *kernels.entry(kernel.clone()).or_default() -= launches;
    }
    kernels.retain(|_, launches| *launches > 0);
    kernels
}

static TURN: Mutex<()> = Mutex::new(());

/// The process's driver, for one test at a time.
pub(crate) struct Driver {
    file: File,
    _turn: MutexGuard<'static, ()>,
}

impl Driver {
    /// Waits for other tests; a device of compute capability 8.0 with 1 GiB.
    pub(crate) fn take() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let path = env::var("LASER_FAKE_CUDA").expect("these tests need the driver that tests/cuda.sh builds");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        let driver = Self { file, _turn: turn };
        driver.set(CAPABILITY, 80);
        driver.set_memory(1 << 30);
        driver
    }

    /// Ten times the major number and the minor one.
    pub(crate) fn set_capability(&self, capability: i64) {
        self.set(CAPABILITY, capability);
    }

    pub(crate) fn set_memory(&self, bytes: i64) {
        self.set(MEMORY, bytes);
    }

    /// As a driver begins: freed memory returns to the system.
    pub(crate) fn keep_nothing(&self) {
        self.set(KEPT, 0);
    }

    /// Whether all memory that is freed stays in the pool.
    pub(crate) fn keeps_all(&self) -> bool {
        self.words()[KEPT as usize].cast_unsigned() == u64::MAX
    }

    fn set(&self, word: u64, value: i64) {
        self.file.write_all_at(&value.to_le_bytes(), 8 * word).unwrap();
    }

    fn words(&self) -> [i64; WORDS] {
        let mut bytes = [0; 8 * WORDS];
        // Before the first call of the driver the file is short.
        let _ = self.file.read_at(&mut bytes, 0).unwrap();
        std::array::from_fn(|word| i64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * word + byte])))
    }

    pub(crate) fn counts(&self) -> Counts {
        let words = self.words();
        Counts {
            launches: words[0],
            uploads: words[2],
            uploaded_bytes: words[3],
            downloads: words[4],
            copies: words[6] + words[8],
            allocations: words[9],
            live_bytes: words[11],
            synchronisations: words[12],
            events: words[13],
            refusals: words[14],
            lookups: words[20],
        }
    }

    pub(crate) fn kernels(&self) -> Kernels {
        let mut bytes = vec![0; (NAME + 8) * KERNELS];
        let length = self.file.read_at(&mut bytes, (8 * WORDS + TEXT) as u64).unwrap();
        let kernel = |entry: &[u8]| {
            let (name, launches) = entry.split_at(NAME);
            let name = String::from_utf8_lossy(name).trim_end_matches('\0').to_owned();
            (name, i64::from_le_bytes(launches.try_into().unwrap()))
        };
        bytes[..length].chunks_exact(NAME + 8).map(kernel).filter(|(name, _)| !name.is_empty()).collect()
    }

    /// No call was wrong, also where nobody looked at what it returned.
    pub(crate) fn assert_no_error(&self) {
        let mut text = [0; TEXT];
        let _ = self.file.read_at(&mut text, 8 * WORDS as u64).unwrap();
        let text = String::from_utf8_lossy(&text);
        assert_eq!(self.words()[15], 0, "{}", text.trim_end_matches('\0'));
    }
}
