//! The command as a user runs it: real processes, the fixture model, real files, real signals.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod architecture;
mod azure;
mod bad_input;
mod canary;
mod constraint;
mod cycle;
mod delta;
mod distributed;
mod docs;
mod doctor;
mod draft_model;
mod encode;
mod erase;
mod erase_meanwhile;
mod estimate;
mod eval_lists;
mod faults;
mod feast;
mod guards;
mod ids;
mod learning;
mod list_drafts;
mod lists;
mod night;
mod outages;
mod outputs;
mod prepare;
mod priority;
mod production;
mod proxy;
mod report;
mod s3;
mod sampling;
mod server;
mod soak;
mod sources;
mod telemetry;
mod tracing;
mod train;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde::de::DeserializeOwned;
use tempfile::TempDir;

/// Of every workspace: a night small enough for a test, and strict, so that equal runs have equal texts. `DIR` is the
/// workspace, `FIXTURES` the folder of the fixtures.
const COMMON: &str = r#"
[model]
path = "FIXTURES/profile-lm"
[output]
path = "DIR/out"
[prompt]
user = "plain/films"
item = "plain/films"
chat = false
max_tokens = 150
[generate]
max_new_tokens = 24
batch = 2
[verification]
policy = "strict"
[pools.user]
grouping = "router"
clusters = 2
min_group = 2
"#;

const LAST_NIGHT: &str = r#"
[demo]
last_night = [
    "FIXTURES/demo/small/last-night/users.parquet",
    "FIXTURES/demo/small/last-night/items.parquet",
]
[[previous]]
path = "latest"
"#;

/// The second night of the demo.
const TONIGHT: &str = r#"
[[input]]
path = "FIXTURES/demo/small/tonight/users.parquet"
[[input]]
path = "FIXTURES/demo/small/tonight/items.parquet"
[pools.item]
grouping = "attribute"
attributes = ["genres"]
min_group = 2
[run]
date = "2026-01-02"
shard_rows = 4
audit_share = 0.2
"#;

/// A table of users that a test writes.
const USERS: &str = r#"
[[input]]
path = "DIR/users.jsonl"
kind = "user"
"#;

/// A folder with a configuration.
struct Workspace {
    dir: TempDir,
    /// Of every process.
    environment: Vec<(&'static str, String)>,
}

impl Workspace {
    /// The demo of two nights.
    fn new() -> Self {
        Self::with(&[LAST_NIGHT, TONIGHT])
    }

    /// What all have, with these sections of the configuration.
    fn with(sections: &[&str]) -> Self {
        let workspace = Self { dir: tempfile::tempdir().unwrap(), environment: Vec::new() };
        workspace.configure(&[&[COMMON], sections].concat());
        workspace
    }

    fn configure(&self, sections: &[&str]) {
        let config = sections.concat().replace("DIR", self.dir.path().to_str().unwrap());
        let fixtures = std::path::absolute("fixtures").unwrap();
        fs::write(self.path("laser.toml"), config.replace("FIXTURES", fixtures.to_str().unwrap())).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, subcommand: &str, settings: &[&str]) -> Command {
        let mut command = laser();
        command.arg(subcommand).arg(self.path("laser.toml")).args(set(settings));
        command.envs(self.environment.clone());
        command
    }

    fn output(&self, subcommand: &str, settings: &[&str]) -> Output {
        self.command(subcommand, settings).output().unwrap()
    }

    fn run(&self, settings: &[&str]) -> Output {
        self.output("run", settings)
    }

    fn verify(&self) -> Output {
        laser().arg("verify").arg(self.path("out")).output().unwrap()
    }

    /// All parts below the output, with their bytes, by name.
    fn parts(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        parts(&self.path("out/profiles"))
    }

    /// Those of a night.
    fn parts_of(&self, date: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut parts = self.parts();
        parts.retain(|path, _| path.to_str().unwrap().contains(&format!("dt={date}")));
        parts
    }

    /// The published folders of a night, users first.
    fn published(&self, date: &str) -> Vec<PathBuf> {
        let night = |kind: &str| entries(&self.path(&format!("out/profiles/kind={kind}/dt={date}")));
        ["user", "item"].into_iter().flat_map(night).collect()
    }
}

fn laser() -> Command {
    Command::new(env!("CARGO_BIN_EXE_laser"))
}

/// The arguments that set keys of the configuration.
fn set<'a>(settings: &[&'a str]) -> impl Iterator<Item = &'a str> {
    settings.iter().flat_map(|setting| ["--set", setting])
}

/// The parts below a folder, with their bytes.
fn parts(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for path in entries(folder) {
        if path.is_dir() {
            found.extend(parts(&path));
        } else if path.extension().is_some_and(|extension| extension == "parquet") {
            let bytes = fs::read(&path).unwrap();
            found.insert(path, bytes);
        }
    }
    found
}

/// What is in a folder, in order of the names; nothing is in a folder that is not there.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
}

/// The only folder or file in a folder.
#[track_caller]
fn only(folder: &Path) -> PathBuf {
    let [entry] = entries(folder).try_into().unwrap();
    entry
}

/// All files of a folder, with their bytes.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    entries(folder).into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

fn copy_files(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for file in entries(from) {
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

fn read_json<T: DeserializeOwned>(file: &Path) -> T {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

/// Damages a file in its middle.
fn flip_bit(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(file, bytes).unwrap();
}

fn fixture() -> PathBuf {
    std::path::absolute("fixtures/profile-lm").unwrap()
}

#[track_caller]
fn assert_exit(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "stdout:\n{}\nstderr:\n{}", stdout(output), stderr(output));
}

#[track_caller]
fn assert_contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
}

/// It has succeeded and printed these words.
#[track_caller]
fn assert_prints(output: &Output, words: &[&str]) {
    assert_exit(output, 0);
    assert_contains(&stdout(output), words);
}

/// It was refused, as bad input is, with these words.
#[track_caller]
fn assert_refused(output: &Output, words: &[&str]) {
    assert_exit(output, 65);
    assert_contains(&stderr(output), words);
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
