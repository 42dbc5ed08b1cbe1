//! `laser train draft`: a draft model from the texts of the output's runs.
//!
//! A run keeps the prompts of what it generated, and its parts the texts. Only texts of the configured model count, the
//! newest runs' first and one of an entity.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result, ensure};
use laser_engine::Engine;
use laser_model::ModelFiles;
use laser_schema::job::{Action, ShardJob, ShardRow};
use laser_schema::sample::priority;
use laser_schema::{Digest, EntityId, Kind, Progress};
use laser_store::part::decode_part;
use laser_store::run_store::{PlannedRun, RunStore};
use laser_store::table;
pub use laser_train::{DraftKind, Epoch, Trained};
use laser_train::{Example, Job, Lessons, Target, TrainConfig};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, EngineKind};
use crate::encoder;
use crate::generator::{engine_options, tested};
use crate::model::{DraftFiles, open_model};

/// The reason that a record gives where the model itself ended the text.
const ENDED: &str = "end";

/// Trains the draft model that `[train]` describes, or goes on where an earlier call was stopped; none if it is
/// stopped before the end.
///
/// # Errors
/// Naming the key, the run or the file.
pub async fn train(config: &Config, progress: &mut dyn Progress, drain: &CancellationToken) -> Result<Option<Trained>> {
    check(config)?;
    let model = open_model(config).await?;
    progress.stage("reading texts");
    let texts = Texts::read(config, &model, progress).await?;
    progress.finish_with(&format!("{} texts of {} runs", texts.examples.len(), texts.runs));
    let (held_out, learned) = texts.split(&config.train);
    let draft = open_draft(config, &model).await?;
    let options = engine_options(config, &model);
    let reads_features = config.train.kind.reads_features();
    let parts = reads_features.then(|| laser_engine::target_parts(&options)).transpose()?;
    // An acceptance head learns from the texts and its draft model alone.
    let read_by = draft.as_ref().map_or(options, |draft| engine_options(config, draft));
    tested(read_by.clone()).await?;
    let mut engine = tokio::task::spawn_blocking(move || laser_engine::load(&read_by)).await??;
    let info = engine.info();
    let target = Target {
        digest: model.digest().context("[model] path")?.to_string(),
        tokenizer: Digest::from_bytes(model.tokenizer.fingerprint()).to_string(),
        directory: model.directory.clone(),
        vocab_size: info.vocab_size,
        max_positions: info.max_positions,
        end_of_text: model.end_of_text.clone(),
        bos: model.bos,
    };
    let device = config.model.device;
    let draft_digest = draft.as_ref().map(|draft| Ok::<_, anyhow::Error>(draft.digest()?.to_string())).transpose()?;
    let job = Job { config: &config.train, target, learned, held_out, device, parts, draft: draft_digest };
    if let Some(trained) = job.finished()? {
        return Ok(Some(trained));
    }
    tokio::task::block_in_place(|| {
        let texts = [&job.learned, &job.held_out];
        let [learned, held_out] = match &draft {
            None => {
                progress.stage("the model reads them");
                let [learned, held_out] = texts.map(|texts| laser_train::read(engine.as_mut(), texts, progress));
                [learned?, held_out?]
            }
            Some(_) => texts.map(|texts| laser_train::unread(texts, engine.info().max_positions)),
        };
        // Only what works on features needs it any longer; otherwise its memory is the training's.
        let mut engine = (reads_features || draft.is_some()).then_some(engine);
        if let Some(engine) = &mut engine {
            engine.keep_features();
        }
        let engine = engine.as_mut().map(|engine| engine.as_mut() as &mut dyn Engine);
        let lessons = Lessons { learned: &learned, held_out: &held_out, engine };
        laser_train::train(&job, lessons, progress, &|| drain.is_cancelled())
    })
}

/// The draft model that an acceptance head is trained for, if one is.
async fn open_draft(config: &Config, model: &ModelFiles) -> Result<Option<ModelFiles>> {
    let path = &config.train.draft;
    if path.is_empty() {
        return Ok(None);
    }
    let open = async { DraftFiles::open(encoder::local_path(config, path).await?, None, model).await };
    let files = open.await.with_context(|| format!("[train] draft = {path:?}"))?;
    let files = files.into_model().with_context(|| {
        format!(
            "[train] draft = {path:?}: drafts from the model's features; an acceptance head is for a whole draft model"
        )
    })?;
    Ok(Some(files))
}

fn check(config: &Config) -> Result<()> {
    let output = &config.train.output;
    ensure!(!output.is_empty(), "[train] output: not set; give a folder for the draft model");
    ensure!(
        !output.contains("://"),
        "[train] output = {output:?}: expected a local folder; copy it to a store when it is done, [draft.model] path \
         may be a URL"
    );
    ensure!(
        config.model.engine == EngineKind::Tree,
        "[model] engine = \"mistralrs\" has no draft models; use engine = \"tree\""
    );
    let draft = &config.train.draft;
    ensure!(
        (config.train.kind == DraftKind::Acceptance) != draft.is_empty(),
        "[train] draft = {draft:?}: the draft model that an acceptance head is for; it goes with kind = \"acceptance\" \
         and with no other"
    );
    Ok(())
}

/// The shards with new texts in an order that the seed decides: a plan has them by kind and pool, and a training that
/// takes a part of them is to have some of each.
fn mixed(shards: &[ShardJob], seed: u64) -> Vec<&ShardJob> {
    let mut jobs: Vec<&ShardJob> = shards.iter().filter(|job| job.action == Action::Generate).collect();
    jobs.sort_by_cached_key(|job| priority(seed, &[&job.shard.to_le_bytes()]));
    jobs
}

/// Texts with their prompts.
struct Texts<'a> {
    model: &'a ModelFiles,
    examples: Vec<((Kind, EntityId), Example)>,
    entities: HashSet<(Kind, EntityId)>,
    /// Runs that have some.
    runs: usize,
    most: usize,
}

impl<'a> Texts<'a> {
    async fn read(config: &Config, model: &'a ModelFiles, progress: &mut dyn Progress) -> Result<Self> {
        let output = config.output()?;
        let most = config.train.texts;
        let mut texts = Self { model, examples: Vec::new(), entities: HashSet::new(), runs: 0, most };
        let digests = (model.digest().context("[model] path")?, Digest::from_bytes(model.tokenizer.fingerprint()));
        let mut others = 0;
        for name in RunStore::names(&output).await? {
            let Some(run) = RunStore::new(&output, name).planned().await? else {
                continue;
            };
            if (&run.plan.spec.model, &run.plan.spec.tokenizer) != (&digests.0, &digests.1) {
                others += 1;
                continue;
            }
            let before = texts.examples.len();
            for job in mixed(&run.plan.shards, config.train.seed) {
                texts.add(&run, job).await?;
                progress.update(texts.examples.len() as u64, Some(most as u64), "texts");
            }
            texts.runs += usize::from(texts.examples.len() > before);
            if texts.is_full() {
                break;
            }
        }
        ensure!(
            !texts.examples.is_empty(),
            "[output] path = {:?}: no run with texts of [model] path = {:?} ({others} runs of other models); run a \
             night first",
            config.output.path,
            config.model.path
        );
        Ok(texts)
    }

    fn is_full(&self) -> bool {
        self.examples.len() >= self.most
    }

    /// Adds the texts of a shard that is committed.
    async fn add(&mut self, run: &PlannedRun, job: &ShardJob) -> Result<()> {
        let part = run.part(job);
        if self.is_full() {
            return Ok(());
        }
        let Some(bytes) = part.read_optional().await? else {
            return Ok(());
        };
        let (records, _) = decode_part(part.url(), bytes)?;
        let input = run.input(job);
        let rows: Vec<ShardRow> = table::decode(input.url(), input.read().await?)?;
        let mut prompts: HashMap<EntityId, Vec<u32>> =
            rows.into_iter().map(|row| (row.entity_id, row.prompt)).collect();
        for record in records {
            let entity = (job.kind, record.entity_id);
            let Some(prompt) = prompts.remove(&entity.1) else {
                continue;
            };
            let mut text = self.model.tokenizer.encode(&record.text, false)?;
            if record.stop_reason == ENDED {
                text.extend(self.model.end_of_text.first());
            }
            if !text.is_empty() && !self.is_full() && self.entities.insert(entity.clone()) {
                self.examples.push((entity, Example { prompt, text }));
            }
        }
        Ok(())
    }

    /// The texts to measure on and those to learn from; the seed and the entities decide which.
    fn split(self, config: &TrainConfig) -> (Vec<Example>, Vec<Example>) {
        let order = |(kind, id): &(Kind, EntityId)| {
            priority(config.seed, &[kind.as_str().as_bytes(), id.to_string().as_bytes()])
        };
        let mut examples = self.examples;
        examples.sort_by_cached_key(|(entity, _)| order(entity));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of the texts")]
        let held_out = (examples.len() as f64 * config.held_out).ceil() as usize;
        let learned = examples.split_off(held_out.min(examples.len()));
        let only = |examples: Vec<(_, Example)>| examples.into_iter().map(|(_, example)| example).collect();
        (only(examples), only(learned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_plans_shards_has_some_of_each_kind() {
        let shards: Vec<ShardJob> = (0..40)
            .map(|shard| ShardJob {
                shard,
                action: if shard % 5 == 0 { Action::Carry } else { Action::Generate },
                kind: if shard < 20 { Kind::User } else { Kind::Item },
                pool: String::new(),
                rows: 4,
                prompt_tokens: 0,
                value: None,
                input: String::new(),
                input_digest: Digest::of(b""),
                output: String::new(),
            })
            .collect();
        let jobs = mixed(&shards, 1);
        assert_eq!(jobs.len(), 32);
        let users = jobs[..12].iter().filter(|job| job.kind == Kind::User).count();
        assert!((3..=9).contains(&users), "{users}");
        let order = |jobs: &[&ShardJob]| jobs.iter().map(|job| job.shard).collect::<Vec<_>>();
        assert_ne!(order(&jobs), order(&mixed(&shards, 2)));
        assert_eq!(order(&jobs), order(&mixed(&shards, 1)));
    }
}
