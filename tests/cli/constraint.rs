//! Nights whose texts follow a schema, an expression or a grammar: every row can be read, and is there as columns.

use std::collections::BTreeMap;
use std::fs;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Fields, Int64Type};
use bytes::Bytes;
use laser_schema::audit::{Audit, Proposer};
use laser_schema::job::{Action, Plan};
use laser_schema::knowledge::{ErrorRecord, KnowledgeRecord};
use laser_schema::manifest::Manifest;
use laser_store::part::decode_part;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

use crate::distributed::{Cluster, Process};
use crate::faults::{start_and_kill, texts, without_run};
use crate::{COMMON, TONIGHT, Workspace, assert_contains, assert_exit, assert_prints, assert_refused, entries, laser};
use crate::{read_json, stderr};

/// Short enough for the fixture's 256 tokens, whatever it writes.
fn taste() -> Value {
    json!({
        "type": "object",
        "properties": {
            "taste": {"type": "string", "maxLength": 16},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "likes": {"type": "array", "items": {"enum": ["drama", "comedy"]}, "maxItems": 2},
            "home": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 6}},
                "required": ["city"],
                "additionalProperties": false
            },
            "note": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
        },
        "required": ["taste", "age", "likes", "note"],
        "additionalProperties": false
    })
}

/// The settings of a night under a schema, which a file of the workspace holds.
struct Constrained {
    workspace: Workspace,
    schema: String,
}

impl Constrained {
    fn new() -> Self {
        Self::of(Workspace::new(), &taste())
    }

    fn of(workspace: Workspace, schema: &Value) -> Self {
        let file = workspace.path("taste.json");
        fs::write(&file, schema.to_string()).unwrap();
        Self { schema: format!("generate.schema={}", file.display()), workspace }
    }

    fn settings<'a>(&'a self, others: &[&'a str]) -> Vec<&'a str> {
        [&[self.schema.as_str(), "generate.max_new_tokens=100"], others].concat()
    }

    #[track_caller]
    fn run(&self, others: &[&str]) -> std::process::Output {
        let output = self.workspace.run(&self.settings(others));
        assert_exit(&output, 0);
        output
    }

    fn texts(&self) -> BTreeMap<(String, String), String> {
        without_run(texts(&self.workspace))
    }
}

/// The rows of a night, with their parsed texts.
fn rows(workspace: &Workspace, date: &str) -> Vec<(KnowledgeRecord, Value)> {
    let mut rows = Vec::new();
    for bytes in workspace.parts_of(date).into_values().map(Bytes::from) {
        let records = decode_part("part", bytes.clone()).unwrap().0;
        let parsed = batches(bytes).iter().flat_map(parsed).collect::<Vec<_>>();
        assert_eq!(records.len(), parsed.len());
        rows.extend(records.into_iter().zip(parsed));
    }
    assert!(!rows.is_empty());
    rows
}

fn batches(bytes: Bytes) -> Vec<RecordBatch> {
    ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap().build().unwrap().map(Result::unwrap).collect()
}

/// The structs of the column, nulls included.
fn parsed(batch: &RecordBatch) -> Vec<Value> {
    let column = batch.column_by_name("parsed").unwrap().as_struct();
    assert_eq!(column.null_count(), 0);
    let string = |name: &str, row| column.column_by_name(name).unwrap().as_string::<i32>().value(row).to_owned();
    let row = |row| {
        let home = column.column_by_name("home").unwrap().as_struct();
        let city = home.column_by_name("city").unwrap().as_string::<i32>();
        let likes = column.column_by_name("likes").unwrap().as_list::<i32>().value(row);
        let likes: Vec<String> = likes.as_string::<i32>().iter().flatten().map(str::to_owned).collect();
        let mut found = json!({
            "taste": string("taste", row),
            "age": column.column_by_name("age").unwrap().as_primitive::<Int64Type>().value(row),
            "likes": likes,
        });
        if home.is_valid(row) {
            found["home"] = json!({"city": city.value(row)});
        }
        // A field of two types is JSON as text.
        found["note"] = serde_json::from_str(&string("note", row)).unwrap();
        found
    };
    (0..batch.num_rows()).map(row).collect()
}

/// That a value follows the schema above.
#[track_caller]
fn assert_valid(value: &Value) {
    let object = value.as_object().unwrap();
    assert!(object.keys().all(|key| taste()["properties"].get(key).is_some()), "{value}");
    assert!(value["taste"].as_str().is_some_and(|taste| taste.chars().count() <= 16), "{value}");
    assert!(value["age"].as_i64().is_some_and(|age| (0..=120).contains(&age)), "{value}");
    let likes = value["likes"].as_array().unwrap();
    assert!(likes.len() <= 2 && likes.iter().all(|like| like == "drama" || like == "comedy"), "{value}");
    assert!(value["note"].is_boolean() || value["note"].is_i64(), "{value}");
}

#[test]
fn every_text_of_a_schema_parses_and_is_there_as_columns() {
    let night = Constrained::new();
    assert_prints(&night.run(&[]), &["needed no forward of their own", "Sample user"]);
    assert_exit(&night.workspace.verify(), 0);
    for (record, parsed) in rows(&night.workspace, "2026-01-02") {
        let value: Value = serde_json::from_str(&record.text).unwrap();
        assert_valid(&value);
        assert_eq!(value, parsed);
    }
    for folder in night.workspace.published("2026-01-02") {
        let manifest: Manifest = read_json(&folder.join("_manifest.json"));
        let constraint = serde_json::to_value(manifest.spec.constraint.clone().unwrap()).unwrap();
        assert_eq!(constraint["schema"]["properties"], taste()["properties"]);
        assert!(manifest.figures.values().all(|figures| figures.forced > 0 && figures.forced < figures.tokens));
    }
    let run = entries(&night.workspace.path("out/runs")).pop().unwrap();
    let plan: Plan = read_json(&run.join("plan.json"));
    let mut audited = 0;
    for job in plan.shards.iter().filter(|job| job.action == Action::Audit) {
        let audit: Audit = read_json(&night.workspace.path("out").join(&job.output));
        for pair in &audit.pairs {
            // Strict texts are those of plain decoding, which follows the schema as well.
            assert_valid(&serde_json::from_str(&pair.plain).unwrap());
            assert!(pair.identical && pair.proposed[&Proposer::Constraint] > 0, "{pair:?}");
            audited += 1;
        }
    }
    assert!(audited > 0);
}

#[test]
fn the_texts_of_a_schema_depend_on_nothing_else() {
    let expected = Constrained::new();
    expected.run(&[]);
    for settings in [
        ["generate.batch=5", "draft.adaptive=false", "draft.nodes=3"],
        ["generate.step_tokens=40", "draft.method=prompt-lookup", "run.shard_rows=3"],
        ["generate.batch=1", "draft.method=none", "run.audit_share=0"],
        ["draft.method=lookahead", "run.audit_share=0", "generate.batch=3"],
    ] {
        let night = Constrained::new();
        night.run(&settings);
        assert_eq!(night.texts(), expected.texts(), "{settings:?}");
    }
}

#[test]
fn relaxed_and_drawn_texts_follow_the_schema_too() {
    for settings in [
        ["verification.policy=relaxed", "verification.p=0.01", "verification.k=4"].as_slice(),
        &["verification.policy=conditional", "verification.beta=0.02", "verification.sources=all"],
        &["generate.temperature=1.2", "generate.seed=4", "generate.samples=3"],
        &["generate.temperature=0.9", "generate.top_k=40", "generate.top_p=0.9"],
        &["generate.temperature=1.0", "verification.policy=typical", "verification.epsilon=0.02"],
    ] {
        let night = Constrained::new();
        night.run(settings);
        assert_exit(&night.workspace.verify(), 0);
        for (record, parsed) in rows(&night.workspace, "2026-01-02") {
            assert_valid(&serde_json::from_str(&record.text).unwrap());
            assert_valid(&parsed);
            record.samples.iter().for_each(|text| assert_valid(&serde_json::from_str(text).unwrap()));
        }
    }
}

#[test]
fn a_killed_run_under_a_schema_goes_on_and_texts_are_carried_until_the_schema_changes() {
    let undisturbed = Constrained::new();
    undisturbed.run(&[]);
    let night = Constrained::new();
    for shards in [1, 3] {
        start_and_kill(night.workspace.command("run", &night.settings(&[])), shards);
    }
    night.run(&[]);
    assert_eq!(night.texts(), undisturbed.texts());
    night.workspace.configure(&[COMMON, "[[previous]]\npath = \"latest\"\n", TONIGHT]);
    let tonight = rows(&night.workspace, "2026-01-02");
    let of = |rows: &[(KnowledgeRecord, Value)]| -> BTreeMap<_, _> {
        rows.iter().map(|(row, parsed)| ((row.pool.clone(), row.entity_id.to_string()), parsed.clone())).collect()
    };
    assert_contains(&crate::stdout(&night.run(&["run.date=2026-01-03"])), &[" 0 generated"]);
    assert_eq!(of(&rows(&night.workspace, "2026-01-03")), of(&tonight));
    let mut other = taste();
    other["properties"]["age"]["maximum"] = json!(9);
    fs::write(night.workspace.path("taste.json"), other.to_string()).unwrap();
    let changed = night.run(&["run.date=2026-01-04"]);
    assert_contains(&crate::stdout(&changed), &[" 0 unchanged and carried forward"]);
    let ages = rows(&night.workspace, "2026-01-04").into_iter().map(|(_, parsed)| parsed["age"].as_i64().unwrap());
    assert!(ages.clone().count() > 0 && ages.clone().all(|age| age <= 9));
    assert_exit(&night.workspace.verify(), 0);
}

#[test]
fn workers_write_what_one_process_writes_under_a_schema() {
    let expected = Constrained::new();
    expected.run(&[]);
    let cluster = Cluster::new("LASER_NATS_NEW");
    let schema = cluster.tonight.path("taste.json");
    fs::write(&schema, taste().to_string()).unwrap();
    let settings = [&format!("generate.schema={}", schema.display()), "generate.max_new_tokens=100"];
    let coordinator = cluster.coordinator(&settings);
    // Without the schema a worker would write something else.
    let stranger = cluster.start("worker", &["generate.max_new_tokens=100"]);
    stranger.wait_for("it wants constraint", 1);
    stranger.assert_ends(65);
    let workers = [(); 2].map(|()| cluster.start("worker", &[settings.as_slice(), &["generate.batch=3"]].concat()));
    coordinator.assert_ends(0);
    workers.into_iter().for_each(|worker| drop(Process::terminate(worker)));
    assert_exit(&cluster.tonight.verify(), 0);
    let tonight = expected.texts().into_iter().filter(|((folder, _), _)| folder.contains("dt=2026-01-02")).collect();
    assert_eq!(without_run(texts(&cluster.tonight)), tonight);
}

#[test]
fn texts_follow_an_expression_or_a_grammar() {
    let workspace = Workspace::new();
    let settings = [r"generate.regex='(Likes|Avoids) [a-z]{3,9}( and [a-z]{3,9})?\.'", "generate.max_new_tokens=60"];
    assert_exit(&workspace.run(&settings), 0);
    for text in texts(&workspace).into_values() {
        let words = text.strip_prefix("Likes ").or(text.strip_prefix("Avoids ")).unwrap().strip_suffix('.').unwrap();
        assert!(words.split(" and ").all(|word| (3..=9).contains(&word.len())), "{text}");
        assert!(words.split(" and ").count() <= 2, "{text}");
    }
    let workspace = Workspace::new();
    let grammar = workspace.path("list.lark");
    fs::write(&grammar, "start: WORD (\"; \" WORD)~1..2\nWORD: /[a-z]{2,8}/\n").unwrap();
    let grammar = format!("generate.grammar={}", grammar.display());
    assert_exit(&workspace.run(&[&grammar, "generate.max_new_tokens=60"]), 0);
    for text in texts(&workspace).into_values() {
        assert!((2..=3).contains(&text.split("; ").count()), "{text}");
        assert!(text.split("; ").all(|word| word.chars().all(|c| c.is_ascii_lowercase())), "{text}");
    }
    assert_exit(&workspace.verify(), 0);
}

#[test]
fn a_text_that_is_cut_off_is_an_error_and_no_row() {
    let night = Constrained::new();
    let output = night.workspace.run(&[&night.schema, "generate.max_new_tokens=20", "output.min_coverage=0"]);
    assert_exit(&output, 0);
    let mut cut = 0;
    for folder in night.workspace.published("2026-01-02") {
        let errors = fs::read_to_string(folder.join("_errors.jsonl")).unwrap();
        for line in errors.lines() {
            let error: ErrorRecord = serde_json::from_str(line).unwrap();
            assert_eq!(error.stage, "generate");
            assert_contains(&error.reason, &["cut off after 20 tokens", "max_new_tokens"]);
            cut += 1;
        }
    }
    assert!(cut > 0);
    assert_exit(&night.workspace.verify(), 0);
}

#[test]
fn a_table_has_the_parsed_column() {
    let night = Constrained::new();
    night.run(&["output.table=delta"]);
    assert_prints(&night.workspace.verify(), &["agrees: the table profiles/kind=user"]);
    let log = night.workspace.path("out/profiles/kind=user/_delta_log");
    let first = fs::read_to_string(&entries(&log)[0]).unwrap();
    assert_contains(&first, &[r#"\"name\":\"parsed\""#, r#"\"name\":\"taste\""#]);
}

#[test]
fn what_no_text_can_follow_is_refused_before_anything_is_written() {
    let workspace = Workspace::new();
    let file = |name: &str, text: &str| {
        fs::write(workspace.path(name), text).unwrap();
        workspace.path(name).display().to_string()
    };
    let schema = |name: &str, text: &str| format!("generate.schema={}", file(name, text));
    let good = schema("good.json", "{\"type\": \"integer\"}");
    let cases: Vec<(Vec<String>, &[&str])> = vec![
        (vec!["generate.schema=no/such.json".into()], &["[generate] schema = \"no/such.json\"", "cannot be read"]),
        (vec!["generate.grammar=no/such.lark".into()], &["[generate] grammar", "cannot be read"]),
        (vec![schema("a.json", "{")], &["[generate] schema", "a.json", "not JSON"]),
        (vec![schema("b.json", "{\"type\": \"objekt\"}")], &["[generate] schema", "cannot be compiled"]),
        (vec![schema("c.json", "{\"type\": \"integer\", \"minimum\": 4, \"maximum\": 2}")], &["[generate] schema"]),
        (vec!["generate.regex='('".into()], &["[generate] regex", "cannot be compiled"]),
        (vec![good.clone(), "generate.regex='a+'".into()], &["[generate] schema, regex: a text follows one of them"]),
        (vec![good.clone(), "generate.stop=['x']".into()], &["[generate] stop", "remove stop"]),
        (vec![good.clone(), "model.engine=mistralrs".into()], &["[generate] schema", "engine = \"tree\""]),
        (
            vec![good, "lists.catalogue.path=items.parquet".into()],
            &["[generate] schema: lists follow the catalogue", "remove schema"],
        ),
    ];
    for (settings, words) in cases {
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let output = workspace.run(&settings);
        assert_refused(&output, words);
        assert!(!workspace.path("out").exists(), "{settings:?}: {}", stderr(&output));
    }
}

#[test]
fn the_example_of_factors_is_a_struct_with_a_field_for_each() {
    let output = laser().args(["plan", "docs/examples/factors/laser.toml"]).output().unwrap();
    assert_exit(&output, 0);
    // The fixture's 256 tokens hold the factors in a few characters each.
    let text = fs::read_to_string("docs/examples/factors/factors.json").unwrap();
    let schema: Value = serde_json::from_str(&text.replace("200", "3")).unwrap();
    let factors: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
    assert_eq!(factors.len(), 8);
    let night = Constrained::of(Workspace::new(), &schema);
    night.run(&["generate.max_new_tokens=140", "prompt.max_tokens=100"]);
    for (_, bytes) in night.workspace.parts() {
        let batches = batches(bytes.into());
        let schema = batches[0].schema();
        let field = |name: &&String| Field::new(name.as_str(), DataType::Utf8, true);
        let fields: Fields = factors.iter().map(field).collect();
        assert_eq!(schema.field_with_name("parsed").unwrap().data_type(), &DataType::Struct(fields));
    }
}
