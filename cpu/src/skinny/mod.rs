//! The skinny matrix product: y = x Wᵀ for a few rows of x, at the speed at which W can be read.
//!
//! Verifying a draft tree multiplies every weight with 2 to 64 rows. General kernels pack and block for large
//! matrices and need 3 to 5 times as long for 8 rows as for one; here the weights are packed once, when they are
//! loaded, and streamed once a product, while the rows' sums stay in registers.
//!
//! Layout: outputs in *panels* of 16, and in a panel one [`Line`] of 16 weights for each input (f32) or two inputs
//! (bf16), so that a line is one register of AVX-512, two of AVX2 or four of NEON. A tile of the product holds
//! V × T registers of sums for V registers of outputs and T rows; each line is loaded once and each x is broadcast.
//!
//! bf16 weights are widened to f32, which takes as many instructions as the products of a few rows. AVX512-BF16
//! multiplies pairs as they are stored: there the rows of x are rounded to bf16 once a product, and a pair is an
//! element like any other.
//!
//! Weights of 8 bits are multiplied with rows of x in 8 bits, in [blocks](quants): a line has four inputs, and the
//! sum of a block is exact.
//!
//! AMX multiplies tiles of both: a panel is one as it is stored. It sums pairs of bf16 in an order of its own,
//! the same for every row, so it takes a matrix for any number of rows or not at all.
//!
//! Every sum runs over the inputs in ascending order, alone in its lane. A row's result therefore does not depend, to
//! the bit, on the other rows, the tile or the number of threads.
#![expect(unsafe_code, reason = "registers are addressed through pointers; `product` checks the bounds of all of them")]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod format;
mod ggml;
#[cfg(target_arch = "x86_64")]
mod isa;
mod kernel;
mod layout;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packing;
#[cfg(any(target_arch = "x86_64", test))]
mod portable;
mod product;
mod quants;
mod rows;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
use self::arm as processor;
#[cfg(target_arch = "x86_64")]
use self::x86 as processor;

#[cfg(target_arch = "x86_64")]
pub(crate) use self::isa::{Isa, isa};
pub use self::{format::Format, packing::Matrix};
pub(crate) use self::{
    format::{Line, PANEL, TILE_INPUTS, ZERO, bf16},
    packing::{PackedMatrix, Panels},
    processor::vectorized,
    product::{Order, TILED_OUTPUTS, add_pairs},
    rows::Rows,
};
