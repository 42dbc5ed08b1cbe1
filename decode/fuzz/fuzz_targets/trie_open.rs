//! Arbitrary bytes as a trie: `cargo +nightly fuzz run trie_open` in decode/.
#![no_main]

use laser_decode::{Allowed, Seen, Stock, Trie};
use libfuzzer_sys::fuzz_target;

#[path = "../open_and_read.rs"]
mod open_and_read;

fuzz_target!(|content: &[u8]| open_and_read::run(content));
