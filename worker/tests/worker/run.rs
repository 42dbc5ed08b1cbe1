//! A worker against a queue and a store: what is committed, and what a fault costs.

use std::collections::BTreeMap;

use bytes::Bytes;
use jiff::civil::date;
use laser_engine::FakeOptions;
use laser_schema::Kind;
use laser_schema::audit::AuditReport;
use laser_schema::job::Action;
use laser_schema::knowledge::KnowledgeRecord;
use laser_store::data_set::verify;
use serde_json::json;

use crate::planned::{first_night, generator, good, plan_as, plan_night, users_to};
use crate::support::*;
use crate::watch::Mischief;

#[tokio::test]
async fn every_shard_is_committed_once_and_holds_its_texts() {
    let run = first_night(23).await;
    let queue = run.queue();
    run.work(&queue, good()).await;
    assert_eq!(queue.counts().committed, run.plan().shards.len());
    run.assert_whole().await;
    let progress = run.context.progress.snapshot();
    assert_eq!((progress.shards, progress.figures.texts, progress.failed_attempts), (5, 23, 0));
    let manifest = run.publish().await;
    assert_eq!((manifest.rows, manifest.errors), (23, 0));
    assert_eq!(manifest.figures["user-all"].texts, 23);
    assert_eq!(manifest.figures["user-all"].tokens, progress.figures.tokens);
    let folder = run.output.join(&run.plan().partition(Kind::User));
    assert!(verify(&folder).await.unwrap().faults.is_empty());
}

#[tokio::test]
async fn carried_rows_stand_for_the_new_night_with_their_old_text() {
    let first = first_night(12).await;
    first.work(&first.queue(), good()).await;
    first.publish().await;
    let mut old = BTreeMap::new();
    for job in &first.plan().shards {
        for record in first.part(job).await.0 {
            old.insert(record.entity_id.to_string(), record);
        }
    }
    let mut users = users_to(12);
    users[4]["about"] = json!(" who likes to laugh");
    let second = plan_as(first.dir, date(2026, 11, 21), &users, |_| ()).await;
    second.work(&second.queue(), good()).await;
    assert_eq!(second.context.progress.snapshot().carried, 11);
    assert_eq!(second.context.progress.snapshot().figures.texts, 1);
    for job in &second.plan().shards {
        for record in second.part(job).await.0 {
            let old = old[&record.entity_id.to_string()].clone();
            assert_eq!(record.event_timestamp.to_string(), "2026-11-21T00:00:00Z");
            if job.action == Action::Carry {
                let event_timestamp = record.event_timestamp;
                assert_eq!(record, KnowledgeRecord { event_timestamp, ..old });
            } else {
                assert_ne!(record.prompt_digest, old.prompt_digest);
                assert_eq!(record.generated_by, second.plan().run);
            }
        }
    }
    let manifest = second.publish().await;
    assert_eq!((manifest.rows, manifest.carried), (12, 11));
    assert_eq!(manifest.figures["user-all"].texts, 1);
}

#[tokio::test]
async fn an_audit_of_strict_texts_finds_them_identical() {
    let run = plan_night(&users_to(20), 0.5).await;
    run.work(&run.queue(), good()).await;
    let (mut report, mut rows) = (AuditReport::default(), 0);
    for job in run.jobs(Action::Audit) {
        report.add(&run.audit(job).await.report);
        rows += job.rows;
    }
    assert!(report.texts > 2);
    assert_eq!((report.texts, report.identical), (rows, rows));
    assert_eq!(report.tokens, report.plain_tokens);
    assert_eq!((report.identical_share(), report.length_ratio()), (1.0, 1.0));
    assert!(report.speedup() > 0.0);
    let manifest = run.publish().await;
    assert_eq!(manifest.audit["user-all"], report);
}

#[tokio::test]
async fn rows_that_fail_become_error_records() {
    let mut users = users_to(10);
    users[2]["about"] = json!(" word".repeat(200));
    users[7]["about"] = json!(" and then".repeat(12));
    let run = plan_night(&users, 0.0).await;
    let small = FakeOptions { max_positions: 70, ..fake_options() };
    run.work(&run.queue(), generator(small, Mischief::default())).await;
    let mut errors = Vec::new();
    for job in &run.plan().shards {
        errors.extend(run.part(job).await.1);
    }
    let errors: Vec<_> =
        errors.iter().map(|e| (e.entity_id.to_string(), e.stage.as_str(), e.reason.as_str())).collect();
    assert_eq!(errors.len(), 2);
    assert_eq!((errors[0].0.as_str(), errors[0].1), ("2", "plan"));
    assert!(errors[0].2.contains("more than max_tokens = 100"));
    assert_eq!((errors[1].0.as_str(), errors[1].1), ("7", "generate"));
    assert!(errors[1].2.contains("but the model's context is 70"));
    assert_eq!(run.context.progress.snapshot().errors, 2);
    let manifest = run.publish().await;
    assert_eq!((manifest.rows, manifest.errors, manifest.entities), (8, 2, 10));
}

#[tokio::test]
async fn an_empty_text_is_a_failed_row() {
    let run = first_night(3).await;
    let only_ends = FakeOptions { eos_probability: 1.0, ..fake_options() };
    run.work(&run.queue(), generator(only_ends, Mischief::default())).await;
    let (rows, errors) = run.part(&run.plan().shards[0]).await;
    assert!(rows.is_empty());
    assert!(errors.iter().all(|e| e.reason == "the model's text is empty"));
}

#[tokio::test]
async fn a_shard_whose_input_changed_is_given_up_and_the_others_are_not() {
    let run = first_night(15).await;
    let changed = &run.plan().shards[1];
    let input = run.context.run.input(changed);
    input.write(run.context.run.store.folder().join("plan.json").read().await.unwrap()).await.unwrap();
    let queue = run.queue();
    run.work(&queue, good()).await;
    assert_eq!((queue.counts().committed, queue.counts().dead), (2, 1));
    let (shard, reason) = &queue.dead()[0];
    assert_eq!(*shard, 1);
    assert!(reason.contains(&changed.input) && reason.contains("plan again"), "{reason}");
    assert_eq!(run.context.progress.snapshot().failed_attempts, 3);
}

#[tokio::test]
async fn two_workers_share_the_shards_of_one_queue() {
    let run = first_night(60).await;
    let queue = run.queue();
    tokio::join!(run.work(&queue, good()), run.work(&queue, good()));
    assert_eq!(queue.counts().committed, 12);
    run.assert_whole().await;
    assert_eq!(run.context.progress.snapshot().figures.texts, 60, "a text was generated twice");
    run.publish().await;
}

#[tokio::test]
async fn an_output_that_exists_is_kept() {
    let run = first_night(10).await;
    let other = run.output.join(&run.plan().shards[0].output);
    other.create(Bytes::from("another writer's")).await.unwrap();
    let queue = run.queue();
    run.work(&queue, good()).await;
    assert_eq!(queue.counts().committed, 2);
    assert_eq!(other.read().await.unwrap(), "another writer's");
    assert_eq!(run.context.run.committed().await.unwrap(), [0, 1]);
}

#[tokio::test]
async fn a_panicking_engine_costs_an_attempt() {
    // The first steps are the shared prefix's, then come those of the texts.
    for step in [0, 1, 5, 30] {
        let run = first_night(15).await;
        let mischief = Mischief { panic_on_step: Some(step), ..Mischief::default() };
        let queue = run.queue();
        let generator = run.work(&queue, generator(fake_options(), mischief)).await;
        assert_eq!(generator.load(), 0);
        assert_eq!(queue.counts().committed, 3, "step {step}");
        assert!(run.context.progress.snapshot().failed_attempts > 0, "step {step}");
        run.assert_whole().await;
    }
}
