//! Every source of drafts and every rule of verification beside each other: what `laser-bench compare` takes, its
//! variants, and the draft models in them.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use laser_decode::{Drafter, PolicyError, Sampling, Verification};
use laser_engine::Engine;
use laser_model::{Hub, ModelFiles, resolve};
use laser_night::{DraftFiles, DraftOptions};
use laser_worker::cost::StepCost;
use laser_worker::generate::{DraftSource, GenerateOptions};

use super::SetupArgs;
use super::pools::PoolScheme;
use super::variants::{ADAPTIVE_NODES, Drafts, Variant};

/// `laser-bench compare`.
#[derive(Debug, Clone, Args)]
pub(super) struct CompareArgs {
    #[command(flatten)]
    pub(super) setup: SetupArgs,
    /// A draft model, an EAGLE layer or Medusa's heads: a path, or NAME=PATH for its name in the tables; NAME=PATH,HEAD
    /// for a draft model with an acceptance head. As often as there are some; all in the precision of --model.
    #[arg(long = "draft", value_name = "[NAME=]PATH[,HEAD]", value_parser = DraftArg::parse)]
    pub(super) drafts: Vec<DraftArg>,
    /// Names of draft models whose trees are merged (SpecInfer).
    #[arg(long, value_delimiter = ',')]
    pub(super) merge: Vec<String>,
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
    /// Thresholds of SpecDec++'s stopping rule to try with each draft model alone: probabilities that the model rejects
    /// a token of a path, such as 0.7.
    #[arg(long, value_delimiter = ',', value_parser = parse_threshold)]
    pub(super) stops: Vec<f32>,
    /// A variant to run beside plain decoding, by its name in the tables, as often as there are some; all by default.
    #[arg(long, value_name = "NAME")]
    pub(super) only: Vec<String>,
    /// Draw texts, also the old ones, at this temperature; without it they are greedy.
    #[arg(long)]
    pub(super) temperature: Option<f32>,
    /// Runners-up to keep of each place of an old text, for a pool that has them; without any there is none.
    #[arg(long, default_value_t = 0)]
    pub(super) runners_up: usize,
    /// α of conditional verification, for greedy texts.
    #[arg(long, default_value_t = 0.1)]
    pub(super) alpha: f32,
    /// β of conditional verification.
    #[arg(long, default_value_t = 0.1)]
    pub(super) beta: f32,
    /// ε of typical verification, for drawn texts.
    #[arg(long, default_value_t = 0.09)]
    pub(super) epsilon: f32,
    /// δ of typical verification.
    #[arg(long, default_value_t = 0.3)]
    pub(super) delta: f32,
}

/// A draft model and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DraftArg {
    name: String,
    path: String,
    acceptance_head: Option<String>,
}

impl DraftArg {
    fn parse(text: &str) -> Result<Self, String> {
        let (name, paths) = text.split_once('=').unwrap_or((text, text));
        let mut paths = paths.split(',').map(str::to_owned);
        let (path, acceptance_head) = (paths.next().unwrap_or_default(), paths.next());
        match name.is_empty() || path.is_empty() || acceptance_head.as_deref() == Some("") || paths.next().is_some() {
            true => Err("expected a path, NAME=PATH or NAME=PATH,HEAD".to_owned()),
            false => Ok(Self { name: name.to_owned(), path, acceptance_head }),
        }
    }
}

fn parse_forwards(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(forwards @ 1..=20) => Ok(forwards),
        _ => Err("expected a number from 1 to 20".to_owned()),
    }
}

fn parse_threshold(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(threshold) if threshold > 0.0 && threshold <= 1.0 => Ok(threshold),
        _ => Err("expected a probability above 0 and up to 1".to_owned()),
    }
}

impl CompareArgs {
    /// How texts are drawn, if they are.
    pub(super) fn sampling(&self) -> Result<Option<Sampling>> {
        let sampling = self.temperature.map(|temperature| Sampling::new(temperature, None, 1.0));
        sampling.transpose().context("--temperature")
    }

    /// Plain decoding, prompt lookup, lookahead decoding, bigrams, the pool of all texts, AASD, each draft model alone
    /// with the pool, with fixed and adaptive trees, and the rules that accept more than the target's choice. Of each
    /// draft model `has_heads` says whether it is Medusa's heads, which have their paper's tree, too.
    pub(super) fn variants(&self, has_heads: &[bool]) -> Result<Vec<Variant>, PolicyError> {
        let setup = &self.setup;
        let pool = |name: &str| Variant::pooled(name, setup, PoolScheme::Global);
        let mut variants = vec![
            Variant::plain(),
            Variant::lookup(setup),
            Variant::lookup(setup).aligned("PLD, aligned"),
            Variant::lookahead(),
            Variant { drafter: Drafter::RawFrequency { max_ngram: 1 }, ..pool("bigrams of the pool") },
            pool("").by_frequency("pool, paper's rule"),
            pool("pool"),
            pool("").aligned("pool, aligned"),
            pool("").adaptive("pool, adaptive"),
        ];
        if self.runners_up > 0 {
            let soft = |name: &str| Variant::pooled(name, setup, PoolScheme::Soft);
            variants.extend([soft("soft pool"), soft("").adaptive("soft pool, adaptive")]);
        }
        if self.temperature.is_none() {
            let aasd = Verification::conditional(self.alpha, self.beta, false)?;
            variants.push(Variant::lookup(setup).aligned("AASD").verified(aasd));
        }
        for (index, (DraftArg { name, .. }, &has_heads)) in self.drafts.iter().zip(has_heads).enumerate() {
            variants.extend(self.of_drafts(name, vec![index]));
            variants.extend(has_heads.then(|| self.measured_tree(name, index)));
        }
        if !self.merge.is_empty() {
            let of = |name: &String| self.drafts.iter().position(|draft| draft.name == *name);
            variants.extend(self.of_drafts("merged", self.merge.iter().filter_map(of).collect()));
        }
        for (name, rule) in self.rules()? {
            variants.push(pool("").adaptive(&name).verified(rule));
        }
        Ok(variants)
    }

    /// Those of the variants that are to run, of which the first is plain decoding.
    ///
    /// # Errors
    /// A name that none has.
    pub(super) fn chosen(&self, mut variants: Vec<Variant>) -> Result<Vec<Variant>> {
        for name in &self.only {
            let names: Vec<&str> = variants.iter().map(|variant| variant.name.as_str()).collect();
            ensure!(names.contains(&name.as_str()), "--only {name}: expected one of: {}", names.join("; "));
        }
        let others = variants.split_off(1);
        variants.extend(others.into_iter().filter(|other| self.only.is_empty() || self.only.contains(&other.name)));
        Ok(variants)
    }

    /// Draft models alone and with the pool, with fixed and adaptive trees.
    fn of_drafts(&self, name: &str, indices: Vec<usize>) -> Vec<Variant> {
        let setup = &self.setup;
        let most = self.forwards.iter().max().copied().unwrap_or(1);
        let with = |variant, forwards| {
            let drafts = Drafts { indices: indices.clone(), forwards, ..Drafts::default() };
            Variant { drafts, ..variant }
        };
        let alone = |name: String, nodes| Variant { name, nodes, ..Variant::plain() };
        let by_forwards = self.forwards.iter().map(|&forwards| {
            let plural = if forwards == 1 { "" } else { "s" };
            with(alone(format!("{name}, {forwards} forward{plural}"), setup.nodes), forwards)
        });
        let trees = self.trees.iter().filter(|&&nodes| nodes != setup.nodes);
        let by_nodes = trees.map(|&nodes| with(alone(format!("{name}, {nodes} nodes"), nodes), most));
        let by_stops = self.stops.iter().map(|&threshold| {
            let mut variant = with(alone(format!("{name}, stop at {threshold}"), ADAPTIVE_NODES), most);
            variant.drafts.stop_threshold = Some(threshold);
            variant
        });
        let adaptive = Variant { adaptive: true, ..alone(format!("{name}, adaptive"), ADAPTIVE_NODES) };
        let pool = Variant::pooled(format!("pool + {name}"), setup, PoolScheme::Global);
        let pool_adaptive = pool.clone().adaptive(&format!("pool + {name}, adaptive"));
        let others = [adaptive, pool, pool_adaptive].map(|variant| with(variant, most));
        by_forwards.chain(by_nodes).chain(by_stops).chain(others).collect()
    }

    /// Medusa's heads alone, with trees that follow what was measured of each head.
    fn measured_tree(&self, name: &str, index: usize) -> Variant {
        let drafts = Drafts { indices: vec![index], forwards: 1, has_measured_tree: true, ..Drafts::default() };
        Variant { name: format!("{name}, measured tree"), nodes: self.setup.nodes, drafts, ..Variant::plain() }
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
pub(super) struct DraftModels(Vec<NamedDraft>);

/// A draft model that is not loaded yet.
struct NamedDraft {
    name: String,
    options: DraftOptions,
    has_heads: bool,
}

impl DraftModels {
    /// Without any.
    pub(super) const NONE: Self = Self(Vec::new());

    /// Opens the files of all of them.
    ///
    /// # Errors
    /// Naming the option, if one is missing or does not belong to the model.
    pub(super) async fn open(args: &CompareArgs, model: &ModelFiles) -> Result<Self> {
        for name in &args.merge {
            let is_known = args.drafts.iter().any(|draft| draft.name == *name);
            ensure!(is_known, "--merge {name}: there is no --draft {name}=PATH");
        }
        let mut all = Vec::new();
        for DraftArg { name, path, acceptance_head } in &args.drafts {
            let local = |path: &String| -> Result<PathBuf> { Ok(resolve(path, &Hub::from_env())?) };
            let open =
                async { DraftFiles::open(local(path)?, acceptance_head.as_ref().map(local).transpose()?, model).await };
            let files = open.await.with_context(|| format!("--draft {path}"))?;
            let target = args.setup.load.options(model.path().to_owned());
            let has_heads = files.has_heads();
            all.push(NamedDraft { name: name.clone(), options: files.options(target), has_heads });
        }
        Ok(Self(all))
    }

    /// Of each whether it is Medusa's heads.
    pub(super) fn have_heads(&self) -> Vec<bool> {
        self.0.iter().map(|draft| draft.has_heads).collect()
    }

    /// The draft models of each variant: each has its own, because what they learn of their worth depends on the
    /// variant. Those of one that adapts know what their forwards cost.
    pub(super) fn of_variants(
        &self,
        variants: &[Variant],
        base: &GenerateOptions,
    ) -> Result<Vec<Vec<Box<dyn DraftSource>>>> {
        let mut costs: Vec<Option<StepCost>> = vec![None; self.0.len()];
        let mut load = |variant: &Variant| -> Result<Vec<Box<dyn DraftSource>>> {
            let &Drafts { ref indices, forwards, has_measured_tree, stop_threshold } = &variant.drafts;
            let one = |&index: &usize| -> Result<Box<dyn DraftSource>> {
                let NamedDraft { name, options, .. } = &self.0[index];
                let measure = |engine: &mut dyn Engine| -> Result<Option<StepCost>> {
                    if variant.adaptive && costs[index].is_none() {
                        costs[index] = Some(StepCost::measure(engine, base.batch, base.batch * (ADAPTIVE_NODES + 1))?);
                    }
                    Ok(costs[index].clone().filter(|_| variant.adaptive))
                };
                let model = options.load(forwards, measure).with_context(|| format!("--draft {name}"))?;
                let model = model.with_stop_threshold(stop_threshold);
                Ok(if has_measured_tree { model.with_measured_tree() } else { model }.into_source())
            };
            indices.iter().map(one).collect()
        };
        variants.iter().map(&mut load).collect()
    }
}
