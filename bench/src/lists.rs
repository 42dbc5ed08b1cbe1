//! `laser-bench lists`: every source of drafts for lists and both ways to verify them, beside plain beam search, on the
//! users of a night that `laser run` has planned.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use laser_decode::{Method, Normalisation as Relative};
use laser_engine::Engine;
use laser_model::{ModelFiles, Tokenizer};
use laser_night::config::{GenerateConfig, HistoryFiles};
use laser_night::{DraftFiles, DraftOptions, catalogue_of_run, history_files};
use laser_schema::job::{Action, SamplingSpec, ShardRow};
use laser_schema::lists::{ListSpec, Normalisation, Ties};
use laser_schema::{Kind, knowledge::ratio};
use laser_store::run_store::{PlannedRun, RunStore};
use laser_store::{Location, table};
use laser_terminal::{Style, Table};
use laser_worker::cost::{StepCost, StepLoad};
use laser_worker::generate::{Finished, Generated, Request, TextGenerator};
use laser_worker::lists::{Catalogue, ListDraft, ListDraftModel, ListGenerator, ListOptions, ListSampling};
use serde::Serialize;

use super::apart::Search;
use super::rounds::mean_and_error;
use super::shared::SharedEngine;
use super::{LoadArgs, machine};

/// `laser-bench lists`.
#[derive(Debug, Clone, Args, Serialize)]
pub(super) struct ListsArgs {
    /// The output of a night of lists.
    night: String,
    /// Its run; the newest if not given.
    #[arg(long)]
    run: Option<String>,
    /// The model: the night's, or the same padded.
    #[arg(long)]
    model: PathBuf,
    /// A draft model as NAME=PATH, as often as there are some.
    #[arg(long = "draft", value_name = "NAME=PATH", value_parser = parse_draft)]
    drafts: Vec<(String, PathBuf)>,
    /// Lengths of the lists (K).
    #[arg(long, value_delimiter = ',', default_values_t = [1, 3, 5, 10, 20])]
    items: Vec<usize>,
    /// Beams; as many as items if not given.
    #[arg(long)]
    width: Option<usize>,
    /// Lists that are worked on at a time.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16])]
    batches: Vec<usize>,
    /// Prefixes that are drafted for each step (N); 0 leaves fixed drafts out.
    #[arg(long, value_delimiter = ',', default_values_t = [40])]
    drafted: Vec<usize>,
    /// Steps ahead that are drafted for (gamma).
    #[arg(long, value_delimiter = ',', default_values_t = [3])]
    steps: Vec<usize>,
    /// Prefixes that are drafted for a user and step at most, to complete the trie and by adaptive drafts.
    #[arg(long, default_value_t = 240)]
    nodes: usize,
    /// Draw lists at this temperature, too, by stochastic beam search and by AtSpeed's relaxed sampling.
    #[arg(long)]
    temperature: Option<f32>,
    /// Users whose lists are measured.
    #[arg(long, default_value_t = 320)]
    users: usize,
    /// Users before them of whom adaptive drafts learn.
    #[arg(long, default_value_t = 64)]
    warm_up: usize,
    /// Parts of the users that all variants work on in turns.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    #[command(flatten)]
    #[serde(flatten)]
    load: LoadArgs,
    /// Where the figures are written.
    #[arg(long, default_value = "output/bench")]
    pub(super) output: PathBuf,
}

fn parse_draft(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok((name.to_owned(), path.into())),
        _ => Err("expected NAME=PATH".to_owned()),
    }
}

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct ListsReport {
    options: ListsArgs,
    machine: String,
    pub(super) settings: Vec<Setting>,
}

/// All variants at one batch size and length of lists.
#[derive(Debug, Serialize)]
pub(super) struct Setting {
    batch: usize,
    items: usize,
    /// What perfect drafts would come to by the measured costs of forwards: one forward computes the prompt and all
    /// beams, against one for each code.
    ceiling: f64,
    /// What plain search comes to with a cache for each beam in place of tree attention.
    apart: f64,
    pub(super) rows: Vec<Row>,
}

/// A variant's figures.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) variant: String,
    /// Accepted steps per list (AS@K): mean of the lists.
    pub(super) accepted: f64,
    /// Its standard error over the lists.
    accepted_error: f64,
    /// Forwards of the target per list.
    pub(super) calls: f64,
    /// Of the list that took the most.
    pub(super) most_calls: usize,
    /// Drafted prefixes per list.
    pub(super) drafted: f64,
    /// Seconds per list in which it is decided what to draft, and drafted.
    draft_seconds: f64,
    /// Lists per second.
    rate: f64,
    /// Lists per second over those of the plain search that draws in the same way (WS@K): mean of the rounds.
    speedup: f64,
    /// Its standard error over the rounds.
    error: f64,
    pub(super) lists: usize,
    /// Lists that are the plain search's, item for item with the same scores.
    pub(super) same: usize,
    /// Listed items that may not be: out of stock, of the user's history where that is excluded, or there twice.
    pub(super) illegal: usize,
}

/// A way to make lists.
#[derive(Debug, Clone)]
struct Variant {
    name: String,
    draft: ListDraft,
    /// The draft model.
    model: Option<usize>,
    /// Prefixes drafted for each step; those that pay if absent.
    drafted: Option<usize>,
    steps: usize,
    temperature: Option<f64>,
    sampling: ListSampling,
    /// The index of the plain search that draws in the same way.
    plain: usize,
    /// Whether it goes without the users' previous lists.
    is_first_night: bool,
}

impl Variant {
    fn plain(name: &str, index: usize) -> Self {
        let sampling = ListSampling::StochasticBeam;
        let draft = ListDraft::None;
        Self {
            name: name.to_owned(),
            draft,
            model: None,
            drafted: None,
            steps: 1,
            temperature: None,
            sampling,
            plain: index,
            is_first_night: false,
        }
    }

    /// The same with drafts of whatever size pays.
    fn adaptive(self, name: &str) -> Self {
        Self { name: format!("{name}, adaptive"), drafted: None, steps: 3, ..self }
    }

    fn is_adaptive(&self) -> bool {
        self.drafted.is_none() && (self.draft != ListDraft::None || self.model.is_some())
    }
}

/// What the lists of all variants are made of.
struct Setup {
    args: ListsArgs,
    model: ModelFiles,
    drafts: Vec<DraftOptions>,
    spec: ListSpec,
    requests: Vec<Request>,
    files: HistoryFiles,
}

/// Measures.
///
/// # Errors
/// Naming what is missing, and the engine's.
pub(super) async fn run(args: &ListsArgs) -> Result<ListsReport> {
    let setup = Setup::open(args).await?;
    let measure = move || -> Result<Vec<Setting>> {
        let engine = laser_engine::load(&setup.args.load.options(setup.model.path().to_owned()))?;
        let engine = SharedEngine::new(engine);
        let mut settings = Vec::new();
        for &batch in &setup.args.batches {
            for &items in &setup.args.items {
                settings.push(setup.measure(engine.clone(), batch, items)?);
            }
        }
        Ok(settings)
    };
    let settings = tokio::task::spawn_blocking(measure).await??;
    Ok(ListsReport { options: args.clone(), machine: machine(), settings })
}

impl Setup {
    async fn open(args: &ListsArgs) -> Result<Self> {
        ensure!(args.rounds > 1, "--rounds {}: expected at least 2, for an error", args.rounds);
        ensure!(args.users >= args.rounds, "--users {}: expected at least one per round", args.users);
        let model = laser_night::open_local_model(&args.model.to_string_lossy()).await.context("--model")?;
        let mut drafts = Vec::new();
        for (name, path) in &args.drafts {
            let files = DraftFiles::open(path.clone(), None, &model).await;
            let target = args.load.options(model.path().to_owned());
            drafts.push(files.with_context(|| format!("--draft {name}"))?.options(target));
        }
        let output = Location::parse(&args.night)?;
        let run = planned(&output, args.run.as_deref()).await?;
        let Some(spec) = run.plan.spec.lists.clone() else {
            bail!("{}: run {} makes texts; give a night of lists", args.night, run.name());
        };
        let files = history_files(&run.store).await?;
        let catalogue = catalogue_of_run(&run, None, files, &model.tokenizer).await?;
        let requests = requests(&run, &catalogue.context("a night of lists has a catalogue")?, args).await?;
        Ok(Self { args: args.clone(), model, drafts, spec, requests, files })
    }

    /// All variants in turns.
    fn measure(&self, mut engine: SharedEngine, batch: usize, items: usize) -> Result<Setting> {
        let variants = self.variants(items);
        let largest = self.options(&variants[0], batch, items).largest_step(engine.info().max_positions);
        let cost = StepCost::measure(&mut engine, batch, largest)?;
        let mut generators = Vec::new();
        for variant in &variants {
            generators.push(self.generator(engine.clone(), variant, (batch, items), &cost)?);
        }
        let (learned, measured) = self.requests.split_at(self.args.warm_up);
        // A night of shorter lists has shorter ones before it.
        let previous: Vec<usize> = variants.iter().map(|of| if of.is_first_night { 0 } else { items }).collect();
        for (generator, previous) in generators.iter_mut().zip(&previous) {
            lists(generator, learned, *previous)?;
        }
        let mut sums = vec![Sums::default(); variants.len()];
        for (round, users) in measured.chunks(measured.len().div_ceil(self.args.rounds)).enumerate() {
            let mut made: Vec<(Vec<Generated>, f64)> = vec![Default::default(); variants.len()];
            for turn in 0..variants.len() {
                let at = (turn + round) % variants.len();
                made[at] = lists(&mut generators[at], users, previous[at])?;
            }
            for (at, variant) in variants.iter().enumerate() {
                sums[at].add(&made[at], &made[variant.plain]);
                let lists = users.iter().zip(&made[at].0);
                sums[at].illegal += lists.map(|(user, list)| self.illegal(user, list)).sum::<usize>();
            }
        }
        let rows = variants.iter().zip(&sums).map(|(variant, sums)| sums.row(&variant.name)).collect();
        let apart = self.search(batch, items).apart(&mut engine)?;
        Ok(Setting { batch, items, ceiling: self.ceiling(&cost, batch, items), apart, rows })
    }

    fn width(&self, items: usize) -> usize {
        self.args.width.unwrap_or(items).max(items)
    }

    /// The size of a plain search.
    fn search(&self, batch: usize, items: usize) -> Search {
        let prompts: usize = self.requests.iter().map(|request| request.prompt.len()).sum();
        let levels = self.requests[0].catalogue.as_ref().map_or(1, |catalogue| catalogue.trie.levels());
        let prompt = (prompts / self.requests.len().max(1)).max(1);
        Search { batch, prompt, width: self.width(items), steps: levels.saturating_sub(1) }
    }

    /// Seconds of plain search over those of one forward that computes the prompt and all beams.
    fn ceiling(&self, cost: &StepCost, batch: usize, items: usize) -> f64 {
        let Search { prompt, width, steps, .. } = self.search(batch, items);
        let seconds = |tokens: usize| cost.seconds(StepLoad { tokens: tokens * batch, pairs: tokens * batch * prompt });
        ratio(seconds(prompt) + steps as f64 * seconds(width), seconds(prompt + steps * width))
    }

    fn variants(&self, items: usize) -> Vec<Variant> {
        let plain = Variant::plain("plain", 0);
        let trie = Variant { draft: ListDraft::Trie, ..plain.clone() };
        let completed = Variant { name: "trie, completed".to_owned(), drafted: Some(self.args.nodes), ..trie.clone() };
        let mut variants = vec![plain.clone(), completed, trie.adaptive("trie")];
        variants.extend(self.of_source(ListDraft::Listed, &plain));
        if self.requests.iter().any(|request| !request.previous_items.is_empty()) {
            let first_night = Variant { is_first_night: true, ..plain.clone() };
            let named = |of: Variant| Variant { name: format!("{}, first night", of.name), ..of };
            variants.extend(self.of_source(ListDraft::Listed, &first_night).into_iter().map(named));
        }
        let counted = Method::ALL.into_iter().filter(|_| self.files.counted).map(ListDraft::Counted);
        for draft in counted.chain(self.files.codes.then_some(ListDraft::Retrieval)) {
            variants.extend(self.of_source(draft, &plain));
        }
        if self.files == (HistoryFiles { counted: true, codes: true }) {
            variants.push(Variant { draft: ListDraft::Auto, ..plain.clone() }.adaptive("auto"));
        }
        variants.extend(self.of_models(&plain));
        if let Some(temperature) = self.args.temperature.map(f64::from) {
            let drawn = Variant::plain("plain, stochastic beams", variants.len());
            let drawn = Variant { temperature: Some(temperature), ..drawn };
            variants.push(drawn.clone());
            variants.extend(self.of_source(ListDraft::Listed, &drawn));
            variants.extend(self.of_models(&drawn));
            let drawn = Variant::plain("plain, drawn at each step", variants.len());
            let drawn = Variant { temperature: Some(temperature), sampling: ListSampling::AtSpeed, ..drawn };
            variants.push(drawn.clone());
            variants.extend(self.relaxed(&drawn, items));
        }
        variants
    }

    /// Fixed drafts of a variant, of every size.
    fn fixed(&self, name: &str, of: &Variant) -> Vec<Variant> {
        let sizes = self.args.drafted.iter().filter(|&&drafted| drafted > 0);
        let sizes = sizes.flat_map(|&drafted| self.args.steps.iter().map(move |&steps| (drafted, steps)));
        let fixed = |(drafted, steps)| {
            let name = format!("{name}, N {drafted}, gamma {steps}");
            Variant { name, drafted: Some(drafted), steps, ..of.clone() }
        };
        sizes.map(fixed).collect()
    }

    /// Fixed and adaptive drafts by a source without a model, strictly verified.
    fn of_source(&self, draft: ListDraft, plain: &Variant) -> Vec<Variant> {
        let (name, by_source) = (name(draft), Variant { draft, ..plain.clone() });
        self.fixed(name, &by_source).into_iter().chain([by_source.adaptive(name)]).collect()
    }

    /// The same by each draft model, where they adapt beside what lists so far had.
    fn of_models(&self, plain: &Variant) -> Vec<Variant> {
        let mut variants = Vec::new();
        for (index, (name, _)) in self.args.drafts.iter().enumerate() {
            let by_model = Variant { model: Some(index), ..plain.clone() };
            variants.extend(self.fixed(name, &by_model));
            variants.push(Variant { draft: ListDraft::Listed, ..by_model }.adaptive(name));
        }
        variants
    }

    /// Each draft model under AtSpeed's relaxed sampling, and as that was published.
    fn relaxed(&self, plain: &Variant, items: usize) -> Vec<Variant> {
        let width = self.width(items);
        let mut variants = Vec::new();
        for (index, (name, _)) in self.args.drafts.iter().enumerate() {
            let fixed = Variant { model: Some(index), drafted: Some(width), steps: 3, ..plain.clone() };
            variants.push(Variant { name: format!("{name}, relaxed"), ..fixed.clone() });
            variants.push(Variant { name: format!("{name}, relaxed, adaptive"), drafted: None, ..fixed.clone() });
            for &drafted in self.args.drafted.iter().filter(|&&drafted| drafted > width) {
                let (name, sampling) = (format!("{name}, published, N {drafted}"), ListSampling::Published(drafted));
                variants.push(Variant { name, drafted: Some(drafted), sampling, ..fixed.clone() });
            }
        }
        variants
    }

    fn generator(
        &self,
        engine: SharedEngine,
        variant: &Variant,
        (batch, items): (usize, usize),
        cost: &StepCost,
    ) -> Result<ListGenerator> {
        let cost = variant.is_adaptive().then(|| cost.clone());
        let options = ListOptions { cost, ..self.options(variant, batch, items) };
        let load = |draft: &DraftOptions| -> Result<ListDraftModel> {
            let mut engine: Box<dyn Engine> = laser_engine::load(&draft.engine)?;
            let largest = options.largest_step(engine.info().max_positions);
            let measured = variant.is_adaptive().then(|| StepCost::measure(engine.as_mut(), batch, largest));
            let cost = measured.transpose()?;
            Ok(ListDraftModel::new(engine, cost))
        };
        let draft = variant.model.map(|index| load(&self.drafts[index])).transpose()?;
        Ok(ListGenerator::new(Box::new(engine), self.tokenizer(), options).with_draft_model(draft))
    }

    /// Without the cost of forwards.
    fn options(&self, variant: &Variant, batch: usize, items: usize) -> ListOptions {
        let nodes = variant.drafted.map_or(self.args.nodes, |drafted| drafted * variant.steps);
        ListOptions {
            items,
            width: self.width(items),
            normalisation: match self.spec.normalisation {
                Normalisation::Vocabulary => Relative::Vocabulary,
                Normalisation::Allowed => Relative::Allowed,
            },
            temperature: variant.temperature,
            sampling: variant.sampling,
            repeat: self.spec.repeat,
            all_ties: self.spec.ties == Ties::All,
            draft: variant.draft,
            nodes,
            steps: variant.steps,
            batch,
            step_tokens: GenerateConfig::default().step_tokens(self.args.load.device),
            cost: None,
        }
    }

    /// Items of a list that may not be there.
    fn illegal(&self, user: &Request, list: &Generated) -> usize {
        let Some(catalogue) = &user.catalogue else { return list.items.len() };
        let mut listed = HashSet::new();
        let mut may_be = |item: &u32| {
            let is_had = !self.spec.repeat && user.history.contains(item);
            listed.insert(*item) && !is_had && catalogue.stock.contains_item(&catalogue.trie, *item)
        };
        list.items.iter().filter(|(item, _)| !may_be(item)).count()
    }

    fn tokenizer(&self) -> Tokenizer {
        self.model.tokenizer.clone()
    }
}

fn name(draft: ListDraft) -> &'static str {
    match draft {
        ListDraft::None => "plain",
        ListDraft::Trie => "trie",
        ListDraft::Listed => "listed",
        ListDraft::Counted(Method::Popularity) => "popularity",
        ListDraft::Counted(Method::Markov) => "markov",
        ListDraft::Counted(Method::Knn) => "knn",
        ListDraft::Retrieval => "retrieval",
        ListDraft::Auto => "auto",
    }
}

/// The run of a name, or the newest one that is planned.
async fn planned(output: &Location, name: Option<&str>) -> Result<PlannedRun> {
    let names = match name {
        Some(name) => vec![name.to_owned()],
        None => RunStore::names(output).await?,
    };
    for name in names {
        if let Some(run) = RunStore::new(output, name).planned().await? {
            return Ok(run);
        }
    }
    bail!("{}: no planned run here; `laser run` a configuration with [lists] first", output.url())
}

/// The users of a run's shards, as many as are measured and learnt of.
async fn requests(run: &PlannedRun, catalogue: &Arc<Catalogue>, args: &ListsArgs) -> Result<Vec<Request>> {
    let sampling = SamplingSpec { temperature: 1.0, top_k: None, top_p: 1.0, seed: 0, samples: 1 };
    let wanted = args.users + args.warm_up;
    let mut requests = Vec::with_capacity(wanted);
    for job in run.plan.shards.iter().filter(|job| job.action == Action::Generate) {
        let rows: Vec<ShardRow> = table::decode(&job.input, run.input(job).read().await?)?;
        for row in rows.into_iter().filter(|row| row.error.is_none()) {
            let key = sampling.key(Kind::User, &row.entity_id, 0);
            let (prompt, history, previous_items) = (row.prompt, row.history, row.previous_items);
            let catalogue = Some(catalogue.clone());
            requests.push(Request { prompt, history, previous_items, key, catalogue, ..Request::default() });
        }
        if requests.len() >= wanted {
            requests.truncate(wanted);
            return Ok(requests);
        }
    }
    bail!("run {}: {} users are to be generated; --users and --warm-up ask for {wanted}", run.name(), requests.len())
}

/// The lists of users in their order, given so many items of the previous ones, and the seconds that they took.
fn lists(generator: &mut ListGenerator, users: &[Request], previous: usize) -> Result<(Vec<Generated>, f64)> {
    let start = Instant::now();
    for (id, request) in (0..).zip(users) {
        let previous_items = request.previous_items.iter().copied().take(previous).collect();
        generator.submit(Request { id, previous_items, ..request.clone() });
    }
    let mut made = vec![Generated::default(); users.len()];
    while generator.load() > 0 {
        for Finished { id, result } in generator.step()? {
            made[usize::try_from(id)?] = result.with_context(|| format!("user {id}"))?;
        }
    }
    Ok((made, start.elapsed().as_secs_f64()))
}

/// What the rounds came to.
#[derive(Debug, Clone, Default)]
struct Sums {
    lists: usize,
    same: usize,
    /// Accepted steps of each list.
    accepted: Vec<f64>,
    calls: usize,
    most_calls: usize,
    illegal: usize,
    drafted: u64,
    draft_seconds: f64,
    seconds: f64,
    speedups: Vec<f64>,
}

impl Sums {
    fn add(&mut self, (lists, seconds): &(Vec<Generated>, f64), (plain, plain_seconds): &(Vec<Generated>, f64)) {
        self.lists += lists.len();
        self.same += lists.iter().zip(plain).filter(|(list, plain)| list.items == plain.items).count();
        let steps = |list: &Generated| list.step_accepted.iter().map(|steps| f64::from(*steps)).sum::<f64>();
        self.accepted.extend(lists.iter().map(steps));
        let calls = || lists.iter().map(|list| list.step_accepted.len());
        self.calls += calls().sum::<usize>();
        self.most_calls = calls().fold(self.most_calls, usize::max);
        self.drafted += lists.iter().map(|list| list.drafted).sum::<u64>();
        self.draft_seconds += lists.iter().map(|list| list.draft_seconds).sum::<f64>();
        self.seconds += seconds;
        self.speedups.push(plain_seconds / seconds);
    }

    fn row(&self, variant: &str) -> Row {
        let lists = self.lists as f64;
        let (accepted, accepted_error) = mean_and_error(&self.accepted);
        let (speedup, error) = mean_and_error(&self.speedups);
        Row {
            variant: variant.to_owned(),
            accepted,
            accepted_error,
            calls: ratio(self.calls as f64, lists),
            most_calls: self.most_calls,
            drafted: ratio(self.drafted as f64, lists),
            draft_seconds: ratio(self.draft_seconds, lists),
            rate: ratio(lists, self.seconds),
            speedup,
            error,
            lists: self.lists,
            same: self.same,
            illegal: self.illegal,
        }
    }
}

impl ListsReport {
    /// The table of each batch size and length.
    pub(super) fn render(&self, style: Style) -> String {
        let mut out = String::new();
        for Setting { batch, items, ceiling, apart, rows } in &self.settings {
            out.push_str(&format!(
                "\nBatch {batch}, {items} items; of the plain search perfect drafts would come to {ceiling:.2}, \
                 a cache for each beam to {apart:.2}\n\n"
            ));
            let header = [
                "variant", "AS", "calls", "most", "drafted", "drafting ms", "lists/s", "of plain", "same lists",
                "illegal items",
            ];
            let mut table = Table::new(&header);
            for row in rows {
                table.push(vec![
                    row.variant.clone(),
                    format!("{:.2} ± {:.2}", row.accepted, row.accepted_error),
                    format!("{:.2}", row.calls),
                    row.most_calls.to_string(),
                    format!("{:.0}", row.drafted),
                    format!("{:.3}", 1e3 * row.draft_seconds),
                    format!("{:.1}", row.rate),
                    format!("{:.3} ± {:.3}", row.speedup, row.error),
                    format!("{} of {}", row.same, row.lists),
                    row.illegal.to_string(),
                ]);
            }
            out.push_str(&table.render(style));
        }
        out
    }
}
