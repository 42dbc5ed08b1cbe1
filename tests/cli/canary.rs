//! Canaries: a part of a night's entities, made by another configuration, compared with the night and taken for none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cycle::Nights;
use crate::distributed::Cluster;
use crate::faults::{texts, without_run};
use crate::feast::rows;
use crate::server::installed;
use crate::{
    assert_contains, assert_exit, assert_prints, assert_refused, files, laser, only, parts, read_json, stdout,
};

const SHARE: &str = "canary.share=0.5";
const SHORTER: &str = "generate.max_new_tokens=12";

/// Two nights of twelve users, the second of new texts.
fn nights(settings: &[&str]) -> Nights {
    let nights = Nights::new();
    nights.night(1, settings);
    nights.write_users("Alien");
    nights.night(2, settings);
    nights
}

fn canaries(nights: &Nights) -> PathBuf {
    nights.workspace.path("out/canaries")
}

/// The folder of the one canary beside the second night.
fn published(nights: &Nights) -> PathBuf {
    let night = canaries(nights).join("profiles/kind=user/dt=2026-01-02");
    only(&night)
}

fn name(run: &Path) -> String {
    run.file_name().unwrap().to_str().unwrap().replace("run=", "")
}

/// All that readers and later nights look at.
fn seen(nights: &Nights) -> BTreeMap<PathBuf, Vec<u8>> {
    let out = |folder: &str| nights.workspace.path("out").join(folder);
    let mut seen = parts(&out("profiles"));
    seen.extend(files_of(&out("profiles/kind=user")));
    seen.extend(["runs", "pools"].into_iter().flat_map(|folder| nights.names(folder)).map(|n| (n.into(), Vec::new())));
    seen
}

fn files_of(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    crate::entries(folder)
        .into_iter()
        .filter(|path| path.is_file())
        .map(|p| (p.clone(), fs::read(p).unwrap()))
        .collect()
}

fn report(dir: &Path) -> Value {
    let report = laser().arg("report").arg(dir).arg("--json").output().unwrap();
    assert_exit(&report, 0);
    serde_json::from_str(&stdout(&report)).unwrap()
}

#[test]
fn a_canary_is_compared_with_the_night_and_taken_for_none() {
    let nights = nights(&[]);
    let before = seen(&nights);
    let night = name(&nights.published(2)[0]);
    let ran = nights.night(2, &[SHARE, SHORTER, "price.gpu_hour=2.5"]);
    assert_eq!(seen(&nights), before);
    let folder = published(&nights);
    let own = rows(&folder);
    assert!((1..12).contains(&own.len()), "{}", own.len());
    let compared = format!("{0} users, {0} of them with a row in {night}, which is in force", own.len());
    assert_contains(&stdout(&ran), &["Canary of 50 % of the entities", &compared, "tokens per text"]);
    let manifest: Value = read_json(&folder.join("_manifest.json"));
    assert_eq!(manifest["canary"], json!({"share": 0.5, "seed": 1}));
    assert_eq!(manifest["date"], "2026-01-02");
    let pins: Value = read_json(&canaries(&nights).join("runs").join(name(&folder)).join("pins.json"));
    assert_eq!(pins["previous"].as_array().unwrap().len(), 1);
    assert_contains(&pins["previous"].to_string(), &["profiles/kind=user/dt=2026-01-01"]);

    // Its figures are those of the same entities.
    let report = report(&canaries(&nights));
    let comparison = &report["comparisons"][0];
    assert_eq!((&comparison["night"], &comparison["compared"]), (&json!(night), &json!(own.len())));
    assert_eq!(comparison["same_specification"], false);
    let all = rows(&nights.published(2)[0]);
    let tokens = |rows: &BTreeMap<i64, Value>| -> f64 {
        own.keys().map(|id| rows[id]["text_tokens"].as_f64().unwrap()).sum::<f64>() / own.len() as f64
    };
    let figures = comparison["figures"].as_array().unwrap();
    let figure = |name: &str| figures.iter().find(|figure| figure["name"] == name).unwrap();
    let close = |found: &Value, expected: f64| (found.as_f64().unwrap() - expected).abs() < 1e-9;
    let of_tokens = figure("tokens per text");
    assert!(close(&of_tokens["canary"], tokens(&own)) && close(&of_tokens["night"], tokens(&all)), "{of_tokens}");
    assert!(tokens(&own) < tokens(&all));
    // The night has no price.
    assert!(figure("USD per 1,000 texts")["canary"].as_f64().unwrap() > 0.0);
    assert!(figure("USD per 1,000 texts")["night"].is_null());
    let pair = &comparison["pairs"][0];
    let id: i64 = pair["id"].as_str().unwrap().parse().unwrap();
    assert_eq!(pair["texts"], json!([own[&id]["text"], all[&id]["text"]]));
    let page = nights.workspace.path("canary.html");
    assert_exit(&laser().arg("report").arg(&folder).arg("-o").arg(&page).output().unwrap(), 0);
    assert_contains(&fs::read_to_string(page).unwrap(), &["Canary beside the night of 2026-01-02", &night]);

    // Whoever looks at the output sees a canary, or no more than before.
    assert_prints(&nights.workspace.verify(), &["rows, canary)"]);
    let status = stdout(&nights.workspace.output("status", &[]));
    assert_contains(&status, &[&format!("{} (canary, 50 % of the entities)", name(&folder)), &night]);
    assert!(!stdout(&nights.laser(&["outputs", "list"], &[])).contains(&name(&folder)));
    assert_refused(&nights.laser(&["outputs", "promote", &name(&folder)], &[]), &["is a canary"]);
    assert_prints(&nights.night(3, &[]), &["12 unchanged"]);
}

#[test]
fn a_canary_resumes_where_it_was_killed() {
    let nights = nights(&[]);
    let settings = ["canary.share=0.9", SHORTER];
    nights.kill_night(2, &settings);
    let committed = parts(&canaries(&nights));
    assert!(!committed.is_empty());
    nights.night(2, &settings);
    let after = parts(&canaries(&nights));
    assert!(committed.iter().all(|(path, bytes)| after[path] == *bytes));
    assert!(published(&nights).join("_SUCCESS").exists());
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn a_table_of_ids_names_the_entities_of_a_canary() {
    let nights = nights(&[]);
    let file = nights.workspace.path("ids.csv");
    fs::write(&file, "id,kind\n3,user\n11,user\n").unwrap();
    let ids = format!("canary.ids={}", file.display());
    nights.night(2, &[&ids, SHORTER]);
    assert_eq!(rows(&published(&nights)).into_keys().collect::<BTreeSet<_>>(), BTreeSet::from([3, 11]));
}

#[test]
fn a_canary_of_no_entities_is_refused_before_anything_is_written() {
    let nights = nights(&[]);
    let file = nights.workspace.path("ids.csv");
    let refused = |content: &str, words: &[&str]| {
        fs::write(&file, content).unwrap();
        let ids = format!("canary.ids={}", file.display());
        assert_refused(&nights.command("run", 2, &[&ids]).output().unwrap(), words);
    };
    refused("id\n3\n99\n77\n", &["2 of its ids are in no table of [[input]], such as 77, 99"]);
    refused("id,kind\n3,item\n", &["1 of its ids are in no table"]);
    refused("id,kind\n3,film\n", &["row 1", "film"]);
    refused("user\n3\n", &["no column \"id\"; it has user"]);
    refused("id\n", &["has no id"]);
    let small = nights.command("run", 2, &["canary.share=0.000001"]).output().unwrap();
    assert_refused(&small, &["takes none of the 12 entities", "a larger share"]);
    let both = nights.command("run", 2, &[SHARE, "canary.ids=x.csv"]).output().unwrap();
    assert_refused(&both, &["give share or ids, one of them"]);
    assert!(!canaries(&nights).exists());
}

#[test]
fn a_canary_without_a_night_and_one_of_the_same_specification_are_told_as_such() {
    let nights = Nights::new();
    nights.night(1, &[]);
    nights.write_users("Alien");
    assert_prints(&nights.night(2, &[SHARE]), &["there is no complete run of this night to compare them with"]);
    nights.night(2, &[]);
    let same = nights.night(2, &[SHARE]);
    assert_prints(&same, &["complete already", "Both have the same specification"]);
    let report = report(&canaries(&nights));
    assert_eq!(report["comparisons"][0]["same_specification"], true);
    assert_eq!(report["comparisons"][0]["agreement"][0], json!({"name": "texts that are the same", "value": 1.0}));
}

#[test]
fn a_canary_leaves_with_its_night_and_enters_no_table() {
    let delta = "output.table=delta";
    let nights = nights(&[delta]);
    nights.night(2, &[delta, SHARE, SHORTER, "output.keep_nights=2"]);
    assert!(!canaries(&nights).join("profiles/kind=user/_delta_log").exists());
    for (day, film) in [(3, "Brazil"), (4, "Casablanca")] {
        assert!(published(&nights).exists());
        nights.write_users(film);
        nights.night(day, &[delta, "output.keep_nights=2"]);
    }
    assert!(!nights.workspace.path("out/profiles/kind=user/dt=2026-01-02").exists());
    assert!(parts(&canaries(&nights)).is_empty());
    assert!(files(&canaries(&nights).join("runs")).is_empty());
    assert_exit(&nights.workspace.verify(), 0);
}

#[test]
fn texts_of_a_canary_are_compared_by_their_embeddings() {
    let encoder = format!("encoder.path={}", installed("LASER_MINILM", "encoder.sh"));
    let nights = Nights::new();
    nights.night(2, &[&encoder]);
    nights.night(2, &[&encoder, SHARE, SHORTER]);
    let comparison = &report(&canaries(&nights))["comparisons"][0];
    let agreement = comparison["agreement"].as_array().unwrap();
    let mean = agreement.iter().find(|figure| figure["name"] == "mean similarity").unwrap();
    assert!((0.1..0.999).contains(&mean["value"].as_f64().unwrap()), "{mean}");
    let counts = comparison["similarities"]["bins"].as_array().unwrap().iter();
    assert_eq!(counts.map(|bin| bin["counts"][0].as_u64().unwrap()).sum::<u64>(), comparison["compared"]);
}

#[test]
fn lists_of_a_canary_are_compared_item_by_item() {
    let night = crate::lists::workspace();
    assert_exit(&night.run(&[]), 0);
    let before = crate::lists::only_lists(&night, "2026-01-02");
    assert_prints(&night.run(&[SHARE, "lists.normalisation=allowed"]), &["items that both lists have"]);
    assert_eq!(crate::lists::only_lists(&night, "2026-01-02"), before);
    let comparison = &report(&night.path("out/canaries"))["comparisons"][0];
    let agreement = comparison["agreement"].as_array().unwrap();
    let names: Vec<&str> = agreement.iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    assert_eq!(names[1..3], ["items that both lists have", "lists with the same first item"]);
    assert!(agreement.iter().all(|figure| (-1.0..=1.0).contains(&figure["value"].as_f64().unwrap())));
    let [own, other] = [0, 1].map(|side| &comparison["pairs"][0]["lists"][side]["items"]);
    let user = comparison["pairs"][0]["id"].as_str().unwrap();
    let items = |items: &Value| -> Vec<Value> {
        items
            .as_array()
            .unwrap()
            .iter()
            .map(|item| json!(item["id"].as_str().unwrap().parse::<i64>().unwrap()))
            .collect()
    };
    assert_eq!(json!(items(other)), json!(before[user].0));
    assert_eq!(items(own).len(), 5);
}

#[test]
fn many_machines_make_a_canary_as_one_does() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    // Beside its night, each with workers that refuse the other's shards.
    let other = [SHARE, "generate.stop=[\"never written\"]"];
    let (night, coordinator) = (cluster.coordinator(&[]), cluster.coordinator(&other));
    let (worker, canary_worker) = (cluster.worker(), cluster.start("worker", &other));
    canary_worker.wait_for("writing", 1);
    canary_worker.kill();
    let canary_worker = cluster.start("worker", &other);
    coordinator.assert_ends(0);
    canary_worker.terminate();
    cluster.finish(night, worker);
    let canary = crate::Workspace { dir: tempfile::tempdir().unwrap(), environment: Vec::new() };
    fs::rename(cluster.tonight.path("out/canaries"), canary.path("out")).unwrap();
    let made = without_run(texts(&canary));
    assert!(!made.is_empty() && made.len() < cluster.expected.len(), "{}", made.len());
    assert!(made.iter().all(|(key, text)| cluster.expected[key] == *text));
}
