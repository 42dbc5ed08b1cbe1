//! Arbitrary bytes as a pool: `cargo +nightly fuzz run pool_open` in decode/.
#![no_main]

use laser_decode::{DraftContext, DraftTree, Drafter, Pool};
use libfuzzer_sys::fuzz_target;

#[path = "../open_and_draft.rs"]
mod open_and_draft;

fuzz_target!(|content: &[u8]| open_and_draft::run(content));
