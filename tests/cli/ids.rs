//! Knowledge ids, night after night.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;

use arrow::array::{ArrayRef, FixedSizeListArray, Int64Array, RecordBatch};
use arrow::datatypes::Float32Type;
use laser_schema::EntityId;
use laser_schema::ids::{IdRecord, IdSet};
use laser_schema::manifest::Manifest;
use laser_schema::sample::priority;
use laser_store::table;
use parquet::arrow::ArrowWriter;

use crate::erase::files_below;
use crate::{
    Workspace, assert_contains, assert_exit, assert_prints, assert_refused, files, laser, only, parts, read_json,
    stdout,
};

const DIMENSION: usize = 8;

/// An embedding near one of four directions, with noise of its own.
pub(crate) fn embedding(theme: usize, noise: u64) -> Vec<f32> {
    let value = |axis: usize| {
        let hash = priority(noise, &[&axis.to_le_bytes()]) % 1000;
        f32::from(u16::try_from(hash).unwrap()) / 5000.0 + if axis == theme % 4 { 1.0 } else { 0.0 }
    };
    (0..DIMENSION).map(value).collect()
}

fn users(ids: impl Iterator<Item = i64>) -> Vec<(i64, Vec<f32>)> {
    let user = |id: i64| (id, embedding(usize::try_from(id).unwrap(), id.unsigned_abs()));
    ids.map(user).collect()
}

pub(crate) fn write_embeddings(path: &Path, rows: &[(i64, Vec<f32>)]) {
    let ids = Int64Array::from_iter_values(rows.iter().map(|(id, _)| *id));
    let dimension = rows.first().map_or(1, |(_, e)| e.len());
    let lists = rows.iter().map(|(_, e)| Some(e.iter().map(|v| Some(*v))));
    let lists = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(lists, i32::try_from(dimension).unwrap());
    let columns: [(&str, ArrayRef); 2] = [("id", Arc::new(ids)), ("embedding", Arc::new(lists))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(fs::File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

struct Night<'a> {
    workspace: &'a Workspace,
    day: u32,
}

impl Night<'_> {
    fn ids(&self, source: &Path, args: &[&str]) -> Output {
        let date = format!("run.date=2026-01-{:02}", self.day);
        let mut command = self.workspace.command("ids", &[&date, "ids.clusters=4"]);
        command.arg(source).args(args).output().unwrap()
    }

    /// The folder of the one run of the night.
    #[track_caller]
    fn folder(&self) -> PathBuf {
        only(&self.workspace.path(&format!("out/knowledge_ids/kind=user/dt=2026-01-{:02}", self.day)))
    }

    fn manifest(&self) -> Manifest<IdSet> {
        read_json(&self.folder().join("_manifest.json"))
    }

    fn records(&self) -> Vec<IdRecord> {
        let decode =
            |(path, bytes): (PathBuf, Vec<u8>)| table::decode(&path.display().to_string(), bytes.into()).unwrap();
        parts(&self.folder()).into_iter().flat_map(decode).collect()
    }

    fn by_user(&self) -> BTreeMap<EntityId, Vec<i64>> {
        let records = self.records().into_iter();
        records.map(|r| (r.entity_id, r.knowledge_ids)).collect()
    }
}

const USER: [&str; 2] = ["--kind", "user"];

#[test]
fn ids_are_published_kept_from_night_to_night_and_not_made_twice() {
    let workspace = Workspace::new();
    let source = workspace.path("embeddings.parquet");
    let night = |day| Night { workspace: &workspace, day };
    write_embeddings(&source, &users(0..200));
    assert_exit(&night(2).ids(&source, &USER), 0);
    let first = night(2);
    assert_eq!(first.manifest().churn, None);
    let ids = first.by_user();
    assert_eq!(ids.len(), 200);
    let of = |id: i64| &ids[&EntityId::Int(id)];
    assert!((0..200).all(|id| of(id) == of(id % 4)), "users of one theme have one id");
    let record = &first.records()[0];
    assert_eq!(record.event_timestamp, "2026-01-02T00:00:00Z".parse().unwrap());
    assert_eq!(record.created_timestamp, first.manifest().codebook.info.created);

    // Ten users have another theme, five are gone, seven are new.
    let mut tonight = users(5..207);
    for (id, values) in &mut tonight[..10] {
        *values = embedding(usize::try_from(*id).unwrap() + 1, 999);
    }
    write_embeddings(&source, &tonight);
    let second = night(3).ids(&source, &USER);
    assert_prints(&second, &["its centroids are kept", "5.1 % of 195 entities"]);
    let manifest = night(3).manifest();
    let churn = manifest.churn.clone().unwrap();
    assert_eq!((churn.looked_at, churn.common, churn.changed), (200, 195, 10));
    assert_eq!(churn.changed_by_place, [10]);
    assert_eq!(manifest.codebook.info.parent, Some(first.manifest().codebook.digest.clone()));
    assert_eq!(manifest.rows, 202);
    assert_complete(&night(3), &source);
    assert_prints(&workspace.verify(), &["(1 parts, 202 rows)"]);
}

/// The same command finds all of it done.
#[track_caller]
fn assert_complete(night: &Night<'_>, source: &Path) {
    let before = files(&night.folder());
    assert_prints(&night.ids(source, &USER), &["complete already"]);
    assert_eq!(files(&night.folder()), before);
}

#[test]
fn what_was_stopped_goes_on_with_the_codebook_that_is_there() {
    let workspace = Workspace::new();
    let source = workspace.path("embeddings.parquet");
    write_embeddings(&source, &users(0..100));
    let night = Night { workspace: &workspace, day: 2 };
    assert_exit(&night.ids(&source, &USER), 0);
    let whole = files(&night.folder());
    for name in ["part-00000.parquet", "_manifest.json", "_SUCCESS"] {
        fs::remove_file(night.folder().join(name)).unwrap();
    }
    assert_exit(&night.ids(&source, &USER), 0);
    assert_eq!(files(&night.folder()), whole);
    // A part that is not what it should be is not published.
    fs::remove_file(night.folder().join("_SUCCESS")).unwrap();
    fs::write(night.folder().join("part-00000.parquet"), "x").unwrap();
    assert_refused(&night.ids(&source, &USER), &["part-00000.parquet: not what the source"]);
    assert!(!night.folder().join("_SUCCESS").exists());
}

#[test]
fn the_order_of_the_rows_changes_no_id() {
    let (one, other) = (Workspace::new(), Workspace::new());
    let mut rows = users(0..150);
    let ids = |workspace: &Workspace, rows: &[(i64, Vec<f32>)]| {
        let source = workspace.path("embeddings.parquet");
        write_embeddings(&source, rows);
        let night = Night { workspace, day: 2 };
        // Fewer than there are, so that the sample is one.
        let output = night.ids(&source, &["--kind", "user", "--set", "ids.sample=60"]);
        assert_exit(&output, 0);
        (night.by_user(), night.manifest().codebook.info.fitted_on)
    };
    let ordered = ids(&one, &rows);
    rows.reverse();
    assert_eq!(ids(&other, &rows), ordered);
    assert_eq!(ordered.1, 60);
}

#[test]
fn a_matrix_with_a_list_of_ids_has_ids_too() {
    let workspace = Workspace::new();
    let (npy, list) = (workspace.path("users.npy"), workspace.path("users.txt"));
    let rows = users(0..40);
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': (41, {DIMENSION}), }}");
    let mut file = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    file.extend(format!("{header:<117}\n").as_bytes());
    let padding = [0.0; DIMENSION];
    let values = padding.iter().chain(rows.iter().flat_map(|(_, e)| e));
    file.extend(values.flat_map(|v: &f32| v.to_le_bytes()));
    fs::write(&npy, file).unwrap();
    fs::write(&list, (0..40).map(|id| format!("{id}\n")).collect::<String>()).unwrap();
    let night = Night { workspace: &workspace, day: 2 };
    let list = list.to_str().unwrap();
    let args = ["--kind", "user", "--ids", list, "--skip-rows", "1", "--id-type", "int64"];
    assert_exit(&night.ids(&npy, &args), 0);
    let from_matrix = night.by_user();
    assert_eq!(from_matrix.len(), 40);
    let table = workspace.path("users.parquet");
    write_embeddings(&table, &rows);
    let later = Night { workspace: &workspace, day: 3 };
    assert_exit(&later.ids(&table, &USER), 0);
    assert_eq!(later.by_user(), from_matrix);
    assert_refused(&night.ids(&npy, &USER), &["give --ids FILE"]);
}

#[test]
fn unusable_embeddings_are_refused_with_what_to_do() {
    let workspace = Workspace::new();
    let source = workspace.path("embeddings.parquet");
    let night = Night { workspace: &workspace, day: 2 };
    let check = |rows: &[(i64, Vec<f32>)], args: &[&str], expected: &str| {
        write_embeddings(&source, rows);
        assert_refused(&night.ids(&source, args), &[expected]);
        let out = workspace.path("out");
        assert!(!out.exists() || files_below(&out).is_empty(), "something is left");
    };
    let mut rows = users(0..9);
    check(&rows, &[], "embeddings.parquet: whose embeddings are these? give --kind");
    check(&rows[..3], &USER, "clusters = 4: there are only 3 users with an embedding; set clusters to at most 3");
    check(
        &rows,
        &["--kind", "user", "--set", "ids.codebooks=3"],
        "codebooks = 3: embeddings of 8 values cannot be cut",
    );
    check(&rows, &["--kind", "user", "--set", "ids.cluster=3"], "did you mean \"clusters\"");
    rows[6].1[2] = f32::NAN;
    check(&rows, &USER, "embeddings.parquet, row 7: the embedding of 6 holds NaN, infinity or null at position 2");
    rows[6] = rows[5].clone();
    check(&rows, &USER, "user 5 is there twice");
    assert_refused(&night.ids(&workspace.path("out"), &[]), &["no complete night"]);
}

#[test]
fn a_night_without_embeddings_is_refused() {
    let workspace = Workspace::new();
    assert_exit(&workspace.run(&[]), 0);
    assert_refused(&workspace.output("ids", &[]), &["its texts have no embeddings; run `laser encode`"]);
    assert!(!workspace.path("out/knowledge_ids").exists());
}

#[test]
fn ids_need_neither_model_nor_night() {
    let workspace = Workspace::new();
    let source = workspace.path("embeddings.parquet");
    write_embeddings(&source, &users(0..40));
    let config = workspace.path("ids.toml");
    fs::write(&config, "[ids]\nclusters = 4\n").unwrap();
    let ids = |args: &[&str]| laser().arg("ids").args([&config, &source]).args(USER).args(args).output().unwrap();
    let nowhere = ids(&["--set", "output.path=''"]);
    assert_refused(&nowhere, &["[output] path: not set; set it, or give --output"]);
    let out = workspace.path("elsewhere");
    assert_exit(&ids(&["--output", out.to_str().unwrap()]), 0);
    assert!(out.join("knowledge_ids/kind=user").exists());
}

#[test]
fn a_previous_codebook_that_does_not_fit_is_refused() {
    let workspace = Workspace::new();
    let source = workspace.path("embeddings.parquet");
    let night = |day| Night { workspace: &workspace, day };
    write_embeddings(&source, &users(0..40));
    assert_exit(&night(2).ids(&source, &USER), 0);
    let check = |args: &[&str], expected: &str| {
        assert_refused(&night(3).ids(&source, &[&USER[..], args].concat()), &[expected]);
    };
    check(&["--set", "ids.clusters=5"], "has [ids] clusters = 4, tonight it is 5");
    check(&["--previous", "nowhere"], "--previous nowhere: no complete user ids before 2026-01-03 there");
    let wide: Vec<(i64, Vec<f32>)> = (0..40).map(|id| (id, vec![1.0; 9])).collect();
    write_embeddings(&source, &wide);
    check(&[], "has embeddings of dimension 8, tonight it is 9");
    // A flipped bit is found, by whoever begins with it and by `laser verify`.
    let file = night(2).folder().join("_codebook.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    check(&[], "_codebook.safetensors: not a codebook: its bytes do not match its checksum");
    let verified = workspace.verify();
    assert_exit(&verified, 65);
    assert_contains(&stdout(&verified), &["_codebook.safetensors: its bytes do not match the manifest's digest"]);
    let anew = night(3).ids(&source, &["--kind", "user", "--previous", "none", "--set", "ids.clusters=1"]);
    assert_exit(&anew, 0);
}
