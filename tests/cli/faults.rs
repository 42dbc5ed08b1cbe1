//! Kills, signals and second processes: nothing is lost, nothing is done twice.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command};

use laser_store::part::decode_part;

use crate::distributed::Process;
use crate::{Workspace, assert_exit, assert_refused, copy_files, fixture, stderr};

/// Starts a run and returns once it has committed `shards` shards.
fn start(run: Command, shards: usize) -> Process {
    let run = Process::start(run);
    run.wait_for("committed", shards);
    run
}

/// Starts a run and kills it once it has committed `shards` shards.
pub(crate) fn start_and_kill(run: Command, shards: usize) {
    start(run, shards).kill();
}

pub(crate) fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Night, kind, entity and text of every row; each once.
pub(crate) fn texts(workspace: &Workspace) -> BTreeMap<(String, String), String> {
    let mut texts = BTreeMap::new();
    for (path, bytes) in workspace.parts() {
        let folder = path.parent().unwrap().display().to_string();
        let folder = folder.split_once("profiles").unwrap().1.to_owned();
        for row in decode_part("part", bytes.into()).unwrap().0 {
            let key = (folder.clone(), row.entity_id.to_string());
            assert!(texts.insert(key, row.text).is_none(), "{} twice in {folder}", row.entity_id);
        }
    }
    texts
}

/// Without the run's name, which hangs on where the inputs are.
pub(crate) fn without_run(texts: BTreeMap<(String, String), String>) -> BTreeMap<(String, String), String> {
    let night = |folder: &str| folder.split("/run=").next().unwrap().to_owned();
    texts.into_iter().map(|((folder, id), text)| ((night(&folder), id), text)).collect()
}

#[test]
fn a_killed_run_resumes_and_regenerates_nothing() {
    let disturbed = Workspace::new();
    for shards in [1, 2, 4] {
        start_and_kill(disturbed.command("run", &[]), shards);
        let before = disturbed.parts();
        assert!(!before.is_empty());
        start_and_kill(disturbed.command("run", &[]), 1);
        let after = disturbed.parts();
        assert!(before.iter().all(|(path, bytes)| after[path] == *bytes), "a committed part changed");
    }
    assert_undisturbed(&disturbed);
}

/// The same command goes on, and the night is that of a run which nothing disturbed.
#[track_caller]
fn assert_undisturbed(disturbed: &Workspace) {
    assert_exit(&disturbed.run(&[]), 0);
    assert_exit(&disturbed.verify(), 0);
    let quiet = Workspace::new();
    assert_exit(&quiet.run(&[]), 0);
    assert_eq!(without_run(texts(disturbed)), without_run(texts(&quiet)));
}

#[test]
fn a_terminated_run_drains_and_goes_on_later() {
    let workspace = Workspace::new();
    start(workspace.command("run", &[]), 1).terminate();
    let committed = workspace.parts();
    assert_exit(&workspace.run(&[]), 0);
    assert_exit(&workspace.verify(), 0);
    let after = workspace.parts();
    assert!(committed.iter().all(|(path, bytes)| after[path] == *bytes));
}

#[test]
fn a_second_process_on_the_same_run_is_refused() {
    let workspace = Workspace::new();
    let first = start(workspace.command("run", &[]), 1);
    signal(&first.child, "-STOP");
    let second = workspace.run(&[]);
    signal(&first.child, "-CONT");
    assert_refused(&second, &["another process is working on run"]);
    first.assert_ends(0);
    assert_exit(&workspace.verify(), 0);
}

/// The setting of a model with which every device fails the self-test, as one does that computes nothing: rotations of
/// base 0 give no numbers.
pub(crate) fn faulty_device(workspace: &Workspace) -> String {
    let folder = workspace.path("faulty");
    copy_files(&fixture(), &folder);
    let file = folder.join("config.json");
    let config = fs::read_to_string(&file).unwrap();
    let faulty = config.replace("\"rope_theta\": 10000.0", "\"rope_theta\": 0.0");
    assert_ne!(faulty, config);
    fs::write(&file, faulty).unwrap();
    format!("model.path={}", folder.display())
}

/// What such a device is told by.
pub(crate) const FAULTY: [&str; 2] = ["device cpu fails the self-test (step ", "or another [model] device"];

#[test]
fn a_night_on_a_device_that_fails_the_self_test_generates_nothing() {
    let workspace = Workspace::new();
    assert_refused(&workspace.run(&[&faulty_device(&workspace)]), &FAULTY);
    assert!(workspace.parts().is_empty());
}

/// The run where no file may grow beyond `kib`: what a full disk is to a program, without a disk of one's own.
fn run_with_file_limit(workspace: &Workspace, kib: u32) -> std::process::Output {
    let laser = workspace.command("run", &[]);
    // The signal is ignored across exec, so that the write fails instead.
    let script = format!("trap '' XFSZ; ulimit -f {}; exec \"$0\" \"$@\"", kib * 2);
    Command::new("sh").args(["-c", &script]).arg(laser.get_program()).args(laser.get_args()).output().unwrap()
}

#[test]
fn a_full_disk_is_told_and_the_same_command_goes_on() {
    let full = Workspace::new();
    let mut failed = 0;
    for kib in [1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 64] {
        let output = run_with_file_limit(&full, kib);
        if output.status.success() {
            break;
        }
        failed += 1;
        let message = stderr(&output);
        assert!(
            matches!(output.status.code(), Some(65 | 75)) && message.contains("File too large"),
            "{kib} KiB: {message}"
        );
        assert!(message.contains(&full.path("").display().to_string()), "names no file: {message}");
    }
    assert!(failed >= 3, "{failed} runs failed");
    assert_undisturbed(&full);
}
