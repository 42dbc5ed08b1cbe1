//! The output in a real Feast, in deltalake, DuckDB, pandas and Polars, read by the very files that
//! docs/output.md names.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use laser_store::table;
use serde_json::{Value, json};

use crate::cycle::Nights;
use crate::server::installed;
use crate::{assert_exit, entries, only, parts, stderr, stdout};

/// The Python with Feast and its scripts.
fn python() -> PathBuf {
    installed("LASER_FEAST", "feast.sh").into()
}

fn root() -> PathBuf {
    std::path::absolute(".").unwrap()
}

/// All rows below a folder, by entity.
pub(crate) fn rows(folder: &Path) -> BTreeMap<i64, Value> {
    let decode =
        |(path, bytes): (PathBuf, Vec<u8>)| table::decode::<Value>(&path.display().to_string(), bytes.into()).unwrap();
    let rows = parts(folder).into_iter().flat_map(decode);
    rows.map(|row| (row["entity_id"].as_i64().unwrap(), row)).collect()
}

/// Two nights of twelve users with embeddings and ids, the second run twice.
struct Outputs {
    nights: Nights,
    first: BTreeMap<i64, Value>,
    second: BTreeMap<i64, Value>,
}

impl Outputs {
    /// With these settings throughout.
    fn new(common: &[&str]) -> Self {
        let nights = Nights::new();
        let encoder = format!("encoder.path={}", installed("LASER_MINILM", "encoder.sh"));
        let night = |day: u32, settings: &[&str]| {
            nights.night(day, &[&[encoder.as_str()], common, settings].concat());
            let settings = [&["ids.clusters=3", "ids.levels=2"], common].concat();
            assert_exit(&nights.command("ids", day, &settings).output().unwrap(), 0);
        };
        let folder = |day: u32| nights.workspace.path(&format!("out/profiles/kind=user/dt=2026-01-{day:02}"));
        night(1, &[]);
        let first = rows(&folder(1));
        nights.write_users("Alien");
        night(2, &[]);
        let once = only(&folder(2));
        night(2, &["generate.max_new_tokens=12"]);
        let second = rows(entries(&folder(2)).iter().find(|run| **run != once).unwrap());
        Self { nights, first, second }
    }

    fn out(&self) -> PathBuf {
        self.nights.workspace.path("out")
    }

    /// A tool of the Python's environment, in the Feast repository of the examples.
    fn tool(&self, name: &str, arguments: &[&Path]) -> Output {
        let repository = self.nights.workspace.path("feast");
        let mut command = Command::new(python().with_file_name(name));
        command.current_dir(repository).env("LASER_OUTPUT", self.out());
        command.args(arguments).output().unwrap()
    }
}

#[test]
fn duckdb_pandas_and_polars_read_whole_nights_as_documented() {
    let outputs = Outputs::new(&[]);
    assert_exit(&outputs.nights.workspace.verify(), 0);
    // A run that is under way: its parts are there, its `_SUCCESS` is not.
    let night = outputs.out().join("profiles/kind=user/dt=2026-01-02");
    let finished = &entries(&night)[0];
    let unfinished = night.join("run=2026-01-02-ffffffffffff");
    fs::create_dir(&unfinished).unwrap();
    for (part, bytes) in parts(finished) {
        fs::write(unfinished.join(part.file_name().unwrap()), bytes).unwrap();
    }
    let (script, examples) = (root().join("tests/feast/report.py"), root().join("docs/examples"));
    let report = python_report(&[&script, &outputs.out(), &examples, Path::new("2026-01-02")], &[]);
    check_frames(&report, &outputs);
    check_duckdb(&report["duckdb"], &outputs);

    // The run that was made first is put in force in place of the other.
    let first = entries(&night).into_iter().find(|run| tokens(&rows(run)) != tokens(&outputs.second)).unwrap();
    let (run, first) = (first.file_name().unwrap().to_str().unwrap().replace("run=", ""), tokens(&rows(&first)));
    assert_exit(&outputs.nights.laser(&["outputs", "promote", &run], &[]), 0);
    let report = python_report(&[&script, &outputs.out(), &examples, Path::new("2026-01-02")], &[]);
    assert_eq!(report["pandas"]["tokens"], first);
    assert_eq!(report["polars"]["tokens"], tokens(&outputs.first) + first);
    assert_eq!(report["duckdb"]["by_night"][1][2], first);
}

#[test]
fn feast_deltalake_and_polars_read_delta_tables_as_documented() {
    let outputs = Outputs::new(&["output.table=delta", "encoder.layout=list"]);
    let verified = outputs.nights.workspace.verify();
    assert_exit(&verified, 0);
    assert_eq!(stdout(&verified).matches("agrees: the table").count(), 2, "texts and ids");
    let examples = root().join("docs/examples");
    let repository = outputs.nights.workspace.path("feast");
    fs::create_dir(&repository).unwrap();
    for file in ["feature_store.yaml", "features.py"] {
        fs::copy(examples.join("feast").join(file), repository.join(file)).unwrap();
    }
    assert_exit(&outputs.tool("feast", &[Path::new("apply")]), 0);
    let interactions = "entity_id,event_timestamp,label\n\
        1,2026-01-01T12:00:00Z,0\n\
        1,2026-01-02T12:00:00Z,1\n\
        2,2025-12-31T23:59:59Z,1\n\
        3,2026-01-05T00:00:00Z,1\n\
        4,2026-01-20T00:00:00Z,0\n";
    fs::write(repository.join("interactions.csv"), interactions).unwrap();
    let script = examples.join("training_set.py");
    let arguments = [&script, Path::new("."), Path::new("interactions.csv"), Path::new("set.parquet")];
    assert_exit(&outputs.tool("python", &arguments), 0);
    let (script, set) = (root().join("tests/feast/delta.py"), repository.join("set.parquet"));
    let report = python_report(&[&script, &outputs.out(), &examples, Path::new("2026-01-02"), &set], &[]);
    check_training(&report["training"], &outputs);
    let (first, second) = (tokens(&outputs.first), tokens(&outputs.second));
    assert_eq!(
        report["deltalake"],
        json!({"texts": 12, "tokens": second, "runs": 1}),
        "the later run has replaced one"
    );
    let types = json!({
        "entity_id": "Int64", "dt": "Date", "text": "String", "text_tokens": "Int64",
        "embedding": "List(Float32)", "knowledge_ids": "List(Int64)",
    });
    assert_eq!(report["polars"], json!({"rows": 24, "tokens": first + second, "types": types}));
}

#[test]
fn lists_are_read_as_documented_and_a_row_for_each_item_holds_the_same() {
    let settings = ["output.table=delta", "draft.adaptive=false", "lists.steps=1"];
    let night = crate::lists::workspace();
    assert_exit(&night.run(&settings), 0);
    assert_exit(&night.verify(), 0);
    let examples = root().join("docs/examples/lists");
    let repository = night.path("feast");
    fs::create_dir(&repository).unwrap();
    for file in ["feature_store.yaml", "features.py"] {
        fs::copy(examples.join(file), repository.join(file)).unwrap();
    }
    let output = night.path("out");
    let environment = [("LASER_OUTPUT", output.display().to_string())];
    let mut feast = Command::new(python().with_file_name("feast"));
    let applied = feast.arg("apply").current_dir(&repository).envs(environment.iter().cloned()).output().unwrap();
    assert_exit(&applied, 0);
    let script = root().join("tests/feast/lists.py");
    let report = python_report(&[&script, &output, &examples, Path::new("2026-01-02"), &repository], &environment);
    let lists = crate::lists::only_lists(&night, "2026-01-02");
    let rows = lists.iter().flat_map(|(user, (items, scores))| {
        let listed = items.iter().zip(scores).zip(1..);
        listed.map(move |((item, score), rank): (_, i64)| json!([user, rank, item, score]))
    });
    let rows: Vec<Value> = rows.collect();
    for reader in ["pandas", "polars", "feast", "duckdb"] {
        assert_eq!(report[reader], json!(rows), "{reader}");
    }
    assert_eq!(report["by_night"][0].as_array().unwrap()[..3], [json!("2026-01-02"), json!(60), json!(300)]);
    assert_eq!((&report["records"], &report["rows"]), (&json!(60), &json!(60)));

    // A row for each item: the log counts what the file has.
    let ranked = crate::lists::workspace();
    assert_exit(&ranked.run(&[&settings[..], &["lists.rows=item"]].concat()), 0);
    assert_exit(&ranked.verify(), 0);
    // It ends as tests/feast/report.py does, and for the same reason.
    let script = "import json, os, sys; from deltalake import DeltaTable; table = DeltaTable(sys.argv[1]); \
        frame = table.to_pandas()[['entity_id', 'rank', 'item_id', 'score']]; \
        counted = sum(table.get_add_actions(flatten=True).column('num_records').to_pylist()); \
        print(json.dumps([counted, sorted(frame.values.tolist())])); sys.stdout.flush(); os._exit(0)";
    let table = ranked.path("out/recommendations/kind=user");
    let report = python_report(&[Path::new("-c"), Path::new(script), &table], &[]);
    assert_eq!(report, json!([300, rows]));
}

/// What a script of tests/feast prints.
#[track_caller]
pub(crate) fn python_report(arguments: &[&Path], environment: &[(&str, String)]) -> Value {
    let report = Command::new(python()).args(arguments).envs(environment.iter().cloned()).output().unwrap();
    assert_exit(&report, 0);
    serde_json::from_str(&stdout(&report)).unwrap_or_else(|e| panic!("{e}: {}", stderr(&report)))
}

/// Each interaction has what was known at its time: of the night before it, in the version that was created last.
fn check_training(training: &Value, outputs: &Outputs) {
    let rows = training.as_array().unwrap();
    let of = |user: i64, day: &str| {
        let is = |row: &&Value| row["entity_id"] == user && row["event_timestamp"].as_str().unwrap().starts_with(day);
        rows.iter().find(is)
    };
    for (user, day, night) in
        [(1, "2026-01-01", &outputs.first), (1, "2026-01-02", &outputs.second), (3, "2026-01-05", &outputs.second)]
    {
        let row = of(user, day).unwrap();
        for feature in ["text", "text_tokens"] {
            let (found, expected) = (&row[feature], &night[&user][feature]);
            // pandas has integers with gaps as floats.
            let is_equal = found == expected || found.as_f64() == expected.as_f64() && found.is_f64();
            assert!(is_equal, "{feature} of {user} on {day}: {found}, expected {expected}");
        }
        assert_eq!(embedding(row), embedding(&night[&user]));
        assert_eq!(embedding(row).len(), 384);
        assert_eq!(row["knowledge_ids"].as_array().unwrap().len(), 2);
    }
    let texts = |user: i64| (&outputs.first[&user]["text"], &outputs.second[&user]["text"]);
    assert_ne!(texts(1).0, texts(1).1, "the nights have different texts");
    // Nothing was known before the first night, and nothing is known any more when it is older than the view allows.
    for (user, day) in [(2, "2025-12-31"), (4, "2026-01-20")] {
        let row = of(user, day).unwrap();
        for feature in ["text", "text_tokens", "embedding", "knowledge_ids"] {
            assert!(row[feature].is_null(), "{feature} of {user} on {day}: {row}");
        }
    }
}

fn embedding(row: &Value) -> Vec<f32> {
    serde_json::from_value(row["embedding"].clone()).unwrap()
}

fn tokens(rows: &BTreeMap<i64, Value>) -> i64 {
    rows.values().map(|row| row["text_tokens"].as_i64().unwrap()).sum()
}

fn check_frames(report: &Value, outputs: &Outputs) {
    let (first, second) = (tokens(&outputs.first), tokens(&outputs.second));
    let expected = json!({
        "texts": 12, "tokens": second, "embeddings": [12, 384, "float32"], "ids": [12, 2, "int64"],
        "event_timestamp": "datetime64[us, UTC]",
    });
    assert_eq!(report["pandas"], expected);
    let types = json!({
        "entity_id": "Int64", "dt": "Date", "text": "String", "text_tokens": "Int64",
        "embedding": "Array(Float32, shape=(384,))", "knowledge_ids": "List(Int64)",
    });
    let expected = json!({"rows": 24, "tokens": first + second, "types": types});
    assert_eq!(report["polars"], expected);
}

fn check_duckdb(report: &Value, outputs: &Outputs) {
    let accepted = |rows: &BTreeMap<i64, Value>| -> i64 {
        rows.values().map(|row| row["accepted_tokens"].as_i64().unwrap()).sum()
    };
    let night = |date: &str, rows| json!([date, 12, tokens(rows), accepted(rows)]);
    let expected = json!([night("2026-01-01", &outputs.first), night("2026-01-02", &outputs.second)]);
    assert_eq!(report["by_night"], expected);
    let similar = report["similar"].as_array().unwrap();
    assert_eq!(similar.len(), 12);
    assert_eq!(similar[0][0], 0, "a text is most similar to itself: {similar:?}");
    let counts = report["users_by_id"].as_array().unwrap().iter();
    let users: i64 = counts.map(|row| row[2].as_i64().unwrap()).sum();
    assert_eq!(users, 24);
}
