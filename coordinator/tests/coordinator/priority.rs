//! Shards in the order of their entities' value.

use std::collections::BTreeMap;

use jiff::civil::date;
use laser_coordinator::finalise::{Published, Terms, publish, seal};
use laser_schema::job::{Action, Plan, Priority};
use laser_schema::{EntityId, Kind};
use laser_store::Location;
use serde_json::json;

use crate::support::*;

/// The value of a user in the tables of these tests: the larger, the later, except that sevens are worth nothing.
fn value(id: i64) -> f64 {
    if id % 7 == 0 { 0.0 } else { id as f64 }
}

fn by(expression: &str, bands: usize) -> Option<Priority> {
    Some(Priority { expression: expression.to_owned(), bands })
}

/// 200 users whose value is known, and 5 items that are worth as much as they have interactions: nothing.
fn valued(bands: usize) -> Night {
    let mut night = Night::new();
    night.write_table("users.jsonl", Kind::User, (0..200).map(|id| json!({"id": id, "revenue": value(id)})));
    night.priority = by("revenue | default(interactions)", bands);
    night
}

/// The values of generated users by shard, in the order of the shards.
async fn values(output: &Location, plan: &Plan) -> Vec<Vec<f64>> {
    let mut values = Vec::new();
    for job in plan.shards.iter().filter(|job| job.action == Action::Generate && job.kind == Kind::User) {
        let of_rows: Vec<f64> = rows(output, plan, job).await.iter().map(|row| row.value.unwrap()).collect();
        assert_eq!(job.value, Some(of_rows.iter().sum()));
        values.push(of_rows);
    }
    values
}

#[tokio::test]
async fn rows_fall_in_value_within_a_pool_and_shards_by_band() {
    let night = valued(1024);
    let output = night.output("out");
    let plan = night.plan(&output).await;
    let mut pools: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let shards = plan.shards.iter().filter(|job| job.kind == Kind::User);
    for (job, values) in shards.clone().zip(values(&output, &plan).await) {
        pools.entry(&job.pool).or_default().extend(values);
    }
    assert_eq!(pools.len(), 2);
    for values in pools.values() {
        assert!(values.is_sorted_by(|a, b| a >= b) && values.len() == 100, "{values:?}");
    }
    // With a band per row the first rows of the shards fall, too, whatever their pool.
    let firsts: Vec<f64> = values(&output, &plan).await.iter().map(|values| values[0]).collect();
    assert!(firsts.is_sorted_by(|a, b| a >= b), "{firsts:?}");
    assert_eq!(plan.counts[&Kind::User].value, Some((0..200).map(value).sum()));
    assert_eq!(plan.counts[&Kind::Item].value, Some(0.0));
}

#[tokio::test]
async fn few_bands_keep_the_shards_of_a_pool_together() {
    let changes = |plan: &Plan| {
        let pools: Vec<_> = plan.shards.iter().map(|job| job.pool.clone()).collect();
        pools.windows(2).filter(|pair| pair[0] != pair[1]).count()
    };
    let mut counts = Vec::new();
    for bands in [1, 4, 1024] {
        let night = valued(bands);
        counts.push(changes(&night.plan(&night.output("out")).await));
    }
    // One band: items, even, odd. Four: twice in each, but for the items, who are in one.
    assert!(counts[0] == 2 && counts[1] <= 9 && counts[2] > 20, "{counts:?}");
}

#[tokio::test]
async fn neither_memory_nor_a_second_planner_changes_a_byte() {
    let mut night = valued(8);
    night.audit_share = 0.3;
    let mut plans = Vec::new();
    for (memory, name) in [(1 << 30, "held"), (0, "spilled"), (1 << 30, "again")] {
        plans.push(night.plan_within(memory, Some(&night.output(name))).await.unwrap());
    }
    assert!(plans[0].shards.iter().any(|job| job.action == Action::Audit));
    assert!(plans[1] == plans[0] && plans[2] == plans[0]);
}

#[tokio::test]
async fn a_deadline_loses_the_least_valuable_and_the_manifest_says_how_much() {
    let mut night = valued(1024);
    let output = night.output("out");
    let mut plan = night.plan(&output).await;
    let whole = plan.clone();
    let generated = plan.shards.iter().filter(|job| job.action == Action::Generate).count();
    plan.shards.truncate(generated / 2);
    work(&output, &plan).await;
    let run = planned(&output, &whole);
    seal(&run, "too late").await.unwrap();
    let terms = Terms::coverage(0.0);
    let Published::Complete(manifest) = publish(&run, Kind::User, &terms).await.unwrap() else { panic!("complete") };
    let lost = values(&output, &whole).await.concat().split_off(usize::try_from(manifest.rows).unwrap());
    let value = manifest.value.clone().unwrap();
    assert!((value.lost - lost.iter().sum::<f64>()).abs() < 1e-9 && manifest.errors == lost.len() as u64);
    assert!((0.8..0.85).contains(&value.coverage()), "{}", value.coverage());
    assert!((whole.value_after(0.5)[&Kind::User] - value.coverage()).abs() < 0.02);
    // What was carried has its value from the start.
    night.run = "night-2".into();
    night.date = date(2026, 11, 21);
    night.set_previous(output.url(), None, None);
    let next = night.plan(&night.output("next")).await;
    assert!((next.value_after(0.0)[&Kind::User] - value.coverage()).abs() < 1e-9);
    assert!((next.value_after(1.0)[&Kind::User] - 1.0).abs() < 1e-9);
}

#[tokio::test]
async fn many_equal_values_stay_in_the_order_of_the_tables() {
    let mut night = Night::new();
    night.write_table("users.jsonl", Kind::User, (0..300).map(|id| json!({"id": 2 * id, "revenue": id / 150})));
    night.priority = by("revenue | default(0)", 2);
    let output = night.output("out");
    let plan = night.plan(&output).await;
    let rows = all_rows(&output, &plan, Action::Generate).await;
    let ids = rows.iter().filter(|row| row.pool == "user-even").map(|row| row.entity_id.clone());
    let expected = (150..300).chain(0..150).map(|id| EntityId::Int(2 * id));
    assert!(ids.eq(expected));
}

#[tokio::test]
async fn what_is_no_value_is_refused_with_its_row() {
    let mut night = valued(4);
    for (expression, words) in [
        ("sales", ["[run] priority = \"sales\", user 0: it has no such column", "There are revenue, interactions"]),
        ("revenue - 5", ["user 0: its value is -5;", "at least 0"]),
        ("revenue *", ["[run] priority = \"revenue *\": ", "unexpected end"]),
    ] {
        night.priority = by(expression, 4);
        night.assert_refused(&words).await;
    }
}
