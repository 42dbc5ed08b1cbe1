//! `laser eval lists`: published lists against what users took later.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Output;

use serde_json::{Value, json};

use crate::lists::{List, only_lists, users, workspace};
use crate::{Workspace, assert_exit, assert_prints, assert_refused, laser, only, set, stdout};

const EVAL: &str = r#"
[eval.lists]
truth = "DIR/truth.jsonl"
[[eval.lists.makers]]
name = "target"
paths = ["DIR/out"]
"#;

fn eval(night: &Workspace, options: &[&str], settings: &[&str]) -> Output {
    let mut command = laser();
    command.args(["eval", "lists"]).arg(night.path("laser.toml")).args(options).args(set(settings));
    command.output().unwrap()
}

fn json(night: &Workspace, settings: &[&str]) -> Value {
    let output = eval(night, &["--json"], settings);
    assert_exit(&output, 0);
    serde_json::from_str(&stdout(&output)).unwrap()
}

/// A night of lists, ready to be judged.
fn judged_night() -> (Workspace, BTreeMap<String, List>) {
    let night = workspace();
    let config = fs::read_to_string(night.path("laser.toml")).unwrap();
    night.configure(&[&config, EVAL]);
    assert_exit(&night.run(&[]), 0);
    let lists = only_lists(&night, "2026-01-02");
    (night, lists)
}

fn write_truth(night: &Workspace, truth: impl IntoIterator<Item = (String, Vec<i64>)>) {
    let row = |(user, items)| json!({ "id": user, "items": items }).to_string() + "\n";
    fs::write(night.path("truth.jsonl"), truth.into_iter().map(row).collect::<String>()).unwrap();
}

fn ids(list: &List) -> Vec<i64> {
    list.0.iter().map(|item| item.to_string().parse().unwrap()).collect()
}

/// Recall at 5 of the most popular items that a user does not have yet.
fn recall_of_popularity(lists: &BTreeMap<String, List>) -> f64 {
    let rows: Vec<Value> = users(0).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let history = |row: &Value| -> Vec<i64> {
        row["history"].as_array().unwrap().iter().map(|one| one["item"].as_i64().unwrap()).collect()
    };
    let mut counts: BTreeMap<i64, i64> = (0..48).map(|item| (item, 0)).collect();
    rows.iter().flat_map(&history).for_each(|item| *counts.get_mut(&item).unwrap() += 1);
    let mut popular: Vec<i64> = counts.keys().copied().collect();
    popular.sort_by_key(|item| (-counts[item], *item));
    let hits = rows.iter().map(|row| {
        let known: BTreeSet<i64> = history(row).into_iter().collect();
        let truth = ids(&lists[row["id"].as_str().unwrap()]);
        popular.iter().filter(|item| !known.contains(item)).take(5).filter(|item| truth.contains(item)).count()
    });
    hits.sum::<usize>() as f64 / (5 * rows.len()) as f64
}

#[test]
fn a_night_whose_lists_are_the_truth_has_all_of_it_and_popularity_what_one_counts() {
    let (night, lists) = judged_night();
    write_truth(&night, lists.iter().map(|(user, list)| (user.clone(), ids(list))));
    let report = json(&night, &[]);
    let (target, popularity) = (&report["makers"][0], &report["makers"][1]);
    for measure in ["recall", "ndcg", "hit"] {
        for figure in target[measure].as_array().unwrap() {
            assert!((figure["mean"].as_f64().unwrap() - 1.0).abs() < 1e-12, "{measure}: {target}");
        }
    }
    assert_eq!((&report["users"], &report["true_in_history"]), (&json!(60), &json!(0)));
    assert_eq!((&target["seeds"][0]["longest"], &target["seeds"][0]["in_history"]), (&json!(5), &json!(0)));
    assert_eq!(popularity["name"], "popularity");
    let (found, expected) = (popularity["recall"][0]["mean"].as_f64().unwrap(), recall_of_popularity(&lists));
    assert!((found - expected).abs() < 1e-12 && expected > 0.0 && expected < 0.9, "{found}, expected {expected}");
    let difference = &report["comparisons"][0]["by_user"]["recall"][0]["comparison"];
    assert!((difference["difference"]["mean"].as_f64().unwrap() - 1.0 + expected).abs() < 1e-12);
    assert_eq!(difference["verdict"], "different");
    assert_eq!(report["comparisons"][0]["over_seeds"], Value::Null);
    // The same night by its folder, as a second seed; and a user whom no list is for.
    let nobody = [("nobody".to_owned(), vec![7])];
    write_truth(&night, lists.iter().map(|(user, list)| (user.clone(), ids(list))).chain(nobody));
    let folder = only(&night.path("out/recommendations/kind=user/dt=2026-01-02"));
    let paths = format!(
        "eval.lists.makers=[{{name='target',paths=['{}','{}']}}]",
        night.path("out").display(),
        folder.display()
    );
    let output = eval(&night, &["--markdown"], &[&paths]);
    let all = format!("{:.4} ± 0.0000", 60.0 / 61.0);
    let words = [
        &*format!("| target     |     2 | {all} |"),
        "target less item-kNN",
        "| difference by seed |",
        "no list for 1 of 61 users, which counts as an empty one",
        "no history of 1 of these users",
        "lists have 5 items at most",
    ];
    assert_prints(&output, &words);
}

#[test]
fn lists_that_cannot_be_judged_are_refused_and_baselines_need_none() {
    let (night, lists) = judged_night();
    let (user, list) = lists.iter().next().map(|(user, list)| (user.clone(), ids(list))).unwrap();
    write_truth(&night, [(user.clone(), vec![4000])]);
    let refuse = |settings: &[&str], words: &[&str]| assert_refused(&eval(&night, &[], settings), words);
    refuse(&[], &["[eval.lists] truth: ", "truth.jsonl, row 1: item 4000 is not in the catalogue"]);
    // A catalogue without an item of the list.
    let other = (0..48).find(|item| !list.contains(item)).unwrap();
    write_truth(&night, [(user.clone(), vec![other])]);
    let items = fs::read_to_string(night.path("items.jsonl")).unwrap();
    let without = |line: &&str| !line.contains(&format!("\"id\":{},", list[0]));
    let fewer: Vec<&str> = items.lines().filter(without).collect();
    assert_eq!(fewer.len(), 47);
    fs::write(night.path("fewer.jsonl"), fewer.join("\n")).unwrap();
    let catalogue = format!("lists.catalogue.path={}", night.path("fewer.jsonl").display());
    let expected = format!("the list of user {user}: item {} is not in the catalogue", list[0]);
    refuse(&[&catalogue], &["[[eval.lists.makers]] \"target\": ", &expected]);
    let nowhere = "eval.lists.makers=[{name='target',paths=['no/such/output']}]";
    refuse(&[nowhere], &["no/such/output: no complete night of lists"]);
    refuse(&["eval.lists.truth="], &["[eval.lists] truth: not set"]);
    refuse(&["eval.lists.margins=1"], &["did you mean \"margin\""]);
    let config = fs::read_to_string(night.path("laser.toml")).unwrap();
    night.configure(&[config.split("[eval.lists]").next().unwrap()]);
    refuse(&[], &["[eval.lists] truth: not set"]);
    let truth = format!("eval.lists.truth={}", night.path("truth.jsonl").display());
    assert_prints(&eval(&night, &[], &[&truth]), &["1 users with 1 true items", "popularity", "Markov", "item-kNN"]);
}
