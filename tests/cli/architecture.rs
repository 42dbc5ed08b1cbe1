//! What ARCHITECTURE.md says is deliberately absent.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    std::path::absolute(".").unwrap()
}

/// Code without tests and comments.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]").next().unwrap();
    code.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

fn check_absent(path: &Path, words: &[&str]) {
    let code = code(path);
    for word in words {
        assert!(!code.contains(word), "{} mentions {word}", path.display());
    }
}

#[test]
fn decode_knows_no_tensor_file_clock_thread_or_async() {
    let absent = ["std::fs", "std::io", "std::time", "std::thread", "std::net", "async ", "serde", "candle"];
    let mut folders = vec![root().join("decode/src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => check_absent(&path, &absent),
            }
        }
    }
}

#[test]
fn the_ledger_knows_no_runtime_clock_or_network() {
    let absent = ["tokio", "async ", "std::net", "std::thread", "Instant::now", "std::fs"];
    check_absent(&root().join("coordinator/src/ledger.rs"), &absent);
}

#[test]
fn dependencies_point_one_way() {
    let allowed = [
        ("decode", &[][..]),
        ("schema", &[]),
        ("store", &["schema"]),
        ("delta", &["schema", "store"]),
        ("model", &["schema"]),
        ("pool-builder", &["decode", "model", "schema", "store"]),
        ("features", &["model", "schema", "store"]),
        ("recommender", &[]),
        ("coordinator", &["delta", "model", "schema", "store"]),
        ("worker", &["decode", "features", "model", "schema", "store"]),
    ];
    for (name, allowed) in allowed {
        let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        let normal = manifest.split("[dev-dependencies]").next().unwrap();
        let own = normal.lines().filter_map(|l| l.strip_prefix("laser-")?.split('.').next());
        for dependency in own {
            assert!(allowed.contains(&dependency), "{name} depends on {dependency}");
        }
    }
}

#[test]
fn every_test_that_reliability_md_names_exists() {
    let mut tests = String::new();
    for folder in ["tests/cli", "coordinator/tests/coordinator", "worker/tests/worker"] {
        for file in fs::read_dir(root().join(folder)).unwrap() {
            tests += &fs::read_to_string(file.unwrap().path()).unwrap();
        }
    }
    let page = fs::read_to_string(root().join("docs/reliability.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| "));
    let names = rows.flat_map(|row| row.split('`').skip(1).step_by(2));
    let names: Vec<&str> = names.filter(|name| name.matches('_').count() > 2).collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        assert!(tests.contains(&format!("fn {name}(")), "there is no test {name}");
    }
}
