//! Nights without a pool, whose texts draft from each other.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::civil::date;
use laser_coordinator::plan::PlanRequest;
use laser_schema::job::Action;
use laser_schema::knowledge::{Figures, KnowledgeRecord};

use crate::planned::{RELAXED, Run, adapting, plan_as, relaxed, users_to};
use crate::support::*;

const USERS: i64 = 160;

/// A night of texts that are verified by [`RELAXED`], with a pool of so many texts by nobody, or with none.
async fn night(audit_share: f64, pooled: u32) -> Run {
    let wish = |request: &mut PlanRequest<'_>| {
        request.spec.verification = RELAXED;
        request.audit_share = audit_share;
    };
    let mut run = plan_as(tempfile::tempdir().unwrap(), date(2026, 11, 20), &users_to(USERS), wish).await;
    let texts: Vec<Vec<u32>> = (0..pooled).map(|seed| tokens(1 + seed, 50)).collect();
    let pools = (pooled > 0).then(|| ("user-all".to_owned(), pool(&texts)));
    Arc::get_mut(&mut run.context).unwrap().pools = pools.into_iter().collect();
    run
}

/// The records of all texts, in the order of their shards. A few texts are empty, and none.
async fn records(run: &Run) -> Vec<KnowledgeRecord> {
    let mut records = Vec::new();
    for job in run.jobs(Action::Generate) {
        records.extend(run.part(job).await.0);
    }
    assert!(records.len() as i64 > USERS * 9 / 10, "{}", records.len());
    records
}

/// Every text is what plain greedy decoding gives.
async fn assert_plain(run: &Run, records: &[KnowledgeRecord]) {
    let records: HashMap<_, _> = records.iter().map(|record| (&record.entity_id, record)).collect();
    for job in run.jobs(Action::Generate) {
        for row in run.rows(job).await {
            let expected = naive(&mut fake(), &row.prompt, &options()).text;
            let found = records.get(&row.entity_id).map_or("", |record| &record.text);
            assert_eq!(found.trim(), expected.trim(), "{}", row.entity_id);
        }
    }
}

/// Accepted drafts per forward.
fn accepted(records: &[KnowledgeRecord]) -> f64 {
    let sum = |of: fn(&KnowledgeRecord) -> i64| records.iter().map(of).sum::<i64>() as f64;
    sum(|record| record.accepted_tokens) / sum(|record| record.forwards)
}

#[tokio::test]
async fn texts_without_a_pool_draft_from_those_before_them_and_are_plain_ones() {
    let run = night(0.0, 0).await;
    run.work(&run.queue(), relaxed()).await;
    let records = records(&run).await;
    assert_plain(&run, &records).await;
    assert!(records.iter().all(|r| r.policy == "strict" && r.relaxed_tokens == 0 && r.pool_digest.is_empty()));
    let (early, late) = (accepted(&records[..15]), accepted(&records[records.len() / 2..]));
    assert!(early < 0.5 && late > 1.5, "{early} and {late} accepted drafts per forward");
    assert_eq!(run.context.progress.snapshot().figures.relaxed, 0);
}

#[tokio::test]
async fn a_pool_of_a_few_texts_is_replaced_by_those_of_the_night() {
    let run = night(0.0, 4).await;
    run.work(&run.queue(), adapting()).await;
    let records = records(&run).await;
    let is_strict = |record: &KnowledgeRecord| record.policy == "strict";
    let first = records.iter().position(is_strict).unwrap();
    // Sixteen texts are four times as many as four.
    assert!((16..32).contains(&first), "{first}");
    assert!(records[..first].iter().all(|record| !record.pool_digest.is_empty()));
    assert!(records[first..].iter().all(|record| is_strict(record) && record.pool_digest.is_empty()));
    assert!(accepted(&records[records.len() / 2..]) > 1.5);
}

#[tokio::test]
async fn texts_with_a_pool_are_verified_as_configured() {
    let run = night(0.0, 50).await;
    run.work(&run.queue(), adapting()).await;
    let records = records(&run).await;
    assert!(records.iter().all(|record| record.policy == RELAXED.to_string() && !record.pool_digest.is_empty()));
    assert!(accepted(&records) < 0.5, "nobody wrote the texts of its pool, and 160 are not four times as many");
}

#[tokio::test]
async fn an_audit_drafts_from_the_texts_of_others() {
    let run = night(0.2, 0).await;
    run.work(&run.queue(), relaxed()).await;
    let mut figures = Figures::default();
    for job in run.jobs(Action::Audit) {
        let audit = run.audit(job).await;
        assert_eq!(audit.report.texts, audit.report.identical);
        figures.add(&audit.figures);
    }
    let late = accepted(&records(&run).await[80..]);
    // If it knew the texts that it makes again, it would be twice as many.
    let ratio = figures.accepted as f64 / figures.forwards as f64 / late;
    assert!((0.8..1.3).contains(&ratio), "{ratio} of what the night accepts");
}
