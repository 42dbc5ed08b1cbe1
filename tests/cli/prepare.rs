//! Data sets become tables: what is said, and what is refused.

use std::fs;
use std::path::Path;
use std::process::Output;

use crate::{assert_prints, assert_refused, entries, laser};

/// Two items; a user with all three parts, and one who only comes in the test.
fn write_sequences(dir: &Path) {
    let files = [
        ("items.jsonl", "{\"recid\": 0, \"sid\": [\"<a_1>\"]}\n{\"recid\": 1, \"sid\": [\"<a_0>\"]}\n"),
        ("sequential_train.txt", "1 2 1\n2\n"),
        ("sequential_valid.txt", "1 2\n2\n"),
        ("sequential_test.txt", "1 1\n2 2\n"),
    ];
    for (name, text) in files {
        fs::write(dir.join(name), text).unwrap();
    }
}

fn prepare(dir: &Path, options: &[&str]) -> Output {
    laser().args(["prepare", "atspeed"]).arg(dir).arg("-o").arg(dir.join("out")).args(options).output().unwrap()
}

#[test]
fn sequences_become_five_tables_and_users_without_a_history_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    write_sequences(dir.path());
    let said = |in_histories| {
        let left_out = "  1 others left out: they have no item in their history\n".to_owned();
        [format!("1 users: {}\n  {in_histories} items in their histories\n", table(dir.path(), "users")), left_out]
            .concat()
    };
    let rest = |in_histories| {
        let interactions = format!("{in_histories} interactions");
        let tables = [("2 items", "items"), (&interactions, "interactions"), ("1 sequences to train on", "sequences")];
        let tables = tables.into_iter().chain([("1 users with a truth", "truth")]);
        tables.map(|(rows, name)| format!("{rows}: {}\n", table(dir.path(), name))).collect::<String>()
    };
    assert_prints(&prepare(dir.path(), &[]), &[&(said(3) + &rest(3))]);
    assert_prints(&prepare(dir.path(), &["--until", "train"]), &[&(said(2) + &rest(2))]);
    assert_eq!(entries(&dir.path().join("out")).len(), 5);
}

fn table(dir: &Path, name: &str) -> String {
    dir.join(format!("out/{name}.parquet")).display().to_string()
}

#[test]
fn a_wrong_sequence_is_refused_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    write_sequences(dir.path());
    fs::write(dir.path().join("sequential_valid.txt"), "1 2\n2 3\n").unwrap();
    assert_refused(&prepare(dir.path(), &[]), &["sequential_valid.txt, line 2: item 3 is not in items.jsonl"]);
    assert!(entries(&dir.path().join("out")).is_empty());
}
