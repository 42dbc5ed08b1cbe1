//! The embeddings of texts, where the plan asks for them.

use std::sync::Arc;

use laser_features::encoder::{Encoded, Encoder};
use laser_schema::audit::{Audit, AuditedText};
use laser_schema::embedding::cosine;

use super::context::RunContext;
use crate::error::WorkerError;
use crate::part::Rows;

/// The encoder, where the plan asks for embeddings.
fn encoder(context: &RunContext) -> Result<Option<Arc<Encoder>>, WorkerError> {
    match (&context.run.plan.embedding, &context.encoder) {
        (None, _) => Ok(None),
        (Some(_), Some(encoder)) => Ok(Some(encoder.clone())),
        (Some(_), None) => Err(WorkerError::NoEncoder),
    }
}

/// Encodes on a thread that may be busy for long.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, WorkerError> + Send + 'static,
) -> Result<T, WorkerError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| WorkerError::Panicked("encoder"))?
}

/// An audit with how alike its pairs of texts are.
pub(super) async fn compare(context: &RunContext, mut audit: Audit) -> Result<Audit, WorkerError> {
    let Some(encoder) = encoder(context)? else {
        return Ok(audit);
    };
    blocking(move || {
        let plain = audit.pairs.iter().map(|pair| pair.plain.clone());
        let texts = plain.chain(audit.pairs.iter().map(AuditedText::text));
        let embeddings = encoder.encode(&texts.collect::<Vec<_>>())?.embeddings;
        let count = audit.pairs.len();
        for index in 0..count {
            let cosine = cosine(embeddings.row(index), embeddings.row(count + index));
            audit.add_similarity(index, cosine);
        }
        Ok(audit)
    })
    .await
}

/// The embeddings of the rows' texts. Rows that were carried forward are encoded as all others are: an embedding
/// depends on the text alone, and takes a thousandth of the time that the text took.
pub(super) async fn embed(context: &RunContext, rows: Rows) -> Result<(Rows, Option<Encoded>), WorkerError> {
    let Some(encoder) = encoder(context)? else {
        return Ok((rows, None));
    };
    blocking(move || {
        let texts: Vec<&str> = rows.rows.iter().map(|row| row.text.as_str()).collect();
        let encoded = encoder.encode(&texts)?;
        Ok((rows, Some(encoded)))
    })
    .await
}
