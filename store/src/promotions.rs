//! Choices that are in force until another one is made, with their history.
//!
//! A promotion is an object `000007.json` in a folder. It is created once and never changes. The highest number is in
//! force, all together are the history, and a rollback is one more promotion, of the choice that was in force before.
//! If two promote at the same time, one of them is refused, because a number can be created only once. So nothing needs
//! the update of an object, which not every store supports.

use std::marker::PhantomData;
use std::ops::Deref;

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::location::{Created, Location, LocationError};

/// Why promotions could not be read, or nothing was promoted.
#[derive(Debug, thiserror::Error)]
pub enum PromotionError {
    /// The store.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// An object that holds something else.
    #[error("{file}: not a promotion: {reason}; restore it, or remove it to go back to the one before")]
    Unreadable {
        /// The object.
        file: String,
        /// The parser's message.
        reason: String,
    },
    /// Another process was faster.
    #[error("{file}: somebody else has just promoted; list what is in force, and repeat if it is still wanted")]
    Lost {
        /// The object that is there.
        file: String,
    },
}

/// One promotion; the fields of what was chosen can be read as if they were its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promotion<T> {
    /// Counted from 1.
    pub number: u64,
    /// What was put in force.
    #[serde(flatten)]
    pub choice: T,
    /// The time of the promotion.
    pub time: Timestamp,
    /// For a rollback, the earlier promotion that it brings back; 0 stands for what was before the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restores: Option<u64>,
}

impl<T> Promotion<T> {
    /// The promotion whose predecessor a rollback returns to.
    pub fn origin(&self) -> u64 {
        self.restores.unwrap_or(self.number)
    }
}

impl<T> Deref for Promotion<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.choice
    }
}

/// The number of the promotion that was in force before the newest one of a history, and 0 if none was; `None` if
/// there is nothing to go back from. A further rollback goes one further back.
pub fn before<T>(history: &[Promotion<T>]) -> Option<u64> {
    let origin = history.last().map(Promotion::origin).filter(|origin| *origin > 0)?;
    let before = history.iter().rfind(|promotion| promotion.number < origin);
    Some(before.map_or(0, Promotion::origin))
}

/// The promotions in a folder.
#[derive(Debug, Clone)]
pub struct Promotions<T> {
    folder: Location,
    choice: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> Promotions<T> {
    /// The promotions in a folder, which needs not be there.
    pub fn new(folder: Location) -> Self {
        Self { folder, choice: PhantomData }
    }

    /// All of them, the one in force last.
    ///
    /// # Errors
    /// The store's, and [`PromotionError::Unreadable`].
    pub async fn history(&self) -> Result<Vec<Promotion<T>>, PromotionError> {
        let mut history = Vec::new();
        for listed in self.folder.list().await? {
            let file = self.folder.join(&listed.name);
            let promotion: Promotion<T> = serde_json::from_slice(&file.read().await?)
                .map_err(|e| PromotionError::Unreadable { file: file.url().to_owned(), reason: e.to_string() })?;
            history.push(promotion);
        }
        history.sort_unstable_by_key(|promotion| promotion.number);
        Ok(history)
    }

    /// Puts a choice in force after a history that the caller has read; a rollback names the promotion that it
    /// restores.
    ///
    /// # Errors
    /// [`PromotionError::Lost`] if the history has gone on, and the store's; then nothing has changed.
    pub async fn promote(
        &self,
        history: &[Promotion<T>],
        choice: T,
        (time, restores): (Timestamp, Option<u64>),
    ) -> Result<Promotion<T>, PromotionError> {
        let number = history.last().map_or(1, |last| last.number + 1);
        let promotion = Promotion { number, choice, time, restores };
        let file = self.folder.join(&format!("{number:06}.json"));
        let json = serde_json::to_vec_pretty(&promotion).unwrap_or_default();
        match file.create(json.into()).await? {
            Created::Won => Ok(promotion),
            Created::Exists => Err(PromotionError::Lost { file: file.url().to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn promotion(number: u64, restores: Option<u64>) -> Promotion<()> {
        Promotion { number, choice: (), time: Timestamp::UNIX_EPOCH, restores }
    }

    #[test]
    fn rollbacks_go_back_one_promotion_each_and_end_before_the_first() {
        let mut history: Vec<Promotion<()>> = Vec::new();
        assert_eq!(before(&history), None);
        history.extend([promotion(1, None), promotion(2, None)]);
        for (number, expected) in [(3, 1), (4, 0)] {
            assert_eq!(before(&history), Some(expected));
            history.push(promotion(number, Some(expected)));
        }
        assert_eq!(before(&history), None);
        // What was in force before the fifth is what was before the first.
        history.push(promotion(5, None));
        assert_eq!(before(&history), Some(0));
    }
}
