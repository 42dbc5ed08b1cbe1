//! Two nights, published, checked, and not done twice.

use std::fs;

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
fn config_prints_what_is_in_force() {
    let workspace = Workspace::new();
    let printed =
        workspace.command("config", &["generate.batch=3"]).env("LASER_RUN__SHARD_ROWS", "9").output().unwrap();
    assert_exit(&printed, 0);
    let text = stdout(&printed);
    assert!(text.contains("batch = 3") && text.contains("shard_rows = 9"), "{text}");
}

#[test]
fn production_toml_names_every_key() {
    let documented = fs::read_to_string("configs/production.toml").unwrap();
    let workspace = Workspace::new();
    let printed = workspace
        .command("config", &["model.isq=q8_0", "run.limit=5", "encoder.path=models/bert", "output.keep_nights=30"])
        .output()
        .unwrap();
    for line in stdout(&printed).lines() {
        let Some((key, _)) = line.split_once(" = ") else {
            continue;
        };
        if ["users", "items", "data", "input", "previous", "knowledge"].contains(&key) {
            continue;
        }
        assert!(documented.contains(&format!("{key} = ")), "configs/production.toml lacks {key}");
    }
}
