//! Two nights, published, checked, and not done twice.

use std::fs;

use crate::{Workspace, assert_contains, assert_exit, assert_prints, flip_bit, laser, stdout};

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
