//! Embeddings of a night's texts: made with them, and made of them later.

#[path = "../../features/src/encoder/tests/tiny_bert.rs"]
mod tiny_bert;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{DataType, Float32Type};
use laser_schema::embedding_set::EmbeddingSet;
use laser_schema::manifest::Manifest;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::distributed::{Cluster, Process};
use crate::{Workspace, assert_exit, collect, stderr, stdout};

/// Embeddings by kind, night and entity.
type Embeddings = BTreeMap<(String, String), Vec<f32>>;

/// A tiny encoder in a workspace, as a setting.
fn encoder(workspace: &Workspace) -> String {
    let directory = workspace.path("encoder");
    tiny_bert::write(&directory, 7);
    format!("encoder.path={}", directory.display())
}

fn lists(column: &ArrayRef) -> Vec<ArrayRef> {
    let lists: Vec<Option<ArrayRef>> = match column.data_type() {
        DataType::FixedSizeList(..) => column.as_fixed_size_list().iter().collect(),
        _ => column.as_list::<i32>().iter().collect(),
    };
    lists.into_iter().map(Option::unwrap).collect()
}

/// All embeddings below a folder, and the type of their column.
fn read(root: &Path) -> (Embeddings, DataType) {
    let (mut parts, mut all, mut found) = (Vec::new(), BTreeMap::new(), DataType::Null);
    collect(root, &mut parts);
    for (path, bytes) in parts {
        let night = path.strip_prefix(root).unwrap().display().to_string();
        let night = night.split("/run=").next().unwrap().to_owned();
        let reader = ParquetRecordBatchReaderBuilder::try_new(bytes::Bytes::from(bytes)).unwrap();
        for batch in reader.build().unwrap() {
            let batch = batch.unwrap();
            let id = arrow::compute::cast(&batch["entity_id"], &DataType::Utf8).unwrap();
            let embeddings = &batch["embedding"];
            found = embeddings.data_type().clone();
            for (id, values) in id.as_string::<i32>().iter().zip(lists(embeddings)) {
                let values = values.as_primitive::<Float32Type>().values().to_vec();
                let key = (night.clone(), id.unwrap().to_owned());
                assert!(all.insert(key, values).is_none(), "{id:?} twice");
            }
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
    let mut folders = vec![root.to_owned()];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.ends_with("_manifest.json") => found.push(path),
                false => {}
            }
        }
    }
    found
}

fn encode(workspace: &Workspace, settings: &[&str], args: &[&str]) -> Output {
    let mut command = workspace.command("encode", settings);
    command.args(args).output().unwrap()
}

#[test]
fn a_night_with_an_encoder_has_the_embeddings_that_encode_makes_of_its_texts() {
    let (with, without) = (Workspace::new(), Workspace::new());
    let setting = encoder(&with);
    let night = with.run(&[&setting]);
    assert_exit(&night, 0);
    let summary = stdout(&night);
    assert!(summary.contains("embeddings of 8 dimensions; "), "{summary}");
    assert_exit(&with.verify(), 0);
    let (column, list) = read(&with.path("out/profiles"));
    assert_eq!(list.to_string(), "FixedSizeList(8 x non-null Float32)");
    for path in manifests(&with.path("out/profiles")) {
        let manifest: Manifest = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let embedding = manifest.details.embedding.as_ref().unwrap();
        assert_eq!(embedding.encoder_digest, embedding.spec.encoder.digest());
        // A token a letter: no text fits into 32.
        assert_eq!(embedding.truncated, manifest.rows);
    }
    // Published is published: the same command finds its run, and another layout is another run.
    assert!(stdout(&with.run(&[&setting])).contains("complete already"));
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
    let ids = without.command("ids", &[&setting, "ids.clusters=4"]).output();
    assert_exit(&ids.unwrap(), 0);
}

#[test]
fn texts_are_embedded_in_the_layout_asked_for() {
    let workspace = Workspace::new();
    let setting = encoder(&workspace);
    assert_exit(&workspace.run(&[&setting, "encoder.layout=list"]), 0);
    let (column, list) = read(&workspace.path("out/profiles"));
    assert_eq!(list.to_string(), "List(non-null Float32)");
    assert_exit(&workspace.verify(), 0);
    let out = workspace.path("list").display().to_string();
    let args = ["--embedding-layout", "list", "--kind", "item", "-o", &out];
    assert_exit(&encode(&workspace, &[&setting], &args), 0);
    let (encoded, list) = read(&workspace.path("list/embeddings"));
    assert_eq!(list.to_string(), "List(non-null Float32)");
    let items = column.into_iter().filter(|((night, _), _)| night.contains("kind=item/dt=2026-01-02"));
    assert_close(&items.collect(), &encoded);
    let refused = encode(&workspace, &[&setting], &["--embedding-layout", "wide"]);
    assert_exit(&refused, 65);
    assert!(stderr(&refused).contains("layout"), "{}", stderr(&refused));
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
    let read_all = || {
        let mut parts = Vec::new();
        collect(folder, &mut parts);
        parts.sort();
        (parts, fs::read(&manifest).unwrap())
    };
    let whole = read_all();
    assert_eq!(whole.0.len(), 2);
    let parsed: Manifest<EmbeddingSet> = serde_json::from_slice(&whole.1).unwrap();
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
    assert!(stdout(&run()).contains("complete already"));

    fs::remove_file(folder.join("_SUCCESS")).unwrap();
    let part = folder.join("part-00000.parquet");
    let mut bytes = fs::read(&part).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&part, bytes).unwrap();
    let damaged = run();
    assert_exit(&damaged, 65);
    assert!(stderr(&damaged).contains("part-00000.parquet and run again"), "{}", stderr(&damaged));
    assert_exit(&workspace.verify(), 65);
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
        let output = encode(&workspace, settings, args);
        assert_exit(&output, 65);
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
        let success = workspace.path("out/embeddings");
        assert!(!success.exists() || manifests(&success).is_empty(), "something was published");
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
        let output = workspace.command(subcommand, &[&setting]).output().unwrap();
        assert_exit(&output, 65);
        let told = stdout(&output) + &stderr(&output);
        assert!(told.contains("config.json: model_type is \"roberta\"; expected \"bert\""), "{told}");
    }
    assert!(workspace.parts().is_empty());
}

#[test]
fn workers_make_the_embeddings_of_one_process_and_need_the_encoder() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let setting = encoder(&cluster.tonight);
    let coordinator = cluster.start_with("coordinator", &[&setting]);
    coordinator.wait_for("queued shards", 1);
    let refused = |settings: &[&str], expected: &str| {
        let output = cluster.tonight.command("worker", settings).output().unwrap();
        assert_exit(&output, 65);
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    };
    refused(&[], "its output has embeddings, and this configuration makes none");
    refused(
        &[&setting, "encoder.pooling=cls"],
        "its encoder has pooling = \"mean\", but this configuration gives \"cls\"",
    );
    let worker = cluster.start_with("worker", &[&setting]);
    coordinator.assert_ends(0);
    worker.terminate();
    cluster.assert_whole();
    let (column, _) = read(&cluster.tonight.path("out/profiles"));
    assert_eq!(column.len(), cluster.expected.len());
    let mut encode: Command = cluster.tonight.command("encode", &[&setting]);
    assert_exit(&encode.output().unwrap(), 0);
    let (encoded, _) = read(&cluster.tonight.path("out/embeddings"));
    assert_close(&column, &encoded);
}

#[test]
fn a_shard_that_misses_the_deadline_still_has_the_column() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let setting = encoder(&cluster.tonight);
    let coordinator = cluster.start_with("coordinator", &[&setting]);
    coordinator.wait_for("queued shards", 1);
    coordinator.kill();
    let soon = jiff::Zoned::now() + jiff::Span::new().seconds(1);
    let mut command = cluster.tonight.command("coordinator", &[&setting]);
    command.args(["--deadline", &soon.strftime("%H:%M:%S").to_string()]);
    command.args(["--min-coverage", "0"]);
    Process::start(command).assert_ends(0);
    assert_exit(&cluster.tonight.verify(), 0);
    for (path, bytes) in cluster.tonight.parts() {
        let reader = ParquetRecordBatchReaderBuilder::try_new(bytes::Bytes::from(bytes)).unwrap();
        let field = reader.schema().field_with_name("embedding").cloned();
        let list = field.unwrap().data_type().to_string();
        assert_eq!(list, "FixedSizeList(8 x non-null Float32)", "{}", path.display());
    }
}
