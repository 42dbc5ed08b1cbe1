//! The previous knowledge of a configuration.

use anyhow::{Result, ensure};
use futures::Stream;
use jiff::civil::Date;
use laser_pool_builder::ReadError;
use laser_schema::layout::DataSet;
use laser_store::Location;
use laser_store::previous::{self, PreviousReader, PreviousSource, PreviousText};

use crate::config::Config;

/// The batches of a reader as a stream.
pub fn previous_texts(reader: PreviousReader) -> impl Stream<Item = Result<Vec<PreviousText>, ReadError>> {
    futures::stream::try_unfold(reader, |mut reader| async move {
        let texts = reader.next_batch().await.map_err(|e| Box::new(e) as ReadError)?;
        Ok(texts.map(|texts| (texts, reader)))
    })
}

/// The folders of a data set that `latest` of `[[previous]]` stands for tonight; none if it is not asked for.
pub(crate) async fn latest(config: &Config, output: &Location, data_set: DataSet, date: Date) -> Result<Vec<String>> {
    match config.previous.iter().any(PreviousSource::is_latest) {
        true => Ok(previous::latest(output, data_set, date).await?),
        false => Ok(Vec::new()),
    }
}

/// The previous texts outside of a run, `latest` resolved.
pub(crate) async fn previous_sources(config: &Config, before: Date) -> Result<Vec<PreviousSource>> {
    let output = config.output()?;
    let folders = latest(config, &output, DataSet::Profiles, before).await?;
    let sources = previous::resolve_latest(&config.previous, &output, &folders);
    ensure!(
        !sources.is_empty(),
        "no previous knowledge: [[previous]] gives none, or there is no complete night in {} yet",
        output.url()
    );
    Ok(sources)
}
