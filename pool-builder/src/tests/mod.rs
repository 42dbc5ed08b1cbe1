//! Tests of building, opening, tuning and inspecting whole sets of pools.

mod build;
mod embeddings;
mod open;
mod purge;
mod registry;
mod shared;
mod tune;

use std::path::{Path, PathBuf};

use futures::stream::{self, Stream};
use laser_schema::{Columns, EntityId, EntityTable, Kind};
use laser_store::Location;
use laser_store::previous::PreviousText;
use serde_json::json;
use tokenizers::Tokenizer;

use crate::clusters::tests::planted;
use crate::{PoolSet, PoolTokenizer, PoolsConfig, PoolsError, Progress, ReadError, build_pools};

pub(crate) const FINGERPRINT: [u8; 32] = [7; 32];
const VOCABULARY: u32 = 200;
/// More than any test here needs.
const MEMORY: usize = 1 << 30;

/// Words `w2` to `w199` are tokens 2 to 199; token 0 ends a text.
fn tokenizer() -> Tokenizer {
    let words = (2..VOCABULARY).map(|i| (format!("w{i}"), json!(i)));
    let mut vocabulary: serde_json::Map<_, _> = words.collect();
    vocabulary.extend([("</s>".to_owned(), json!(0)), ("[UNK]".to_owned(), json!(1))]);
    let json = json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    });
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

fn pool_tokenizer(tokenizer: &Tokenizer) -> PoolTokenizer<'_> {
    PoolTokenizer { tokenizer, fingerprint: FINGERPRINT, vocab_size: VOCABULARY, end_of_text: 0 }
}

fn config(json: serde_json::Value) -> PoolsConfig {
    serde_json::from_value(json).unwrap()
}

/// Users 0 to 89 around three centres, of which every fifth is cold; items 0 to 59 of three genres.
fn write_tables(dir: &Path) -> Vec<EntityTable> {
    let users = planted(3, 30).into_iter().enumerate().map(|(id, embedding)| {
        let interactions = if id % 5 == 0 { 1 } else { 20 };
        let age = [18, 25, 35][id / 30];
        json!({"id": id, "interactions": interactions, "age": age, "embedding": embedding})
    });
    let items = (0..60).map(|id| {
        let genre = ["Drama", "Comedy", "Film-Noir"][id % 3];
        json!({"id": format!("i{id}"), "genres": [genre], "title": format!("film {id}")})
    });
    vec![
        write_table(dir, "users.jsonl", Kind::User, &users.collect::<Vec<_>>()),
        write_table(dir, "items.jsonl", Kind::Item, &items.collect::<Vec<_>>()),
    ]
}

fn write_table(dir: &Path, name: &str, kind: Kind, rows: &[serde_json::Value]) -> EntityTable {
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    std::fs::write(dir.join(name), lines).unwrap();
    let path = dir.join(name).to_str().unwrap().to_owned();
    EntityTable { path, kind: Some(kind), columns: Columns::default() }
}

/// One text for every entity of [`write_tables`], of words of its group and one of its own.
fn previous() -> Vec<PreviousText> {
    let words = |group: usize, own: usize| {
        let word = |i: usize| format!("w{}", 2 + 10 * group + i);
        let words: Vec<String> = (0..9).map(word).collect();
        format!("{} w{} {}", words[..5].join(" "), 100 + own, words[5..].join(" "))
    };
    let text = |kind, id, text| PreviousText { runners_up: Vec::new(), record: None, kind, id, text };
    let user = |id: usize| text(Kind::User, EntityId::Int(i64::try_from(id).unwrap()), words(id % 3, id));
    let item = |id: usize| text(Kind::Item, EntityId::Text(format!("i{id}")), words(3 + id % 3, id));
    (0..90).map(user).chain((0..60).map(item)).collect()
}

fn batches(texts: Vec<PreviousText>, size: usize) -> impl Stream<Item = Result<Vec<PreviousText>, ReadError>> {
    let batches: Vec<_> = texts.chunks(size).map(|batch| Ok(batch.to_vec())).collect();
    stream::iter(batches)
}

fn location(dir: &Path) -> Location {
    Location::parse(dir.to_str().unwrap()).unwrap()
}

/// Small groups, since the tables are small.
fn default_config() -> PoolsConfig {
    config(json!({"user": {"grouping": "router", "min_group": 5}, "item": {"grouping": "router", "min_group": 5}}))
}

async fn build(
    tables: &[EntityTable],
    texts: Vec<PreviousText>,
    config: &PoolsConfig,
    dir: &Path,
) -> Result<PoolSet, PoolsError> {
    build_with(tables, batches(texts, 16), config, MEMORY, dir, &mut quiet).await
}

async fn build_with(
    tables: &[EntityTable],
    texts: impl Stream<Item = Result<Vec<PreviousText>, ReadError>>,
    config: &PoolsConfig,
    memory: usize,
    dir: &Path,
    progress: Progress<'_>,
) -> Result<PoolSet, PoolsError> {
    let tokenizer = tokenizer();
    build_pools(tables, texts, pool_tokenizer(&tokenizer), config, memory, &location(dir), progress).await
}

fn quiet(_: u64, _: Option<u64>, _: &str) {}

/// Tables and the default pools in a folder of their own, which is the second.
async fn built() -> (tempfile::TempDir, PathBuf, PoolSet) {
    let dir = tempfile::tempdir().unwrap();
    let pools = dir.path().join("pools");
    let set = build(&write_tables(dir.path()), previous(), &default_config(), &pools).await.unwrap();
    (dir, pools, set)
}

/// The names and contents of all files.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> =
        entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect();
    files.sort();
    files
}
