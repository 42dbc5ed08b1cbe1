//! `[run] priority`: what is most valuable comes first, and everybody is told how much of the value there is.

use std::fs;

use serde_json::Value;

use crate::distributed::Cluster;
use crate::faults::signal;
use crate::report::page;
use crate::{Workspace, assert_contains, assert_exit, assert_prints, assert_refused, entries, only, read_json};

const PRIORITY: &str = "run.priority='interactions'";

#[test]
fn a_night_by_value_tells_how_much_of_it_there_is() {
    let workspace = Workspace::new();
    let planned = workspace.output("plan", &[PRIORITY, "run.priority_bands=4"]);
    assert_prints(&planned, &["By priority \"interactions\", in 4 bands:", "users' value", "items' value", "90%"]);
    assert_prints(&workspace.run(&[PRIORITY]), &["100.0 % of the value by [run] priority = \"interactions\""]);
    assert_prints(&workspace.output("status", &[]), &["100.0 % of the users' value, 100.0 % of the items' value"]);
    let manifest: Value = read_json(&workspace.published("2026-01-02")[0].join("_manifest.json"));
    assert_eq!(manifest["value"]["priority"]["expression"], "interactions");
    assert_eq!(manifest["value"]["lost"], 0.0);
    let page = page(&workspace, &workspace.path("out"));
    assert_contains(
        &page,
        &["Value covered, users", "by the priority interactions", "value that had a text, over time"],
    );
    assert_exit(&workspace.verify(), 0);
}

#[test]
fn what_gives_no_value_is_refused_before_anything_is_written() {
    let workspace = Workspace::new();
    for (priority, words) in [
        ("run.priority='revenue'", ["[run] priority = \"revenue\", user ", "it has no such column"]),
        ("run.priority='kind'", ["[run] priority = \"kind\", ", "expected a finite number"]),
        ("run.priority='interactions *'", ["[run] priority = \"interactions *\"", "unexpected end of input"]),
        ("run.priority_bands=3", ["[run] priority_bands", "set [run] priority"]),
    ] {
        assert_refused(&workspace.run(&[priority]), &words);
    }
    assert_refused(&workspace.run(&[PRIORITY, "run.priority_bands=0"]), &["priority_bands = 0: expected 1"]);
    assert!(entries(&workspace.path("out")).is_empty());
}

#[test]
fn at_the_deadline_the_value_that_is_lost_is_told_row_by_row() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[PRIORITY]);
    let late = cluster.worker();
    late.wait_for("leased", 1);
    signal(&late.child, "-STOP");
    coordinator.kill();
    cluster.seal(&[PRIORITY]);
    signal(&late.child, "-CONT");
    late.terminate();
    let users = only(&cluster.tonight.path("out/profiles/kind=user/dt=2026-01-02"));
    let errors = fs::read_to_string(users.join("_errors.jsonl")).unwrap();
    // Those that were to be carried have no value of their own.
    let values = errors.lines().filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["value"].as_f64());
    let manifest: Value = read_json(&users.join("_manifest.json"));
    let (lost, all) = (manifest["value"]["lost"].as_f64().unwrap(), manifest["value"]["all"].as_f64().unwrap());
    let of_rows: f64 = values.sum();
    assert!(of_rows > 0.0 && of_rows <= lost + 1e-9 && lost <= all + 1e-9, "{of_rows}, {lost} of {all}");
    assert_exit(&cluster.tonight.verify(), 0);
}
