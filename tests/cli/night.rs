//! Two nights, published, checked, and not done twice.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::distributed::Process;
use crate::{USERS, Workspace, assert_contains, assert_exit, assert_prints, flip_bit, laser, only, stdout};

#[test]
fn two_nights_are_published_verified_and_not_repeated() {
    let workspace = Workspace::new();
    let summary = ["carried forward", "Audit of", "speedup", "Sample user", "100 % of the texts are the plain ones"];
    assert_prints(&workspace.run(&[]), &summary);
    assert_exit(&workspace.verify(), 0);
    let parts = workspace.parts();
    assert_prints(&workspace.run(&[]), &["complete already"]);
    assert_eq!(workspace.parts(), parts);
}

/// mistralrs blocks the thread that loads it: beside it the plan's files are read, and no wake-up of theirs may be
/// lost.
#[test]
fn mistralrs_decodes_a_night_by_itself() {
    let workspace = Workspace::new();
    let night = workspace.run(&["model.engine=mistralrs", "generate.max_new_tokens=8"]);
    assert_prints(&night, &["decodes plainly: no drafts"]);
    assert_prints(&workspace.verify(), &["24 rows", "20 rows"]);
}

#[test]
fn a_flipped_byte_is_found_by_verify() {
    let workspace = Workspace::new();
    assert_exit(&workspace.run(&[]), 0);
    flip_bit(workspace.parts().first_key_value().unwrap().0);
    let verified = workspace.verify();
    assert_exit(&verified, 65);
    assert_contains(&stdout(&verified), &["do not match the manifest's digest"]);
}

#[test]
fn plan_tells_what_would_be_done_and_does_not_do_it() {
    let workspace = Workspace::new();
    assert_exit(&workspace.run(&[]), 0);
    let parts = workspace.parts();
    let planned = workspace.output("plan", &["generate.max_new_tokens=20"]);
    // The specification has changed.
    assert_prints(&planned, &["24 to generate, 0 unchanged", "ETA:", "tokens/s"]);
    assert_eq!(workspace.parts(), parts);
}

#[test]
fn the_minimal_configuration_gives_every_viewer_a_text() {
    let workspace = Workspace::new();
    let output = format!("output.path={}", workspace.path("out").display());
    let run = laser().args(["run", "configs/minimal.toml", "--set", &output]).output().unwrap();
    let viewers = fs::read_to_string("fixtures/demo/viewers.jsonl").unwrap().lines().count();
    assert_prints(&run, &[&format!("{viewers} entities, {viewers} generated")]);
    assert_exit(&workspace.verify(), 0);
}

#[test]
fn config_prints_what_is_in_force() {
    let workspace = Workspace::new();
    let mut command = workspace.command("config", &["generate.batch=3"]);
    let printed = command.env("LASER_RUN__SHARD_ROWS", "9").output().unwrap();
    assert_prints(&printed, &["batch = 3", "shard_rows = 9"]);
}

/// All users are one shard, and no machine generates their texts in the seconds until the deadline.
#[test]
fn at_the_deadline_a_night_of_one_process_gives_back_the_shard_in_hand() {
    const ROWS: usize = 2000;
    let night = format!("[run]\ndate = \"2026-01-02\"\nshard_rows = {ROWS}\naudit_share = 0.0\n");
    let workspace = Workspace::with(&[USERS, &night]);
    let user = |id: usize| json!({"id": id, "history": [{"title": format!("Film {}", id % 5), "rating": 4}]});
    let users: String = (0..ROWS).map(|id| user(id).to_string() + "\n").collect();
    fs::write(workspace.path("users.jsonl"), users).unwrap();
    let run = || workspace.command("run", &["generate.max_new_tokens=150"]);
    let started = Instant::now();
    let planning = Process::start(run());
    planning.wait_for("leased", 1);
    planning.kill();
    only(&only(&workspace.path("out/runs")).join("shards"));
    // It leases sooner this time, since it is planned.
    let deadline = jiff::Zoned::now() + started.elapsed() + Duration::from_secs(2);
    let mut late = run();
    late.args(["--deadline", &deadline.strftime("%H:%M:%S").to_string(), "--min-coverage", "0"]);
    Process::start(late).assert_ends(0);
    let folder = only(&workspace.path("out/profiles/kind=user/dt=2026-01-02"));
    let errors = fs::read_to_string(folder.join("_errors.jsonl")).unwrap();
    assert_eq!(errors.matches("not generated before the deadline").count(), ROWS);
    assert!(folder.join("_SUCCESS").exists());
    assert_exit(&workspace.verify(), 0);
}
