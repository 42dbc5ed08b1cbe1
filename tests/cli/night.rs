//! Two nights, published, checked, and not done twice.

use std::fs;
use std::process::Command;

use crate::{Workspace, assert_exit, stdout};

#[test]
fn two_nights_are_published_verified_and_not_repeated() {
    let workspace = Workspace::new();
    let first = workspace.run(&[]);
    assert_exit(&first, 0);
    let text = stdout(&first);
    for part in ["carried forward", "Audit of", "speedup", "Sample user", "100 % of the texts are the plain ones"] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert_exit(&workspace.verify(), 0);
    let parts = workspace.parts();
    let again = workspace.run(&[]);
    assert_exit(&again, 0);
    assert!(stdout(&again).contains("complete already"), "{}", stdout(&again));
    assert_eq!(workspace.parts(), parts);
}

/// mistralrs blocks the thread that loads it: beside it the plan's files are read, and no wake-up of theirs may be
/// lost.
#[test]
fn mistralrs_decodes_a_night_by_itself() {
    let workspace = Workspace::new();
    let night = workspace.run(&["model.engine=mistralrs", "generate.max_new_tokens=8"]);
    assert_exit(&night, 0);
    let text = stdout(&night);
    assert!(text.contains("decodes plainly: no drafts"), "{text}");
    let verified = workspace.verify();
    assert_exit(&verified, 0);
    for rows in ["24 rows", "20 rows"] {
        assert!(stdout(&verified).contains(rows), "{}", stdout(&verified));
    }
}

#[test]
fn a_flipped_byte_is_found_by_verify() {
    let workspace = Workspace::new();
    assert_exit(&workspace.run(&[]), 0);
    let (path, mut bytes) = workspace.parts().swap_remove(0);
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    let verified = workspace.verify();
    assert_exit(&verified, 65);
    assert!(stdout(&verified).contains("do not match the manifest's digest"));
}

#[test]
fn plan_tells_what_would_be_done_and_does_not_do_it() {
    let workspace = Workspace::new();
    assert_exit(&workspace.run(&[]), 0);
    let parts = workspace.parts();
    let planned = workspace.command("plan", &["generate.max_new_tokens=20"]).output().unwrap();
    assert_exit(&planned, 0);
    let text = stdout(&planned);
    assert!(text.contains("24 to generate, 0 unchanged"), "the specification changed:\n{text}");
    assert!(text.contains("ETA:") && text.contains("tokens/s"), "{text}");
    assert_eq!(workspace.parts(), parts);
}

#[test]
fn the_minimal_configuration_gives_every_viewer_a_text() {
    let workspace = Workspace::new();
    let output = format!("output.path={}", workspace.path("out").display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_laser"));
    let run = command.args(["run", "configs/minimal.toml", "--set", &output]).output().unwrap();
    assert_exit(&run, 0);
    let viewers = fs::read_to_string("fixtures/demo/viewers.jsonl").unwrap().lines().count();
    assert!(stdout(&run).contains(&format!("{viewers} entities, {viewers} generated")), "{}", stdout(&run));
    assert_exit(&workspace.verify(), 0);
}

#[test]
fn config_prints_what_is_in_force() {
    let workspace = Workspace::new();
    let printed =
        workspace.command("config", &["generate.batch=3"]).env("LASER_RUN__SHARD_ROWS", "9").output().unwrap();
    assert_exit(&printed, 0);
    let text = stdout(&printed);
    assert!(text.contains("batch = 3") && text.contains("shard_rows = 9"), "{text}");
}
