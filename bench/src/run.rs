//! Running variants interleaved: the heart of every comparison.
//!
//! The entities are taken in chunks of a few batches. Each variant generates a chunk before the next one is
//! begun, and the order of the variants turns by one from chunk to chunk, so that a drift of the machine's speed,
//! a neighbour's load or the state of caches hits all of them alike.

use std::time::Instant;

use anyhow::{Result, bail};
use laser_decode::{Drafter, Pool};
use laser_night::Progress;
use laser_schema::EntityId;
use laser_terminal::Display;
use laser_worker::generate::{DraftModel, Finished, GenerateOptions, Generated, Generator, Request, TextGenerator};

use super::pools::PoolScheme;
use super::variants::Variant;

/// Batches of a turn. At its end the batch runs empty, which more batches make rarer; fewer of them interleave finer.
const TURN_BATCHES: std::ops::RangeInclusive<usize> = 2..=4;

/// One entity to generate for.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    pub(super) id: EntityId,
    /// What decides what is drawn where texts are.
    pub(super) key: u64,
    pub(super) prompt: Vec<u32>,
    /// Tokens of the entity's own old text; empty without one.
    pub(super) own: Vec<u32>,
    /// Its pool under each scheme.
    pub(super) pools: Vec<(PoolScheme, Option<Pool>)>,
}

/// What one variant generated and how long that took.
#[derive(Debug, Clone, Default)]
pub(super) struct Measured {
    /// In the order of the subjects.
    pub(super) texts: Vec<Generated>,
    /// Wall time of all steps.
    pub(super) seconds: f64,
    /// Forwards with a prompt in them, and their wall time.
    pub(super) prefill_steps: u64,
    pub(super) prefill_seconds: f64,
    /// The other forwards, and theirs.
    pub(super) decode_steps: u64,
    pub(super) decode_seconds: f64,
}

/// Generates a text for every subject with every variant and its draft models. `base` tells what variants do not.
///
/// # Errors
/// The first text that fails: figures over different texts could not be compared.
pub(super) fn interleave(
    generator: &mut Generator,
    base: &GenerateOptions,
    variants: &[Variant],
    draft_models: &mut [Vec<DraftModel>],
    subjects: &[Subject],
    display: &mut Display,
) -> Result<Vec<Measured>> {
    let prompts: Vec<&[u32]> = subjects.iter().map(|subject| subject.prompt.as_slice()).collect();
    generator.share_prefix(&prompts)?;
    warm_up(generator, base, subjects)?;
    let mut measured = vec![Measured::default(); variants.len()];
    // Kept from turn to turn: a budget learns from its own variant only.
    let mut options: Vec<GenerateOptions> = variants.iter().map(|v| v.options(base)).collect();
    // Few subjects make shorter turns, so that every variant is first once.
    let turn_size =
        (subjects.len() / variants.len()).clamp(TURN_BATCHES.start() * base.batch, TURN_BATCHES.end() * base.batch);
    let total = Some((subjects.len() * variants.len()) as u64);
    let mut done = 0;
    for (turn, chunk) in subjects.chunks(turn_size).enumerate() {
        for place in 0..variants.len() {
            let index = (turn + place) % variants.len();
            let variant = &variants[index];
            generator.swap_options(&mut options[index]);
            generator.swap_draft_models(&mut draft_models[index]);
            let requests = chunk.iter().map(|subject| request(subject, variant)).collect();
            measured[index].add(generate(generator, requests)?);
            generator.swap_draft_models(&mut draft_models[index]);
            generator.swap_options(&mut options[index]);
            done += chunk.len() as u64;
            display.update(done, total, &variant.name);
        }
    }
    Ok(measured)
}

/// The first text pays for memory that all others reuse; it is not measured.
fn warm_up(generator: &mut Generator, base: &GenerateOptions, subjects: &[Subject]) -> Result<()> {
    generator.swap_options(&mut GenerateOptions { drafter: Drafter::None, nodes: 0, ..base.clone() });
    let plain = |subject: &Subject| Request { prompt: subject.prompt.clone(), plain: true, ..Request::default() };
    generate(generator, subjects.first().map(plain).into_iter().collect()).map(drop)
}

fn request(subject: &Subject, variant: &Variant) -> Request {
    let pool = subject.pools.iter().find(|(scheme, _)| Some(*scheme) == variant.pools);
    Request {
        key: subject.key,
        prompt: subject.prompt.clone(),
        previous: if variant.own_previous { subject.own.clone() } else { Vec::new() },
        pool: pool.and_then(|(_, pool)| pool.clone()),
        ..Request::default()
    }
}

/// Generates the text of every request, in their order; their ids are given here.
///
/// A step counts as prefill if a text joins in it: the generator lets texts in as soon as there is room, and
/// a step has room for several prompts.
///
/// # Errors
/// The engine's, and the first request's that fails.
pub(super) fn generate(generator: &mut Generator, requests: Vec<Request>) -> Result<Measured> {
    let mut texts = vec![Generated::default(); requests.len()];
    let (mut waiting, mut active) = (requests.len(), 0);
    for (request, id) in requests.into_iter().zip(0..) {
        generator.submit(Request { id, ..request });
    }
    let mut measured = Measured::default();
    while generator.load() > 0 {
        let joining = waiting.min(generator.batch().saturating_sub(active));
        let start = Instant::now();
        let finished = generator.step()?;
        measured.count(start.elapsed().as_secs_f64(), joining > 0);
        waiting -= joining;
        active = (active + joining).saturating_sub(finished.len());
        for Finished { id, result } in finished {
            match (result, usize::try_from(id).ok().and_then(|id| texts.get_mut(id))) {
                (Ok(text), Some(place)) => *place = text,
                (Err(reason), _) => bail!("text {id}: {reason}"),
                (Ok(_), None) => {}
            }
        }
    }
    measured.texts = texts;
    Ok(measured)
}

impl Measured {
    fn count(&mut self, seconds: f64, prefill: bool) {
        self.seconds += seconds;
        let (steps, time) = match prefill {
            true => (&mut self.prefill_steps, &mut self.prefill_seconds),
            false => (&mut self.decode_steps, &mut self.decode_seconds),
        };
        *steps += 1;
        *time += seconds;
    }

    fn add(&mut self, other: Self) {
        self.texts.extend(other.texts);
        self.seconds += other.seconds;
        self.prefill_steps += other.prefill_steps;
        self.prefill_seconds += other.prefill_seconds;
        self.decode_steps += other.decode_steps;
        self.decode_seconds += other.decode_seconds;
    }
}
