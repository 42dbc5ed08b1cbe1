//! The most probable tokens of rows of logits.

use candle_core::{DType, Result, Tensor, bail};
use laser_decode::Candidate;

use super::{Launch, output_of};

const THREADS: usize = 256;

/// Appends the `k` most probable tokens of every row of logits, `[rows, vocabulary]`, as
/// [`laser_cpu::push_top_k`] does. They alone leave the device: a row of 32,000 logits would be 128 kB.
pub(crate) fn push_top_k(logits: &Tensor, k: usize, best: &mut Vec<Candidate>) -> Result<()> {
    let (rows, width) = logits.dims2()?;
    let k = k.min(width);
    let found = output_of((rows, 2 * k), DType::U32, logits.device())?;
    Launch {
        kernel: "top_k",
        tensors: &[Some(logits), Some(&found)],
        sizes: &[width, k],
        floats: &[],
        grid: (rows, 1),
        threads: THREADS,
        shared: 2 * THREADS / 32,
    }
    .run(logits.device())?;
    let found = found.flatten_all()?.to_vec1::<u32>()?;
    if found.iter().step_by(2).any(|&token| token as usize >= width) {
        bail!("logits that are no numbers came from the GPU");
    }
    best.extend(
        found.chunks_exact(2).map(|pair| Candidate { token: pair[0], log_probability: f32::from_bits(pair[1]) }),
    );
    Ok(())
}
