//! Nights in a row: each is made from the one before, drafts from pools that can be promoted, and leaves when it is
//! old.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use laser_store::run_store::CANCELLED;
use serde_json::Value;

use crate::faults::start_and_kill;
use crate::guards::with;
use crate::{
    USERS, Workspace, assert_contains, assert_exit, assert_prints, assert_refused, entries, flip_bit, laser, only,
    read_json, set, stderr, stdout,
};

/// A cron user's configuration: users, and what this output held last night.
pub(crate) struct Nights {
    pub(crate) workspace: Workspace,
}

impl Nights {
    pub(crate) fn new() -> Self {
        let run = "[run]\nshard_rows = 3\naudit_share = 0.2\n";
        let workspace = Workspace::with(&[USERS, "[[previous]]\npath = \"latest\"\n", run]);
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
    pub(crate) fn kill_night(&self, day: u32, settings: &[&str]) {
        start_and_kill(self.command("run", day, settings), 1);
    }

    /// The published folders of a night, one a run.
    pub(crate) fn published(&self, day: u32) -> Vec<PathBuf> {
        self.workspace.published(&format!("2026-01-{day:02}"))
    }

    /// A command such as `laser pools list` with further arguments.
    pub(crate) fn laser(&self, args: &[&str], settings: &[&str]) -> Output {
        let (subcommand, rest) = args.split_at(args.len().min(2));
        let mut command = laser();
        command.args(subcommand).arg(self.workspace.path("laser.toml")).args(rest).args(set(settings));
        command.output().unwrap()
    }

    /// The names in a folder of the output.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let entries = entries(&self.workspace.path("out").join(folder)).into_iter();
        entries.map(|entry| entry.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    /// The folder of the one run of a night.
    #[track_caller]
    fn run_of(&self, day: u32) -> PathBuf {
        let mut runs = self.names("runs");
        runs.retain(|run| run.starts_with(&format!("2026-01-{day:02}-")));
        assert_eq!(runs.len(), 1, "{runs:?}");
        self.workspace.path("out/runs").join(&runs[0])
    }

    fn json(&self, day: u32, file: &str) -> Value {
        read_json(&self.run_of(day).join(file))
    }
}

/// The date of yesterday's night, for nights of today, which have no `[run] date`.
pub(crate) fn yesterday() -> String {
    jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).date().yesterday().unwrap().to_string()
}

#[test]
fn one_command_makes_a_first_night_and_every_night_after_it() {
    let nights = Nights::new();
    let first = nights.night(1, &[]);
    assert!(stderr(&first).contains("a first night: no complete night before 2026-01-01"));
    assert_eq!(nights.json(1, "pins.json")["previous"], Value::Array(Vec::new()));
    // Nothing has changed: all is carried forward.
    let second = nights.night(2, &[]);
    assert_contains(&stderr(&second), &["dt=2026-01-01"]);
    assert_contains(&stdout(&second), &["12 unchanged"]);
    // Everything has: last night's texts are the pools, and what tonight's lengths are compared with.
    nights.write_users("Alien");
    assert_prints(&nights.night(3, &[]), &["12 generated"]);
    let figures = &read_json::<Value>(&nights.published(3)[0].join("_manifest.json"))["figures"];
    let sum = |key: &str| {
        let pools = figures.as_object().unwrap().values();
        pools.map(|pool| pool[key].as_u64().unwrap()).sum::<u64>()
    };
    assert!(sum("drafted") > 0 && sum("previous") > 0, "{figures}");
    assert_eq!(sum("compared"), sum("tokens"));
    // Again: it is published, and tonight is not its own past.
    let parts = nights.workspace.parts();
    for (day, film) in [(2, "Heat"), (3, "Alien")] {
        nights.write_users(film);
        assert_prints(&nights.night(day, &[]), &["complete already"]);
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
    // With what to do.
    assert_refused(&named, &["empty: no complete earlier output", "path = \"latest\""]);
    let mut latest = nights.command("plan", 2, &["previous=[]"]);
    let latest = latest.args(["--previous", "latest"]).output().unwrap();
    assert_prints(&latest, &["12 unchanged"]);
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
    assert_contains(&nights.json(3, "pins.json")["previous"].to_string(), &["dt=2026-01-01"]);
    let after = nights.workspace.parts();
    assert!(committed.iter().all(|(path, bytes)| after[path] == *bytes));
    assert_exit(&nights.workspace.verify(), 0);
}

/// It begins with another night before it.
#[test]
fn a_run_that_is_begun_anew_does_not_take_parts_of_its_earlier_plan() {
    let nights = Nights::new();
    nights.night(1, &[]);
    nights.write_users("Alien");
    nights.kill_night(3, &[]);
    nights.night(2, &[]);
    fs::remove_dir_all(nights.run_of(3)).unwrap();
    let refused = nights.command("run", 3, &[]).output().unwrap();
    assert_refused(&refused, &["dt=2026-01-03/run=", "an earlier plan of this run", "[run] seed"]);
    fs::remove_dir_all(only(&nights.workspace.path("out/profiles/kind=user/dt=2026-01-03"))).unwrap();
    assert_prints(&nights.night(3, &[]), &["12 unchanged"]);
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn tonight_takes_up_a_killed_run_of_yesterday_and_no_cancelled_one() {
    let (nights, date) = (Nights::new(), yesterday());
    start_and_kill(nights.workspace.command("run", &[&format!("run.date={date}")]), 1);
    let marker = only(&nights.workspace.path("out/runs")).join(CANCELLED);
    let is_published = || nights.workspace.published(&date)[0].join("_SUCCESS").exists();
    // As `laser cancel` does.
    fs::write(&marker, "").unwrap();
    assert_prints(&nights.workspace.run(&[]), &["12 generated"]);
    assert!(nights.names("runs").len() == 2 && !is_published());
    fs::remove_file(marker).unwrap();
    assert_exit(&nights.workspace.run(&[]), 0);
    assert!(nights.names("runs").len() == 2 && is_published());
}

#[test]
fn tonight_is_made_though_yesterday_is_withheld_which_can_still_be_let_through() {
    let (nights, date) = (Nights::new(), yesterday());
    let setting = format!("run.date={date}");
    let refused = ["_SUCCESS is withheld"];
    assert_refused(&nights.workspace.run(&[with("guards.action=fail").as_slice(), &[&*setting]].concat()), &refused);
    assert_refused(&nights.workspace.run(&with("guards.action=fail")), &refused);
    assert_eq!(nights.names("runs").len(), 2);
    let is_published = || nights.workspace.published(&date)[0].join("_SUCCESS").exists();
    assert!(!is_published());
    assert_exit(&nights.workspace.run(&with("guards.action=warn")), 0);
    assert!(nights.names("runs").len() == 2 && is_published());
}

#[test]
fn pool_sets_are_promoted_and_rolled_back_between_nights_and_never_within_one() {
    let nights = Nights::new();
    nights.night(1, &[]);
    nights.write_users("Alien");
    let promoted = ["run.pools=promoted"];
    let refused = nights.command("run", 2, &promoted).output().unwrap();
    assert_refused(&refused, &["laser pools promote CONFIG VERSION"]);
    for (name, size) in [("a", "pools.user.max_texts=9"), ("b", "pools.user.max_texts=3")] {
        assert_exit(&nights.laser(&["pools", "build", "--name", name], &[size]), 0);
    }
    assert_refused(&nights.laser(&["pools", "build", "--name", "a"], &[]), &["give another --name"]);
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
        assert_prints(&nights.laser(&["pools", "inspect", set], &[]), &["bytes a token"]);
    }
    assert_refused(&nights.laser(&["pools", "inspect", "c"], &[]), &["no finished pool set \"c\""]);
}

#[test]
fn other_embeddings_of_the_pools_make_another_run_and_pool_set() {
    let table = "[pools.user.embeddings]\ntable = \"DIR/vectors.jsonl\"\n";
    let nights = Nights { workspace: Workspace::with(&[table, USERS, "[[previous]]\npath = \"latest\"\n"]) };
    nights.write_users("Heat");
    let write = |scale: usize| {
        let row = |id: usize| serde_json::json!({"id": id, "embedding": [id % 2, 1 + scale * id]}).to_string() + "\n";
        fs::write(nights.workspace.path("vectors.jsonl"), (0..12).map(row).collect::<String>()).unwrap();
    };
    let runs = |scale: usize| {
        write(scale);
        nights.night(1, &[]);
        nights.names("runs").len()
    };
    assert_eq!([1, 2, 1].map(runs), [1, 2, 2]);
    let sets = |scale: usize| {
        write(scale);
        assert_exit(&nights.laser(&["pools", "build"], &[]), 0);
        nights.names("pools").len()
    };
    // Beside those of the two runs.
    assert_eq!([1, 2, 1].map(sets), [3, 4, 4]);
    // A set of which nothing can be made is not under way: erasures would wait for it.
    fs::write(nights.workspace.path("vectors.jsonl"), "{\"id\": 1, \"embedding\": [null, 1]}\n").unwrap();
    assert_refused(&nights.laser(&["pools", "build", "--name", "bad"], &[]), &["vectors.jsonl"]);
    assert!(!nights.workspace.path("out/pools/bad/sources.json").exists());
}

#[test]
fn a_damaged_pool_set_cannot_be_promoted() {
    let nights = Nights::new();
    nights.night(1, &[]);
    assert_exit(&nights.laser(&["pools", "build", "--name", "a"], &[]), 0);
    let pools = nights.names("pools/a");
    let pool = pools.iter().find(|name| name.ends_with(".pool")).unwrap();
    flip_bit(&nights.workspace.path("out/pools/a").join(pool));
    assert_refused(&nights.laser(&["pools", "promote", "a"], &[]), &[".pool"]);
    assert!(!nights.workspace.path("out/pools/promotions").exists());
}

#[test]
fn nights_beyond_those_that_are_kept_are_removed_and_the_rest_stays_whole() {
    let nights = Nights::new();
    for (day, film) in [(1, "Heat"), (2, "Alien"), (3, "Ran"), (4, "Jaws")] {
        nights.write_users(film);
        nights.night(day, &[]);
    }
    let [first, second, ..] = &nights.names("pools")[..] else {
        panic!("four nights' pools");
    };
    assert_refused(&nights.laser(&["pools", "promote", first], &[]), &["a set without pools"]);
    assert_exit(&nights.laser(&["pools", "promote", second], &[]), 0);
    let before = nights.workspace.parts();
    assert_refused(&nights.workspace.output("prune", &[]), &["[output] keep_nights"]);
    let mut dry = nights.workspace.command("prune", &["output.keep_nights=3"]);
    let dry = dry.arg("--dry-run").output().unwrap();
    assert_prints(&dry, &["would remove", "dt=2026-01-01"]);
    assert_eq!(nights.workspace.parts(), before);
    // By the next night, once it is published; the promoted pools of the second night stay.
    nights.write_users("Tron");
    nights.night(5, &["output.keep_nights=2"]);
    assert_eq!(nights.names("profiles/kind=user"), ["_in_force.json", "dt=2026-01-04", "dt=2026-01-05"]);
    assert_eq!(nights.names("runs").len(), 2);
    assert_eq!(nights.names("pools").len(), 4, "two nights', the promoted one, promotions");
    assert_exit(&nights.workspace.verify(), 0);
    assert_exit(&nights.laser(&["pools", "inspect", "promoted"], &[]), 0);
    nights.write_users("Big");
    nights.night(6, &["output.keep_nights=2", "run.pools=promoted"]);
    // A night of an older date is there for its readers until the next one is published.
    nights.night(2, &["output.keep_nights=2"]);
    let kept = ["_in_force.json", "dt=2026-01-02", "dt=2026-01-05", "dt=2026-01-06"];
    assert_eq!(nights.names("profiles/kind=user"), kept);
    nights.write_users("Up");
    nights.night(7, &["output.keep_nights=2"]);
    assert_eq!(nights.names("profiles/kind=user"), ["_in_force.json", "dt=2026-01-06", "dt=2026-01-07"]);
}

#[test]
fn a_night_that_is_made_again_counts_also_if_it_carries_every_text() {
    let nights = Nights::new();
    nights.night(1, &[]);
    let runs = || nights.names("profiles/kind=user/dt=2026-01-02");
    let in_force = || fs::read_to_string(nights.workspace.path("out/profiles/kind=user/_in_force.json")).unwrap();
    nights.write_users("Alien");
    nights.night(2, &[]);
    let mistaken = runs();
    assert_contains(&in_force(), &[mistaken[0].strip_prefix("run=").unwrap()]);
    // The mistake is taken back: nothing differs from the first night.
    nights.write_users("Heat");
    assert_prints(&nights.night(2, &[]), &["12 unchanged"]);
    let again = runs().into_iter().find(|run| !mistaken.contains(run)).unwrap();
    assert_contains(&in_force(), &[again.strip_prefix("run=").unwrap()]);
    assert!(!in_force().contains(mistaken[0].strip_prefix("run=").unwrap()));
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn a_price_is_told_by_pool_and_in_all() {
    let nights = Nights::new();
    let price = ["price.gpu_hour=7200", "price.currency=EUR"];
    assert_prints(&nights.night(1, &price), &["EUR, ", "per 1,000 texts"]);
    let manifest: Value = read_json(&nights.published(1)[0].join("_manifest.json"));
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
    assert_prints(&status, &["EUR per 1,000 texts"]);
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
