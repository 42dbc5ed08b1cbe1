//! Nights in a row: each is made from the one before, drafts from pools that can be promoted, and leaves when it is
//! old.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

use crate::faults::start;
use crate::{Workspace, assert_exit, fixture, stderr, stdout};

/// A cron user's configuration: users, and what this output held last night.
pub(crate) struct Nights {
    pub(crate) workspace: Workspace,
}

impl Nights {
    pub(crate) fn new() -> Self {
        let workspace = Workspace::new();
        let root = workspace.path("").display().to_string();
        let config = format!(
            r#"
[model]
path = "{}"
[[input]]
path = "{root}/users.jsonl"
kind = "user"
[[previous]]
path = "latest"
[output]
path = "{root}/out"
[prompt]
user = "plain/films"
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
[run]
shard_rows = 3
audit_share = 0.2
"#,
            fixture().display()
        );
        fs::write(workspace.path("laser.toml"), config).unwrap();
        let nights = Self { workspace };
        nights.write_users("Heat");
        nights
    }

    /// Twelve users who have last seen a film; another film, and every prompt is another.
    pub(crate) fn write_users(&self, film: &str) {
        let user = |id: usize| {
            serde_json::json!({
                "id": id,
                "history": (0..6).map(|n| serde_json::json!({"title": format!("Film {}", (id + n) % 5), "rating": 4}))
                    .chain([serde_json::json!({"title": film, "rating": 5})]).collect::<Vec<_>>(),
                "embedding": [id % 2, 1],
            })
        };
        let rows: String = (0..12).map(|id| format!("{}\n", user(id))).collect();
        fs::write(self.workspace.path("users.jsonl"), rows).unwrap();
    }

    pub(crate) fn command(&self, subcommand: &str, day: u32, settings: &[&str]) -> Command {
        let mut command = self.workspace.command(subcommand, settings);
        command.args(["--set", &format!("run.date=2026-01-{day:02}")]);
        command
    }

    #[track_caller]
    pub(crate) fn night(&self, day: u32, settings: &[&str]) -> Output {
        let output = self.command("run", day, settings).output().unwrap();
        assert_exit(&output, 0);
        output
    }

    /// Starts a night and kills it once it has committed a shard.
    fn kill_night(&self, day: u32, settings: &[&str]) {
        let mut child = start(self.command("run", day, settings), 1);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn laser(&self, args: &[&str], settings: &[&str]) -> Output {
        let (subcommand, rest) = args.split_at(args.len().min(2));
        let mut command = Command::new(env!("CARGO_BIN_EXE_laser"));
        command.args(subcommand).arg(self.workspace.path("laser.toml")).args(rest);
        for setting in settings {
            command.args(["--set", setting]);
        }
        command.output().unwrap()
    }

    fn folders(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.workspace.path("out").join(path)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// The folder of the one run of a night.
    #[track_caller]
    fn run_of(&self, day: u32) -> PathBuf {
        let day = format!("2026-01-{day:02}-");
        let runs = self.folders("runs").into_iter().filter(|run| run.starts_with(&day));
        let runs: Vec<String> = runs.collect();
        assert_eq!(runs.len(), 1, "{runs:?}");
        self.workspace.path("out/runs").join(&runs[0])
    }

    fn json(&self, day: u32, file: &str) -> Value {
        serde_json::from_slice(&fs::read(self.run_of(day).join(file)).unwrap()).unwrap()
    }

    fn manifest(&self, day: u32) -> Value {
        let night = format!("out/profiles/kind=user/dt=2026-01-{day:02}");
        let run = fs::read_dir(self.workspace.path(&night)).unwrap().next();
        let file = run.unwrap().unwrap().path().join("_manifest.json");
        serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
    }
}

#[test]
fn one_command_makes_a_first_night_and_every_night_after_it() {
    let nights = Nights::new();
    let first = nights.night(1, &[]);
    assert!(stderr(&first).contains("a first night: no complete night before 2026-01-01"));
    assert_eq!(nights.json(1, "pins.json")["previous"], Value::Array(Vec::new()));
    // Nothing has changed: all is carried forward.
    let second = nights.night(2, &[]);
    assert!(stderr(&second).contains("dt=2026-01-01"), "{}", stderr(&second));
    assert!(stdout(&second).contains("12 unchanged"), "{}", stdout(&second));
    // Everything has: last night's texts are the pools, and what tonight's lengths are compared with.
    nights.write_users("Alien");
    let third = nights.night(3, &[]);
    assert!(stdout(&third).contains("12 generated"), "{}", stdout(&third));
    let figures = &nights.manifest(3)["figures"];
    let sum = |key: &str| {
        let pools = figures.as_object().unwrap().values();
        pools.map(|pool| pool[key].as_u64().unwrap()).sum::<u64>()
    };
    assert!(sum("drafted") > 0 && sum("previous") > 0, "{figures}");
    assert_eq!(sum("compared"), sum("tokens"));
    // Again: it is published, and tonight is not its own past.
    let parts = nights.workspace.parts();
    for day in [2, 3] {
        let users = if day == 2 { "Heat" } else { "Alien" };
        nights.write_users(users);
        assert!(stdout(&nights.night(day, &[])).contains("complete already"));
    }
    assert_eq!(nights.workspace.parts(), parts);
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn previous_on_the_command_line_replaces_that_of_the_configuration() {
    let nights = Nights::new();
    nights.night(1, &[]);
    let empty = nights.workspace.path("empty");
    fs::create_dir(&empty).unwrap();
    let mut named = nights.command("run", 2, &[]);
    let named = named.arg("--previous").arg(&empty).output().unwrap();
    assert_exit(&named, 65);
    let message = stderr(&named);
    assert!(message.contains("empty: no complete earlier output"), "{message}");
    assert!(message.contains("path = \"latest\""), "says what to do: {message}");
    let mut latest = nights.command("plan", 2, &["previous=[]"]);
    let latest = latest.args(["--previous", "latest"]).output().unwrap();
    assert_exit(&latest, 0);
    assert!(stdout(&latest).contains("12 unchanged"), "{}", stdout(&latest));
}

#[test]
fn a_night_that_is_resumed_keeps_the_past_it_was_begun_with() {
    let nights = Nights::new();
    nights.night(1, &[]);
    nights.write_users("Alien");
    nights.kill_night(3, &[]);
    let committed = nights.workspace.parts();
    nights.night(2, &[]);
    nights.night(3, &[]);
    let previous = nights.json(3, "pins.json")["previous"].to_string();
    assert!(previous.contains("dt=2026-01-01"), "{previous}");
    let after: std::collections::BTreeMap<_, _> = nights.workspace.parts().into_iter().collect();
    assert!(committed.iter().all(|(path, bytes)| after[path] == *bytes));
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn pool_sets_are_promoted_and_rolled_back_between_nights_and_never_within_one() {
    let nights = Nights::new();
    nights.night(1, &[]);
    nights.write_users("Alien");
    let promoted = ["run.pools=promoted"];
    let refused = nights.command("run", 2, &promoted).output().unwrap();
    assert_exit(&refused, 65);
    assert!(stderr(&refused).contains("laser pools promote CONFIG VERSION"));
    for (name, size) in [("a", "pools.user.max_texts=9"), ("b", "pools.user.max_texts=3")] {
        assert_exit(&nights.laser(&["pools", "build", "--name", name], &[size]), 0);
    }
    let again = nights.laser(&["pools", "build", "--name", "a"], &[]);
    assert_exit(&again, 65);
    assert!(stderr(&again).contains("give another --name"), "{}", stderr(&again));
    let promote = |version: &str| {
        assert_exit(&nights.laser(&["pools", "promote", version], &promoted), 0);
    };
    promote("a");
    nights.kill_night(2, &promoted);
    promote("b");
    nights.night(2, &promoted);
    assert_eq!(nights.json(2, "plan.json")["pools"], "pools/a");
    nights.write_users("Ran");
    nights.night(3, &promoted);
    assert_eq!(nights.json(3, "plan.json")["pools"], "pools/b");
    assert_exit(&nights.laser(&["pools", "rollback"], &promoted), 0);
    let listed = stdout(&nights.laser(&["pools", "list"], &[]));
    let current: Vec<&str> = listed.lines().filter(|l| l.ends_with("promoted")).collect();
    assert!(current.len() == 1 && current[0].starts_with("a "), "{listed}");
    assert_eq!(listed.lines().count(), 3, "the first night's own, a and b:\n{listed}");
    // By name too, and each can be looked into.
    nights.write_users("Jaws");
    nights.night(4, &["run.pools=b"]);
    assert_eq!(nights.json(4, "plan.json")["pools"], "pools/b");
    for set in ["promoted", "b", nights.workspace.path("out/pools/a").to_str().unwrap()] {
        let inspected = nights.laser(&["pools", "inspect", set], &[]);
        assert_exit(&inspected, 0);
        assert!(stdout(&inspected).contains("bytes a token"));
    }
    let unknown = nights.laser(&["pools", "inspect", "c"], &[]);
    assert_exit(&unknown, 65);
    assert!(stderr(&unknown).contains("no finished pool set \"c\""), "{}", stderr(&unknown));
}

#[test]
fn a_damaged_pool_set_cannot_be_promoted() {
    let nights = Nights::new();
    nights.night(1, &[]);
    assert_exit(&nights.laser(&["pools", "build", "--name", "a"], &[]), 0);
    let pools = nights.folders("pools/a");
    let pool = pools.iter().find(|name| name.ends_with(".pool")).unwrap();
    let pool = nights.workspace.path("out/pools/a").join(pool);
    let mut bytes = fs::read(&pool).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&pool, bytes).unwrap();
    let refused = nights.laser(&["pools", "promote", "a"], &[]);
    assert_exit(&refused, 65);
    assert!(stderr(&refused).contains(".pool"), "{}", stderr(&refused));
    assert!(!nights.workspace.path("out/pools/promotions").exists());
}

#[test]
fn nights_beyond_those_that_are_kept_are_removed_and_the_rest_stays_whole() {
    let nights = Nights::new();
    for (day, film) in [(1, "Heat"), (2, "Alien"), (3, "Ran"), (4, "Jaws")] {
        nights.write_users(film);
        nights.night(day, &[]);
    }
    let [first, second, ..] = &nights.folders("pools")[..] else {
        panic!("four nights' pools");
    };
    let empty = nights.laser(&["pools", "promote", first], &[]);
    assert_exit(&empty, 65);
    assert!(stderr(&empty).contains("a set without pools"));
    assert_exit(&nights.laser(&["pools", "promote", second], &[]), 0);
    let before = nights.workspace.parts();
    let unset = nights.workspace.command("prune", &[]).output().unwrap();
    assert_exit(&unset, 65);
    assert!(stderr(&unset).contains("[output] keep_nights"));
    let mut dry = nights.workspace.command("prune", &["output.keep_nights=3"]);
    let dry = dry.arg("--dry-run").output().unwrap();
    assert_exit(&dry, 0);
    assert!(stdout(&dry).contains("would remove") && stdout(&dry).contains("dt=2026-01-01"));
    assert_eq!(nights.workspace.parts(), before);
    // By the next night, once it is published; the promoted pools of the second night stay.
    nights.write_users("Tron");
    nights.night(5, &["output.keep_nights=2"]);
    let dates = ["dt=2026-01-04", "dt=2026-01-05"];
    assert_eq!(nights.folders("profiles/kind=user"), dates);
    assert_eq!(nights.folders("runs").len(), 2);
    assert_eq!(nights.folders("pools").len(), 4, "two nights', the promoted one, promotions");
    assert_exit(&nights.workspace.verify(), 0);
    assert_exit(&nights.laser(&["pools", "inspect", "promoted"], &[]), 0);
    nights.write_users("Big");
    nights.night(6, &["output.keep_nights=2", "run.pools=promoted"]);
}

#[test]
fn a_price_is_told_by_pool_and_in_all() {
    let nights = Nights::new();
    let price = ["price.gpu_hour=7200", "price.currency=EUR"];
    let night = nights.night(1, &price);
    let text = stdout(&night);
    assert!(text.contains("EUR, ") && text.contains("per 1,000 texts"), "{text}");
    let manifest = nights.manifest(1);
    let (cost, figures) = (&manifest["cost"], manifest["figures"].as_object().unwrap());
    let number = |value: &Value| value.as_f64().unwrap();
    for (pool, figures) in figures {
        let expected = number(&figures["engine_seconds"]) * 2.0 * 1e3 / number(&figures["texts"]);
        let found = number(&cost["per_1000_texts_by_pool"][pool]);
        assert!((found - expected).abs() < 1e-9 * expected, "{pool}: {found}, not {expected}");
    }
    let seconds: f64 = figures.values().map(|f| number(&f["engine_seconds"])).sum();
    assert!((number(&cost["gpu_seconds"]) - seconds).abs() < 1e-9);
    assert!((number(&cost["per_1000_texts"]) - seconds * 2.0 * 1e3 / 12.0).abs() < 1e-6);
    let status = nights.command("status", 1, &[]).output().unwrap();
    assert!(stdout(&status).contains("EUR per 1,000 texts"), "{}", stdout(&status));
}

#[test]
fn json_logs_of_a_shard_name_run_shard_and_pool() {
    let nights = Nights::new();
    let mut command = nights.command("run", 1, &[]);
    let command = command.env("LASER_LOG", "json").env("RUST_LOG", "laser_worker=debug");
    let output = command.output().unwrap();
    assert_exit(&output, 0);
    let run = nights.run_of(1).file_name().unwrap().to_str().unwrap().to_owned();
    let mut seen = 0;
    for line in stderr(&output).lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let message = line["message"].as_str().unwrap_or_default();
        if ["leased", "writing", "committed", "acknowledged"].contains(&message) {
            seen += 1;
            let span = &line["span"];
            assert_eq!(span["run"], run.as_str(), "{line}");
            assert!(span["shard"].is_u64() && span["pool"].is_string(), "{line}");
        }
    }
    assert!(seen >= 16, "{seen} lines of four shards");
}
