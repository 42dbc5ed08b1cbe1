//! What is published, and what keeps a night from being so.

use std::collections::BTreeSet;

use bytes::Bytes;
use laser_coordinator::finalise::{FinaliseError, Published, Terms, publish};
use laser_schema::job::{Action, Plan, ShardJob};
use laser_schema::manifest::{ERRORS, MANIFEST, SUCCESS};
use laser_schema::{Digest, Kind};
use laser_store::Location;
use laser_store::data_set::verify;
use laser_store::part::decode_part;
use laser_store::run_store::{Committed, PLAN};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use serde_json::json;

use crate::support::*;

/// A night whose shards are all committed; user 30's prompt is too long.
async fn finished() -> (Night, Location, Plan) {
    let mut night = Night::new();
    night.audit_share = 0.5;
    night.template = "{{ attributes.about | default('short') }} {{ id }}".into();
    let long = json!({"id": 30, "about": "word ".repeat(100)});
    night.write_table("users.jsonl", Kind::User, (0..30).map(user).chain([long]));
    let output = night.output("out");
    let plan = night.plan(&output).await;
    work(&output, &plan).await;
    (night, output, plan)
}

#[tokio::test]
async fn looking_again_finds_what_a_whole_listing_finds() {
    let mut night = Night::new();
    night.audit_share = 0.5;
    let output = night.output("out");
    let plan = night.plan(&output).await;
    let shards = plan.shards.len();
    assert!(shards > 9 && !shards.is_multiple_of(7));
    let mut looked = Committed::new(&planned(&output, &plan));
    for step in 0..shards {
        let job = &plan.shards[step * 7 % shards];
        output.join(&job.output).write(Bytes::new()).await.unwrap();
        looked.poll().await.unwrap();
        let whole = planned(&output, &plan).committed().await.unwrap();
        assert_eq!((whole.len(), looked.shards()), (step + 1, whole));
    }
}

fn first_part(plan: &Plan) -> &ShardJob {
    let mut jobs = plan.shards.iter();
    jobs.find(|job| job.action == Action::Generate && job.kind == Kind::User).unwrap()
}

#[tokio::test]
async fn a_published_night_is_whole_and_counts_add_up() {
    let (_night, output, plan) = finished().await;
    assert_eq!(planned(&output, &plan).committed().await.unwrap().len(), plan.shards.len());
    for (kind, entities, errors) in [(Kind::User, 31, 1), (Kind::Item, 5, 0)] {
        let manifest = complete(publish(&planned(&output, &plan), kind, &Terms::coverage(0.9)).await.unwrap());
        let counts = (manifest.entities, manifest.rows, manifest.errors, manifest.carried);
        assert_eq!(counts, (entities, entities - errors, errors, 0));
        let texts: u64 = manifest.figures.values().map(|f| f.texts).sum();
        assert_eq!(texts, manifest.rows);
        let audits = plan.shards.iter().filter(|s| s.action == Action::Audit && s.kind == kind);
        let audited: u64 = audits.map(|s| s.rows).sum();
        assert_eq!(manifest.audit.values().map(|a| a.texts).sum::<u64>(), audited);
        let folder = output.join(&plan.partition(kind));
        let report = verify(&folder).await.unwrap();
        assert!(report.faults.is_empty(), "{report:?}");
        assert_eq!((report.rows, report.parts), (manifest.rows, manifest.parts.len()));
        let lines = folder.join(ERRORS).read().await.unwrap();
        assert_eq!(lines.iter().filter(|b| **b == b'\n').count() as u64, errors);
        assert!(folder.join(SUCCESS).exists().await.unwrap());
    }
}

#[tokio::test]
async fn publishing_again_changes_nothing() {
    let (_night, output, plan) = finished().await;
    let first = complete(publish_users(&output, &plan, 0.0).await.unwrap());
    assert_eq!(complete(publish_users(&output, &plan, 0.0).await.unwrap()), first);
}

#[tokio::test]
async fn below_coverage_there_is_no_success() {
    let (_night, output, plan) = finished().await;
    let folder = output.join(&plan.partition(Kind::User));
    let published = publish_users(&output, &plan, 1.0).await.unwrap();
    assert!(matches!(published, Published::BelowCoverage(_)));
    assert!(!folder.join(SUCCESS).exists().await.unwrap());
    assert!(folder.join(MANIFEST).exists().await.unwrap());
    complete(publish_users(&output, &plan, 0.9).await.unwrap());
}

#[tokio::test]
async fn a_night_with_a_missing_part_is_not_published() {
    let (_night, output, plan) = finished().await;
    output.join(&first_part(&plan).output).remove().await.unwrap();
    let published = publish_users(&output, &plan, 0.0).await.unwrap();
    assert_eq!(published, Published::Incomplete { missing: 1 });
    let folder = output.join(&plan.partition(Kind::User));
    assert!(folder.list().await.unwrap().iter().all(|listed| !listed.name.starts_with('_')));
    let there: BTreeSet<u32> = planned(&output, &plan).committed().await.unwrap().into_iter().collect();
    assert_eq!(there.len(), plan.shards.len() - 1);
    assert!(!there.contains(&first_part(&plan).shard));
}

#[tokio::test]
async fn a_run_that_is_begun_anew_keeps_its_own_parts_and_refuses_those_of_another_plan() {
    let (mut night, output, plan) = finished().await;
    let store = planned(&output, &plan).store;
    let file = store.folder().join(PLAN);
    file.remove().await.unwrap();
    assert_eq!(night.plan(&output).await, plan);
    file.remove().await.unwrap();
    night.template = "another {{ id }}".into();
    let error = night.try_plan(Some(&output)).await.unwrap_err().to_string();
    assert!(error.contains(&plan.partition(Kind::User)) && error.contains("an earlier plan of this run"), "{error}");
    assert_eq!(store.plan().await.unwrap(), None);
}

/// A worker that was at a shard when the run was begun anew.
#[tokio::test]
async fn a_part_of_another_plan_keeps_a_night_from_being_published() {
    let (_night, output, mut plan) = finished().await;
    let job = first_part(&plan).clone();
    plan.shards[job.shard as usize].input_digest = Digest::of(b"another");
    let error = publish_users(&output, &plan, 0.0).await.unwrap_err().to_string();
    assert!(error.contains(&job.output) && error.contains("another plan of this run"), "{error}");
}

/// Rows, page headers, statistics, indexes, filters, footer and digest alike.
#[tokio::test]
async fn a_flipped_byte_of_a_part_keeps_a_night_from_being_published() {
    let (_night, output, plan) = finished().await;
    let job = first_part(&plan);
    let success = output.join(&plan.partition(Kind::User)).join(SUCCESS);
    let part = output.join(&job.output);
    let whole = part.read().await.unwrap();
    let mut runner = TestRunner::deterministic();
    let anywhere = (0..whole.len(), 0..8);
    let random = (0..200).map(|_| anywhere.new_tree(&mut runner).unwrap().current());
    for (at, bit) in (0..whole.len()).step_by(61).map(|at| (at, 4)).chain(random) {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 1u8 << bit;
        part.write(Bytes::from(bytes)).await.unwrap();
        let error = publish_users(&output, &plan, 0.0).await.unwrap_err();
        assert!(error.to_string().contains(&job.output), "{at}: {error}");
        assert!(!success.exists().await.unwrap());
    }
    part.write(whole.slice(..whole.len() - 9)).await.unwrap();
    publish_users(&output, &plan, 0.0).await.unwrap_err();
    assert!(!success.exists().await.unwrap());
    part.write(whole).await.unwrap();
    publish_users(&output, &plan, 0.0).await.unwrap();
    assert!(success.exists().await.unwrap());
}

#[tokio::test]
async fn a_night_whose_audits_failed_is_published_without_their_figures() {
    let (_night, output, plan) = finished().await;
    for audit in plan.shards.iter().filter(|s| s.action == Action::Audit) {
        output.join(&audit.output).remove().await.unwrap();
    }
    assert!(complete(publish_users(&output, &plan, 0.0).await.unwrap()).audit.is_empty());
}

#[tokio::test]
async fn a_part_of_other_rows_is_refused() {
    let (_night, output, plan) = finished().await;
    let users = plan.shards.iter().filter(|j| j.action == Action::Generate && j.kind == Kind::User);
    let jobs: Vec<&ShardJob> = users.collect();
    let (a, b) = (jobs[0], jobs[1]);
    let bytes = output.join(&a.output).read().await.unwrap();
    let (rows, _) = decode_part(&a.output, bytes.clone()).unwrap();
    let target = output.join(&b.output);
    let fewer = encode(&plan, b, &rows[1..], Vec::new(), 0);
    target.write(fewer).await.unwrap();
    let error = publish_users(&output, &plan, 0.0).await.unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, FinaliseError::Rows { found: 3, expected: 4, .. }), "{message}");
    assert!(message.contains(&b.output), "{message}");
    target.write(encode(&plan, b, &rows, Vec::new(), 0)).await.unwrap();
    let error = publish_users(&output, &plan, 0.0).await.unwrap_err();
    assert!(matches!(error, FinaliseError::Duplicate { .. }), "{error}");
    let folder = output.join(&plan.partition(Kind::User));
    assert!(!folder.join(SUCCESS).exists().await.unwrap());
}
