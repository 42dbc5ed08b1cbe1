//! `laser train recommender`: a model that writes identifiers, from the histories of the input.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use laser_schema::{Entity, EntityId, Kind, Progress};
use laser_store::catalogue;
use laser_store::entities::EntityReader;
use laser_train::{Catalogue, CodeVocabulary, History, RecommenderJob, train_recommender};
pub use laser_train::{RecommenderEpoch, Trained};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, RecommenderConfig};

/// Trains the model that `[recommender]` describes, or goes on where an earlier call was stopped; none if it is stopped
/// before the end.
///
/// # Errors
/// Naming the key, the table or the row.
pub async fn train(
    config: &Config,
    progress: &mut dyn Progress,
    drain: &CancellationToken,
) -> Result<Option<Trained<RecommenderEpoch>>> {
    let RecommenderConfig { output, held_out, options } = &config.recommender;
    ensure!(!output.is_empty(), "[recommender] output: not set; give a folder for the model");
    ensure!(
        !output.contains("://"),
        "[recommender] output = {output:?}: expected a local folder; copy it to a store when it is done, [model] path \
         may be a URL"
    );
    ensure!(*held_out > 0, "[recommender] held_out = 0: expected at least 1 item of a history to measure on");
    options.validate().context("[recommender.model]")?;
    progress.stage("reading histories");
    let items = Items::read(config).await?;
    let histories = items.histories(config, progress).await?;
    let (learned, measured) = split(&histories, *held_out);
    ensure!(
        !learned.is_empty(),
        "[[input]]: no user has more than {held_out} items of the catalogue in its history; nothing is left to learn \
         from"
    );
    progress.finish_with(&format!("{} users with {} items to learn from", histories.len(), count(&learned)));
    let job = RecommenderJob {
        options,
        folder: Path::new(output),
        catalogue: &items.catalogue,
        learned: &learned,
        held_out: &measured,
        target: None,
        device: config.model.device,
    };
    tokio::task::block_in_place(|| train_recommender(&job, progress, &|| drain.is_cancelled())).context("[recommender]")
}

fn count(histories: &[History]) -> usize {
    histories.iter().map(|history| history.items.len() - history.counts_from).sum()
}

/// What is learnt from, and what is measured on: the latest items of each history after the others.
fn split(histories: &[Vec<u32>], held_out: usize) -> (Vec<History>, Vec<History>) {
    let (mut learned, mut measured) = (Vec::new(), Vec::new());
    for items in histories {
        let before = items.len().saturating_sub(held_out);
        if before > 0 {
            learned.push(History { items: items[..before].to_vec(), counts_from: 0 });
            measured.push(History { items: items.clone(), counts_from: before });
        }
    }
    (learned, measured)
}

/// The items of the catalogue by id, and their codes as tokens.
struct Items {
    catalogue: Catalogue,
    numbers: HashMap<EntityId, u32>,
}

impl Items {
    async fn read(config: &Config) -> Result<Self> {
        let table =
            &config.lists.as_ref().context("[lists.catalogue]: not set; give the items' identifiers")?.catalogue;
        let read = catalogue::Catalogue::read(table).await.context("[lists.catalogue]")?;
        let vocabulary = CodeVocabulary::new(read.codes.clone()).context("[lists.catalogue] identifier")?;
        let levels = read.levels().max(1);
        let token = |(level, code): (usize, &u16)| -> Result<u32> {
            Ok(u32::try_from(vocabulary.level(level).start)? + u32::from(*code))
        };
        let identifiers = read.identifiers.chunks_exact(levels);
        let identifiers: Vec<Vec<u32>> =
            identifiers.map(|codes| codes.iter().enumerate().map(token).collect()).collect::<Result<_>>()?;
        let numbers = read.ids.into_iter().zip(0..).collect();
        Ok(Self { catalogue: Catalogue::new(vocabulary, identifiers)?, numbers })
    }

    /// The items of every user that the catalogue has, oldest first; users without any are left out.
    async fn histories(&self, config: &Config, progress: &mut dyn Progress) -> Result<Vec<Vec<u32>>> {
        let field = config.lists.as_ref().map_or("item", |lists| &lists.item);
        let mut histories = Vec::new();
        for table in &config.input {
            let mut reader = EntityReader::open(table).await?;
            while let Some(users) = reader.next_batch().await? {
                for user in users {
                    ensure!(
                        user.kind == Kind::User,
                        "{}: {} {} is no user, and only users have histories to learn from",
                        table.path,
                        user.kind,
                        user.id
                    );
                    histories.extend(Some(self.known(&user, field)).filter(|items| !items.is_empty()));
                }
                progress.update(histories.len() as u64, None, "users");
            }
        }
        Ok(histories)
    }

    fn known(&self, user: &Entity, field: &str) -> Vec<u32> {
        let number = |value: &Value| {
            let id = match value {
                Value::Number(number) => EntityId::Int(number.as_i64()?),
                Value::String(text) => EntityId::Text(text.clone()),
                _ => return None,
            };
            self.numbers.get(&id).copied()
        };
        user.history.iter().filter_map(|interaction| number(interaction.fields.get(field)?)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_items_are_measured_on_and_not_learnt_from() {
        let (learned, measured) = split(&[vec![1, 2, 3], vec![7], vec![4, 5]], 1);
        let history = |items: &[u32], counts_from| History { items: items.to_vec(), counts_from };
        assert_eq!(learned, [history(&[1, 2], 0), history(&[4], 0)]);
        assert_eq!(measured, [history(&[1, 2, 3], 2), history(&[4, 5], 1)]);
    }
}
