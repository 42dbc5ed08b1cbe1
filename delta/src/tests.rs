//! A table on a local disk through nights, kills, races, reruns and removal.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;

use arrow::datatypes::{DataType, Field, Schema};
use jiff::Timestamp;
use jiff::civil::{Date, date};
use laser_schema::embedding::EmbeddingLayout;
use laser_schema::entity::IdType;
use laser_schema::knowledge::{Content, SCHEMA_VERSION, WRITER};
use laser_schema::layout::DataSet;
use laser_schema::lists::ListRows;
use laser_schema::manifest::{AnyManifest, MANIFEST, Manifest, PartEntry};
use laser_schema::{Digest, Kind};
use laser_store::part::record_schema;
use laser_store::{Location, data_set, embedding_column, table};
use serde::Serialize;
use serde_json::{Value, json};

use crate::night::Night;
use crate::{DeltaError, Table};

const FIRST: Date = date(2026, 1, 1);
const SECOND: Date = date(2026, 1, 2);

#[derive(Clone, Serialize)]
struct Row {
    entity_id: Value,
    text: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding: Option<[f32; 2]>,
}

fn part_entry(name: &str, rows: u64, bytes: u64) -> PartEntry {
    PartEntry { name: name.to_owned(), rows, table_rows: None, bytes, digest: Digest::of(b"") }
}

fn manifest_of(data_set: DataSet, night: &Night) -> AnyManifest {
    Manifest {
        version: SCHEMA_VERSION,
        data_set,
        run: night.run.clone(),
        kind: Kind::User,
        date: night.date,
        created: night.created,
        writer: WRITER.to_owned(),
        rows: night.parts.iter().map(|part| part.rows).sum(),
        details: serde_json::Map::new(),
        parts: night.parts.clone(),
    }
}

/// An output with a table of users' texts.
struct Output {
    _folder: tempfile::TempDir,
    root: Location,
    table: Table,
    /// When the latest run was created, in seconds.
    clock: AtomicI64,
}

impl Output {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = Location::parse(folder.path().to_str().unwrap()).unwrap();
        let table = Table::new(&root, DataSet::Profiles, Kind::User);
        Self { _folder: folder, root, table, clock: AtomicI64::default() }
    }

    fn folder(&self, night: &Night) -> Location {
        self.root.join("profiles/kind=user").join(&night.folder())
    }

    /// Writes a run of two parts with three rows and one.
    async fn run(&self, date: Date, run: &str) -> Night {
        self.run_of(date, run, &[3, 1], json!(7), None).await
    }

    async fn run_of(
        &self,
        date: Date,
        run: &str,
        parts: &[usize],
        id: Value,
        layout: Option<EmbeddingLayout>,
    ) -> Night {
        let created = Timestamp::from_second(self.clock.fetch_add(1, Relaxed)).unwrap();
        let mut night = Night { date, run: run.to_owned(), created, parts: Vec::new() };
        let id_type = if id.is_i64() { DataType::Int64 } else { DataType::Utf8 };
        let fields = [("entity_id", id_type), ("text", DataType::Utf8)];
        let fields = fields.map(|(name, data_type)| Field::new(name, data_type, false)).into_iter();
        let embedding = layout.map(|layout| embedding_column::field(layout, 2));
        let schema = Arc::new(Schema::new(fields.chain(embedding).collect::<Vec<_>>()));
        let row = Row { entity_id: id, text: "Likes noir.", embedding: layout.map(|_| [0.5, 0.5]) };
        for (part, &rows) in parts.iter().enumerate() {
            let name = format!("part-{part:05}.parquet");
            let bytes = table::encode(&name, schema.clone(), &vec![row.clone(); rows], &[]).unwrap();
            night.parts.push(part_entry(&name, rows as u64, bytes.len() as u64));
            self.folder(&night).join(&name).write(bytes).await.unwrap();
        }
        self.write_manifest(&night).await;
        night
    }

    async fn write_manifest(&self, night: &Night) {
        let json = serde_json::to_vec(&manifest_of(DataSet::Profiles, night)).unwrap();
        self.folder(night).join(MANIFEST).write(json.into()).await.unwrap();
    }

    async fn finish(&self, night: &Night) {
        data_set::complete(&self.folder(night)).await.unwrap();
    }

    async fn published(&self, date: Date, run: &str) -> Night {
        let night = self.run(date, run).await;
        self.table.publish(night.date, &night.run).await.unwrap();
        self.finish(&night).await;
        night
    }

    /// The actions of each commit.
    async fn commits(&self) -> Vec<Vec<Value>> {
        let log = self.root.join("profiles/kind=user/_delta_log");
        let mut commits = Vec::new();
        for listed in log.list().await.unwrap() {
            if listed.name.ends_with(".json") {
                let bytes = log.join(&listed.name).read().await.unwrap();
                commits.push(serde_json::Deserializer::from_slice(&bytes).into_iter().map(Result::unwrap).collect());
            }
        }
        commits
    }

    /// How many parts of each run the table has.
    async fn runs(&self) -> BTreeMap<String, usize> {
        let version = self.table.read().await.unwrap().unwrap();
        let mut runs = BTreeMap::new();
        for path in version.files.keys() {
            *runs.entry(path.split('/').nth(1).unwrap().replace("run=", "")).or_default() += 1;
        }
        runs
    }

    async fn faults(&self) -> Vec<String> {
        self.table.verify().await.unwrap().unwrap()
    }
}

fn runs<const N: usize>(runs: [(&str, usize); N]) -> BTreeMap<String, usize> {
    runs.map(|(run, parts)| (run.to_owned(), parts)).into()
}

fn actions<'a>(commit: &'a [Value], name: &str) -> Vec<&'a Value> {
    commit.iter().filter_map(|action| action.get(name)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_night_is_one_commit() {
    let output = Output::new();
    output.published(FIRST, "a").await;
    let commits = output.commits().await;
    assert_eq!(commits.len(), 2, "the empty table and the night");
    let metadata = actions(&commits[0], "metaData")[0];
    assert_eq!(metadata["partitionColumns"], json!(["kind", "dt", "run"]));
    let adds = actions(&commits[1], "add");
    assert_eq!(adds.len(), 2);
    assert_eq!(adds[0]["path"], "dt=2026-01-01/run=a/part-00000.parquet");
    assert_eq!(adds[0]["partitionValues"], json!({"kind": "user", "dt": "2026-01-01", "run": "a"}));
    let stats: Value = serde_json::from_str(adds[0]["stats"].as_str().unwrap()).unwrap();
    assert_eq!(stats, json!({"numRecords": 3, "tightBounds": true}));
    let transactions = actions(&commits[1], "txn");
    assert_eq!((&transactions[0]["appId"], &transactions[0]["version"]), (&json!("laser:a"), &json!(1)));
    assert!(output.faults().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_before_or_after_the_commit_and_a_rerun_publish_once() {
    let output = Output::new();
    let night = output.run(FIRST, "a").await;
    // Killed once the empty table was there.
    output.table.create_as(&night).await;
    assert_eq!(output.faults().await, Vec::<String>::new());
    output.table.publish(night.date, &night.run).await.unwrap();
    // Killed before `_SUCCESS`.
    let faults = output.faults().await;
    assert!(faults[0].contains("in the table, but not complete"), "{faults:?}");
    output.table.publish(night.date, &night.run).await.unwrap();
    output.finish(&night).await;
    // Run again.
    output.table.publish(night.date, &night.run).await.unwrap();
    assert_eq!(output.commits().await.len(), 2);
    assert!(output.faults().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_publishers_each_night_is_committed_once() {
    let output = Output::new();
    let mut tasks = tokio::task::JoinSet::new();
    for day in 1..=4 {
        let night = output.run(date(2026, 1, day), &format!("r{day}")).await;
        for _ in 0..3 {
            let (table, night) = (output.table.clone(), night.clone());
            tasks.spawn(async move { table.publish(night.date, &night.run).await });
        }
    }
    tasks.join_all().await.into_iter().for_each(|done| done.unwrap());
    assert_eq!(output.commits().await.len(), 1 + 4);
    assert_eq!(output.runs().await, runs([("r1", 2), ("r2", 2), ("r3", 2), ("r4", 2)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_run_replaces_its_night_and_the_first_one_stays_out() {
    let output = Output::new();
    let first = output.published(FIRST, "a").await;
    output.published(SECOND, "x").await;
    output.published(FIRST, "b").await;
    let commits = output.commits().await;
    let last = commits.last().unwrap();
    assert_eq!((actions(last, "remove").len(), actions(last, "add").len()), (2, 2), "in one commit");
    assert!(actions(last, "remove").iter().all(|file| file["path"].as_str().unwrap().contains("run=a/")));
    output.table.publish(first.date, &first.run).await.unwrap();
    output.published(date(2026, 1, 3), "y").await;
    assert_eq!(output.runs().await, runs([("b", 2), ("x", 2), ("y", 2)]));
    assert!(output.faults().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_was_removed_by_hand_and_made_anew_replaces_itself() {
    let output = Output::new();
    output.published(FIRST, "a").await;
    let anew = output.run_of(FIRST, "a", &[4], json!(7), None).await;
    output.folder(&anew).join("part-00001.parquet").remove().await.unwrap();
    output.table.publish(anew.date, &anew.run).await.unwrap();
    assert_eq!(output.runs().await, runs([("a", 1)]));
    assert!(output.faults().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_night_comes_back_only_if_it_is_run_again() {
    let output = Output::new();
    let first = output.published(FIRST, "a").await;
    output.published(SECOND, "b").await;
    let outdated = BTreeMap::from([("a".to_owned(), FIRST)]);
    output.table.remove(&outdated).await.unwrap();
    output.table.remove(&outdated).await.unwrap();
    assert_eq!(output.commits().await.len(), 4, "killed before it deleted, removal commits nothing more");
    // Another process publishes before the parts are deleted.
    output.published(date(2026, 1, 3), "c").await;
    assert_eq!(output.runs().await, runs([("b", 2), ("c", 2)]));
    assert!(output.faults().await.is_empty());
    output.table.publish(first.date, &first.run).await.unwrap();
    assert_eq!(output.runs().await, runs([("a", 2), ("b", 2), ("c", 2)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn nights_from_before_the_table_are_adopted() {
    let output = Output::new();
    output.table.remove(&BTreeMap::from([("a".to_owned(), FIRST)])).await.unwrap();
    assert!(output.table.verify().await.unwrap().is_none(), "no table");
    for run in ["b", "a"] {
        let night = output.run(FIRST, run).await;
        output.finish(&night).await;
    }
    output.run(date(2026, 1, 3), "unfinished").await;
    let fixed = output.run_of(date(2026, 1, 4), "fixed", &[1], json!(7), Some(EmbeddingLayout::Fixed)).await;
    output.finish(&fixed).await;
    let damaged = output.run(date(2026, 1, 5), "damaged").await;
    output.folder(&damaged).join("part-00000.parquet").remove().await.unwrap();
    output.finish(&damaged).await;
    output.published(SECOND, "x").await;
    assert_eq!(output.commits().await.len(), 2, "in one commit");
    assert_eq!(output.runs().await, runs([("a", 2), ("x", 2)]), "of two runs the one that was created last");
    assert!(output.faults().await.is_empty(), "what no table can hold is not missed");
}

#[tokio::test(flavor = "multi_thread")]
async fn columns_may_come_but_not_change() {
    let output = Output::new();
    output.published(FIRST, "a").await;
    let embedded = output.run_of(SECOND, "b", &[2], json!(7), Some(EmbeddingLayout::List)).await;
    output.table.publish(embedded.date, &embedded.run).await.unwrap();
    let commits = output.commits().await;
    let schema = actions(&commits[2], "metaData")[0]["schemaString"].as_str().unwrap();
    assert!(schema.contains(r#""name":"embedding","type":{"type":"array","elementType":"float""#), "{schema}");
    let error = |night: Night| {
        let table = output.table.clone();
        async move { table.publish(night.date, &night.run).await.unwrap_err() }
    };
    let texts = output.run_of(date(2026, 1, 3), "c", &[1], json!("u1"), None).await;
    let texts = error(texts).await;
    assert!(matches!(texts, DeltaError::Unfit { .. }));
    assert!(texts.to_string().contains("column entity_id is of type string, in the table it is long"), "{texts}");
    let fixed = output.run_of(date(2026, 1, 3), "d", &[1], json!(7), Some(EmbeddingLayout::Fixed)).await;
    let fixed = error(fixed).await.to_string();
    assert!(fixed.contains("[encoder] layout = \"list\""), "{fixed}");
    assert_eq!(output.commits().await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_have_a_table_of_their_own_whose_items_keep_their_type() {
    let output = Output::new();
    output.published(FIRST, "a").await;
    let lists = Table::new(&output.root, DataSet::Recommendations, Kind::User);
    let night = async |date: Date, run: &str, items| {
        let schema = record_schema(DataType::Int64, Content::Lists { items, rows: ListRows::User });
        let bytes = table::encode("part", schema, &Vec::<Row>::new(), &[]).unwrap();
        let parts = vec![part_entry("part-00000.parquet", 0, bytes.len() as u64)];
        let night = Night { date, run: run.to_owned(), created: Timestamp::UNIX_EPOCH, parts };
        let folder = lists.root.join(&night.folder());
        folder.join("part-00000.parquet").write(bytes).await.unwrap();
        let manifest = manifest_of(DataSet::Recommendations, &night);
        folder.join(MANIFEST).write(serde_json::to_vec(&manifest).unwrap().into()).await.unwrap();
        lists.publish(date, run).await.map(|()| folder)
    };
    let folder = night(FIRST, "l", IdType::Int64).await.unwrap();
    data_set::complete(&folder).await.unwrap();
    assert_eq!(lists.verify().await.unwrap(), Some(Vec::new()));
    let schema = lists.read().await.unwrap().unwrap().schema();
    let schema = serde_json::to_string(&*schema).unwrap();
    for column in [r#""name":"items","type":{"type":"array","elementType":"long""#, r#""elementType":"double""#] {
        assert!(schema.contains(column), "{schema}");
    }
    let error = night(SECOND, "m", IdType::String).await.unwrap_err().to_string();
    assert!(error.contains("recommendations/kind=user: run m does not fit the table: column items is"), "{error}");
    assert_eq!(output.runs().await, runs([("a", 2)]), "the table of texts has none of them");
    assert!(output.faults().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disagreement_of_table_and_manifests_is_found() {
    let output = Output::new();
    let mut night = output.published(FIRST, "a").await;
    let other = output.run(SECOND, "b").await;
    output.finish(&other).await;
    let bytes = night.parts[0].bytes;
    night.parts = vec![part_entry("part-00000.parquet", 4, bytes), part_entry("part-00002.parquet", 1, 1)];
    output.write_manifest(&night).await;
    let faults = output.faults().await;
    let expected = [
        "run=a/part-00000.parquet: the table says 3 rows",
        "run=a/part-00001.parquet: in the table, but not in the manifest",
        "run=a/part-00002.parquet: in the manifest, but not in the table",
        "run=b: complete, but not in the table",
    ];
    assert_eq!(faults.len(), expected.len(), "{faults:?}");
    for (fault, expected) in faults.iter().zip(expected) {
        assert!(fault.contains(expected), "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_has_checkpoints() {
    let output = Output::new();
    for day in 1..=11 {
        output.published(date(2026, 1, day), &format!("r{day}")).await;
    }
    let log = output.root.join("profiles/kind=user/_delta_log");
    assert!(log.join("_last_checkpoint").exists().await.unwrap());
    assert_eq!(output.runs().await.len(), 11);
    let first = output.table.read().await.unwrap().unwrap();
    assert_eq!(first.files.len(), 22);
    output.published(FIRST, "again").await;
    assert!(output.faults().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_erased_leave_by_one_commit_and_the_files_stay() {
    let output = Output::new();
    let mut first = output.published(FIRST, "a").await;
    output.published(SECOND, "b").await;
    output.table.restate(first.date, &first.run).await.unwrap();
    assert_eq!(output.commits().await.len(), 3, "nothing was erased");
    first.parts[0].rows = 2;
    output.write_manifest(&first).await;
    assert_eq!(output.faults().await.len(), 1);
    for _ in 0..2 {
        output.table.restate(first.date, &first.run).await.unwrap();
    }
    let commits = output.commits().await;
    let last = &commits[3];
    assert_eq!((commits.len(), actions(last, "add").len(), actions(last, "remove").len()), (4, 1, 0));
    assert_eq!(output.runs().await, runs([("a", 2), ("b", 2)]));
    assert!(output.faults().await.is_empty());
    // A night that the table does not have does not enter by it.
    let other = output.run(date(2026, 1, 3), "c").await;
    output.table.restate(other.date, &other.run).await.unwrap();
    assert_eq!(output.commits().await.len(), 4);
}
