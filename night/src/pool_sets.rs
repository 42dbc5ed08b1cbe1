//! The output's pool sets: which a run takes, and building, listing, promoting and rolling back.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use jiff::civil::Date;
use laser_model::ModelFiles;
use laser_pool_builder::{
    Inspection, OpenPools, POOL_SET_FILE, POOL_SOURCES_FILE, PoolPromotion, PoolRegistry, PoolSet, PoolTokenizer,
    PoolsConfig, TuneConfig, TuneReport, build_pools, clear_pools, embedding_fingerprints, inspect, tune,
    write_sources,
};
use laser_schema::layout::{DataSet, dated_name};
use laser_schema::{Digest, Progress};
use laser_store::Location;
use laser_store::entities::fingerprints;
use laser_store::previous::{self, PreviousReader, PreviousSource};
use serde::Serialize;

use crate::config::{Config, PoolChoice};
use crate::erasure::marker::ensure_none;
use crate::failure::may_pass;
use crate::model::open_model;
use crate::previous::{previous_sources, previous_texts};

/// Tokens of a branch, and branches of a pool, that an inspection shows.
const INSPECTED: (usize, usize) = (8, 3);

/// Where the pools are that a run would begin with now: below the output's root, or a URL.
pub(crate) async fn choose(config: &Config, output: &Location, run: &str) -> Result<String> {
    Ok(match &config.run.pools {
        PoolChoice::Nightly => PoolRegistry::place(run)?,
        PoolChoice::Promoted => {
            let promotion = PoolRegistry::new(output).promoted().await;
            version_place(config, output, &promotion.context("[run] pools = \"promoted\"")?.version)?
        }
        PoolChoice::Set(text) if text.contains('/') => Location::parse(text)?.absolute_url(),
        PoolChoice::Set(version) => {
            let registry = PoolRegistry::new(output);
            registry.digest(version).await.context("[run] pools")?;
            version_place(config, output, version)?
        }
    })
}

/// Where a version of the output is for a run: below the root of what the run writes. A canary has another one.
fn version_place(config: &Config, output: &Location, version: &str) -> Result<String> {
    let place = PoolRegistry::place(version)?;
    Ok(if config.canary.is_some() { output.join(&place).absolute_url() } else { place })
}

/// The folder that a user names: `promoted`, a version, or anything with a slash.
///
/// # Errors
/// If there is no such set.
pub async fn find(config: &Config, name: &str) -> Result<Location> {
    let output = config.output()?;
    let registry = PoolRegistry::new(&output);
    Ok(match name {
        name if name.contains('/') => Location::parse(name)?,
        "promoted" => output.join(&PoolRegistry::place(&registry.promoted().await?.version)?),
        version => {
            registry.digest(version).await?;
            output.join(&PoolRegistry::place(version)?)
        }
    })
}

/// Places, below the output's root, of the sets that stay whatever their age.
pub(crate) async fn kept(output: &Location) -> Result<BTreeSet<String>> {
    let registry = PoolRegistry::new(output);
    let current = registry.history().await?.pop();
    let target = registry.rollback_target().await?;
    let versions = current.into_iter().chain(target).map(|p| p.choice.version);
    versions.map(|v| Ok(PoolRegistry::place(&v)?)).collect()
}

/// What a set is built from: folders below the output, or other places by URL.
pub(crate) fn sources(output: &Location, previous: &PreviousReader) -> BTreeSet<String> {
    let place = |place: String| output.relative(&place).map(str::to_owned).unwrap_or(place);
    previous.places().into_iter().map(place).collect()
}

/// A pool set that was asked for.
#[derive(Debug)]
pub enum Built {
    /// It has been built.
    Now {
        /// Where it is.
        dir: Location,
        /// What it holds.
        set: Box<PoolSet>,
    },
    /// It was built before.
    Before {
        /// Its name.
        version: String,
        /// Where it is.
        dir: Location,
    },
}

/// Builds a set from the previous knowledge: a version of the output, or a folder elsewhere.
///
/// # Errors
/// If `name` is there already, and those of building.
pub async fn build(
    config: &Config,
    name: Option<&str>,
    dir: Option<&str>,
    progress: &mut dyn Progress,
) -> Result<Built> {
    let root = Location::parse(&config.output.path)?;
    ensure_none(&root).await?;
    let model = open_model(config).await?;
    let before = config.run.date.unwrap_or(Date::MAX);
    let sources = previous_sources(config, before).await?;
    let dir = match dir {
        Some(dir) => Location::parse(dir)?,
        None => {
            let output = config.output()?;
            let version = match name {
                Some(name) => name.to_owned(),
                None => default_version(config, &model, &sources, before).await?,
            };
            let dir = output.join(&PoolRegistry::place(&version)?);
            if PoolRegistry::new(&output).is_finished(&version).await? {
                ensure!(
                    name.is_none(),
                    "{}: a pool set never changes once it is built; give another --name",
                    dir.url()
                );
                return Ok(Built::Before { version, dir });
            }
            dir
        }
    };
    clear_pools(&dir).await?;
    progress.stage("building pools");
    let mut show = |done, total, stage: &str| progress.update(done, total, stage);
    let previous = PreviousReader::open(&sources, DataSet::Profiles, before).await?;
    write_sources(&dir, &self::sources(&root, &previous)).await?;
    let built = async {
        // Again, before any text is read: an erasure that begins now sees a set under way, or is seen here.
        ensure_none(&root).await?;
        let texts = previous_texts(previous);
        let tokenizer = PoolTokenizer::of(&model)?;
        let (input, pools, memory) = (&config.input, &config.pools, config.run.memory());
        anyhow::Ok(build_pools(input, texts, tokenizer, pools, memory, &dir, &mut show).await?)
    };
    let built = built.await;
    // Of input of which nothing can be made no set is under way.
    if built.as_ref().is_err_and(|error| !may_pass(error)) {
        dir.join(POOL_SOURCES_FILE).remove().await?;
    }
    Ok(Built::Now { dir, set: Box::new(built?) })
}

/// Named, as a run is, by the date and by what the pools depend on.
async fn default_version(
    config: &Config,
    model: &ModelFiles,
    sources: &[PreviousSource],
    before: Date,
) -> Result<String> {
    let inputs = fingerprints(&config.input).await?;
    let identity = Digest::of_json(&(
        Digest::from_bytes(model.tokenizer.fingerprint()),
        &config.input,
        inputs,
        previous::fingerprint(sources, DataSet::Profiles, before).await?,
        &config.pools,
    ));
    Ok(dated_name(config.night(), &with_embeddings(identity, &config.pools).await?))
}

/// An identity that also covers the tables of `[pools.*] embeddings`; without any it stays what it is.
pub(crate) async fn with_embeddings(identity: Digest, pools: &PoolsConfig) -> Result<Digest> {
    let embeddings = embedding_fingerprints(pools).await.context("[pools]")?;
    Ok(match embeddings.is_empty() {
        true => identity,
        false => Digest::of_json(&(identity, "embeddings", embeddings)),
    })
}

/// A pool set of the output.
#[derive(Debug, Serialize)]
pub struct Listed {
    /// Its name.
    pub version: String,
    /// When it was finished.
    pub built: Timestamp,
    /// How many pools it has.
    pub pools: usize,
    /// Previous texts that were read for it.
    pub texts: u64,
    /// Tokens of all pools.
    pub tokens: usize,
    /// Bytes of all pools.
    pub bytes: usize,
    /// Digest of the set.
    pub digest: Digest,
    /// In force: `[run] pools = "promoted"` takes it.
    pub promoted: bool,
    /// When it was promoted, each time.
    pub promotions: Vec<Timestamp>,
}

/// The output's pool sets, oldest first.
///
/// # Errors
/// The store's, and a set that cannot be read.
pub async fn list(output: &Location) -> Result<Vec<Listed>> {
    let registry = PoolRegistry::new(output);
    let history = registry.history().await?;
    let mut sets = Vec::new();
    for version in registry.versions().await? {
        sets.push(listed(output, version, &history).await?);
    }
    sets.sort_by_key(|set| set.built);
    Ok(sets)
}

async fn listed(output: &Location, version: String, history: &[PoolPromotion]) -> Result<Listed> {
    let file = output.join(&PoolRegistry::place(&version)?).join(POOL_SET_FILE);
    let json = file.read().await?;
    let set: PoolSet = serde_json::from_slice(&json).with_context(|| format!("{}: not a pool set", file.url()))?;
    let promotions = history.iter().filter(|p| p.version == version);
    Ok(Listed {
        built: file.modified().await?,
        pools: set.pools.len(),
        texts: set.texts.read,
        tokens: set.pools.iter().map(|p| p.tokens).sum(),
        bytes: set.pools.iter().map(|p| p.bytes).sum(),
        digest: Digest::of(&json),
        promoted: history.last().is_some_and(|p| p.version == version),
        promotions: promotions.map(|p| p.time).collect(),
        version,
    })
}

/// Puts a set in force for runs that begin from now on. It must open whole with the model's tokenizer.
///
/// # Errors
/// If it does not.
pub async fn promote(config: &Config, version: &str) -> Result<PoolPromotion> {
    let output = config.output()?;
    ensure_none(&output).await?;
    let registry = PoolRegistry::new(&output);
    registry.digest(version).await?;
    check(config, &output, version).await?;
    Ok(registry.promote(version, Timestamp::now()).await?)
}

/// Goes one promotion back.
///
/// # Errors
/// If there is none, or its set does not open.
pub async fn rollback(config: &Config) -> Result<PoolPromotion> {
    let output = config.output()?;
    ensure_none(&output).await?;
    let registry = PoolRegistry::new(&output);
    if let Some(target) = registry.rollback_target().await? {
        registry.digest(&target.version).await?;
        check(config, &output, &target.version).await?;
    }
    Ok(registry.rollback(Timestamp::now()).await?)
}

async fn check(config: &Config, output: &Location, version: &str) -> Result<()> {
    let model = open_model(config).await?;
    let dir = output.join(&PoolRegistry::place(version)?);
    let pools = OpenPools::open(&dir, &model.tokenizer.fingerprint()).await?;
    ensure!(
        !pools.set().pools.is_empty(),
        "{}: a set without pools, since no previous text belonged to an entity; nothing could be drafted from it",
        dir.url()
    );
    Ok(pools.verify()?)
}

/// Sizes, groups and the most frequent branches of a set that [`find`] finds.
///
/// # Errors
/// If it does not open whole with the model's tokenizer.
pub async fn inspection(config: &Config, name: &str) -> Result<Inspection> {
    let model = open_model(config).await?;
    let dir = find(config, name).await?;
    let pools = OpenPools::open(&dir, &model.tokenizer.fingerprint()).await?;
    pools.verify()?;
    let (branch_tokens, branches) = INSPECTED;
    Ok(inspect(&pools, model.tokenizer.library(), branch_tokens, branches)?)
}

/// Replays held-out previous texts with pools of several sizes.
///
/// # Errors
/// Those of building pools.
pub async fn tuning(config: &Config, tuning: &TuneConfig, progress: &mut dyn Progress) -> Result<TuneReport> {
    let model = open_model(config).await?;
    progress.stage("tuning pools");
    let mut show = |done, total, stage: &str| progress.update(done, total, stage);
    let before = config.run.date.unwrap_or(Date::MAX);
    let sources = previous_sources(config, before).await?;
    let texts = previous_texts(PreviousReader::open(&sources, DataSet::Profiles, before).await?);
    let (drafter, tokenizer) = (config.draft.drafter()?, PoolTokenizer::of(&model)?);
    let pools = (&config.pools, config.run.memory());
    Ok(tune(&config.input, texts, tokenizer, pools, tuning, drafter, &mut show).await?)
}
