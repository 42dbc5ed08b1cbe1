//! Ranges of entities, which are rendered together, and their prompts.

use std::collections::BTreeMap;

use laser_schema::Kind;
use laser_store::join::{JoinError, JoinReader, JoinedEntity};
use laser_store::run_store::Prompt;
use laser_store::{TablesReader, parallel};
use rayon::prelude::*;
use tokio::sync::mpsc::{Receiver, channel};
use tokio::task::JoinHandle;

use super::{PlanError, PlanRequest};
use crate::catalogue::{CatalogueError, Histories, KnownItems};
use crate::prompt::{PromptError, PromptRenderer};

/// A batch of the input without what the run leaves out: at most 1,024 entities.
#[derive(Debug)]
pub(super) struct Range {
    /// Its place among the ranges, from 0: the same in each process that plans the run.
    pub(super) number: u64,
    pub(super) entities: Vec<JoinedEntity>,
    /// Of each entity what the catalogue has of its history; nothing in a run of texts.
    pub(super) items: Vec<KnownItems>,
}

impl Range {
    /// Renders the prompts on all threads.
    ///
    /// # Errors
    /// [`PromptError`] of the first entity that has one, but for a prompt that is too long: that is the entity's error.
    pub(super) fn render(&self, prompts: &PromptRenderer) -> Result<Vec<Prompt>, PromptError> {
        let render = |joined: &JoinedEntity| match prompts.render(&joined.entity) {
            Ok(rendered) => Ok(Ok(rendered.tokens)),
            Err(error @ PromptError::TooLong { .. }) => Ok(Err(error.to_string())),
            Err(error) => Err(error),
        };
        parallel::try_collect(self.entities.par_iter().map(render))
    }
}

/// Where the entities of a run come from.
pub(super) enum Batches {
    /// With all that belongs to them.
    Joined(JoinReader),
    /// As far as prompts are made of them: without earlier texts, and without embeddings that are not of their tables.
    Entities(TablesReader),
}

impl Batches {
    async fn next(&mut self) -> Result<Option<Vec<JoinedEntity>>, JoinError> {
        let alone = |entity| JoinedEntity { entity, texts: Vec::new() };
        match self {
            Self::Joined(reader) => reader.next_batch().await,
            Self::Entities(reader) => {
                Ok(reader.next_batch().await?.map(|entities| entities.into_iter().map(alone).collect()))
            }
        }
    }
}

/// Reads the ranges of a run.
pub(super) struct Ranges<'a> {
    request: &'a PlanRequest<'a>,
    /// Batches of the input, and the task that reads them.
    batches: Receiver<Vec<JoinedEntity>>,
    reading: Option<JoinHandle<Result<(), JoinError>>>,
    /// Of lists.
    histories: Option<Histories<'a>>,
    taken: BTreeMap<Kind, u64>,
    next: u64,
}

impl<'a> Ranges<'a> {
    pub(super) fn new(batches: Batches, request: &'a PlanRequest<'a>) -> Self {
        let (batches, reading) = read_ahead(batches);
        let histories = request.catalogue.map(Histories::new);
        Self { request, batches, reading: Some(reading), histories, taken: BTreeMap::new(), next: 0 }
    }

    /// The next range, or `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Range>, PlanError> {
        let Some(mut entities) = self.batches.recv().await else {
            if let Some(reading) = self.reading.take() {
                reading.await??;
            }
            return Ok(None);
        };
        let canary = self.request.canary;
        entities.retain(|JoinedEntity { entity, .. }| {
            canary.is_none_or(|canary| canary.takes(entity.kind, &entity.id)) && self.within_limit(entity.kind)
        });
        let items = self.known_items(&mut entities)?;
        self.next += 1;
        Ok(Some(Range { number: self.next - 1, entities, items }))
    }

    /// Counts the entity if the limit leaves room for it.
    fn within_limit(&mut self, kind: Kind) -> bool {
        let taken = self.taken.entry(kind).or_default();
        let room = self.request.limit.is_none_or(|limit| *taken < limit);
        *taken += u64::from(room);
        room
    }

    /// Leaves in the histories what the catalogue has, and returns it of each.
    fn known_items(&mut self, entities: &mut [JoinedEntity]) -> Result<Vec<KnownItems>, CatalogueError> {
        match &mut self.histories {
            Some(histories) => histories.keep_known(entities.iter_mut().map(|j| &mut j.entity.history).collect()),
            None => Ok(vec![KnownItems::default(); entities.len()]),
        }
    }
}

/// Reads a batch ahead, so that tables are decoded while prompts are rendered. The task ends with the error of a batch
/// that cannot be read.
fn read_ahead(mut batches: Batches) -> (Receiver<Vec<JoinedEntity>>, JoinHandle<Result<(), JoinError>>) {
    let (sender, receiver) = channel(1);
    let reading = tokio::spawn(async move {
        while let Some(batch) = batches.next().await? {
            if sender.send(batch).await.is_err() {
                break;
            }
        }
        Ok(())
    });
    (receiver, reading)
}
