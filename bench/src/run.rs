//! Running variants interleaved: the heart of every comparison.
//!
//! The entities are taken in chunks of a few batches. Each variant generates a chunk before the next one is
//! begun, and the order of the variants turns by one from chunk to chunk, so that a drift of the machine's speed,
//! a neighbour's load or the state of caches hits all of them alike.
//!
//! All of it may be repeated in rounds, each of which begins as the first one did: with budgets and draft models that
//! have learnt nothing, since what they would know from the rounds before is of the very texts that are measured.
//! Pools never learn. What carries over is the engine with its memory, and the order of the variants, which goes on
//! turning. So rounds differ by the machine's chance alone, of which an error can be told; how far other texts would
//! differ it does not tell.

use std::time::Instant;

use anyhow::{Result, bail};
use laser_decode::{Drafter, Pool};
use laser_night::Progress;
use laser_schema::EntityId;
use laser_schema::knowledge::ratio;
use laser_terminal::Display;
use laser_worker::generate::{Finished, GenerateOptions, Generated, Generator, Request, TextGenerator};

use super::pools::PoolScheme;
use super::sources::DraftModels;
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
    /// In the order of the subjects, one round behind the other.
    pub(super) texts: Vec<Generated>,
    /// Tokens per second of each round.
    pub(super) rates: Vec<f64>,
    /// Wall time of all steps.
    pub(super) seconds: f64,
    /// Forwards with a prompt in them, and their wall time.
    pub(super) prefill_steps: u64,
    pub(super) prefill_seconds: f64,
    /// The other forwards, and theirs.
    pub(super) decode_steps: u64,
    pub(super) decode_seconds: f64,
}

/// What is compared: ways to generate the same texts.
pub(super) struct Comparison<'a> {
    /// What variants do not tell.
    pub(super) base: &'a GenerateOptions,
    pub(super) variants: &'a [Variant],
    pub(super) draft_models: &'a DraftModels,
    pub(super) subjects: &'a [Subject],
    /// How often all of it is done.
    pub(super) rounds: u16,
}

impl Comparison<'_> {
    /// Generates a text for every subject with every variant, in every round.
    ///
    /// # Errors
    /// A draft model that cannot be loaded, and the first text that fails: figures over different texts could not be
    /// compared.
    pub(super) fn interleave(&self, generator: &mut Generator, display: &mut Display) -> Result<Vec<Measured>> {
        warm_up(generator, self.base, self.subjects)?;
        let mut measured = vec![Measured::default(); self.variants.len()];
        for round in 0..usize::from(self.rounds) {
            let made = self.round(round, generator, display)?;
            measured.iter_mut().zip(made).for_each(|(all, made)| all.add_round(made));
        }
        Ok(measured)
    }

    /// One round, which knows nothing of those before it.
    fn round(&self, round: usize, generator: &mut Generator, display: &mut Display) -> Result<Vec<Measured>> {
        let Self { base, variants, subjects, .. } = *self;
        let prompts: Vec<&[u32]> = subjects.iter().map(|subject| subject.prompt.as_slice()).collect();
        let mut measured = vec![Measured::default(); variants.len()];
        // Kept from turn to turn: budgets and draft models learn from their own variant only.
        let mut options: Vec<GenerateOptions> = variants.iter().map(|v| v.options(base)).collect();
        let mut sources = self.draft_models.of_variants(variants, base)?;
        // Few subjects make shorter turns, so that every variant is first once.
        let turn_size =
            (subjects.len() / variants.len()).clamp(TURN_BATCHES.start() * base.batch, TURN_BATCHES.end() * base.batch);
        let first_turn = round * subjects.len().div_ceil(turn_size);
        let texts = subjects.len() * variants.len();
        let total = Some((texts * usize::from(self.rounds)) as u64);
        let mut done = (texts * round) as u64;
        for (turn, chunk) in (first_turn..).zip(subjects.chunks(turn_size)) {
            for place in 0..variants.len() {
                let index = (turn + place) % variants.len();
                let variant = &variants[index];
                generator.swap_options(&mut options[index]);
                generator.swap_draft_sources(&mut sources[index]);
                // Read again, since what a variant keeps of it is its own: its draft models' caches, its alignment.
                generator.reset();
                generator.share_prefix(&prompts)?;
                let requests = chunk.iter().map(|subject| request(subject, variant)).collect();
                measured[index].add(generate(generator, requests)?);
                generator.swap_draft_sources(&mut sources[index]);
                generator.swap_options(&mut options[index]);
                done += chunk.len() as u64;
                display.update(done, total, &variant.name);
            }
        }
        Ok(measured)
    }
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
    /// Tokens of all texts.
    pub(super) fn tokens(&self) -> u64 {
        self.texts.iter().map(|text| text.tokens.len() as u64).sum()
    }

    pub(super) fn tokens_per_second(&self) -> f64 {
        ratio(self.tokens() as f64, self.seconds)
    }

    fn count(&mut self, seconds: f64, prefill: bool) {
        self.seconds += seconds;
        let (steps, time) = match prefill {
            true => (&mut self.prefill_steps, &mut self.prefill_seconds),
            false => (&mut self.decode_steps, &mut self.decode_seconds),
        };
        *steps += 1;
        *time += seconds;
    }

    /// Adds another turn of the same round.
    fn add(&mut self, other: Self) {
        self.texts.extend(other.texts);
        self.seconds += other.seconds;
        self.prefill_steps += other.prefill_steps;
        self.prefill_seconds += other.prefill_seconds;
        self.decode_steps += other.decode_steps;
        self.decode_seconds += other.decode_seconds;
    }

    /// Adds a round to those before it.
    fn add_round(&mut self, round: Self) {
        self.rates.push(round.tokens_per_second());
        self.add(round);
    }
}
