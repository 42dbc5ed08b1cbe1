//! A worker and the guards: how it verifies the texts of a pool that was judged, and what it measures.

use std::sync::Arc;

use jiff::civil::date;
use laser_coordinator::gate::Gate;
use laser_coordinator::local_queue::LocalQueue;
use laser_schema::Kind;
use laser_schema::audit::Proposer;
use laser_schema::guard::{GuardAction, Guards, Verdict};
use laser_schema::job::Action;
use laser_schema::knowledge::{Figures, KnowledgeRecord};

use crate::planned::{RELAXED, Run, adapting, limits, plan_as, relaxed, users_to};
use crate::support::*;

/// A night of relaxed texts that are judged by how probable they are.
async fn gated(min_log_probability: f64) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let mut run = plan_as(dir, date(2026, 11, 20), &users_to(20), |request| {
        request.audit_share = 0.5;
        request.spec.verification = RELAXED;
        request.guards = Some(Guards {
            action: GuardAction::Strict,
            min_texts: 1,
            min_log_probability: Some(min_log_probability),
            ..Guards::default()
        });
    })
    .await;
    let mut texts = Vec::new();
    for job in run.jobs(Action::Generate) {
        let rows = run.rows(job).await;
        texts.extend(rows.iter().map(|row| second_best(&row.prompt)));
    }
    let context = Arc::get_mut(&mut run.context).unwrap();
    context.pools.insert("user-all".to_owned(), pool(&texts));
    run
}

/// A night of relaxed texts whose pool, which has kept its bounds if there are guards, is so small that a worker soon
/// outgrows it. Its audits come last, as one that is delivered again does.
async fn outgrown(guards: Option<Guards>) -> Run {
    // Planned without guards: with them audits come first.
    let mut run = plan_as(tempfile::tempdir().unwrap(), date(2026, 11, 20), &users_to(60), |request| {
        request.audit_share = 0.2;
        request.spec.verification = RELAXED;
    })
    .await;
    let mut audited = Vec::new();
    for job in run.jobs(Action::Audit) {
        audited.extend(run.rows(job).await);
    }
    let texts: Vec<Vec<u32>> = audited.iter().take(4).map(|row| second_best(&row.prompt)).collect();
    let context = Arc::get_mut(&mut run.context).unwrap();
    context.pools.insert("user-all".to_owned(), pool(&texts));
    Arc::get_mut(&mut context.run.plan).unwrap().guards = guards;
    context.run.store.judge(Kind::User, "user-all", Verdict::default()).await.unwrap();
    run
}

/// The end of a prompt and a text of the second most probable tokens: what relaxed verification accepts and strict does
/// not.
fn second_best(prompt: &[u32]) -> Vec<u32> {
    let mut engine = fake();
    let mut naive = Naive::new(&mut engine, 2);
    let mut top = naive.feed_all(prompt);
    let mut text = prompt[prompt.len().saturating_sub(8)..].to_vec();
    while text.len() < 30 && top[1].token != END {
        text.push(top[1].token);
        top = naive.feed(top[1].token);
    }
    text
}

/// The queue without the shards of an action.
fn queue_without(run: &Run, action: Action) -> Arc<LocalQueue> {
    let done: Vec<u32> = run.jobs(action).map(|job| job.shard).collect();
    Arc::new(LocalQueue::new(&run.plan().shards, &done, limits()))
}

/// Audits first, then what the gate admits.
async fn work(run: &Run) -> Verdict {
    let audits = queue_without(run, Action::Generate);
    let generator = run.work(&audits, relaxed()).await;
    let mut gate = Gate::new(run.plan());
    gate.poll(&run.context.run, |_| true).await.unwrap();
    let texts = queue_without(run, Action::Audit);
    run.work(&texts, generator).await;
    assert_eq!(texts.counts().committed, run.plan().shards.len());
    let verdict = run.context.run.store.verdict(Kind::User, "user-all").await;
    verdict.unwrap().unwrap()
}

#[tokio::test]
async fn texts_of_a_pool_that_breaches_are_plain_greedy_ones_and_say_so() {
    let run = gated(-0.001).await;
    let verdict = work(&run).await;
    assert!(verdict.strict);
    assert_eq!(verdict.breaches[0].guard, "min_log_probability");
    for job in run.jobs(Action::Generate) {
        let (records, errors) = run.part(job).await;
        assert!(errors.is_empty());
        for (row, record) in run.rows(job).await.iter().zip(&records) {
            assert_eq!(record.text, naive(&mut fake(), &row.prompt, &options()).text);
            assert_eq!((record.policy.as_str(), record.relaxed_tokens), ("strict", 0));
            assert_eq!(record.spec_digest, run.plan().spec.digest());
        }
    }
}

#[tokio::test]
async fn texts_of_a_pool_that_keeps_its_bounds_are_relaxed() {
    let run = gated(-90.0).await;
    let verdict = work(&run).await;
    assert!(!verdict.strict && verdict.breaches.is_empty() && verdict.texts > 0);
    let mut relaxed = 0;
    for job in run.jobs(Action::Generate) {
        let (records, _) = run.part(job).await;
        assert!(records.iter().all(|r| r.policy == RELAXED.to_string()));
        relaxed += records.iter().map(|r| r.relaxed_tokens).sum::<i64>();
    }
    assert!(relaxed > 0);
}

#[tokio::test]
async fn a_pool_that_guards_judge_is_audited_and_drafted_from_though_the_night_has_outgrown_it() {
    let guards = Guards { action: GuardAction::Strict, max_relaxed_share: Some(0.5), ..Guards::default() };
    for guards in [None, Some(guards)] {
        let run = outgrown(guards).await;
        run.work(&run.queue(), adapting()).await;
        let (mut relaxed, mut records) = (0, Vec::new());
        for job in run.jobs(Action::Audit) {
            relaxed += run.audit(job).await.figures.relaxed;
        }
        for job in run.jobs(Action::Generate) {
            records.extend(run.part(job).await.0);
        }
        assert_eq!(relaxed > 0, guards.is_some());
        let of_pool = |r: &KnowledgeRecord| r.policy == RELAXED.to_string() && !r.pool_digest.is_empty();
        assert_eq!(records.iter().all(of_pool), guards.is_some());
    }
}

#[tokio::test]
async fn a_shard_of_a_pool_that_was_not_judged_is_not_generated() {
    let run = gated(-90.0).await;
    let queue = queue_without(&run, Action::Audit);
    run.work(&queue, relaxed()).await;
    let dead = queue.dead();
    assert_eq!(dead.len(), run.jobs(Action::Generate).count());
    assert!(dead[0].1.contains("have not judged pool \"user-all\""), "{}", dead[0].1);
}

#[tokio::test]
async fn an_audit_holds_both_texts_and_sums_over_those_with_speculation() {
    let run = gated(-90.0).await;
    work(&run).await;
    let mut figures = Figures::default();
    for job in run.jobs(Action::Audit) {
        let audit = run.audit(job).await;
        assert_eq!(audit.pairs.len() as u64, audit.report.texts);
        for (row, text) in run.rows(job).await.iter().zip(&audit.pairs) {
            let expected = naive(&mut fake(), &row.prompt, &options());
            assert_eq!((&text.entity_id, &text.plain), (&row.entity_id, &expected.text));
            assert_eq!(text.proposed.values().sum::<u64>(), text.tokens);
            let relaxed = text.pieces.iter().filter(|piece| piece.origin.relaxed);
            assert!(relaxed.clone().all(|piece| piece.origin.source != Proposer::Target));
            assert_eq!(relaxed.count() > 0, text.relaxed > 0);
        }
        figures.add(&audit.figures);
    }
    assert!(figures.relaxed > 0 && figures.texts > 2);
    assert_eq!(figures.ngrams[0], figures.tokens);
    assert_eq!(figures.ngrams[1], figures.tokens - figures.texts);
    assert!(figures.distinct(2).is_some_and(|share| share > 0.1 && share <= 1.0));
    assert!(figures.mean_log_probability().is_some_and(|mean| mean < 0.0));
}
