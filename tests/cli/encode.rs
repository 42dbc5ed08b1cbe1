//! Embeddings of a night's texts: made with them, and made of them later.

#[path = "../../features/src/encoder/tests/tiny_bert.rs"]
mod tiny_bert;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use bytes::Bytes;
use laser_schema::EntityId;
use laser_schema::embedding_set::EmbeddingSet;
use laser_schema::manifest::Manifest;
use laser_store::table;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::Deserialize;
use serde_json::Value;

use crate::distributed::Cluster;
use crate::{
    Workspace, assert_contains, assert_exit, assert_prints, assert_refused, entries, flip_bit, laser, parts, read_json,
    stderr, stdout,
};

/// Embeddings by kind, night and entity.
type Embeddings = BTreeMap<(String, String), Vec<f32>>;

/// A tiny encoder in a workspace, as a setting.
pub(crate) fn encoder(workspace: &Workspace) -> String {
    let directory = workspace.path("encoder");
    tiny_bert::write(&directory, 7);
    format!("encoder.path={}", directory.display())
}

#[derive(Deserialize)]
struct Row {
    entity_id: EntityId,
    embedding: Vec<f32>,
}

/// The type of a part's column of embeddings.
fn column_type(part: &[u8]) -> String {
    let reader = ParquetRecordBatchReaderBuilder::try_new(Bytes::copy_from_slice(part)).unwrap();
    reader.schema().field_with_name("embedding").unwrap().data_type().to_string()
}

/// All embeddings below a folder, and the type of their column.
fn read(root: &Path) -> (Embeddings, String) {
    let (mut all, mut found) = (BTreeMap::new(), String::new());
    for (path, bytes) in parts(root) {
        let night = path.strip_prefix(root).unwrap().display().to_string();
        let night = night.split("/run=").next().unwrap().to_owned();
        found = column_type(&bytes);
        for Row { entity_id, embedding } in table::decode("part", bytes.into()).unwrap() {
            assert!(all.insert((night.clone(), entity_id.to_string()), embedding).is_none(), "{entity_id} twice");
        }
    }
    (all, found)
}

#[track_caller]
fn assert_close(a: &Embeddings, b: &Embeddings) {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (key, row) in a {
        let close = row.iter().zip(&b[key]).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(close, "{key:?}: {row:?} {:?}", b[key]);
    }
}

fn manifests(root: &Path) -> Vec<PathBuf> {
    let below = |path: PathBuf| match path.is_dir() {
        true => manifests(&path),
        false => Vec::from_iter(path.ends_with("_manifest.json").then_some(path)),
    };
    entries(root).into_iter().flat_map(below).collect()
}

fn encode(workspace: &Workspace, settings: &[&str], args: &[&str]) -> Output {
    let mut command = workspace.command("encode", settings);
    command.args(args).output().unwrap()
}

#[test]
fn a_night_with_an_encoder_has_the_embeddings_that_encode_makes_of_its_texts() {
    let (with, without) = (Workspace::new(), Workspace::new());
    let setting = encoder(&with);
    assert_prints(&with.run(&[&setting]), &["embeddings of 8 dimensions; "]);
    assert_exit(&with.verify(), 0);
    let (column, list) = read(&with.path("out/profiles"));
    assert_eq!(list, "FixedSizeList(8 x non-null Float32)");
    for path in manifests(&with.path("out/profiles")) {
        let manifest: Manifest = read_json(&path);
        let embedding = manifest.details.embedding.as_ref().unwrap();
        assert_eq!(embedding.encoder_digest, embedding.spec.encoder.digest());
        // A token a letter: no text fits into 32.
        assert_eq!(embedding.truncated, manifest.rows);
    }
    // Published is published: the same command finds its run, and another layout is another run.
    assert_prints(&with.run(&[&setting]), &["complete already"]);
    assert_exit(&without.run(&[]), 0);
    let texts = without.parts();
    assert_exit(&encode(&without, &[&setting], &[]), 0);
    assert_eq!(without.parts(), texts, "no text is generated or changed");
    let tonight = |mut all: Embeddings| {
        all.retain(|(night, _), _| night.contains("dt=2026-01-02"));
        all
    };
    let (encoded, _) = read(&without.path("out/embeddings"));
    assert_close(&tonight(column), &encoded);
    assert_exit(&without.verify(), 0);
    assert_exit(&without.output("ids", &[&setting, "ids.clusters=4"]), 0);
}

#[test]
fn an_evaluation_finds_the_embeddings_of_a_nights_texts_by_its_output() {
    let workspace = Workspace::new();
    assert_exit(&workspace.run(&[&encoder(&workspace)]), 0);
    let (rows, _) = read(&workspace.path("out/profiles"));
    let mut table = "user,item,rating,timestamp\n".to_owned();
    for (time, (_, id)) in rows.keys().enumerate().filter(|(_, (place, _))| place.starts_with("kind=item")) {
        (0..40).for_each(|user| writeln!(table, "{user},{id},{},{}", user % 2 * 5, time * 40 + user).unwrap());
    }
    fs::write(workspace.path("table.csv"), table).unwrap();
    let config = "[interactions]\npath = \"table.csv\"\n[eval]\nseeds = 2\nmodels = [\"din\"]\n[[eval.knowledge]]\n\
                  name = \"night\"\nitem_embeddings = { table = \"out\", id = \"entity_id\" }\n";
    fs::write(workspace.path("eval.toml"), config).unwrap();
    let mut command = laser();
    command.current_dir(workspace.path("")).args(["eval", "ctr", "eval.toml"]);
    assert_prints(&command.output().unwrap(), &["night, embedding"]);
}

#[test]
fn texts_are_embedded_in_the_layout_asked_for() {
    let workspace = Workspace::new();
    let setting = encoder(&workspace);
    assert_exit(&workspace.run(&[&setting, "encoder.layout=list"]), 0);
    let (column, list) = read(&workspace.path("out/profiles"));
    assert_eq!(list, "List(non-null Float32)");
    assert_exit(&workspace.verify(), 0);
    let out = workspace.path("list").display().to_string();
    let args = ["--embedding-layout", "list", "--kind", "item", "-o", &out];
    assert_exit(&encode(&workspace, &[&setting], &args), 0);
    let (encoded, list) = read(&workspace.path("list/embeddings"));
    assert_eq!(list, "List(non-null Float32)");
    let items = column.into_iter().filter(|((night, _), _)| night.contains("kind=item/dt=2026-01-02"));
    assert_close(&items.collect(), &encoded);
    assert_refused(&encode(&workspace, &[&setting], &["--embedding-layout", "wide"]), &["layout"]);
}

/// 8,200 texts, so two parts.
fn many_texts(workspace: &Workspace) -> PathBuf {
    let path = workspace.path("texts.jsonl");
    let line = |id: usize| format!("{{\"id\": {id}, \"text\": \"text {id}\"}}\n");
    fs::write(&path, (0..8200).map(line).collect::<String>()).unwrap();
    path
}

#[test]
fn an_interrupted_pass_goes_on_where_it_was_and_ends_the_same() {
    let workspace = Workspace::new();
    let (setting, texts) = (encoder(&workspace), many_texts(&workspace));
    let texts = texts.display().to_string();
    let run = || encode(&workspace, &[&setting], &[&texts, "--kind", "user"]);
    assert_exit(&run(), 0);
    let root = workspace.path("out/embeddings");
    let [manifest] = manifests(&root).try_into().unwrap();
    let folder = manifest.parent().unwrap();
    let read_all = || (parts(folder), fs::read(&manifest).unwrap());
    let whole = read_all();
    assert_eq!(whole.0.len(), 2);
    let parsed: Manifest<EmbeddingSet> = read_json(&manifest);
    assert_eq!((parsed.rows, parsed.parts[0].rows, parsed.parts[1].rows), (8200, 8192, 8));
    assert_exit(&workspace.verify(), 0);
    let first = fs::metadata(folder.join("part-00000.parquet")).unwrap().modified().unwrap();
    for file in ["part-00001.parquet", "_manifest.json", "_SUCCESS"] {
        fs::remove_file(folder.join(file)).unwrap();
    }
    assert_exit(&run(), 0);
    assert_eq!(read_all(), whole);
    let again = fs::metadata(folder.join("part-00000.parquet")).unwrap().modified().unwrap();
    assert_eq!(again, first, "what was there is not written again");
    assert_prints(&run(), &["complete already"]);

    fs::remove_file(folder.join("_SUCCESS")).unwrap();
    flip_bit(&folder.join("part-00000.parquet"));
    assert_refused(&run(), &["part-00000.parquet and run again"]);
    assert_exit(&workspace.verify(), 65);
}

#[test]
fn of_two_encoders_of_the_same_texts_the_one_that_readers_do_not_get_is_told() {
    let workspace = Workspace::new();
    let (setting, texts) = (encoder(&workspace), workspace.path("texts.jsonl"));
    fs::write(&texts, "{\"id\": 1, \"text\": \"a\"}\n").unwrap();
    let texts = texts.display().to_string();
    let run = |pooling: &str| {
        let settings = [setting.as_str(), pooling, "encoder.layout=list", "output.table=delta"];
        let output = encode(&workspace, &settings, &[&texts, "--kind", "user"]);
        assert_exit(&output, 0);
        stderr(&output)
    };
    let poolings = ["encoder.pooling=mean", "encoder.pooling=cls"];
    for pooling in poolings {
        run(pooling);
    }
    let folder = workspace.path("out/embeddings/kind=user");
    let in_force: Value = read_json(&folder.join("_in_force.json"));
    let in_force = in_force[0]["run"].as_str().unwrap();
    // The newest commit of the table is of the same run.
    let is_commit = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "json");
    let commit = fs::read_to_string(entries(&folder.join("_delta_log")).into_iter().rfind(is_commit).unwrap()).unwrap();
    let actions = commit.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let added: Vec<String> = actions.filter_map(|action| Some(action["add"]["path"].as_str()?.to_owned())).collect();
    assert!(!added.is_empty() && added.iter().all(|path| path.contains(in_force)), "{added:?}, expected {in_force}");
    let told = poolings.map(run);
    let told: Vec<&String> = told.iter().filter(|told| told.contains("laser outputs promote")).collect();
    assert_eq!(told.len(), 1);
    assert_contains(told[0], &[&format!("readers get {in_force} and not ")]);
    assert_exit(&workspace.verify(), 0);
}

#[test]
fn what_cannot_be_encoded_is_refused_by_name() {
    let workspace = Workspace::new();
    let setting = encoder(&workspace);
    let texts = workspace.path("texts.jsonl");
    fs::write(&texts, "{\"id\": 1, \"text\": \"a\"}\n{\"id\": 1, \"text\": \"b\"}\n").unwrap();
    let empty = workspace.path("empty.jsonl");
    fs::write(&empty, "").unwrap();
    let (texts, empty) = (texts.display().to_string(), empty.display().to_string());
    let user = ["--kind", "user"];
    let cases: [(&[&str], &[&str], &str); 5] = [
        (&[], &[&texts], "laser.toml: no [encoder]; give one, or --set encoder.path="),
        (&["encoder.path="], &[&texts], "[encoder] path: not set"),
        (&[&setting], &[&texts], "whose texts are these? give --kind user"),
        (&[&setting], &[&texts, user[0], user[1]], "user 1 is there twice"),
        (&[&setting], &[&empty, user[0], user[1]], "no texts; there is nothing to encode"),
    ];
    for (settings, args, expected) in cases {
        assert_refused(&encode(&workspace, settings, args), &[expected]);
        assert!(manifests(&workspace.path("out/embeddings")).is_empty(), "something was published");
    }
}

#[test]
fn an_encoder_of_another_architecture_ends_a_night_before_it_begins() {
    let workspace = Workspace::new();
    let setting = encoder(&workspace);
    let config = workspace.path("encoder/config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(config, text.replace("\"bert\"", "\"roberta\"")).unwrap();
    for subcommand in ["run", "doctor"] {
        let output = workspace.output(subcommand, &[&setting]);
        assert_exit(&output, 65);
        let told = stdout(&output) + &stderr(&output);
        assert_contains(&told, &["config.json: model_type is \"roberta\"; expected \"bert\""]);
    }
    assert!(workspace.parts().is_empty());
}

#[test]
fn workers_make_the_embeddings_of_one_process_and_need_the_encoder() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let setting = encoder(&cluster.tonight);
    let coordinator = cluster.coordinator(&[&setting]);
    let without = cluster.tonight.output("worker", &[]);
    assert_refused(&without, &["its output has embeddings, and this configuration makes none"]);
    let other = cluster.tonight.output("worker", &[&setting, "encoder.pooling=cls"]);
    assert_refused(&other, &["its encoder has pooling = \"mean\", but this configuration gives \"cls\""]);
    cluster.finish(coordinator, cluster.start("worker", &[&setting]));
    let (column, _) = read(&cluster.tonight.path("out/profiles"));
    assert_eq!(column.len(), cluster.expected.len());
    assert_exit(&cluster.tonight.output("encode", &[&setting]), 0);
    let (encoded, _) = read(&cluster.tonight.path("out/embeddings"));
    assert_close(&column, &encoded);
}

#[test]
fn a_shard_that_misses_the_deadline_still_has_the_column() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let setting = encoder(&cluster.tonight);
    cluster.coordinator(&[&setting]).kill();
    cluster.seal(&[&setting]);
    assert_exit(&cluster.tonight.verify(), 0);
    for (path, bytes) in cluster.tonight.parts() {
        assert_eq!(column_type(&bytes), "FixedSizeList(8 x non-null Float32)", "{}", path.display());
    }
}
