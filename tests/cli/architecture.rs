//! What ARCHITECTURE.md says is deliberately absent.

use std::fs;
use std::path::{Path, PathBuf};

use laser_store::run_store::{FILES, SUBFOLDERS};

use crate::entries;

fn root() -> PathBuf {
    std::path::absolute(".").unwrap()
}

/// Code without tests and comments.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]").next().unwrap();
    code.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// That no file below a folder mentions these words, but in tests.
fn check_absent(folder: &str, words: &[&str]) {
    for path in sources(&root().join(folder)).iter().filter(|path| path.file_stem() != Some("tests".as_ref())) {
        let code = code(path);
        for word in words {
            assert!(!code.contains(word), "{} mentions {word}", path.display());
        }
    }
}

#[test]
fn decode_knows_no_tensor_file_clock_thread_or_async() {
    let absent = ["std::fs", "std::io", "std::time", "std::thread", "std::net", "async ", "serde", "candle"];
    check_absent("decode/src", &absent);
}

#[test]
fn the_cpu_engine_knows_no_file_format_or_tensor_library() {
    let absent = ["std::fs", "std::io", "std::net", "async ", "serde", "candle", "mistralrs"];
    check_absent("cpu/src", &absent);
}

/// Outside of the CPU engine, three files map others into memory, one sets up a GPU, and two start kernels and
/// products.
#[test]
fn unsafe_code_is_in_the_cpu_engine_where_files_are_mapped_and_where_a_gpu_is_opened() {
    let is_unsafe =
        |file: &PathBuf| code(file).split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == "unsafe");
    let files = crates().into_iter().filter(|folder| !folder.ends_with("cpu")).flat_map(|f| sources(&f.join("src")));
    let found: Vec<PathBuf> =
        files.filter(is_unsafe).map(|file| file.strip_prefix(root()).unwrap().to_owned()).collect();
    let expected = [
        "store/src/map.rs",
        "engine/src/cuda/product.rs",
        "engine/src/cuda.rs",
        "engine/src/gguf.rs",
        "engine/src/gpu.rs",
        "engine/src/weight_files.rs",
    ];
    assert_eq!(found, expected.map(PathBuf::from));
}

#[test]
fn the_ledger_knows_no_runtime_clock_or_network() {
    let absent = ["tokio", "async ", "std::net", "std::thread", "Instant::now", "std::fs"];
    check_absent("coordinator/src/ledger.rs", &absent);
}

#[test]
fn dependencies_point_one_way() {
    let allowed = [
        ("decode", ""),
        ("schema", ""),
        ("store", "schema"),
        ("delta", "schema store"),
        ("model", "schema"),
        ("grammar", "model schema"),
        ("cpu", "decode"),
        ("engine", "cpu decode model schema"),
        ("pool-builder", "decode model schema store"),
        ("features", "model schema"),
        ("recommender", "decode schema store"),
        ("prepare", "schema store"),
        ("report", "pool-builder schema store"),
        ("coordinator", "delta model schema store"),
        ("worker", "decode engine features grammar model schema store"),
        ("train", "decode engine schema"),
        (
            "night",
            "coordinator decode delta engine features grammar model pool-builder recommender schema store train worker",
        ),
        ("terminal", "schema"),
        ("bench", "coordinator decode engine model night pool-builder report schema store terminal worker"),
    ];
    for (name, allowed) in allowed {
        let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        let normal = manifest.split("[dev-dependencies]").next().unwrap();
        let own = normal.lines().filter_map(|l| l.strip_prefix("laser-")?.split('.').next());
        for dependency in own {
            assert!(allowed.split(' ').any(|name| name == dependency), "{name} depends on {dependency}");
        }
    }
}

#[test]
fn the_contract_reads_and_writes_nothing() {
    let absent = ["std::fs", "std::io", "std::net", "async fn", "tokio", "object_store", "arrow", "parquet"];
    check_absent("schema/src", &absent);
}

/// Retention and erasure remove the files that the store has names for.
#[test]
fn only_the_store_names_the_files_of_a_run() {
    let files = FILES.iter().map(|name| format!("\"{name}\""));
    let folders = SUBFOLDERS.iter().map(|folder| format!("\"{}/", folder.name));
    let names: Vec<String> = files.chain(folders).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for folder in ["coordinator/src", "worker/src", "train/src", "night/src", "report/src", "src"] {
        check_absent(folder, &names);
    }
}

/// The Rust files at a path: itself, or those below a folder.
fn sources(path: &Path) -> Vec<PathBuf> {
    match path.is_dir() {
        true => entries(path).iter().flat_map(|entry| sources(entry)).collect(),
        false => Vec::from_iter(path.extension().is_some_and(|extension| extension == "rs").then(|| path.to_owned())),
    }
}

/// The folders of the workspace's crates, the root package last.
fn crates() -> Vec<PathBuf> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = manifest.lines().skip_while(|line| !line.starts_with("members")).take_while(|line| !line.is_empty());
    let members = members.take_while(|line| !line.starts_with("resolver")).collect::<String>();
    let names = members.split('"').skip(1).step_by(2);
    names.map(|name| root().join(name)).chain([root()]).collect()
}

/// The module of a file of a crate, such as `movielens::items`.
fn module(source: &Path, file: &Path) -> Vec<String> {
    let path = file.strip_prefix(source).unwrap().with_extension("");
    let mut names: Vec<String> = path.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    if matches!(names.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        names.pop();
    }
    names
}

/// Appends the paths of a tree of imports such as `super::{ggml, quants::{Blocks, Bytes}}`, one a line.
fn paths(before: &str, tree: &str, to: &mut String) {
    let Some((head, inner)) = tree.split_once('{').and_then(|(head, rest)| Some((head, rest.rsplit_once('}')?.0)))
    else {
        to.push_str(&format!("\n{before}{}", tree.trim()));
        return;
    };
    let (mut depth, before) = (0, format!("{before}{}", head.trim()));
    let branches = inner.split(|c: char| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    branches.filter(|branch| !branch.trim().is_empty()).for_each(|branch| paths(&before, branch.trim(), to));
}

/// The modules that a file imports from its own crate, as far as `known` has them.
fn imports(module: &[String], code: &str, known: &[Vec<String>]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let uses = code.split("use ").skip(1).filter_map(|rest| rest.split_once(';'));
    let mut code = code.to_owned();
    for (tree, _) in uses {
        paths("", tree, &mut code);
    }
    for token in code.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':') {
        let mut path: Vec<String> = token.split("::").map(str::to_owned).collect();
        let base = match path.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("super") => module[..module.len().saturating_sub(1)].to_vec(),
            _ => continue,
        };
        path.splice(..1, base);
        while !path.is_empty() && !known.contains(&path) {
            path.pop();
        }
        found.push(path);
    }
    found
}

/// A module and those below it may know each other: the parent is the room, its children the furniture.
fn related(a: &[String], b: &[String]) -> bool {
    a.starts_with(b) || b.starts_with(a)
}

#[test]
fn imports_do_not_run_in_circles() {
    for folder in crates() {
        let source = folder.join("src");
        let files = sources(&source);
        let known: Vec<Vec<String>> = files.iter().map(|file| module(&source, file)).collect();
        let edges: Vec<Vec<usize>> = (files.iter().zip(&known))
            .map(|(file, name)| {
                let imported = imports(name, &code(file), &known);
                let others = imported.iter().filter(|other| !related(name, other));
                others.filter_map(|other| known.iter().position(|module| module == other)).collect()
            })
            .collect();
        for start in 0..files.len() {
            let (mut reached, mut open) = (vec![false; files.len()], edges[start].clone());
            while let Some(next) = open.pop() {
                assert!(next != start, "{}: its imports lead back to it", files[start].display());
                if !std::mem::replace(&mut reached[next], true) {
                    open.extend(&edges[next]);
                }
            }
        }
    }
}

#[test]
fn files_and_lines_stay_short() {
    let mut all = Vec::new();
    for folder in crates() {
        for part in ["src", "tests", "benches"] {
            all.extend(sources(&folder.join(part)));
        }
    }
    let mut lengths = Vec::new();
    for file in &all {
        let text = fs::read_to_string(file).unwrap();
        lengths.push(text.lines().count());
        assert!(text.lines().count() <= 700, "{} has over 700 lines", file.display());
        // Rows of tables and templates that tests read stay on one line each.
        let is_data = |line: &str| ["r#\"", "{\"", "{%"].iter().any(|start| line.trim_start().starts_with(start));
        for (line, number) in text.lines().zip(1..).filter(|(line, _)| !is_data(line)) {
            assert!(line.chars().count() <= 120, "{}:{number} has over 120 characters", file.display());
        }
    }
    lengths.sort_unstable();
    assert!(lengths[lengths.len() / 2] <= 250, "the median file has {} lines", lengths[lengths.len() / 2]);
    let command: usize =
        sources(&root().join("src")).iter().map(|f| fs::read_to_string(f).unwrap().lines().count()).sum();
    assert!(command <= 5_000, "the command has {command} lines: it parses, calls and prints");
}

#[test]
fn every_test_that_reliability_md_names_exists() {
    let mut tests = String::new();
    for folder in ["tests/cli", "coordinator/tests/coordinator", "worker/tests/worker"] {
        for file in entries(&root().join(folder)) {
            tests += &fs::read_to_string(file).unwrap();
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
