//! The pool sets of an output and which of them is promoted: a registry of versions.
//!
//! `pools/VERSION/` is one set and never changes once its `pools.json` exists. `pools/promotions/000007.json` records
//! that a version was promoted and never changes either. The newest promotion is in force, all together are the
//! history, and a rollback is one more promotion, of the version that was in force before. If two promote at the same
//! time, one is refused, because a number can be created only once. This needs no update of an object, which not every
//! store supports.

use jiff::Timestamp;
use laser_schema::Digest;
use laser_store::location::Created;
use laser_store::{Location, LocationError};
use serde::{Deserialize, Serialize};

use crate::pool_set::POOL_SET_FILE;

/// The folder of all pool sets, below an output's root.
pub const POOLS_FOLDER: &str = "pools";

/// The folder of promotions among them; no version may have this name.
const PROMOTIONS: &str = "promotions";

/// The longest name of a version.
const NAME_LENGTH_MAX: usize = 80;

/// Why a pool set could not be found or promoted.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// A version, or a promotion, that is not what it should be.
    #[error("{0}")]
    Refused(String),
}

/// One promotion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promotion {
    /// Counted from 1.
    pub number: u64,
    /// The version.
    pub version: String,
    /// The digest of its `pools.json`.
    pub digest: Digest,
    /// The time of the promotion.
    pub time: Timestamp,
    /// For a rollback, the earlier promotion that it brings back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restores: Option<u64>,
}

impl Promotion {
    /// Returns the promotion whose predecessor a rollback returns to.
    fn origin(&self) -> u64 {
        self.restores.unwrap_or(self.number)
    }
}

/// The pool sets of one output.
#[derive(Debug, Clone)]
pub struct PoolRegistry {
    root: Location,
}

impl PoolRegistry {
    /// Creates the registry of an output.
    pub fn new(output: &Location) -> Self {
        Self { root: output.join(POOLS_FOLDER) }
    }

    /// Returns the folder of a version below the output's root, whether it exists or not.
    ///
    /// # Errors
    /// [`RegistryError::Refused`].
    pub fn place(version: &str) -> Result<String, RegistryError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&c);
        let is_name = version.len() <= NAME_LENGTH_MAX
            && version.starts_with(|c: char| c.is_ascii_alphanumeric())
            && version.chars().all(is_plain)
            && version != PROMOTIONS;
        match is_name {
            true => Ok(format!("{POOLS_FOLDER}/{version}")),
            false => Err(RegistryError::Refused(format!(
                "pool set {version:?}: a version is {NAME_LENGTH_MAX} letters, digits, '.', '_' and '-' at most, \
                 begins with a letter or digit, and is not {PROMOTIONS:?}; a folder elsewhere is given with a slash, \
                 such as ./{version}"
            ))),
        }
    }

    /// Returns the names of the finished sets.
    ///
    /// # Errors
    /// The store's.
    pub async fn versions(&self) -> Result<Vec<String>, RegistryError> {
        let mut versions = Vec::new();
        for name in self.root.folders().await? {
            if name != PROMOTIONS && self.is_finished(&name).await? {
                versions.push(name);
            }
        }
        versions.sort_unstable();
        Ok(versions)
    }

    /// Returns the digest of a finished set.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] or the store's.
    pub async fn digest(&self, version: &str) -> Result<Digest, RegistryError> {
        Self::place(version)?;
        let dir = self.root.join(version);
        let json = dir.join(POOL_SET_FILE).read_optional().await?;
        let json = json.ok_or_else(|| {
            RegistryError::Refused(format!(
                "{}: no finished pool set {version:?}; `laser pools list` tells which there are, `laser pools build \
                 --name {version}` builds it",
                dir.url()
            ))
        })?;
        Ok(Digest::of(&json))
    }

    /// Whether a version's `pools.json` exists.
    ///
    /// # Errors
    /// The store's.
    pub async fn is_finished(&self, version: &str) -> Result<bool, RegistryError> {
        Ok(self.root.join(version).join(POOL_SET_FILE).exists().await?)
    }

    /// Returns all promotions, the one in force last.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] or the store's.
    pub async fn history(&self) -> Result<Vec<Promotion>, RegistryError> {
        let folder = self.root.join(PROMOTIONS);
        let mut history = Vec::new();
        for listed in folder.list().await? {
            let file = folder.join(&listed.name);
            let promotion = serde_json::from_slice(&file.read().await?).map_err(|e| {
                let remedy = "restore it, or remove it to go back to the one before";
                RegistryError::Refused(format!("{}: not a promotion: {e}; {remedy}", file.url()))
            })?;
            history.push(promotion);
        }
        history.sort_unstable_by_key(|promotion: &Promotion| promotion.number);
        Ok(history)
    }

    /// Returns the promotion in force, after checking that its set exists and has not changed.
    ///
    /// # Errors
    /// [`RegistryError`], also if there is none.
    pub async fn promoted(&self) -> Result<Promotion, RegistryError> {
        let promotion = self.promoted_record().await?;
        if self.digest(&promotion.version).await? != promotion.digest {
            let dir = self.root.join(&promotion.version);
            return Err(RegistryError::Refused(format!(
                "{}: its pools.json was changed after it was promoted; promote another version, or this one again",
                dir.url()
            )));
        }
        Ok(promotion)
    }

    /// Puts a version in force from now on. Runs that have started keep their pools.
    ///
    /// # Errors
    /// [`RegistryError`]; then nothing has changed.
    pub async fn promote(&self, version: &str, now: Timestamp) -> Result<Promotion, RegistryError> {
        let history = self.history().await?;
        let digest = self.digest(version).await?;
        let is_current = |p: &Promotion| p.version == version && p.digest == digest;
        if history.last().is_some_and(is_current) {
            return Err(RegistryError::Refused(format!("{version} is promoted already")));
        }
        let promotion = Promotion {
            number: history.last().map_or(1, |last| last.number + 1),
            version: version.to_owned(),
            digest,
            time: now,
            restores: None,
        };
        self.record(promotion).await
    }

    /// Returns the promotion that [`Self::rollback`] brings back, if there is one: the one in force before the current
    /// one. A second rollback goes one further back.
    ///
    /// # Errors
    /// Those of [`Self::history`].
    pub async fn rollback_target(&self) -> Result<Option<Promotion>, RegistryError> {
        let history = self.history().await?;
        let Some(last) = history.last() else {
            return Ok(None);
        };
        let before = history.iter().rfind(|p| p.number < last.origin());
        let origin = before.map(Promotion::origin);
        Ok(history.into_iter().find(|p| Some(p.number) == origin))
    }

    /// Returns to the version in force before the current one.
    ///
    /// # Errors
    /// [`RegistryError`]; then nothing has changed.
    pub async fn rollback(&self, now: Timestamp) -> Result<Promotion, RegistryError> {
        let current = self.promoted_record().await?;
        let target = self.rollback_target().await?;
        let target = target.ok_or_else(|| {
            RegistryError::Refused(format!(
                "{} was the first to be promoted: promote another version, or set [run] pools = \"nightly\"",
                current.version
            ))
        })?;
        let promotion = Promotion {
            number: current.number + 1,
            digest: self.digest(&target.version).await?,
            version: target.version,
            time: now,
            restores: Some(target.number),
        };
        self.record(promotion).await
    }

    /// Returns the promotion in force without checking its set: a rollback must work when the set is damaged.
    async fn promoted_record(&self) -> Result<Promotion, RegistryError> {
        let promotion = self.history().await?.pop();
        promotion.ok_or_else(|| {
            let remedy = "promote one with `laser pools promote CONFIG VERSION`";
            RegistryError::Refused(format!("{}: no pool set is promoted; {remedy}", self.root.url()))
        })
    }

    async fn record(&self, promotion: Promotion) -> Result<Promotion, RegistryError> {
        let name = format!("{PROMOTIONS}/{:06}.json", promotion.number);
        let file = self.root.join(&name);
        let json = serde_json::to_vec_pretty(&promotion).unwrap_or_default();
        match file.create(json.into()).await? {
            Created::Won => Ok(promotion),
            Created::Exists => Err(RegistryError::Refused(format!(
                "{}: somebody else has just promoted a pool set; see `laser pools list`, and repeat if it is still \
                 wanted",
                file.url()
            ))),
        }
    }
}
