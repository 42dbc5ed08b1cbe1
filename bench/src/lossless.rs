//! `laser-bench lossless`: how often the rules that keep the target's distribution accept what a draft model drafts.
//!
//! The target writes texts at a temperature, by keyed sampling. At each place of them both models say what they expect,
//! and every rule tries children that the draft model proposes. So all rules meet the same places, and a figure is the
//! share of places at which a child is accepted.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use laser_decode::{
    Noise, Sampling, TargetScores as _, Token, Trial, accept_given, accept_sampled, arrival, chain_parents, sample,
};
use laser_engine::{Engine, Segment};
use laser_model::{Hub, ModelFiles, resolve};
use laser_night::{DraftFiles, Progress as _, open_local_model};
use laser_schema::Kind;
use laser_terminal::{Display, Style, Table};
use laser_worker::generate::{GenerateOptions, Generator, Request};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;

use super::paper::{load_engine, options, prompts};
use super::run::generate;
use super::{SetupArgs, machine};

/// `laser-bench lossless`.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct LosslessArgs {
    #[command(flatten)]
    #[serde(flatten)]
    pub(super) setup: SetupArgs,
    /// The draft model: a whole model of the same tokenizer.
    #[arg(long)]
    pub(super) draft: String,
    /// Temperatures of both models.
    #[arg(long, value_delimiter = ',', default_values_t = [0.5, 1.0])]
    pub(super) temperatures: Vec<f32>,
    /// Numbers of children to try.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4], value_parser = parse_children)]
    pub(super) children: Vec<usize>,
}

fn parse_children(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(children @ 1..=64) => Ok(children),
        _ => Err("expected a number from 1 to 64".to_owned()),
    }
}

/// How children are made and accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Rule {
    /// Children drawn from the draft model, rejection sampling (Leviathan; with several, SpecInfer).
    Rejection,
    /// Those that the draft model would draw first under the target's noise, keyed sampling.
    SharedNoise,
    /// The draft model's most probable tokens, rejection sampling for given children (EAGLE).
    MostProbableRejection,
    /// The same, keyed sampling.
    MostProbableKeyed,
    /// Children drawn from the draft model, keyed sampling under noise that it does not know.
    Independent,
}

const RULES: [Rule; 5] =
    [Rule::Rejection, Rule::SharedNoise, Rule::MostProbableRejection, Rule::MostProbableKeyed, Rule::Independent];

impl Rule {
    fn name(self) -> &'static str {
        match self {
            Self::Rejection => "drawn, rejection (Leviathan, SpecInfer)",
            Self::SharedNoise => "first under the noise, keyed",
            Self::MostProbableRejection => "most probable, rejection (EAGLE)",
            Self::MostProbableKeyed => "most probable, keyed",
            Self::Independent => "drawn without the noise, keyed",
        }
    }

    /// Whether one of `count` children is accepted at a place.
    fn accepts(self, place: &Place, count: usize, rng: &mut impl Rng) -> bool {
        let Place { p, q, .. } = place;
        let mut uniform = || rng.gen_range(0.0..1.0);
        let is_choice = |children: &[Token]| children.contains(&place.choice);
        match self {
            Self::Rejection | Self::Independent => {
                let children: Vec<Token> = (0..count).map(|_| sample(q, &mut uniform)).collect();
                match self {
                    Self::Independent => is_choice(&children),
                    _ => matches!(accept_sampled(p, q, &children, &mut uniform), Trial::Accepted(_)),
                }
            }
            Self::SharedNoise => is_choice(&place.first_to_arrive(count)),
            Self::MostProbableKeyed => is_choice(&place.most_probable(count)),
            Self::MostProbableRejection => {
                matches!(accept_given(p, &place.most_probable(count), &mut uniform), Trial::Accepted(_))
            }
        }
    }
}

/// A place of a text: what both models expect, at the temperature, and what the target drew.
struct Place {
    p: Vec<f32>,
    q: Vec<f32>,
    noise: Noise,
    choice: Token,
}

impl Place {
    /// The first tokens to arrive by the draft model's probabilities.
    fn first_to_arrive(&self, count: usize) -> Vec<Token> {
        let words = (0..).flat_map(|block| self.noise.block(block));
        let times = words.zip(&self.q).map(|(word, q)| arrival(word, q.max(f32::MIN_POSITIVE)));
        lowest(times.collect(), count)
    }

    fn most_probable(&self, count: usize) -> Vec<Token> {
        lowest(self.q.iter().map(|q| -f64::from(*q)).collect(), count)
    }

    /// Σ min(p, q).
    fn overlap(&self) -> f64 {
        self.p.iter().zip(&self.q).map(|(p, q)| f64::from(p.min(*q))).sum()
    }
}

/// The tokens of the lowest values.
fn lowest(values: Vec<f64>, count: usize) -> Vec<Token> {
    let mut tokens: Vec<Token> = (0..).take(values.len()).collect();
    let by_value = |a: &Token, b: &Token| values[*a as usize].total_cmp(&values[*b as usize]);
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, by_value);
        tokens.truncate(count);
    }
    tokens
}

/// What the rules accept.
#[derive(Debug, Serialize)]
pub(super) struct LosslessReport {
    machine: String,
    options: LosslessArgs,
    pub(super) rows: Vec<LosslessRow>,
}

/// One kind of entity at one temperature.
#[derive(Debug, Serialize)]
pub(super) struct LosslessRow {
    pub(super) kind: Kind,
    pub(super) temperature: f32,
    pub(super) places: usize,
    /// Mean Σ min(p, q).
    pub(super) overlap: f64,
    /// By rule the share of places at which a child is accepted, in the order of the numbers of children.
    pub(super) accepted: Vec<(Rule, Vec<f64>)>,
}

/// Writes texts at every temperature and tries the rules at all of their places.
///
/// # Errors
/// The engines', a draft model of another vocabulary, and temperatures out of range.
pub(super) async fn run(args: &LosslessArgs) -> Result<LosslessReport> {
    let mut display = Display::new();
    let model = open_local_model(&args.setup.model).await?;
    let open = async {
        let local: PathBuf = resolve(&args.draft, &Hub::from_env())?;
        DraftFiles::open(local, None, &model).await
    };
    let files = open.await.with_context(|| format!("--draft {}", args.draft))?;
    let options = files.options(args.setup.load.options(model.path().to_owned()));
    let mut draft = laser_engine::load(&options.engine).with_context(|| format!("--draft {}", args.draft))?;
    let mut target = load_engine(&args.setup, &model)?;
    let (own, theirs) = (draft.info().vocab_size, target.info().vocab_size);
    ensure!(
        own == theirs && !draft.info().reads_features,
        "--draft {}: has {own} tokens, --model {theirs}; expected a whole draft model of as many",
        args.draft
    );
    let mut rows = Vec::new();
    for (kind, prompts) in prompts(&args.setup, &model).await? {
        for &temperature in &args.temperatures {
            display.stage(&format!("{kind} texts at {temperature}"));
            let sampling = Sampling::new(temperature, None, 1.0).context("--temperatures")?;
            let mut generator = generator(args, &model, (target, sampling));
            let texts = drawn(&mut generator, &prompts)?;
            target = generator.into_engine();
            let written = prompts.iter().zip(&texts);
            rows.push(row(args, (kind, temperature), (target.as_mut(), draft.as_mut()), written)?);
            display.finish_with(&format!("{} texts", texts.len()));
        }
    }
    Ok(LosslessReport { machine: machine(), options: args.clone(), rows })
}

fn generator(args: &LosslessArgs, model: &ModelFiles, (target, sampling): (Box<dyn Engine>, Sampling)) -> Generator {
    let options = GenerateOptions { sampling: Some(sampling), ..options(&args.setup, model) };
    Generator::new(target, model.tokenizer.clone(), options)
}

/// The texts that it draws, each under the noise of its place in the list.
fn drawn(generator: &mut Generator, prompts: &[Vec<u32>]) -> Result<Vec<Vec<Token>>> {
    let request =
        |(prompt, key): (&Vec<u32>, u64)| Request { prompt: prompt.clone(), plain: true, key, ..Request::default() };
    let measured = generate(generator, prompts.iter().zip(0..).map(request).collect())?;
    Ok(measured.texts.into_iter().map(|text| text.tokens).collect())
}

/// Tries all rules at all places of the texts.
fn row<'a>(
    args: &LosslessArgs,
    (kind, temperature): (Kind, f32),
    (target, draft): (&mut dyn Engine, &mut dyn Engine),
    texts: impl Iterator<Item = (&'a Vec<u32>, &'a Vec<u32>)>,
) -> Result<LosslessRow> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(args.setup.seed);
    let (mut places, mut overlap) = (0, 0.0);
    let mut accepted: Vec<(Rule, Vec<f64>)> = RULES.map(|rule| (rule, vec![0.0; args.children.len()])).to_vec();
    for ((prompt, text), key) in texts.zip(0..) {
        let expected = distributions(target, prompt, text, temperature)?;
        let drafted = distributions(draft, prompt, text, temperature)?;
        for (((p, q), &choice), at) in expected.into_iter().zip(drafted).zip(text).zip(0..) {
            let place = Place { p, q, noise: Noise::new(key).after(at), choice };
            places += 1;
            overlap += place.overlap();
            for (rule, counts) in &mut accepted {
                for (sum, &children) in counts.iter_mut().zip(&args.children) {
                    *sum += f64::from(u8::from(rule.accepts(&place, children, &mut rng)));
                }
            }
        }
    }
    ensure!(places > 0, "no {kind} text has a token");
    accepted.iter_mut().flat_map(|(_, counts)| counts).for_each(|count| *count /= places as f64);
    Ok(LosslessRow { kind, temperature, places, overlap: overlap / places as f64, accepted })
}

/// What a model expects at each place of a text, over its vocabulary.
fn distributions(engine: &mut dyn Engine, prompt: &[u32], text: &[u32], temperature: f32) -> Result<Vec<Vec<f32>>> {
    let vocab_size = engine.info().vocab_size;
    let tokens = [prompt, &text[..text.len().saturating_sub(1)]].concat();
    let parents: Vec<u32> = chain_parents(tokens.len()).collect();
    let slot = engine.open(tokens.len())?;
    let first = prompt.len() - 1;
    let segment = Segment { slot, tokens: &tokens, parents: &parents, scored_from: first, ..Segment::default() };
    let scores = engine.step(&[segment], vocab_size);
    engine.close(slot);
    let scores = scores?.pop().context("the engine gave no scores")?;
    let distribution = |node: usize| {
        let candidates = scores.top(node);
        let most = candidates.first().map_or(0.0, |first| first.log_probability);
        let mut weights = vec![0.0; vocab_size];
        for candidate in candidates {
            weights[candidate.token as usize] = ((candidate.log_probability - most) / temperature).exp();
        }
        let sum: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
        weights
    };
    Ok((first..tokens.len()).map(distribution).collect())
}

impl LosslessReport {
    /// As a table for each kind and temperature.
    pub(super) fn render(&self, style: Style) -> String {
        let mut out = format!("{}\n\n", self.machine);
        for row in &self.rows {
            let LosslessRow { kind, temperature, places, overlap, .. } = row;
            // Of a share near a half.
            let error = 0.5 / (*places as f64).sqrt();
            out += &format!(
                "{kind} texts at temperature {temperature}, {places} places: Σ min(p, q) = {overlap:.3}, standard \
                 error at most {error:.3}\n\n"
            );
            let named = |&count: &usize| if count == 1 { "1 child".to_owned() } else { format!("{count} children") };
            let children = self.options.children.iter().map(named);
            let header: Vec<String> = std::iter::once("accepted".to_owned()).chain(children).collect();
            let mut table = Table::new(&header.iter().map(String::as_str).collect::<Vec<_>>());
            for (rule, shares) in &row.accepted {
                let shares = shares.iter().map(|share| format!("{share:.3}"));
                table.push(std::iter::once(rule.name().to_owned()).chain(shares).collect());
            }
            out += &table.render(style);
            out.push('\n');
        }
        out
    }
}
