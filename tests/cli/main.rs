//! The command as a user runs it: real processes, the fixture model, real files, real signals.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod architecture;
mod azure;
mod bad_input;
mod cycle;
mod delta;
mod distributed;
mod docs;
mod doctor;
mod encode;
mod faults;
mod feast;
mod guards;
mod ids;
mod learning;
mod night;
mod outages;
mod production;
mod proxy;
mod report;
mod s3;
mod soak;
mod telemetry;
mod tracing;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A folder with a configuration of a demo small enough for a test.
struct Workspace {
    dir: TempDir,
    /// Of every process.
    environment: Vec<(&'static str, String)>,
}

impl Workspace {
    /// Strict, so that equal runs have equal texts.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().display();
        let model = fixture();
        let tables = std::path::absolute("fixtures/demo/small").unwrap();
        let tables = tables.display();
        let config = format!(
            r#"
[model]
path = "{}"
[demo]
last_night = ["{tables}/last-night/users.parquet", "{tables}/last-night/items.parquet"]
[[input]]
path = "{tables}/tonight/users.parquet"
[[input]]
path = "{tables}/tonight/items.parquet"
[[previous]]
path = "latest"
[output]
path = "{root}/out"
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
clusters = 2
min_group = 2
[pools.item]
grouping = "attribute"
attributes = ["genres"]
min_group = 2
[run]
date = "2026-01-02"
shard_rows = 4
audit_share = 0.2
"#,
            model.display()
        );
        fs::write(dir.path().join("laser.toml"), config).unwrap();
        Self { dir, environment: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, subcommand: &str, settings: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_laser"));
        command.arg(subcommand).arg(self.path("laser.toml"));
        command.envs(self.environment.clone());
        for setting in settings {
            command.args(["--set", setting]);
        }
        command
    }

    fn run(&self, settings: &[&str]) -> Output {
        self.command("run", settings).output().unwrap()
    }

    fn verify(&self) -> Output {
        let out = self.path("out");
        Command::new(env!("CARGO_BIN_EXE_laser")).arg("verify").arg(out).output().unwrap()
    }

    /// All parts below the output, with their bytes, by name.
    fn parts(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut parts = Vec::new();
        collect(&self.path("out/profiles"), &mut parts);
        parts.sort();
        parts
    }
}

fn collect(dir: &Path, parts: &mut Vec<(PathBuf, Vec<u8>)>) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, parts);
        } else if path.extension().is_some_and(|e| e == "parquet") {
            parts.push((path.clone(), fs::read(&path).unwrap()));
        }
    }
}

fn fixture() -> PathBuf {
    std::path::absolute("fixtures/profile-lm").unwrap()
}

#[track_caller]
fn assert_exit(output: &Output, code: i32) {
    assert_eq!(
        output.status.code(),
        Some(code),
        "stdout:\n{}\nstderr:\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
