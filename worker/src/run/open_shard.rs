//! A shard whose rows are being generated.

use std::collections::BTreeMap;

use laser_schema::job::{Lease, Policy, ShardRow, Spec};
use laser_schema::knowledge::{ErrorRecord, Figures, KnowledgeRecord};
use tracing::{Span, info_span};

use super::context::RunContext;
use crate::generate::{Generated, StopReason};
use crate::part::{self, Rows};

/// The rows of a shard, and what has become of them.
pub(super) struct OpenShard {
    pub(super) lease: Lease,
    pub(super) rows: Vec<ShardRow>,
    pub(super) policy: Policy,
    /// Whether a guard was breached, so that texts are verified strictly.
    is_fallback: bool,
    /// Whether its texts draft from those of the night in place of a pool.
    pub(super) is_by_tonight: bool,
    /// Tokens of each row's earlier text.
    pub(super) previous: Vec<u64>,
    /// Texts without a result.
    pub(super) left: usize,
    /// Texts of a row.
    samples: u32,
    results: Vec<Option<Result<KnowledgeRecord, ErrorRecord>>>,
    /// Of each row the texts beside the first.
    others: Vec<Vec<String>>,
    figures: BTreeMap<String, Figures>,
    /// Open as long as the shard is.
    _generating: Span,
}

/// A row and which of its texts, both counted from 0.
pub(super) type Place = (usize, u32);

/// Why a row has no text.
pub(super) struct RowError {
    stage: &'static str,
    reason: String,
}

impl RowError {
    pub(super) fn new(stage: &'static str, reason: impl Into<String>) -> Self {
        Self { stage, reason: reason.into() }
    }
}

impl OpenShard {
    /// A shard whose texts are verified by this rule, which is the specification's unless a guard was breached.
    pub(super) fn new(lease: Lease, rows: Vec<ShardRow>, policy: Policy, spec: &Spec) -> Self {
        let samples = spec.samples();
        let others = samples as usize - 1;
        Self {
            _generating: info_span!(target: "laser::trace", "generate", rows = rows.len()),
            lease,
            left: rows.len() * samples as usize,
            samples,
            results: vec![None; rows.len()],
            others: vec![vec![String::new(); others]; rows.len()],
            previous: vec![0; rows.len()],
            figures: BTreeMap::new(),
            policy,
            is_fallback: policy != spec.verification,
            is_by_tonight: false,
            rows,
        }
    }

    /// The same, whose texts draft from those of the night in place of a pool and are verified strictly.
    pub(super) fn by_tonight(self) -> Self {
        Self { policy: Policy::Strict, is_by_tonight: true, ..self }
    }

    /// All its texts.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> + use<> {
        let samples = self.samples;
        (0..self.rows.len()).flat_map(move |index| (0..samples).map(move |sample| (index, sample)))
    }

    /// The number of a text among all of the worker's.
    pub(super) fn id(&self, (index, sample): Place) -> u64 {
        (u64::from(self.lease.job.shard) << 32) | (index as u64 * u64::from(self.samples) + u64::from(sample))
    }

    /// The text whose number among those of the shard this is.
    pub(super) fn place(&self, number: u32) -> Place {
        ((number / self.samples) as usize, number % self.samples)
    }

    /// Takes over a row's text, or another sample of it.
    pub(super) fn add(&mut self, (index, sample): Place, text: &Generated, context: &RunContext) {
        let row = &self.rows[index];
        let pool = context.pools.get(&row.pool).filter(|_| !self.is_by_tonight);
        let record = part::record(&context.run.plan, row, self.policy, (pool, context.trie()), text);
        let previous = with_end(self.previous[index], text.stop);
        let figures = Figures { forced: text.forced, ..Figures::of(&record, &text.tokens, previous) };
        context.progress.text(self.lease.job.kind, &record.pool, &figures, self.is_fallback);
        self.figures.entry(record.pool.clone()).or_default().add(&figures);
        self.left -= 1;
        match sample.checked_sub(1) {
            None if self.results[index].is_none() => self.results[index] = Some(Ok(record)),
            None => {}
            Some(other) => self.others[index][other as usize] = record.text,
        }
    }

    /// The row has no text, or lacks one: then it has none either.
    pub(super) fn fail(&mut self, (index, sample): Place, RowError { stage, reason }: RowError) {
        let ShardRow { entity_id, value, .. } = &self.rows[index];
        let reason = if sample == 0 { reason } else { format!("sample {sample}: {reason}") };
        let error = ErrorRecord { entity_id: entity_id.clone(), stage: stage.to_owned(), reason, value: *value };
        self.results[index] = Some(Err(error));
        self.left -= 1;
    }

    /// The lease and the rows of its part.
    pub(super) fn close(self) -> (Lease, Rows) {
        let (mut rows, mut errors) = (Vec::new(), Vec::new());
        for (result, samples) in self.results.into_iter().flatten().zip(self.others) {
            match result {
                Ok(record) => rows.push(KnowledgeRecord { samples, ..record }),
                Err(error) => errors.push(error),
            }
        }
        (self.lease, Rows { rows, errors, carried: 0, figures: self.figures })
    }
}

/// Tokens of a row's earlier text, 0 if it has none. Its end-of-text token is no part of it, and counts where
/// tonight's does.
pub(super) fn with_end(previous: u64, stop: StopReason) -> u64 {
    match previous {
        0 => 0,
        tokens => tokens + u64::from(stop == StopReason::End),
    }
}
