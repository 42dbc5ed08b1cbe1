//! Embeddings of users and items that are not in the entity table, brought to their entities by the [`Join`].

use laser_schema::embedding::EmbeddingSource;
use laser_schema::{Digest, Kind};
use laser_store::embeddings::{EmbeddingFiles, EmbeddingReader, NpyFiles};
use laser_store::join::Join;

use crate::config::PoolsConfig;
use crate::error::PoolsError;

/// Gives `join` the embeddings that the configuration names, of kinds whose grouping uses them.
///
/// # Errors
/// [`PoolsError::Embeddings`] or the local disk's; an id that is there twice is found when the join is finished.
pub async fn join_embeddings(config: &PoolsConfig, join: &mut Join) -> Result<(), PoolsError> {
    for kind in Kind::ALL {
        let Some(source) = source_of(config, kind) else {
            continue;
        };
        match source {
            EmbeddingSource::Npy { npy, ids, .. } => join.use_embeddings(kind, npy, ids),
            EmbeddingSource::Table { table, .. } => join.use_embeddings(kind, table, table),
        }
        let mut reader = EmbeddingReader::open(EmbeddingFiles::find(source, kind).await?).await?;
        while let Some(batch) = reader.next_batch().await? {
            for (&row, (id, embedding)) in batch.rows.iter().zip(batch.iter()) {
                join.push_embedding(kind, row, &id.to_string(), embedding)?;
            }
        }
    }
    Ok(())
}

/// Digests that change whenever the embeddings do that [`join_embeddings`] gives; none if it gives none.
///
/// # Errors
/// A file that is not there, or the store's.
pub async fn embedding_fingerprints(config: &PoolsConfig) -> Result<Vec<Digest>, PoolsError> {
    let mut found = Vec::new();
    for kind in Kind::ALL {
        let Some(source) = source_of(config, kind) else {
            continue;
        };
        let files = match EmbeddingFiles::find(source, kind).await? {
            EmbeddingFiles::Tables(tables, _) => tables,
            EmbeddingFiles::Npy(NpyFiles { npy, ids, .. }) => vec![npy, ids],
        };
        for file in files {
            found.push(file.fingerprint().await?);
        }
    }
    Ok(found)
}

/// Where the embeddings of a kind are, if its grouping uses any that are not in the entity table.
fn source_of(config: &PoolsConfig, kind: Kind) -> Option<&EmbeddingSource> {
    let grouping = config.of(kind);
    grouping.embeddings.as_ref().filter(|_| grouping.grouping().has_clusters())
}
