//! What rows of logits say of the next token.

use candle_core::{DType, Result, Tensor, bail};
use laser_cpu::Predictions;
use laser_decode::{Candidate, Draw, Prediction};

use super::{Launch, output_of};

/// Of a block, which has a row: a vocabulary of 128,000 is read more than `k` times.
const THREADS: usize = 1024;

/// Words of a draw: the noise's three, and what changes the distribution.
const DRAW_WORDS: usize = 6;

/// Words of a row beside its candidates: the choice, entropy and normaliser.
const ROW_WORDS: usize = 4;

/// The `k` most probable tokens of every row of logits, `[rows, vocabulary]`, and its prediction, as
/// [`Predictions::push`] finds them. They alone leave the device: a row of 32,000 logits would be 128 kB.
pub(crate) fn predictions(logits: &Tensor, k: usize, draws: &[Option<Draw>]) -> Result<Predictions> {
    let (rows, width) = logits.dims2()?;
    let k = k.min(width);
    let found = output_of((rows, 2 * k + ROW_WORDS), DType::U32, logits.device())?;
    let words: Vec<u32> = draws.iter().flat_map(|draw| words(draw.as_ref())).collect();
    let drawn = match draws.iter().any(Option::is_some) {
        true => Some(Tensor::from_vec(words, (rows, DRAW_WORDS), logits.device())?),
        false => None,
    };
    Launch {
        kernel: "top_k",
        tensors: &[Some(logits), Some(&found), drawn.as_ref()],
        sizes: &[width, k],
        floats: &[],
        grid: (rows, 1),
        threads: THREADS,
        shared: 4 * THREADS / 32,
    }
    .run(logits.device())?;
    let mut predictions = Predictions::default();
    for (row, draw) in found.to_vec2::<u32>()?.iter().zip(draws) {
        let candidate = |pair: &[u32]| Candidate { token: pair[0], log_probability: f32::from_bits(pair[1]) };
        let (pairs, rest) = row.split_at(2 * k);
        if pairs.iter().step_by(2).any(|&token| token as usize >= width) {
            bail!("logits that are no numbers came from the GPU");
        }
        predictions.candidates.extend(pairs.chunks_exact(2).map(candidate));
        predictions.rows.push(Prediction {
            choice: candidate(rest),
            entropy: f32::from_bits(rest[2]),
            sharpness: draw.map_or(1.0, |draw| draw.sampling.temperature().recip()),
            log_normaliser: f32::from_bits(rest[3]),
        });
    }
    Ok(predictions)
}

fn words(draw: Option<&Draw>) -> [u32; DRAW_WORDS] {
    draw.map_or([0; DRAW_WORDS], |Draw { sampling, noise }| {
        let [low, high, place] = noise.words();
        let sharpness = sampling.temperature().recip().to_bits();
        [low, high, place, sharpness, sampling.top_k().unwrap_or(u32::MAX), sampling.top_p().to_bits()]
    })
}
