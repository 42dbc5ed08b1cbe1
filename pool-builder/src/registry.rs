//! The pool sets of an output and which of them is promoted: a registry of versions.
//!
//! `pools/VERSION/` is one set and never changes once its `pools.json` exists. `pools/promotions/` holds the
//! [`promotions`].

use jiff::Timestamp;
use laser_schema::Digest;
use laser_store::promotions::{self, Promotion, PromotionError, Promotions};
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
    /// A promotion.
    #[error(transparent)]
    Promotion(#[from] PromotionError),
    /// A version that is not what it should be.
    #[error("{0}")]
    Refused(String),
}

/// A pool set that was promoted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromotedPools {
    /// The version.
    pub version: String,
    /// The digest of its `pools.json`.
    pub digest: Digest,
}

/// One promotion of a pool set.
pub type PoolPromotion = Promotion<PromotedPools>;

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

    fn promotions(&self) -> Promotions<PromotedPools> {
        Promotions::new(self.root.join(PROMOTIONS))
    }

    /// Returns all promotions, the one in force last.
    ///
    /// # Errors
    /// [`RegistryError::Promotion`].
    pub async fn history(&self) -> Result<Vec<PoolPromotion>, RegistryError> {
        Ok(self.promotions().history().await?)
    }

    /// Returns the promotion in force, after checking that its set exists and has not changed.
    ///
    /// # Errors
    /// [`RegistryError`], also if there is none.
    pub async fn promoted(&self) -> Result<PoolPromotion, RegistryError> {
        let promotion = self.history().await?.pop().ok_or_else(|| self.nothing_promoted())?;
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
    pub async fn promote(&self, version: &str, now: Timestamp) -> Result<PoolPromotion, RegistryError> {
        let history = self.history().await?;
        let digest = self.digest(version).await?;
        let is_current = |p: &PoolPromotion| p.version == version && p.digest == digest;
        if history.last().is_some_and(is_current) {
            return Err(RegistryError::Refused(format!("{version} is promoted already")));
        }
        let choice = PromotedPools { version: version.to_owned(), digest };
        Ok(self.promotions().promote(&history, choice, (now, None)).await?)
    }

    /// Returns the promotion that [`Self::rollback`] brings back, if there is one: the one in force before the current
    /// one. A second rollback goes one further back.
    ///
    /// # Errors
    /// Those of [`Self::history`].
    pub async fn rollback_target(&self) -> Result<Option<PoolPromotion>, RegistryError> {
        Ok(restored(&self.history().await?).cloned())
    }

    /// Returns to the version in force before the current one.
    ///
    /// # Errors
    /// [`RegistryError`]; then nothing has changed.
    pub async fn rollback(&self, now: Timestamp) -> Result<PoolPromotion, RegistryError> {
        let history = self.history().await?;
        let current = history.last().ok_or_else(|| self.nothing_promoted())?;
        let target = restored(&history).ok_or_else(|| {
            RegistryError::Refused(format!(
                "{} was the first to be promoted: promote another version, or set [run] pools = \"nightly\"",
                current.version
            ))
        })?;
        let choice = PromotedPools { digest: self.digest(&target.version).await?, version: target.version.clone() };
        Ok(self.promotions().promote(&history, choice, (now, Some(target.number))).await?)
    }

    /// Records the new digest of the set in force, if that set was changed in its place, as only an erasure does.
    ///
    /// # Errors
    /// [`RegistryError`]; then nothing has changed.
    pub async fn renew(&self, now: Timestamp) -> Result<(), RegistryError> {
        let history = self.history().await?;
        let Some(last) = history.last() else {
            return Ok(());
        };
        let digest = self.digest(&last.version).await?;
        if digest != last.digest {
            let choice = PromotedPools { digest, version: last.version.clone() };
            // A rollback goes where it would have gone before.
            self.promotions().promote(&history, choice, (now, Some(last.origin()))).await?;
        }
        Ok(())
    }

    fn nothing_promoted(&self) -> RegistryError {
        let remedy = "promote one with `laser pools promote CONFIG VERSION`";
        RegistryError::Refused(format!("{}: no pool set is promoted; {remedy}", self.root.url()))
    }
}

/// The promotion that a rollback brings back.
fn restored(history: &[PoolPromotion]) -> Option<&PoolPromotion> {
    let number = promotions::before(history)?;
    history.iter().find(|promotion| promotion.number == number)
}
