//! The output's pool sets: which a run takes, and the commands that build, list, promote and roll back.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use jiff::civil::Date;
use laser_model::ModelFiles;
use laser_pool_builder::{
    BuildProgress, OpenPools, POOL_SET_FILE, PoolRegistry, PoolSet, PoolTokenizer, Promotion, build_pools, clear_pools,
};
use laser_schema::Digest;
use laser_schema::layout::dated_name;
use laser_store::Location;
use laser_store::previous::{self, PreviousReader, PreviousSource};
use serde::Serialize;

use crate::commands::print;
use crate::config::{Config, PoolChoice};
use crate::night::{open_model, previous_sources, previous_texts};
use crate::progress::Display;

/// Where the pools are that a run would begin with now: below the output's root, or a URL.
pub(crate) async fn choose(config: &Config, output: &Location, run: &str) -> Result<String> {
    Ok(match &config.run.pools {
        PoolChoice::Nightly => PoolRegistry::place(run)?,
        PoolChoice::Promoted => {
            let promotion = PoolRegistry::new(output).promoted().await;
            PoolRegistry::place(&promotion.context("[run] pools = \"promoted\"")?.version)?
        }
        PoolChoice::Set(text) if text.contains('/') => Location::parse(text)?.absolute_url(),
        PoolChoice::Set(version) => {
            let registry = PoolRegistry::new(output);
            registry.digest(version).await.context("[run] pools")?;
            PoolRegistry::place(version)?
        }
    })
}

/// The folder that a user names: `promoted`, a version, or anything with a slash.
pub(crate) async fn find(config: &Config, name: &str) -> Result<Location> {
    let output = Location::parse(&config.output.path)?;
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
    let versions = current.into_iter().chain(target).map(|p| p.version);
    versions.map(|v| Ok(PoolRegistry::place(&v)?)).collect()
}

/// `laser pools build`: into a version of the output, or into a folder elsewhere.
pub(crate) async fn build(config: &Config, name: Option<&str>, dir: Option<&str>) -> Result<()> {
    let model = open_model(config).await?;
    let before = config.run.date.unwrap_or(Date::MAX);
    let sources = previous_sources(config, before).await?;
    let dir = match dir {
        Some(dir) => Location::parse(dir)?,
        None => {
            let output = Location::parse(&config.output.path)?;
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
                return print(&format!("{version} is built already: {}\n", dir.url()));
            }
            dir
        }
    };
    clear_pools(&dir).await?;
    let set = build_into(config, &model, (&sources, before), &dir).await?;
    let tokens: usize = set.pools.iter().map(|p| p.tokens).sum();
    let pools = set.pools.len();
    print(&format!("{pools} pools, {tokens} tokens: {}\n", dir.url()))
}

/// Named, as a run is, by the date and by what the pools depend on.
async fn default_version(
    config: &Config,
    model: &ModelFiles,
    sources: &[PreviousSource],
    before: Date,
) -> Result<String> {
    let mut inputs = Vec::new();
    for table in &config.input {
        inputs.push(Location::parse(&table.path)?.fingerprint().await?);
    }
    let identity = Digest::of_json(&(
        Digest::from_bytes(model.tokenizer.fingerprint()),
        &config.input,
        inputs,
        previous::fingerprint(sources, before).await?,
        &config.pools,
    ));
    Ok(dated_name(config.night(), &identity))
}

async fn build_into(
    config: &Config,
    model: &ModelFiles,
    (sources, before): (&[PreviousSource], Date),
    dir: &Location,
) -> Result<PoolSet> {
    let mut display = Display::new();
    display.stage("building pools");
    let mut progress = |p: BuildProgress| display.update(p.done, p.total, p.stage.as_str());
    let texts = previous_texts(PreviousReader::open(sources, before).await?);
    let tokenizer = PoolTokenizer::of(model)?;
    let (input, pools) = (&config.input, &config.pools);
    let memory = config.run.memory();
    Ok(build_pools(input, texts, tokenizer, pools, memory, dir, &mut progress).await?)
}

/// A line of `laser pools list`.
#[derive(Debug, Serialize)]
struct Listed {
    version: String,
    built: Timestamp,
    pools: usize,
    texts: u64,
    tokens: usize,
    bytes: usize,
    digest: Digest,
    /// In force: `[run] pools = "promoted"` takes it.
    promoted: bool,
    /// When it was promoted, each time.
    promotions: Vec<Timestamp>,
}

/// `laser pools list`: oldest first.
pub(crate) async fn list(config: &Config, json: bool) -> Result<()> {
    let output = Location::parse(&config.output.path)?;
    let registry = PoolRegistry::new(&output);
    let history = registry.history().await?;
    let mut sets = Vec::new();
    for version in registry.versions().await? {
        sets.push(listed(&output, version, &history).await?);
    }
    sets.sort_by_key(|set| set.built);
    let mut out = String::new();
    for set in &sets {
        if json {
            writeln!(out, "{}", serde_json::to_string(set)?)?;
            continue;
        }
        writeln!(
            out,
            "{:<26} {:>3} pools {:>9} tokens {:>8} texts  built {:.0}{}",
            set.version,
            set.pools,
            set.tokens,
            set.texts,
            set.built,
            if set.promoted { "  promoted" } else { "" }
        )?;
    }
    if sets.is_empty() && !json {
        writeln!(out, "no pool sets in {}", output.url())?;
    }
    print(&out)
}

async fn listed(output: &Location, version: String, history: &[Promotion]) -> Result<Listed> {
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

/// `laser pools promote`: only what opens whole with the model's tokenizer.
pub(crate) async fn promote(config: &Config, version: &str) -> Result<()> {
    let output = Location::parse(&config.output.path)?;
    let registry = PoolRegistry::new(&output);
    registry.digest(version).await?;
    check(config, &output, version).await?;
    let promotion = registry.promote(version, Timestamp::now()).await?;
    tell("promoted", config, &promotion)
}

/// `laser pools rollback`: one promotion back.
pub(crate) async fn rollback(config: &Config) -> Result<()> {
    let output = Location::parse(&config.output.path)?;
    let registry = PoolRegistry::new(&output);
    if let Some(target) = registry.rollback_target().await? {
        registry.digest(&target.version).await?;
        check(config, &output, &target.version).await?;
    }
    let promotion = registry.rollback(Timestamp::now()).await?;
    tell("rolled back to", config, &promotion)
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

/// A promotion that no run will see is told to be one.
fn tell(what: &str, config: &Config, promotion: &Promotion) -> Result<()> {
    let hint = match config.run.pools {
        PoolChoice::Promoted => "runs that begin from now on draft from it",
        _ => "but [run] pools is not \"promoted\", so no run of this configuration takes it",
    };
    print(&format!("{what} {} (promotion {}); {hint}\n", promotion.version, promotion.number))
}
