//! The metrics of a worker. Without a recorder, as in tests, every call does nothing.

use laser_schema::Kind;
use laser_schema::knowledge::Figures;
use laser_store::location::Created;
use metrics::{counter, describe_counter, describe_gauge, gauge};

/// Names and meanings of the counters.
const COUNTERS: &[(&str, &str)] = &[
    ("laser_texts_total", "Generated texts"),
    ("laser_tokens_total", "Generated tokens"),
    ("laser_prompt_tokens_total", "Prompt tokens of generated texts"),
    ("laser_forwards_total", "Forwards that texts took part in, summed over texts"),
    ("laser_drafted_tokens_total", "Drafted tokens"),
    ("laser_accepted_tokens_total", "Accepted draft tokens"),
    ("laser_relaxed_tokens_total", "Accepted tokens that are not the argmax"),
    ("laser_compared_tokens_total", "Tokens of texts whose entity had an earlier text"),
    ("laser_previous_tokens_total", "Tokens of those earlier texts"),
    ("laser_ngrams_total", "Runs of n tokens of generated texts, n being 1 to 3"),
    ("laser_distinct_ngrams_total", "Those that are distinct within their text"),
    ("laser_fallback_texts_total", "Texts verified strictly since a guard was breached in their pool"),
    ("laser_carried_rows_total", "Rows carried forward"),
    ("laser_error_rows_total", "Rows that became error records"),
    ("laser_commits_total", "Shards whose output exists: won, or written by another attempt"),
    ("laser_failed_attempts_total", "Attempts at a shard that failed"),
    ("laser_redeliveries_total", "Shards leased that had been leased before"),
];

/// Names and meanings of the gauges.
const GAUGES: &[(&str, &str)] = &[
    ("laser_draft_seconds_total", "Seconds of drafting"),
    ("laser_engine_seconds_total", "Seconds of the engine, shared evenly by the texts of a step"),
    ("laser_surprisal_nats_total", "Sum of the negative natural-log probabilities of generated tokens"),
    ("laser_batch_occupancy", "Share of the batch that is in use"),
    ("laser_shards_in_hand", "Shards leased and neither committed nor given back"),
    ("laser_oldest_shard_seconds", "Age of the oldest lease in hand"),
];

/// Describes every metric of a worker.
pub fn describe() {
    for (name, meaning) in COUNTERS {
        describe_counter!(*name, *meaning);
    }
    for (name, meaning) in GAUGES {
        describe_gauge!(*name, *meaning);
    }
    // A rate over a counter that first appears at 1 would miss its first event.
    for name in ["laser_failed_attempts_total", "laser_redeliveries_total"] {
        counter!(name).absolute(0);
    }
    rows(0, 0);
}

/// A generated text; `fallback`: it was verified strictly because of a breach.
pub(crate) fn text(kind: Kind, pool: &str, figures: &Figures, fallback: bool) {
    let add = |name: &'static str, value: u64| {
        counter!(name, "kind" => kind.as_str(), "pool" => pool.to_owned()).increment(value);
    };
    add("laser_texts_total", figures.texts);
    add("laser_tokens_total", figures.tokens);
    add("laser_prompt_tokens_total", figures.prompt_tokens);
    add("laser_forwards_total", figures.forwards);
    add("laser_drafted_tokens_total", figures.drafted);
    add("laser_accepted_tokens_total", figures.accepted);
    add("laser_relaxed_tokens_total", figures.relaxed);
    add("laser_compared_tokens_total", figures.compared);
    add("laser_previous_tokens_total", figures.previous);
    // A pool has this one from its first text on.
    add("laser_fallback_texts_total", u64::from(fallback));
    for (n, name) in ["1", "2", "3"].into_iter().enumerate() {
        let add = |metric: &'static str, value: u64| {
            counter!(metric, "kind" => kind.as_str(), "pool" => pool.to_owned(), "n" => name).increment(value);
        };
        add("laser_ngrams_total", figures.ngrams[n]);
        add("laser_distinct_ngrams_total", figures.distinct_ngrams[n]);
    }
    // Counters are whole numbers, so seconds and logarithms are summed in gauges that only rise.
    let add = |name: &'static str, value: f64| {
        gauge!(name, "kind" => kind.as_str(), "pool" => pool.to_owned()).increment(value);
    };
    add("laser_draft_seconds_total", figures.draft_seconds);
    add("laser_engine_seconds_total", figures.engine_seconds);
    add("laser_surprisal_nats_total", -figures.log_probability);
}

pub(crate) fn rows(carried: u64, errors: u64) {
    counter!("laser_carried_rows_total").increment(carried);
    counter!("laser_error_rows_total").increment(errors);
}

pub(crate) fn commit(created: Created) {
    let outcome = match created {
        Created::Won => "won",
        Created::Exists => "exists",
    };
    counter!("laser_commits_total", "outcome" => outcome).increment(1);
}

pub(crate) fn failed_attempt() {
    counter!("laser_failed_attempts_total").increment(1);
}

pub(crate) fn leased(attempt: u32) {
    counter!("laser_redeliveries_total").increment(u64::from(attempt > 1));
}

pub(crate) fn occupancy(load: usize, batch: usize) {
    gauge!("laser_batch_occupancy").set(load.min(batch) as f64 / batch.max(1) as f64);
}

pub(crate) fn in_hand(shards: usize, oldest_seconds: f64) {
    gauge!("laser_shards_in_hand").set(shards as f64);
    gauge!("laser_oldest_shard_seconds").set(oldest_seconds);
}
