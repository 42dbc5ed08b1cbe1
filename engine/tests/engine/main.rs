//! The engine: trees against sequential decoding, mistralrs as oracle, formats, bad input, the fake.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as well")]
#![expect(clippy::cast_possible_truncation, reason = "token ids and lengths of tests are small")]

mod blocks;
#[cfg(feature = "cuda")]
mod cuda;
mod draft_tokens;
#[cfg(feature = "cuda")]
mod driver;
mod eagle;
mod fake;
mod forward;
mod hold;
mod loading;
mod masked;
mod medusa;
#[cfg(feature = "mistralrs")]
mod mistralrs_parity;
mod models;
mod pytorch;
mod support;
