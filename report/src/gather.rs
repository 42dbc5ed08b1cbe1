//! From a published folder to what there is to tell of its night.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use jiff::Timestamp;
use jiff::civil::Date;
use laser_pool_builder::POOL_SET_FILE;
use laser_schema::Kind;
use laser_schema::audit::{Audit, AuditedText, Proposer};
use laser_schema::estimate::Estimate;
use laser_schema::job::Action;
use laser_schema::knowledge::{ErrorRecord, KnowledgeRecord, PartInfo};
use laser_schema::layout::{DataSet, name_date};
use laser_schema::manifest::{ERRORS, MANIFEST, Manifest, Profiles, SUCCESS};
use laser_store::Location;
use laser_store::catalogue;
use laser_store::data_set::{self, NightRuns};
use laser_store::part::decode_part;
use laser_store::run_store::{PINS, PLAN, PlannedRun, RunStore};
use serde::{Deserialize, Serialize};

use crate::canary::{Comparison, Pair, compare};
use crate::lists::ListSample;
use crate::value::{Footers, Reached};

/// Rows without a text that are shown; the others are counted by reason.
const ERRORS_SHOWN: usize = 20;

/// Audited texts, or lists, of a kind that are shown.
const SAMPLES: usize = 6;

/// A run's night.
#[derive(Debug)]
pub(crate) struct Night {
    pub(crate) run: String,
    pub(crate) date: Date,
    pub(crate) kinds: Vec<KindNight>,
    /// Whether the run's own folder is there.
    pub(crate) has_plan: bool,
    /// What the run was expected to take, if that was estimated.
    pub(crate) estimate: Option<Estimate>,
    /// The order of events by the store's clock; empty if unknown.
    pub(crate) timeline: Vec<Stage>,
}

impl Night {
    /// Whether the night has lists in place of texts: a run makes one or the other.
    pub(crate) fn is_lists(&self) -> bool {
        self.kinds.iter().any(|kind| kind.manifest.spec.lists.is_some())
    }
}

/// A stretch of the night, in seconds since it was begun.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Stage {
    pub(crate) name: String,
    pub(crate) from: f64,
    pub(crate) to: f64,
}

/// The published data of one kind.
#[derive(Debug)]
pub(crate) struct KindNight {
    pub(crate) manifest: Manifest,
    pub(crate) folder: String,
    /// Whether `_SUCCESS` is there.
    pub(crate) complete: bool,
    pub(crate) texts: Texts,
    pub(crate) audited: Audited,
    pub(crate) errors: Errors,
    /// When how much of the value had a text, if the night has a priority.
    pub(crate) reached: Option<Reached>,
    /// Beside the night in force, if the run is a canary.
    pub(crate) comparison: Option<Comparison>,
}

/// Counts over the parts of a kind.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    /// Texts by their tokens.
    pub(crate) lengths: BTreeMap<u64, u64>,
    /// Generated texts by why they ended.
    pub(crate) stops: BTreeMap<String, u64>,
    /// Forwards of tonight's texts by their accepted drafts, by pool.
    pub(crate) accepted: BTreeMap<String, Vec<u64>>,
    pub(crate) shards: Vec<ShardLine>,
    /// A few lists, of many parts, where there are lists in place of texts.
    pub(crate) lists: Vec<ListSample>,
}

/// The work of one shard.
#[derive(Debug, Serialize)]
pub(crate) struct ShardLine {
    pub(crate) shard: u32,
    pub(crate) part: String,
    #[serde(skip)]
    pub(crate) pools: Vec<String>,
    pub(crate) texts: u64,
    pub(crate) tokens: u64,
    pub(crate) seconds: f64,
    pub(crate) worker: String,
}

/// Counts over the audits of a kind.
#[derive(Debug, Default)]
pub(crate) struct Audited {
    /// Texts by their tokens, plainly.
    pub(crate) plain: BTreeMap<u64, u64>,
    /// The same entities' texts with speculation.
    pub(crate) texts: BTreeMap<u64, u64>,
    /// Cosines of the embeddings of both texts.
    pub(crate) similarities: Vec<f64>,
    /// Tokens by who proposed them.
    pub(crate) proposed: BTreeMap<Proposer, u64>,
    /// A few of them, of many pools, with their pool.
    pub(crate) samples: Vec<(String, AuditedText)>,
}

/// Rows without a text.
#[derive(Debug, Default)]
pub(crate) struct Errors {
    /// By stage and reason.
    pub(crate) reasons: BTreeMap<(String, String), u64>,
    pub(crate) first: Vec<ErrorRecord>,
}

/// Reads the night in `dir`: an output's newest, or that of one published folder.
pub(crate) async fn gather(dir: &str) -> Result<Night> {
    let location = Location::parse(dir)?;
    let manifest = data_set::read::<Profiles>(&location).await?;
    let (root, manifests) = match manifest {
        Some(manifest) => {
            let below = manifest.data_set.folder(manifest.kind, manifest.date, &manifest.run);
            let url = location.absolute_url();
            let root = url.trim_end_matches('/').strip_suffix(&below);
            let root = root.map(Location::parse).transpose()?;
            (root, vec![(location, manifest)])
        }
        None => {
            let newest = newest(&location).await?;
            (Some(location), newest)
        }
    };
    let (run, date) = manifests.first().map(|(_, m)| (m.run.clone(), m.date)).context("a night has a manifest")?;
    let plan = match &root {
        Some(root) => RunStore::new(root, &run).planned().await?,
        None => None,
    };
    let mut kinds = Vec::new();
    for (folder, manifest) in manifests {
        let mut comparison = compare(root.as_ref(), &folder, &manifest).await?;
        if let (Some(comparison), Some(plan)) = (&mut comparison, &plan) {
            name_items(comparison, plan).await?;
        }
        kinds.push(KindNight { comparison, ..gather_kind(folder, manifest, plan.as_ref()).await? });
    }
    let timeline = match &plan {
        Some(planned) => timeline(planned, &kinds).await?,
        None => Vec::new(),
    };
    let estimate = match &plan {
        Some(planned) => planned.store.estimate().await?,
        None => None,
    };
    Ok(Night { run, date, kinds, has_plan: plan.is_some(), estimate, timeline })
}

/// The folders of the run that is promoted, else published last, of an output's newest night.
async fn newest(output: &Location) -> Result<Vec<(Location, Manifest)>> {
    let mut found = Vec::new();
    for data_set in DataSet::OF_RUNS {
        for kind in Kind::ALL {
            found.extend(newest_of(output, data_set, kind).await?);
        }
    }
    let newest = found.iter().max_by_key(|(promoted, _, m)| (m.date, *promoted, m.created, &m.run));
    let Some(run) = newest.map(|(.., manifest)| manifest.run.clone()) else {
        return Err(nothing_published(output).await?);
    };
    found.retain(|(.., manifest)| manifest.run == run);
    Ok(found.into_iter().map(|(_, folder, manifest)| (folder, manifest)).collect())
}

/// The folders of the newest night of a data set and kind that has manifests, and whether each is promoted.
async fn newest_of(output: &Location, data_set: DataSet, kind: Kind) -> Result<Vec<(bool, Location, Manifest)>> {
    let mut of_night = Vec::new();
    for date in data_set::nights(output, data_set, kind).await? {
        let promoted = NightRuns::read(output, data_set, kind, date).await?;
        for run in data_set::runs(output, data_set, kind, date).await? {
            let folder = output.join(&data_set.folder(kind, date, &run));
            let manifest = data_set::read::<Profiles>(&folder).await?;
            of_night.extend(manifest.map(|manifest| (promoted.promoted() == Some(&run), folder, manifest)));
        }
        if !of_night.is_empty() {
            break;
        }
    }
    Ok(of_night)
}

/// Why an output has no night to tell of.
async fn nothing_published(output: &Location) -> Result<anyhow::Error> {
    let runs = RunStore::names(output).await?;
    let newest = runs.iter().find(|run| name_date(run).is_some());
    let Some(run) = newest else {
        return Ok(anyhow::anyhow!(
            "{}: not an output of Laser's: it has no {MANIFEST} and no nights below profiles/ or recommendations/. \
             Give the [output] path, or a folder profiles/kind=…/dt=…/run=…",
            output.url()
        ));
    };
    let far = match RunStore::new(output, run).planned().await? {
        None => "it is not planned yet".to_owned(),
        Some(planned) => {
            format!("{} of {} shards are committed", planned.committed().await?.len(), planned.plan.shards.len())
        }
    };
    Ok(anyhow::anyhow!(
        "{}: run {run} is not published: {far}. Run the command that began it again, then report",
        output.url()
    ))
}

async fn gather_kind(folder: Location, manifest: Manifest, run: Option<&PlannedRun>) -> Result<KindNight> {
    let (mut texts, mut lists, mut footers) = (Texts::default(), Vec::new(), Footers::default());
    let place = manifest.data_set.folder(manifest.kind, manifest.date, &manifest.run);
    for part in &manifest.parts {
        let bytes = folder.join(&part.name).read().await?;
        let (rows, info) = decode_part(folder.join(&part.name).url(), bytes)?;
        texts.add(&part.name, &rows, &info);
        footers.add(format!("{place}/{}", part.name), &info);
        lists.push(rows.iter().filter_map(ListSample::of).take(SAMPLES).collect());
    }
    texts.lists = in_turns(lists);
    if let Some(run) = run {
        let shown = texts.lists.iter().flat_map(ListSample::ids).cloned().collect();
        let titles = catalogue::titles(&run.store.folder(), &shown).await?;
        texts.lists.iter_mut().for_each(|list| list.name(&titles));
    }
    let audited = match run {
        Some(run) => read_audits(run, manifest.kind).await?,
        None => Audited::default(),
    };
    let reached = match run {
        Some(run) => footers.reached(run, manifest.kind).await?,
        None => None,
    };
    Ok(KindNight {
        reached,
        complete: data_set::is_complete(&folder).await?,
        errors: read_errors(&folder).await?,
        folder: folder.url().to_owned(),
        manifest,
        texts,
        audited,
        comparison: None,
    })
}

/// Gives the items of compared lists their titles.
async fn name_items(comparison: &mut Comparison, run: &PlannedRun) -> Result<()> {
    let shown =
        comparison.pairs.iter_mut().flat_map(Pair::lists).flat_map(|list| list.ids().cloned().collect::<Vec<_>>());
    let titles = catalogue::titles(&run.store.folder(), &shown.collect()).await?;
    comparison.pairs.iter_mut().flat_map(Pair::lists).for_each(|list| list.name(&titles));
    Ok(())
}

impl Texts {
    fn add(&mut self, part: &str, rows: &[KnowledgeRecord], info: &PartInfo) {
        let is_text = info.lists.is_none();
        for row in rows.iter().filter(|_| is_text) {
            *self.lengths.entry(row.text_tokens.unsigned_abs()).or_default() += 1;
        }
        let tonight = rows.iter().filter(|row| row.generated_by == info.run);
        let mut line = ShardLine {
            shard: info.shard,
            part: part.to_owned(),
            pools: Vec::new(),
            texts: 0,
            tokens: 0,
            seconds: 0.0,
            worker: worker(&info.attempt),
        };
        for row in tonight {
            if is_text {
                *self.stops.entry(row.stop_reason.clone()).or_default() += 1;
            }
            let by_accepted = self.accepted.entry(row.pool.clone()).or_default();
            for &accepted in &row.step_accepted {
                let at = usize::try_from(accepted).unwrap_or_default();
                by_accepted.resize(by_accepted.len().max(at + 1), 0);
                by_accepted[at] += 1;
            }
            line.texts += 1;
            line.tokens += row.text_tokens.unsigned_abs();
            line.seconds += row.engine_seconds;
            if !line.pools.contains(&row.pool) {
                line.pools.push(row.pool.clone());
            }
        }
        if line.texts > 0 {
            self.shards.push(line);
        }
    }
}

/// Who wrote a part: its attempt without counts.
fn worker(attempt: &str) -> String {
    attempt.split('/').next().unwrap_or_default().to_owned()
}

async fn read_audits(run: &PlannedRun, kind: Kind) -> Result<Audited> {
    let mut audited = Audited::default();
    let mut by_pool: BTreeMap<String, Vec<AuditedText>> = BTreeMap::new();
    let audits = run.plan.shards.iter();
    for job in audits.filter(|job| job.action == Action::Audit && job.kind == kind) {
        let file = run.part(job);
        // An audit that failed was given up; the night was published without it.
        let Some(bytes) = file.read_optional().await? else {
            continue;
        };
        let audit: Audit = serde_json::from_slice(&bytes).with_context(|| format!("{}: not an audit", file.url()))?;
        let kept = by_pool.entry(job.pool.clone()).or_default();
        for text in audit.pairs {
            *audited.plain.entry(text.plain_tokens).or_default() += 1;
            *audited.texts.entry(text.tokens).or_default() += 1;
            audited.similarities.extend(text.similarity);
            for (&source, tokens) in &text.proposed {
                *audited.proposed.entry(source).or_default() += tokens;
            }
            if kept.len() < SAMPLES {
                kept.push(text);
            }
        }
    }
    let named = |(pool, texts): (String, Vec<AuditedText>)| {
        let texts = texts.into_iter().map(|text| (pool.clone(), text));
        texts.collect()
    };
    audited.samples = in_turns(by_pool.into_iter().map(named).collect());
    Ok(audited)
}

/// A few samples, in turns, so that as many pools or parts as possible are seen.
fn in_turns<T>(groups: Vec<Vec<T>>) -> Vec<T> {
    let mut groups: Vec<_> = groups.into_iter().map(Vec::into_iter).collect();
    let mut samples = Vec::new();
    while samples.len() < SAMPLES {
        let before = samples.len();
        samples.extend(groups.iter_mut().filter_map(Iterator::next));
        if samples.len() == before {
            break;
        }
    }
    samples.truncate(SAMPLES);
    samples
}

async fn read_errors(folder: &Location) -> Result<Errors> {
    let file = folder.join(ERRORS);
    let bytes = file.read_optional().await?.unwrap_or_default();
    let mut errors = Errors::default();
    for row in serde_json::Deserializer::from_slice(&bytes).into_iter() {
        let row: ErrorRecord = row.with_context(|| file.url().to_owned())?;
        let key = (row.stage.clone(), row.reason.clone());
        *errors.reasons.entry(key).or_default() += 1;
        if errors.first.len() < ERRORS_SHOWN {
            errors.first.push(row);
        }
    }
    Ok(errors)
}

/// When the store got the run's files. Nothing more is recorded, and nothing more is needed: they hold for one process
/// and for many, and for runs that were resumed, whose pauses are in them. Copied outputs have the times of the copy.
async fn timeline(run: &PlannedRun, kinds: &[KindNight]) -> Result<Vec<Stage>> {
    let folder = run.store.folder();
    let pools = run.pools()?.join(POOL_SET_FILE);
    let audits = run.audit_times().await?;
    let (mut parts, mut published) = (Vec::new(), Vec::new());
    for kind in kinds {
        for listed in Location::parse(&kind.folder)?.list().await? {
            match listed.name.as_str() {
                MANIFEST | SUCCESS => published.push(listed.modified),
                name if name.starts_with('_') => {}
                _ => parts.push(listed.modified),
            }
        }
    }
    let steps = [
        ("Pools", modified(&pools).await),
        ("Planning", modified(&folder.join(PLAN)).await),
        ("Model and first shard", parts.iter().chain(&audits).min().copied()),
        ("Other shards", parts.iter().max().copied()),
        ("Audit", audits.iter().max().copied()),
        ("Publishing", published.iter().max().copied()),
    ];
    let Some(begun) = modified(&folder.join(PINS)).await else {
        return Ok(Vec::new());
    };
    let mut stages: Vec<Stage> = Vec::new();
    let seconds = |time: Timestamp| time.duration_since(begun).as_secs_f64();
    for (name, time) in steps {
        let from = stages.last().map_or(0.0, |stage| stage.to);
        // What is older took no time of its own: pools that were promoted, audits that came before the texts.
        if let Some(to) = time.map(seconds).filter(|to| *to >= from) {
            stages.push(Stage { name: name.to_owned(), from, to });
        }
    }
    Ok(stages)
}

async fn modified(file: &Location) -> Option<Timestamp> {
    file.modified().await.ok()
}
