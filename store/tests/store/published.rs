//! `verify` finds every class of fault, and earlier texts are read back from every form.

use bytes::Bytes;
use jiff::civil::date;
use laser_schema::entity::IdType;
use laser_schema::ids::IdSet;
use laser_schema::job::{Policy, Spec};
use laser_schema::knowledge::{ErrorRecord, KnowledgeRecord};
use laser_schema::layout::DataSet;
use laser_schema::lists::{ListSpec, Normalisation, Ties};
use laser_schema::manifest::{ERRORS, MANIFEST, Manifest, Profiles, SUCCESS};
use laser_schema::{Digest, EntityId, Kind};
use laser_store::Location;
use laser_store::data_set::{self, PartWriter, PromotedRun, verify};
use laser_store::part::encode_part;
use laser_store::previous::{PreviousReader, PreviousSource, PreviousText, latest, resolve_latest};
use tempfile::TempDir;

use crate::part::{list_info, list_record, part, record};

/// A published folder whose manifest says what the parts hold; tests then change one or the other.
struct Folder {
    _dir: TempDir,
    root: Location,
    manifest: Manifest,
}

impl Folder {
    /// Two parts of two users, and one user without a text.
    async fn new() -> Self {
        let parts = [vec![record(1), record(2)], vec![record(3), record(4)]];
        Self::of(&parts).await
    }

    async fn of(parts: &[Vec<KnowledgeRecord>]) -> Self {
        Self::written(parts, None, part).await
    }

    /// The lists of four users, in two parts.
    async fn of_lists() -> Self {
        let lists = ListSpec {
            trie: Digest::of(b"trie"),
            out_of_stock: None,
            items: 2,
            items_from: None,
            width: 2,
            normalisation: Normalisation::Vocabulary,
            repeat: false,
            ties: Ties::All,
        };
        let rows = |ids: [i64; 2]| ids.map(|id| list_record(id, [70 + id, 7].map(EntityId::Int))).to_vec();
        Self::written(&[rows([1, 2]), rows([3, 4])], Some(lists), list_part).await
    }

    async fn written(
        parts: &[Vec<KnowledgeRecord>],
        lists: Option<ListSpec>,
        encode: fn(&[KnowledgeRecord]) -> Bytes,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = Location::parse(dir.path().to_str().unwrap()).unwrap();
        let spec = Spec {
            engine: "tree".into(),
            model: Digest::of(b"m"),
            tokenizer: Digest::of(b"t"),
            end_of_text: Vec::new(),
            precision: "f32".into(),
            prompts: [].into(),
            verification: Policy::Strict,
            sampling: None,
            max_new_tokens: 9,
            stop: Vec::new(),
            constraint: None,
            lists,
        };
        let mut details = Profiles {
            spec_digest: spec.digest(),
            spec,
            pool_digest: Digest::of(b"p"),
            entities: 1,
            carried: 0,
            errors: 1,
            value: None,
            figures: [].into(),
            audit: [].into(),
            guards: None,
            cost: None,
            embedding: None,
            canary: None,
        };
        let mut writer = PartWriter::new(&root);
        for rows in parts {
            let bytes = writer.create(encode(rows)).await.unwrap();
            writer.add(rows.len() as u64, &bytes);
            details.entities += rows.len() as u64;
        }
        let created = "2026-11-20T05:00:00Z".parse().unwrap();
        let manifest = Manifest::new("r", (Kind::User, date(2026, 11, 20)), created, writer.finish(), details);
        let error =
            ErrorRecord { entity_id: EntityId::Int(99), stage: "plan".into(), reason: "too long".into(), value: None };
        let folder = Self { _dir: dir, root, manifest };
        folder.write(ERRORS, serde_json::to_string(&error).unwrap()).await;
        folder.write(SUCCESS, "").await;
        folder.write_manifest().await;
        folder
    }

    async fn write(&self, name: &str, text: impl Into<Bytes>) {
        self.root.join(name).write(text.into()).await.unwrap();
    }

    async fn write_manifest(&self) {
        self.write(MANIFEST, serde_json::to_vec(&self.manifest).unwrap()).await;
    }

    /// All faults together name everything that is expected, and there are as many.
    async fn check(&self, expected: &[&str]) {
        let faults = verify(&self.root).await.unwrap().faults;
        assert_eq!(faults.len(), expected.len(), "{faults:?}");
        for (fault, expected) in faults.iter().zip(expected) {
            assert!(fault.contains(expected), "expected {expected:?} in {fault:?}");
        }
    }
}

fn list_part(rows: &[KnowledgeRecord]) -> Bytes {
    encode_part("part", IdType::Int64, rows, None, &list_info(rows, IdType::Int64)).unwrap()
}

#[tokio::test]
async fn a_whole_folder_has_no_fault() {
    for folder in [Folder::new().await, Folder::of_lists().await] {
        let report = verify(&folder.root).await.unwrap();
        assert_eq!((report.parts, report.rows, report.faults.len()), (2, 4, 0), "{report:?}");
    }
}

#[tokio::test]
async fn texts_among_lists_are_found() {
    let mut folder = Folder::of_lists().await;
    let texts = part(&[record(3), record(4)]);
    let mut writer = PartWriter::new(&folder.root);
    writer.add(2, &texts);
    folder.manifest.parts[1].digest = writer.finish()[0].digest.clone();
    folder.write("part-00001.parquet", texts).await;
    folder.write_manifest().await;
    let counts = "2 rows in the parts, the manifest says 4";
    folder.check(&["part-00001.parquet: not readable as Parquet: column 2: expected Field", counts]).await;
}

#[tokio::test]
async fn every_flipped_byte_of_a_part_is_found() {
    let folder = Folder::new().await;
    let whole = folder.root.join("part-00001.parquet").read().await.unwrap();
    for at in (0..whole.len()).step_by(499) {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 1;
        folder.write("part-00001.parquet", bytes).await;
        let counts = "2 rows in the parts, the manifest says 4";
        folder.check(&["part-00001.parquet: its bytes do not match", counts]).await;
    }
}

#[tokio::test]
async fn missing_and_unknown_files_are_found() {
    let unknown = Folder::new().await;
    unknown.write("part-00007.parquet", part(&[record(8)])).await;
    unknown.check(&["part-00007.parquet: not named by the manifest"]).await;
    let missing: [(&str, &[&str]); 3] = [
        ("part-00000.parquet", &["part-00000.parquet: missing", "2 rows in the parts"]),
        (SUCCESS, &["_SUCCESS is missing"]),
        (ERRORS, &["_errors.jsonl: 0 rows, the manifest says 1"]),
    ];
    for (file, expected) in missing {
        let folder = Folder::new().await;
        folder.root.join(file).remove().await.unwrap();
        folder.check(expected).await;
    }
}

#[tokio::test]
async fn wrong_rows_are_found() {
    let twice = Folder::of(&[vec![record(1), record(2)], vec![record(2)]]).await;
    twice.check(&["part-00001.parquet: entity 2 appears twice"]).await;
    let both = Folder::of(&[vec![record(1), record(99)]]).await;
    both.check(&["_errors.jsonl: entity 99 appears twice"]).await;
    let empty = KnowledgeRecord { text: " \n".into(), ..record(1) };
    let empty = Folder::of(&[vec![empty, record(2)]]).await;
    empty.check(&["part-00000.parquet: entity 1 has an empty text"]).await;
}

#[tokio::test]
async fn wrong_counts_are_found() {
    type Change = fn(&mut Manifest);
    let cases: [(Change, &[&str]); 3] = [
        (|m| m.parts[0].rows = 3, &["part-00000.parquet: 2 rows, the manifest says 3"]),
        (
            |m| m.rows = 5,
            &["4 rows in the parts, the manifest says 5", "5 rows and 1 errors do not make up 5 entities"],
        ),
        (|m| m.details.entities = 9, &["do not make up 9 entities"]),
    ];
    for (change, expected) in cases {
        let mut folder = Folder::new().await;
        change(&mut folder.manifest);
        folder.write_manifest().await;
        folder.check(expected).await;
    }
}

#[tokio::test]
async fn a_folder_without_a_readable_manifest_is_told() {
    let folder = Folder::new().await;
    folder.write(MANIFEST, "{}").await;
    let faults = verify(&folder.root).await.unwrap().faults;
    assert!(faults[0].contains("_manifest.json: not a manifest"), "{faults:?}");
    folder.root.join(MANIFEST).remove().await.unwrap();
    let error = verify(&folder.root).await.unwrap_err().to_string();
    assert!(error.contains("_manifest.json: no such file or object"), "{error}");
}

/// Three runs of one night and one of the night before, of which only some are complete.
#[tokio::test]
async fn of_two_runs_of_a_night_the_later_one_counts_and_of_equal_ones_the_greater_name() {
    let folder = Folder::new().await;
    let root = folder.root.join("out");
    let newest = async || {
        let found = data_set::newest::<Profiles>(&root, DataSet::Profiles, Kind::User, date(2026, 11, 21)).await;
        found.map(|found| found.map(|found| found.manifest.run))
    };
    let publish = async |night: i8, run: &str, created: &str| {
        let mut manifest = folder.manifest.clone();
        (manifest.run, manifest.date) = (run.to_owned(), date(2026, 11, night));
        manifest.created = created.parse().unwrap();
        let folder = root.join(&DataSet::Profiles.folder(Kind::User, manifest.date, run));
        data_set::publish(&folder, &manifest).await.unwrap();
        folder
    };
    assert_eq!(newest().await.unwrap(), None);
    publish(19, "z", "2026-11-30T00:00:00Z").await;
    publish(21, "tonight", "2026-11-30T00:00:00Z").await;
    assert_eq!(newest().await.unwrap().as_deref(), Some("z"));
    publish(20, "b", "2026-11-20T05:00:00Z").await;
    publish(20, "a", "2026-11-20T05:00:00Z").await;
    assert_eq!(newest().await.unwrap().as_deref(), Some("b"));
    let later = publish(20, "0", "2026-11-20T05:00:01Z").await;
    assert_eq!(newest().await.unwrap().as_deref(), Some("0"));
    later.join(MANIFEST).write(Bytes::from("{\"version\": 2, \"data_set\"")).await.unwrap();
    let error = newest().await.unwrap_err().to_string();
    assert!(error.contains("run=0/_manifest.json: not a manifest of Laser's"), "{error}");
    later.join(SUCCESS).remove().await.unwrap();
    assert_eq!(newest().await.unwrap().as_deref(), Some("b"));
}

#[tokio::test]
async fn of_two_who_promote_at_once_one_is_told_to_look_again() {
    let folder = Folder::new().await;
    let promotions = data_set::promotions(&folder.root, DataSet::Profiles, Kind::User, date(2026, 11, 20));
    let seen = promotions.history().await.unwrap();
    let promote = async |run: &str| {
        let choice = PromotedRun { run: Some(run.to_owned()) };
        promotions.promote(&seen, choice, (jiff::Timestamp::UNIX_EPOCH, None)).await
    };
    assert_eq!(promote("a").await.unwrap().number, 1);
    let error = promote("b").await.unwrap_err().to_string();
    assert!(error.contains("000001.json: somebody else has just promoted"), "{error}");
    let history = promotions.history().await.unwrap();
    assert_eq!(history.iter().map(|p| p.run.as_deref()).collect::<Vec<_>>(), [Some("a")]);
}

#[tokio::test]
async fn a_manifest_of_another_version_or_data_set_is_refused_by_name() {
    let mut folder = Folder::new().await;
    let error = data_set::read::<IdSet>(&folder.root).await.unwrap_err().to_string();
    assert!(error.ends_with("_manifest.json: the manifest of profiles, expected that of knowledge_ids"), "{error}");
    folder.manifest.data_set = DataSet::Recommendations;
    folder.write_manifest().await;
    let error = data_set::read::<Profiles>(&folder.root).await.unwrap_err().to_string();
    assert!(error.contains("names the data_set recommendations and describes profiles"), "{error}");
    folder.manifest.data_set = DataSet::Embeddings;
    folder.write_manifest().await;
    let error = data_set::read::<Profiles>(&folder.root).await.unwrap_err().to_string();
    assert!(error.ends_with("the manifest of embeddings, expected that of profiles or recommendations"), "{error}");
    folder.manifest.data_set = DataSet::Profiles;
    folder.manifest.version = 1;
    folder.write_manifest().await;
    let error = data_set::read::<Profiles>(&folder.root).await.unwrap_err().to_string();
    assert!(error.contains("_manifest.json: schema version 1, this Laser reads 2"), "{error}");
    folder.check(&["_manifest.json: schema version 1"]).await;
}

async fn previous(path: &str, id_type: Option<IdType>) -> Result<Vec<PreviousText>, String> {
    previous_of(DataSet::Profiles, path, id_type).await
}

async fn previous_of(data_set: DataSet, path: &str, id_type: Option<IdType>) -> Result<Vec<PreviousText>, String> {
    let sources = [PreviousSource { path: path.to_owned(), kind: Some(Kind::User), id_type }];
    let read = PreviousReader::open(&sources, data_set, date(2026, 11, 21)).await;
    let mut reader = read.map_err(|e| e.to_string())?;
    let mut all = Vec::new();
    while let Some(texts) = reader.next_batch().await.map_err(|e| e.to_string())? {
        all.extend(texts);
    }
    Ok(all)
}

#[tokio::test]
async fn earlier_texts_are_read_from_a_folder_and_from_files() {
    let folder = Folder::new().await;
    let ids = |texts: &[PreviousText]| texts.iter().map(|t| t.id.clone()).collect::<Vec<_>>();
    let all = previous(folder.root.url(), None).await.unwrap();
    assert_eq!(ids(&all), [1, 2, 3, 4].map(EntityId::Int));
    assert_eq!(all[0].record.as_deref(), Some(&record(1)));
    let one = previous(folder.root.join("part-00001.parquet").url(), None).await.unwrap();
    assert_eq!(ids(&one), [3, 4].map(EntityId::Int));
    for path in [folder.root.clone(), folder.root.join("part-00001.parquet")] {
        let error = previous(path.url(), Some(IdType::String)).await.unwrap_err();
        assert!(error.contains(path.url()) && error.contains("remove id_type"), "{error}");
    }
    folder
        .write("texts.jsonl", "{\"entity_id\": \"7\", \"text\": \"a\"}\n{\"id\": 8, \"text\": \"b\", \"x\": 1}\n")
        .await;
    let path = folder.root.join("texts.jsonl").url().to_owned();
    let texts = previous(&path, Some(IdType::Int64)).await.unwrap();
    assert_eq!(ids(&texts), [7, 8].map(EntityId::Int));
    assert!(texts.iter().all(|t| t.record.is_none() && t.kind == Kind::User));
    let mut texts = previous(&format!("file://{path}"), Some(IdType::String)).await.unwrap();
    assert_eq!(texts.remove(1).id, EntityId::Text("8".into()));
}

/// Both in one output.
#[tokio::test]
async fn the_latest_texts_and_the_latest_lists_are_two_things() {
    let (texts, lists) = (Folder::new().await, Folder::of_lists().await);
    let root = texts.root.join("out");
    for (published, night) in [(&texts, 19), (&lists, 20)] {
        let mut manifest = published.manifest.clone();
        manifest.date = date(2026, 11, night);
        let folder = root.join(&manifest.data_set.folder(Kind::User, manifest.date, "r"));
        for part in &manifest.parts {
            let bytes = published.root.join(&part.name).read().await.unwrap();
            folder.join(&part.name).write(bytes).await.unwrap();
        }
        data_set::publish(&folder, &manifest).await.unwrap();
    }
    let folders = async |data_set| latest(&root, data_set, date(2026, 11, 21)).await.unwrap();
    let [of_texts, of_lists] = [DataSet::Profiles, DataSet::Recommendations].map(folders);
    let (of_texts, of_lists) = (of_texts.await, of_lists.await);
    assert_eq!(of_texts, ["profiles/kind=user/dt=2026-11-19/run=r"]);
    assert_eq!(of_lists, ["recommendations/kind=user/dt=2026-11-20/run=r"]);
    let sources = [PreviousSource { path: "latest".into(), kind: Some(Kind::User), id_type: None }];
    assert_eq!(resolve_latest(&sources, &root, &of_lists)[0].path, root.join(&of_lists[0]).url());

    let read = async |data_set| previous_of(data_set, root.url(), None).await.unwrap();
    let all = read(DataSet::Profiles).await;
    assert_eq!(all[0].record.as_deref(), Some(&record(1)));
    let all = read(DataSet::Recommendations).await;
    assert_eq!((all.len(), all[0].text.as_str()), (4, ""));
    assert_eq!(all[3].record.as_deref(), Some(&list_record(4, [74, 7].map(EntityId::Int))));

    let jsonl = texts.root.join("texts.jsonl");
    jsonl.write("{\"id\": 8, \"text\": \"b\"}".into()).await.unwrap();
    let cases = [
        (DataSet::Profiles, lists.root.clone(), "holds recommendations, expected profiles"),
        (DataSet::Profiles, lists.root.join("part-00001.parquet"), "holds recommendations, expected profiles"),
        (DataSet::Recommendations, texts.root.clone(), "holds profiles, expected recommendations"),
        (DataSet::Recommendations, texts.root.join("part-00001.parquet"), "holds profiles, expected recommendations"),
        (DataSet::Recommendations, jsonl, "holds profiles, expected recommendations"),
        (DataSet::Recommendations, texts.root.join("none"), "no _SUCCESS below recommendations/): give path = "),
        (DataSet::Profiles, texts.root.join("none"), "no _SUCCESS below profiles/): give a .jsonl or .parquet"),
    ];
    for (data_set, path, expected) in cases {
        let error = previous_of(data_set, path.url(), None).await.unwrap_err();
        assert!(error.starts_with(path.url()) && error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn an_earlier_text_that_cannot_be_read_is_named() {
    let folder = Folder::new().await;
    let path = folder.root.join("texts.jsonl").url().to_owned();
    for (line, expected) in [
        ("not json", "row 2: expected {\"id\": …, \"text\": \"…\"}"),
        ("{\"id\": 3}", "row 2: expected"),
        ("{\"id\": 3, \"text\": null}", "row 2: expected"),
        ("{\"id\": \"x\", \"text\": \"t\"}", "row 2: id \"x\" is not an int64"),
    ] {
        folder.write("texts.jsonl", format!("{{\"id\": 1, \"text\": \"a\"}}\n{line}\n")).await;
        let error = previous(&path, Some(IdType::Int64)).await.unwrap_err();
        assert!(error.contains("texts.jsonl, ") && error.contains(expected), "{error}");
    }
    let mut bytes = part(&[record(1)]).to_vec();
    bytes.truncate(bytes.len() / 2);
    folder.write("cut.parquet", bytes).await;
    let error = previous(folder.root.join("cut.parquet").url(), None).await.unwrap_err();
    assert!(error.contains("cut.parquet: not readable as Parquet"), "{error}");
}
