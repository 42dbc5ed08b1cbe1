//! configs/production.toml documents every key in its section, and no other.

use std::collections::BTreeSet;
use std::fs;
use std::process::Output;

use toml::{Table, Value};

use crate::{assert_exit, laser, stderr, stdout};

/// Inline tables, of which the document shows an example: one of several forms, or a table as of [[input]].
const EXAMPLES: [&str; 7] =
    ["clusters", "embeddings", "entities", "user_embeddings", "item_embeddings", "user_ids", "item_ids"];

/// The document with the keys and sections that it has as comments. Of two forms of a key the first stays.
fn uncommented() -> Table {
    let text = fs::read_to_string("configs/production.toml").unwrap();
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.".contains(&b));
    let key = |line: &str| line.split_once(" = ").map(|(key, _)| key.to_owned()).filter(|key| is_name(key));
    let is_header = |line: &str| line.starts_with('[') && line.ends_with(']') && is_name(line.trim_matches(['[', ']']));
    let (mut kept, mut keys) = (String::new(), BTreeSet::new());
    for line in text.lines() {
        let bare = line.strip_prefix("# ").filter(|bare| is_header(bare) || key(bare).is_some()).unwrap_or(line);
        if is_header(bare) {
            keys.clear();
        }
        if key(bare).is_none_or(|key| keys.insert(key)) {
            kept += &format!("{bare}\n");
        }
    }
    kept.parse().unwrap()
}

/// The paths of all tables, and of the first of an array of tables, where the step is its index.
fn tables(value: &Value, path: &[String], found: &mut Vec<Vec<String>>) {
    let step = |name: String| [path, &[name]].concat();
    match value {
        Value::Table(table) => {
            found.push(path.to_vec());
            for (name, value) in table.iter().filter(|(name, _)| !EXAMPLES.contains(&name.as_str())) {
                tables(value, &step(name.clone()), found);
            }
        }
        Value::Array(values) => {
            if let Some(first) = values.first() {
                tables(first, &step("0".to_owned()), found);
            }
        }
        _ => {}
    }
}

fn table<'a>(document: &'a mut Value, path: &[String]) -> &'a mut Table {
    let step = |value: &'a mut Value, step: &String| match value {
        Value::Array(values) => &mut values[step.parse::<usize>().unwrap()],
        other => &mut other[step.as_str()],
    };
    path.iter().fold(document, step).as_table_mut().unwrap()
}

/// `laser config` of a document.
fn config(document: &Value) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("laser.toml");
    fs::write(&path, toml::to_string(document).unwrap()).unwrap();
    laser().arg("config").arg(path).output().unwrap()
}

#[test]
fn production_toml_is_accepted() {
    let shipped = laser().args(["config", "configs/production.toml"]).output();
    assert_exit(&shipped.unwrap(), 0);
    let mut every_key = uncommented();
    // Which of two there can be.
    every_key.remove("demo");
    every_key["output"].as_table_mut().unwrap().remove("table");
    every_key["queue"].as_table_mut().unwrap().remove("nkey_seed");
    every_key["canary"].as_table_mut().unwrap().remove("ids");
    // Lists follow their catalogue.
    for key in ["schema", "regex", "grammar"] {
        every_key["generate"].as_table_mut().unwrap().remove(key).unwrap();
    }
    // Drawn texts, whose keys greedy ones do not have.
    every_key["generate"].as_table_mut().unwrap().insert("temperature".into(), 0.8.into());
    every_key["verification"].as_table_mut().unwrap().insert("policy".into(), "typical".into());
    let printed = config(&Value::Table(every_key.clone()));
    assert_exit(&printed, 0);
    let printed: Table = stdout(&printed).parse().unwrap();
    assert_eq!(printed.keys().collect::<BTreeSet<_>>(), every_key.keys().collect::<BTreeSet<_>>());
}

/// An unknown key in each section in turn: the error lists the keys that there are.
#[test]
fn production_toml_names_every_key() {
    let document = Value::Table(uncommented());
    let mut paths = Vec::new();
    tables(&document, &[], &mut paths);
    assert!(paths.len() > 25, "{paths:?}");
    for path in paths {
        let mut changed = document.clone();
        let section = table(&mut changed, &path);
        section.insert("no_such_key".into(), true.into());
        let refused = config(&changed);
        assert_exit(&refused, 65);
        let error = stderr(&refused);
        let (_, known) = error.split_once("The keys here: ").unwrap_or_else(|| panic!("{path:?}: {error}"));
        let section = table(&mut changed, &path);
        for key in known.trim().split(", ") {
            assert!(section.contains_key(key), "configs/production.toml lacks {key} in [{}]", path.join("."));
        }
    }
}
