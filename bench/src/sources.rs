//! Every source of drafts and every rule of verification beside each other: what `laser-bench compare` takes, its
//! variants, and the draft models in them.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use laser_decode::{Drafter, PolicyError, Sampling, Verification};
use laser_engine::EngineOptions;
use laser_model::{Hub, ModelFiles, resolve};
use laser_night::DraftFiles;
use laser_terminal::Table;
use laser_worker::cost::StepCost;
use laser_worker::generate::{DraftModel, GenerateOptions};

use super::SetupArgs;
use super::pools::PoolScheme;
use super::report::KindReport;
use super::variants::{ADAPTIVE_NODES, Drafts, Variant};

/// `laser-bench compare`.
#[derive(Debug, Clone, Args)]
pub(super) struct CompareArgs {
    #[command(flatten)]
    pub(super) setup: SetupArgs,
    /// A draft model, an EAGLE layer or Medusa's heads: a path, or NAME=PATH for its name in the tables. As often as
    /// there are some; all in the precision of --model.
    #[arg(long = "draft", value_name = "[NAME=]PATH", value_parser = DraftArg::parse)]
    pub(super) drafts: Vec<DraftArg>,
    /// Forwards of a draft model per step; adaptive variants have the most of them at most.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4], value_parser = parse_forwards)]
    pub(super) forwards: Vec<usize>,
    /// Batch sizes to try.
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1, 8, 32],
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    pub(super) batches: Vec<u16>,
    /// Tree sizes to try with each draft model alone, beside --nodes.
    #[arg(long, value_delimiter = ',')]
    pub(super) trees: Vec<usize>,
    /// Draw texts at this temperature; without it they are greedy.
    #[arg(long)]
    pub(super) temperature: Option<f32>,
    /// α of conditional verification, for greedy texts.
    #[arg(long, default_value_t = 0.1)]
    alpha: f32,
    /// β of conditional verification.
    #[arg(long, default_value_t = 0.1)]
    beta: f32,
    /// ε of typical verification, for drawn texts.
    #[arg(long, default_value_t = 0.09)]
    epsilon: f32,
    /// δ of typical verification.
    #[arg(long, default_value_t = 0.3)]
    delta: f32,
}

/// A draft model and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DraftArg {
    name: String,
    path: String,
}

impl DraftArg {
    fn parse(text: &str) -> Result<Self, String> {
        let (name, path) = text.split_once('=').unwrap_or((text, text));
        match name.is_empty() || path.is_empty() {
            true => Err("expected a path or NAME=PATH".to_owned()),
            false => Ok(Self { name: name.to_owned(), path: path.to_owned() }),
        }
    }
}

fn parse_forwards(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(forwards @ 1..=20) => Ok(forwards),
        _ => Err("expected a number from 1 to 20".to_owned()),
    }
}

impl CompareArgs {
    /// How texts are drawn, if they are.
    pub(super) fn sampling(&self) -> Result<Option<Sampling>> {
        let sampling = self.temperature.map(|temperature| Sampling::new(temperature, None, 1.0));
        sampling.transpose().context("--temperature")
    }

    /// Plain decoding, prompt lookup, lookahead decoding, bigrams, the pool of all texts, each draft model alone and
    /// with the pool, with fixed and adaptive trees, and the rules that accept more than the target's choice.
    pub(super) fn variants(&self) -> Result<Vec<Variant>, PolicyError> {
        let setup = &self.setup;
        let pool = |name: &str| Variant::pooled(name, setup, PoolScheme::Global);
        let mut variants = vec![
            Variant::plain(),
            Variant::lookup(setup),
            Variant::lookahead(),
            Variant { drafter: Drafter::RawFrequency { max_ngram: 1 }, ..pool("bigrams of the pool") },
            pool("").by_frequency("pool, paper's rule"),
            pool("pool"),
            pool("").adaptive("pool, adaptive"),
        ];
        for (index, DraftArg { name, .. }) in self.drafts.iter().enumerate() {
            let most = self.forwards.iter().max().copied().unwrap_or(1);
            let with = |variant: Variant, forwards| Variant { draft: Some(Drafts { index, forwards }), ..variant };
            let alone = |name: String, nodes| Variant { name, nodes, ..Variant::plain() };
            variants.extend(self.forwards.iter().map(|&forwards| {
                with(
                    alone(format!("{name}, {forwards} forward{}", if forwards == 1 { "" } else { "s" }), setup.nodes),
                    forwards,
                )
            }));
            let trees = self.trees.iter().filter(|&&nodes| nodes != setup.nodes);
            variants.extend(trees.map(|&nodes| with(alone(format!("{name}, {nodes} nodes"), nodes), most)));
            let adaptive = Variant { adaptive: true, ..alone(format!("{name}, adaptive"), ADAPTIVE_NODES) };
            variants.push(with(adaptive, most));
            variants.push(with(pool(&format!("pool + {name}")), most));
            variants.push(with(pool("").adaptive(&format!("pool + {name}, adaptive")), most));
        }
        for (name, rule) in self.rules()? {
            variants.push(pool("").adaptive(&name).verified(rule));
        }
        Ok(variants)
    }

    /// The rules that accept more than the target's choice, by name.
    fn rules(&self) -> Result<Vec<(String, Verification)>, PolicyError> {
        let Self { alpha, beta, epsilon, delta, setup: SetupArgs { k, p, .. }, .. } = *self;
        Ok(match self.temperature {
            Some(_) => vec![(format!("typical {epsilon}, {delta}"), Verification::typical(epsilon, delta)?)],
            None => vec![
                (format!("relaxed {k}, {p}"), Verification::relaxed(k, p)?),
                (format!("conditional {alpha}, {beta}"), Verification::conditional(alpha, beta, true)?),
            ],
        })
    }
}

/// What loads each of the draft models.
pub(super) struct DraftModels(Vec<(String, EngineOptions)>);

impl DraftModels {
    /// Without any.
    pub(super) const NONE: Self = Self(Vec::new());

    /// Opens the files of all of them.
    ///
    /// # Errors
    /// Naming the option, if one is missing or does not belong to the model.
    pub(super) async fn open(args: &CompareArgs, model: &ModelFiles) -> Result<Self> {
        let mut all = Vec::new();
        for DraftArg { name, path } in &args.drafts {
            let open = async {
                let local: PathBuf = resolve(path, &Hub::from_env())?;
                DraftFiles::open(local, model).await
            };
            let files = open.await.with_context(|| format!("--draft {path}"))?;
            let target = args.setup.load.options(model.path().to_owned());
            all.push((name.clone(), files.engine_options(target)));
        }
        Ok(Self(all))
    }

    /// The draft model of each variant, if it has one: each its own, because what it learns of its worth depends on
    /// the variant. One that adapts knows what its forwards cost.
    pub(super) fn of_variants(&self, variants: &[Variant], base: &GenerateOptions) -> Result<Vec<Option<DraftModel>>> {
        let mut costs: Vec<Option<StepCost>> = vec![None; self.0.len()];
        let load = |variant: &Variant| -> Result<Option<DraftModel>> {
            let Some(Drafts { index, forwards }) = variant.draft else {
                return Ok(None);
            };
            let (name, options) = &self.0[index];
            let mut engine = laser_engine::load(options).with_context(|| format!("--draft {name}"))?;
            if variant.adaptive && costs[index].is_none() {
                costs[index] = Some(StepCost::measure(engine.as_mut(), base.batch, base.batch * (ADAPTIVE_NODES + 1))?);
            }
            let cost = costs[index].clone().filter(|_| variant.adaptive);
            Ok(Some(DraftModel::new(engine, forwards, cost)))
        };
        variants.iter().map(load).collect()
    }
}

/// One row per variant: acceptance, calls and cost at the first batch size, speedup at all of them.
pub(super) fn table(reports: &[KindReport]) -> Table {
    const DEPTHS: [usize; 4] = [1, 2, 4, 8];
    let first = &reports[0];
    let acceptance = DEPTHS.iter().map(|depth| format!("≥ {depth}"));
    let measures = ["AAL", "calls/token", "discarded/token", "drafting ms"].map(str::to_owned);
    let speedups = reports.iter().map(|report| format!("speedup, batch {}", report.batch));
    let texts = ["relaxed", "length", "log p", "identical"].map(str::to_owned);
    let columns: Vec<String> =
        ["variant".to_owned()].into_iter().chain(acceptance).chain(measures).chain(speedups).chain(texts).collect();
    let mut table = Table::new(&columns.iter().map(String::as_str).collect::<Vec<_>>());
    for (at, row) in first.rows.iter().enumerate() {
        let acceptance = DEPTHS.iter().map(|depth| format!("{:.2}", row.accepted_by_depth[depth - 1]));
        let measures = [row.aal, row.calls_per_token, row.discarded_per_token, row.drafting_ms()];
        let speedups = reports.iter().map(|report| report.rows[at].speedup);
        let numbers = measures.into_iter().chain(speedups).map(|number| format!("{number:.2}"));
        let texts = [
            format!("{:.1} %", 100.0 * row.relaxed_share),
            format!("{:.2}", row.length_ratio),
            format!("{:.2}", row.mean_log_probability),
            format!("{}/{}", row.identical, row.texts),
        ];
        table.push([row.variant.clone()].into_iter().chain(acceptance).chain(numbers).chain(texts).collect());
    }
    table
}
