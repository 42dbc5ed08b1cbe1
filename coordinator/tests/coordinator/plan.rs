//! What is planned, what is carried, and what is refused.

use std::collections::{BTreeMap, BTreeSet};

use arrow::datatypes::{DataType, Field, Schema};
use bytes::Bytes;
use jiff::civil::date;
use laser_coordinator::plan::PlanError;
use laser_schema::entity::IdType;
use laser_schema::job::{Action, Plan, Policy};
use laser_schema::manifest::SUCCESS;
use laser_schema::{EntityId, Kind};
use laser_store::Location;
use laser_store::run_store::{PLAN, RunStore};
use laser_store::table::to_batch;
use serde_json::json;

use crate::support::*;

/// All files below a folder.
pub(crate) async fn files(root: &Location) -> BTreeMap<String, Bytes> {
    let mut files = BTreeMap::new();
    for listed in root.list().await.unwrap() {
        let bytes = root.join(&listed.name).read().await.unwrap();
        files.insert(listed.name, bytes);
    }
    files
}

/// A night that is planned, worked on and published, and the next one with it as its past.
async fn second_night() -> (Night, Location) {
    let mut night = Night::new();
    let output = night.output("out");
    let plan = night.plan(&output).await;
    finish(&output, &plan).await;
    night.run = "night-2".into();
    night.date = date(2026, 11, 21);
    night.set_previous(output.url(), None, None);
    (night, output)
}

fn counts(plan: &Plan, kind: Kind) -> (u64, u64, u64) {
    let counts = plan.counts[&kind];
    assert_eq!(counts.carried + counts.generate + counts.failed, counts.entities);
    (counts.entities, counts.carried, counts.generate)
}

#[tokio::test]
async fn planning_is_deterministic_and_a_killed_one_is_repeated() {
    let mut night = Night::new();
    night.audit_share = 0.3;
    let (a, b) = (night.output("a"), night.output("b"));
    let plan = night.plan(&a).await;
    assert_eq!(plan, night.plan(&b).await);
    let whole = files(&a).await;
    assert_eq!(whole, files(&b).await);
    assert_eq!(whole.len(), plan.shards.len() + 1);
    let run = planned(&a, &plan);
    // Killed before the plan was written, with a shard missing and a shard half as old.
    run.store.folder().join(PLAN).remove().await.unwrap();
    run.input(&plan.shards[0]).remove().await.unwrap();
    assert_eq!(run.store.plan().await.unwrap(), None);
    assert_eq!(night.plan(&a).await, plan);
    assert_eq!(files(&a).await, whole);
    assert_eq!(run.store.plan().await.unwrap(), Some(plan));
}

#[tokio::test]
async fn spilling_changes_no_byte() {
    let (mut night, last) = second_night().await;
    night.audit_share = 0.3;
    night.write_table("users.jsonl", Kind::User, (10..41).map(user));
    let old = |id: i64| json!({"id": id, "text": format!("Earlier {id}")});
    let foreign = night.write("old.jsonl", (0..100).map(old));
    night.set_previous(&foreign, Some(Kind::User), None);
    let ours = laser_store::previous::PreviousSource { path: last.url().to_owned(), kind: None, id_type: None };
    night.previous.push(ours);
    let mut outputs = Vec::new();
    for (memory, name) in [(1 << 30, "held"), (0, "spilled"), (2000, "in part")] {
        let output = night.output(name);
        let plan = night.plan_within(memory, Some(&output)).await.unwrap();
        assert_eq!(counts(&plan, Kind::User), (31, 20, 11));
        assert!(plan.shards.iter().any(|job| job.action == Action::Audit));
        outputs.push(files(&output).await);
    }
    assert_eq!(outputs[0], outputs[1]);
    assert_eq!(outputs[0], outputs[2]);
}

#[tokio::test]
async fn a_plan_without_an_output_writes_nothing() {
    let night = Night::new();
    let before = files(&night.output("")).await;
    let dry = night.try_plan(None).await.unwrap();
    let mut after = files(&night.output("")).await;
    after.remove("mine.j2");
    assert_eq!(before, after);
    assert_eq!(dry, night.plan(&night.output("out")).await);
}

#[tokio::test]
async fn a_plan_of_another_version_is_refused() {
    let night = Night::new();
    let output = night.output("out");
    let mut plan = night.plan(&output).await;
    let run = RunStore::new(&output, &plan.run);
    plan.version = 99;
    let bytes = Bytes::from(serde_json::to_vec(&plan).unwrap());
    run.folder().join(PLAN).write(bytes).await.unwrap();
    let error = run.plan().await.unwrap_err().to_string();
    assert!(error.contains("plan.json") && error.contains("plan version 99, this Laser reads 1"));
}

#[tokio::test]
async fn shards_hold_every_entity_once_by_pool_and_within_their_size() {
    let night = Night::new();
    let output = night.output("out");
    let plan = night.plan(&output).await;
    let mut seen = BTreeSet::new();
    for (job, number) in plan.shards.iter().zip(0..) {
        let rows = rows(&output, &plan, job).await;
        assert_eq!((job.shard, job.rows), (number, rows.len() as u64));
        assert!((1..=4).contains(&rows.len()));
        assert_eq!(job.prompt_tokens, rows.iter().map(|r| r.prompt.len() as u64).sum::<u64>());
        for row in rows {
            assert_eq!(row.pool, job.pool);
            assert!(seen.insert((job.kind, row.entity_id)));
        }
    }
    assert_eq!(seen.len(), 35);
    assert_eq!(plan.ids, [(Kind::User, IdType::Int64), (Kind::Item, IdType::String)].into());
    let outputs: BTreeSet<&String> = plan.shards.iter().map(|job| &job.output).collect();
    assert_eq!(outputs.len(), plan.shards.len());
}

#[tokio::test]
async fn an_unchanged_entity_keeps_its_text() {
    let (mut night, output) = second_night().await;
    let changed = (0..31).map(|id| match id {
        5 => json!({"id": 5, "history": [{"title": "Heat"}]}),
        id => user(id),
    });
    night.write_table("users.jsonl", Kind::User, changed);
    let plan = night.plan(&output).await;
    assert_eq!(counts(&plan, Kind::User), (31, 29, 2));
    assert_eq!(counts(&plan, Kind::Item), (5, 5, 0));
    let generated = all_rows(&output, &plan, Action::Generate).await;
    let ids: Vec<_> = generated.iter().map(|r| (&r.entity_id, r.previous.as_deref())).collect();
    assert_eq!(ids, [(&EntityId::Int(30), None), (&EntityId::Int(5), Some("Text of 5"))]);
    assert!(plan.shards.iter().take_while(|job| job.action == Action::Carry).count() >= 9);
}

#[tokio::test]
async fn another_template_specification_or_wish_carries_nothing() {
    let (mut night, _) = second_night().await;
    let original = (night.template.clone(), night.spec.clone(), night.carry_forward);
    type Change = fn(&mut Night);
    let changes: [(Change, u64); 5] = [
        (|_| {}, 30),
        (|n| n.template.push('!'), 0),
        (|n| n.spec.verification = Policy::Relaxed { k: 2, p: 0.1 }, 0),
        (|n| n.spec.max_new_tokens += 1, 0),
        (|n| n.carry_forward = false, 0),
    ];
    for (change, carried) in changes {
        change(&mut night);
        let plan = night.try_plan(None).await.unwrap();
        assert_eq!(counts(&plan, Kind::User), (30, carried, 30 - carried));
        (night.template, night.spec, night.carry_forward) = original.clone();
    }
}

#[tokio::test]
async fn the_newest_complete_night_before_the_date_is_the_past() {
    let (mut night, output) = second_night().await;
    // Night 2 is complete and changes everything; night 3 lacks its _SUCCESS.
    night.template.push('2');
    let second = night.plan(&output).await;
    finish(&output, &second).await;
    (night.run, night.date) = ("night-3".into(), date(2026, 11, 22));
    night.template.push('3');
    let third = night.plan(&output).await;
    work(&output, &third).await;
    complete(publish_users(&output, &third, 1.0).await.unwrap());
    output.join(&third.partition(Kind::User)).join(SUCCESS).remove().await.unwrap();

    let carried = async |night: &Night| {
        let plan = night.try_plan(None).await.unwrap();
        counts(&plan, Kind::User).1
    };
    night.template = format!("{TEMPLATE}2");
    assert_eq!(carried(&night).await, 30, "of three nights the second is the newest complete one");
    night.date = date(2026, 11, 21);
    assert_eq!(carried(&night).await, 0, "a night never takes itself for its past");
    night.template = TEMPLATE.into();
    assert_eq!(carried(&night).await, 30, "before the second night is the first");
    night.date = date(2026, 11, 20);
    night.assert_refused(&["no complete earlier output"]).await;
}

#[tokio::test]
async fn texts_of_others_are_drafted_from_but_not_carried() {
    let mut night = Night::new();
    let texts = |id: i64| json!({"id": id, "text": format!("Earlier {id}")});
    let jsonl = night.write("old.jsonl", (0..20).map(texts));
    let columns = [("entity_id", DataType::Int64), ("text", DataType::Utf8), ("more", DataType::Float64)];
    let fields = columns.map(|(name, data_type)| Field::new(name, data_type, name == "more"));
    let schema = std::sync::Arc::new(Schema::new(fields.to_vec()));
    let rows: Vec<_> =
        (0..20).map(|id| json!({"entity_id": id, "text": format!("Earlier {id}"), "more": 0.5})).collect();
    assert_eq!(to_batch(&schema, &rows).unwrap().num_rows(), 20);
    let bytes = laser_store::table::encode("old", schema, &rows, &[]).unwrap();
    let parquet = night.dir.path().join("old.parquet");
    std::fs::write(&parquet, bytes).unwrap();
    for (path, name) in [(jsonl.as_str(), "a"), (parquet.to_str().unwrap(), "b")] {
        night.set_previous(path, Some(Kind::User), None);
        let output = night.output(name);
        let plan = night.plan(&output).await;
        assert_eq!(counts(&plan, Kind::User), (30, 0, 30));
        for row in all_rows(&output, &plan, Action::Generate).await {
            let earlier = match &row.entity_id {
                EntityId::Int(id) if *id < 20 => Some(format!("Earlier {id}")),
                _ => None,
            };
            assert_eq!(row.previous, earlier);
        }
    }
}

#[tokio::test]
async fn the_past_of_another_data_set_is_refused() {
    let mut night = Night::new();
    let old = |ids: std::ops::Range<i64>| ids.map(|id| json!({"id": id, "text": "x"}));
    let others = night.write("others.jsonl", old(100..120));
    night.set_previous(&others, Some(Kind::User), None);
    night.assert_refused(&["none of its 20 texts belongs to a user of the input"]).await;
    // The same ids, of another type: told by name, and mended by configuration.
    let same = night.write("same.jsonl", (0..20).map(|id| json!({"id": id.to_string(), "text": "x"})));
    night.set_previous(&same, Some(Kind::User), None);
    night.assert_refused(&["ids such as the string ", "has the int64 0"]).await;
    night.set_previous(&format!("file://{same}"), Some(Kind::User), Some(IdType::Int64));
    night.try_plan(None).await.unwrap();
    // A limit that leaves out all who have a past makes it no other data set's.
    let last = night.write("last.jsonl", old(29..30));
    night.set_previous(&last, Some(Kind::User), None);
    night.limit = Some(3);
    night.try_plan(None).await.unwrap();
}

#[tokio::test]
async fn the_past_of_another_kind_is_refused() {
    let (mut night, output) = second_night().await;
    let users = output.join("profiles/kind=user/dt=2026-11-20/run=night-1");
    night.set_previous(users.url(), Some(Kind::Item), None);
    night.assert_refused(&["holds knowledge of users, but [[previous]] says kind = \"item\""]).await;
    let part = users.join(&users.list().await.unwrap().last().unwrap().name);
    assert!(part.url().ends_with(".parquet"));
    night.set_previous(part.url(), Some(Kind::Item), None);
    night.assert_refused(&["holds knowledge of users"]).await;
    let foreign = night.write("foreign.jsonl", [json!({"id": 1, "text": "x"})]);
    night.set_previous(&foreign, None, None);
    night.assert_refused(&["whose texts are these?"]).await;
    night.set_previous("nowhere.jsonl", Some(Kind::User), None);
    night.assert_refused(&["nowhere.jsonl: no such file"]).await;
}

#[tokio::test]
async fn an_id_is_there_once_in_all_tables() {
    let mut night = Night::new();
    night.write_table("more.jsonl", Kind::User, [user(50), user(3)]);
    let twice = "more.jsonl, row 2: user id 3 appears twice; ids must be unique over all tables";
    night.assert_refused(&[twice]).await;
    night.write_table("more.jsonl", Kind::User, [user(50), user(51), user(50)]);
    night.assert_refused(&["more.jsonl, row 3: user id 50 appears twice"]).await;
    // An item may have the id of a user.
    night.write_table("more.jsonl", Kind::User, [json!({"id": 50})]);
    night.write_table("items.jsonl", Kind::Item, [json!({"id": 3})]);
    assert_eq!(night.try_plan(None).await.unwrap().counts[&Kind::Item].entities, 1);
}

#[tokio::test]
async fn ids_of_one_kind_are_of_one_type_in_all_tables() {
    let mut night = Night::new();
    night.write_table("more.jsonl", Kind::User, [json!({"id": "u50"})]);
    night.assert_refused(&["more.jsonl, row 1: user id u50 is string, but the users before have int64 ids"]).await;
    for table in &mut night.tables {
        table.columns.id_type = Some(IdType::String);
    }
    assert_eq!(night.try_plan(None).await.unwrap().ids[&Kind::User], IdType::String);
}

#[tokio::test]
async fn an_empty_input_is_refused() {
    let mut night = Night::new();
    night.write_table("users.jsonl", Kind::User, []);
    night.write_table("items.jsonl", Kind::Item, []);
    let error = night.try_plan(None).await.unwrap_err();
    assert!(matches!(error, PlanError::Empty { .. }));
    assert!(error.to_string().contains("users.jsonl, "), "{error}");
    night.limit = Some(0);
    night.write_table("users.jsonl", Kind::User, [user(1)]);
    assert!(matches!(night.try_plan(None).await, Err(PlanError::Empty { .. })));
}

#[tokio::test]
async fn the_limit_counts_each_kind() {
    let mut night = Night::new();
    night.limit = Some(7);
    let plan = night.try_plan(None).await.unwrap();
    assert_eq!(counts(&plan, Kind::User), (7, 0, 7));
    assert_eq!(counts(&plan, Kind::Item), (5, 0, 5));
}

#[tokio::test]
async fn the_audit_is_a_seeded_share() {
    let mut night = Night::new();
    night.shard_rows = 1000;
    night.write_table("users.jsonl", Kind::User, (0..2000).map(|id| json!({"id": id})));
    let audited = async |night: &Night, name: &str| {
        let output = night.output(name);
        let plan = night.plan(&output).await;
        let rows = all_rows(&output, &plan, Action::Audit).await;
        rows.into_iter().map(|row| row.entity_id.to_string()).collect::<BTreeSet<_>>()
    };
    night.audit_share = 0.1;
    let tenth = audited(&night, "a").await;
    // Four standard deviations of a binomial of 2,005 draws.
    assert!((147..=254).contains(&tenth.len()), "{}", tenth.len());
    assert_eq!(tenth, audited(&night, "b").await);
    night.audit_share = 0.2;
    assert!(tenth.is_subset(&audited(&night, "c").await));
    night.seed += 1;
    assert!(!tenth.is_subset(&audited(&night, "d").await));
    night.audit_share = 0.0;
    assert!(audited(&night, "e").await.is_empty());
    night.audit_share = 1.0;
    assert_eq!(audited(&night, "f").await.len(), 2005);
}

#[tokio::test]
async fn a_prompt_over_its_budget_is_a_failed_row() {
    let mut night = Night::new();
    night.audit_share = 1.0;
    night.template = "{{ attributes.about | default('short') }}".into();
    let long = json!({"id": 30, "about": "word ".repeat(100)});
    night.write_table("users.jsonl", Kind::User, (0..30).map(user).chain([long]));
    let output = night.output("out");
    let plan = night.plan(&output).await;
    assert_eq!(plan.counts[&Kind::User].failed, 1);
    let rows = all_rows(&output, &plan, Action::Generate).await;
    let failed: Vec<_> = rows.iter().filter(|row| row.error.is_some()).collect();
    assert_eq!(failed.len(), 1);
    assert_eq!((&failed[0].entity_id, failed[0].prompt.len()), (&EntityId::Int(30), 0));
    assert!(failed[0].error.as_ref().unwrap().contains("more than max_tokens = 60"));
    let audited = all_rows(&output, &plan, Action::Audit).await;
    assert_eq!(audited.len(), rows.len() - 1);
}
