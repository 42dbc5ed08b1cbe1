//! `laser embed`: collaborative embeddings from interactions.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use arrow::datatypes::{DataType, Field, Schema};
use laser_schema::entity::IdType;
use laser_schema::interactions::InteractionTable;
use laser_schema::{EntityId, Progress};
use laser_store::interactions::{Interactions, Needs};
use laser_store::{Location, table};
use serde::Serialize;

use crate::lightgcn::{CUTOFF, EmbedConfig, Epoch, Trained, train};
use crate::ranking::{Event, Holdout, RankingQuality};

/// The footer's key for how embeddings came to be.
const FOOTER: &str = "laser.embed";

/// The outcome of `laser embed`.
#[derive(Debug)]
pub struct Embedded {
    /// Users with an embedding.
    pub users: usize,
    /// Their table.
    pub user_table: String,
    /// Items with an embedding.
    pub items: usize,
    /// Their table.
    pub item_table: String,
    /// On the held-out interactions.
    pub validation: RankingQuality,
    /// The held-out interactions.
    pub held_out: usize,
    /// The way they were chosen.
    pub split: &'static str,
    /// The epoch of the best validation.
    pub epoch: usize,
    /// Epochs that were trained.
    pub epochs: usize,
}

/// Trains on all interactions but those that validate, and writes `users.parquet` and `items.parquet`.
///
/// # Errors
/// Interactions that cannot be read or are too few, a training that fails, and the store's.
pub async fn embed(
    table: &InteractionTable,
    config: &EmbedConfig,
    output: &str,
    progress: &mut dyn Progress,
) -> Result<Embedded> {
    let output = Location::parse(output)?;
    let interactions = read(table, config).await?;
    let data = hold_out(&interactions, config, 0.0);
    let trained = train_model("LightGCN", &data, config, progress)?;
    let all = [data.train.as_slice(), &data.validation].concat();
    let embeddings = trained.embeddings(&data, &all);
    let footer = serde_json::to_string(&serde_json::json!({
        "config": config,
        "interactions": table.path,
        "epoch": trained.epoch,
        "validation": trained.validation,
    }))?;
    let (users, items) = (output.join("users.parquet"), output.join("items.parquet"));
    // `min_rating` leaves users and items without interactions, of which nothing was learnt.
    let (mut of_users, mut of_items) = (BTreeMap::new(), BTreeMap::new());
    let dimension = embeddings.dimension;
    for &(user, item) in &all {
        let (user, item) = (user as usize, item as usize);
        let row = |values: &[f32], at: usize| values[at * dimension..][..dimension].to_vec();
        of_users.entry(user).or_insert_with(|| row(&embeddings.users, user));
        of_items.entry(item).or_insert_with(|| row(&embeddings.items, item));
    }
    let encoded = [
        (&users, encode(&users, &interactions.users, &of_users, &footer)?),
        (&items, encode(&items, &interactions.items, &of_items, &footer)?),
    ];
    for (location, bytes) in encoded {
        location.write(bytes).await?;
    }
    Ok(Embedded {
        users: of_users.len(),
        user_table: users.url().to_owned(),
        items: of_items.len(),
        item_table: items.url().to_owned(),
        validation: trained.validation,
        held_out: data.validation.len(),
        split: split_name(&data),
        epoch: trained.epoch,
        epochs: trained.epochs,
    })
}

/// The interactions that count as positive.
pub(crate) async fn read(table: &InteractionTable, config: &EmbedConfig) -> Result<Interactions> {
    let needs = Needs { rating: config.min_rating.is_some(), timestamp: false };
    let mut interactions = Interactions::read(table, needs).await?;
    if let Some(least) = config.min_rating {
        let rows = &mut interactions.rows;
        rows.retain(|row| row.rating.is_some_and(|rating| rating >= least));
        anyhow::ensure!(
            !rows.is_empty(),
            "{}: no interaction is rated {least} or higher; lower [embed] min_rating",
            table.path
        );
    }
    Ok(interactions)
}

/// The parts of the interactions, the last `test` share of each user's among them.
pub(crate) fn hold_out(interactions: &Interactions, config: &EmbedConfig, test: f64) -> Holdout {
    let events: Vec<Event> =
        interactions.rows.iter().map(|row| Event { user: row.user, item: row.item, time: row.timestamp }).collect();
    let (users, items) = (interactions.users.len(), interactions.items.len());
    Holdout::new(users, items, &events, (config.validation, test), config.seed)
}

/// How the parts were chosen, for reports.
pub(crate) fn split_name(data: &Holdout) -> &'static str {
    if data.by_time { "each user's latest" } else { "each user's at random: not all interactions have a timestamp" }
}

/// Trains as a stage of its own.
pub(crate) fn train_model(
    name: &str,
    data: &Holdout,
    config: &EmbedConfig,
    progress: &mut dyn Progress,
) -> Result<Trained> {
    progress.stage(name);
    let epochs = config.epochs as u64;
    let mut told = |epoch: Epoch| {
        let recall = epoch.validation.map(|validation| format!(", recall@{CUTOFF} {:.4}", validation.recall));
        let message = format!("loss {:.4}{}", epoch.loss, recall.unwrap_or_default());
        progress.update(epoch.epoch as u64, Some(epochs), &message);
    };
    // Minutes on all cores: other tasks of this thread move to another one.
    let trained = tokio::task::block_in_place(|| train(data, config, &mut told))?;
    progress.finish_with(&format!(
        "recall@{CUTOFF} {:.4} in epoch {} of {}",
        trained.validation.recall, trained.epoch, trained.epochs
    ));
    Ok(trained)
}

/// A table of ids and embeddings, as `[pools.user] embeddings` reads it.
fn encode(
    location: &Location,
    ids: &[EntityId],
    vectors: &BTreeMap<usize, Vec<f32>>,
    footer: &str,
) -> Result<bytes::Bytes> {
    #[derive(Serialize)]
    struct Row<'a> {
        id: &'a EntityId,
        embedding: &'a [f32],
    }
    let id = match ids.first().map(EntityId::id_type) {
        Some(IdType::Int64) => DataType::Int64,
        _ => DataType::Utf8,
    };
    let embedding = DataType::new_list(DataType::Float32, false);
    let schema = Schema::new(vec![Field::new("id", id, false), Field::new("embedding", embedding, false)]);
    let rows = vectors.iter().map(|(&place, embedding)| Row { id: &ids[place], embedding });
    let footer = [(FOOTER, footer.to_owned())];
    table::encode(location.url(), schema.into(), &rows.collect::<Vec<_>>(), &footer)
        .with_context(|| format!("{}: ids of different types", location.url()))
}

#[cfg(test)]
mod tests {
    use laser_store::embeddings::{EmbeddingColumns, EmbeddingFiles, EmbeddingReader};

    use super::*;

    #[tokio::test]
    async fn pools_read_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("users.parquet");
        let location = Location::parse(path.to_str().unwrap()).unwrap();
        let ids = [7, 3, 9].map(EntityId::Int);
        let vectors = BTreeMap::from([(0, vec![0.5, -1.0]), (2, vec![0.25, 2.0])]);
        let bytes = encode(&location, &ids, &vectors, "{}").unwrap();
        location.write(bytes).await.unwrap();
        let files = EmbeddingFiles::Tables(vec![location], EmbeddingColumns::default());
        let batch = EmbeddingReader::open(files).await.unwrap().next_batch().await.unwrap().unwrap();
        assert_eq!(batch.ids, [7, 9].map(EntityId::Int));
        assert_eq!(batch.values, [0.5, -1.0, 0.25, 2.0]);
    }

    #[tokio::test]
    async fn lower_ratings_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("i.csv");
        std::fs::write(&path, "user,item,rating\n1,2,5\n1,3,2\n2,3,4\n").unwrap();
        let table = InteractionTable { path: path.to_str().unwrap().to_owned(), ..InteractionTable::default() };
        let least = |rating| EmbedConfig { min_rating: rating, ..EmbedConfig::default() };
        assert_eq!(read(&table, &least(None)).await.unwrap().rows.len(), 3);
        assert_eq!(read(&table, &least(Some(4.0))).await.unwrap().rows.len(), 2);
        let error = read(&table, &least(Some(6.0))).await.unwrap_err().to_string();
        assert!(error.contains("no interaction is rated 6 or higher"), "{error}");
    }
}
