//! The CPU engine: a Llama-family decoder for draft trees, in f32, bf16 or quantised weights.
//!
//! [`CpuDecoder`] runs one forward over the trees of many sequences, each with a [`CpuCache`] of its own. It knows no
//! files or tensor libraries: weights come by name from [`Tensors`], as plain `f32` values or as GGUF's blocks. Nearly
//! all `unsafe` code of Laser is in its skinny matrix product, behind safe types that check every bound.
//!
//! The decoder for GPUs and other quantised weights, a crate above, shares what describes a model and a step:
//! [`ModelShape`], [`Rope`], [`Batch`] and [`Predictions`].

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("Laser is for x86_64 and aarch64: no other processor was tried");

mod attention;
mod batch;
mod cache;
mod decoder;
mod heads;
mod layer;
mod masked;
mod rope;
mod sample;
mod shape;
mod skinny;
mod top_k;
mod vector;

pub use batch::{Asked, Batch, Span, Tree};
pub use cache::CpuCache;
pub use decoder::CpuDecoder;
pub use heads::CpuHeads;
pub use layer::Tensors;
pub use masked::{Allowed, MaskedRow, is_allowed};
pub use rope::{Rope, RopeScaling};
pub use shape::{MedusaShape, ModelShape};
pub use skinny::{Format, Matrix};
pub use top_k::Predictions;
