//! Reports of small tables, counted by hand, and what is refused.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::statistics::Verdict;

/// Thirty items; what users had, and what they took later.
///
/// Popular are 1 (4 times), 2 (twice), 0, 3, 4 and 5 (once), then the others by number. 1 is followed by 2 twice and by
/// 4 once.
const USERS: &str = r#"{"id": "a", "history": [{"item": 0}, {"item": 1}, {"item": 2}]}
{"id": "b", "history": [{"item": 3}, {"item": "1"}, {"item": 99}, {"item": 4}]}
{"id": "c", "history": [{"item": 1}, {"item": 2}]}
{"id": "d", "history": [{"item": 5}, {"item": 1}]}
{"id": "e", "history": [{"item": 98}]}
"#;

const TRUTH: &str = r#"{"id": "a", "items": [3, 20]}
{"id": "b", "items": [29]}
{"id": "c", "items": [0]}
{"id": "d", "items": [4]}
{"id": "e", "items": []}
"#;

struct Data {
    dir: TempDir,
    catalogue: CatalogueTable,
    input: [EntityTable; 1],
    config: ListsEvalConfig,
}

impl Data {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let catalogue = CatalogueTable { path: path("items.jsonl"), ..CatalogueTable::default() };
        let input = serde_json::json!({"path": path("users.jsonl"), "kind": "user"});
        let config = ListsEvalConfig { truth: path("truth.jsonl"), ..ListsEvalConfig::default() };
        let data = Self { catalogue, input: [serde_json::from_value(input).unwrap()], config, dir };
        data.write("items.jsonl", &(0..30).map(item).collect::<String>());
        data.write("users.jsonl", USERS);
        data.write("truth.jsonl", TRUTH);
        data
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.dir.path().join(name), text).unwrap();
    }

    /// Adds a maker with these tables.
    fn make(&mut self, name: &str, tables: &[&str]) {
        let paths = (0..).zip(tables).map(|(seed, table)| {
            self.write(&format!("{name}-{seed}.jsonl"), table);
            self.dir.path().join(format!("{name}-{seed}.jsonl")).display().to_string()
        });
        let maker = MakerConfig { name: name.to_owned(), paths: paths.collect() };
        self.config.makers.push(maker);
    }

    async fn judge(&self, repeat: bool) -> Result<ListsReport<'_>, String> {
        let source = ListsSource { catalogue: &self.catalogue, input: &self.input, item: "item", repeat };
        lists(source, &self.config, &mut ()).await.map_err(|error| format!("{error:#}"))
    }
}

fn item(id: i64) -> String {
    format!("{{\"id\": {id}, \"identifier\": [{id}]}}\n")
}

fn gain(rank: f64) -> f64 {
    1.0 / (rank + 1.0).log2()
}

/// Means over users, which a single seed has.
fn means(figures: [Mean; 3]) -> [f64; 3] {
    figures.map(|figure| figure.mean)
}

#[tokio::test]
async fn baselines_are_those_that_one_counts_by_hand() {
    let data = Data::new();
    let report = data.judge(false).await.unwrap();
    assert_eq!((report.items, report.histories, report.interactions), (30, 4, 10));
    assert_eq!((report.users, report.without_history), (4, 0));
    assert_eq!((report.true_items, report.true_in_history), (5, 0));
    let [popularity, markov, knn] = &report.makers[..] else { panic!("{:?}", report.makers) };
    assert_eq!([&popularity.name, &markov.name, &knn.name], ["popularity", "Markov", "item-kNN"]);
    assert!(report.comparisons.is_empty() && popularity.is_baseline && popularity.seeds.is_empty());
    // a is listed 3 first and 20 at rank 18, b 2, 0, 5 up to 22, c 0 first, and d 2, 0, 3, 4.
    assert_eq!(means(popularity.measures.recall), [0.625, 0.625, 0.75]);
    let of_a = 1.0 / (1.0 + gain(2.0));
    let expected = (of_a + 0.0 + 1.0 + gain(4.0)) / 4.0;
    assert!((popularity.measures.ndcg[0].mean - expected).abs() < 1e-12);
    // Behind 1 the chain has 2 and then 4; nothing follows the last items of the others.
    assert!((markov.measures.ndcg[0].mean - expected - (gain(2.0) - gain(4.0)) / 4.0).abs() < 1e-12);
    assert_eq!(means(markov.measures.recall), [0.625, 0.625, 0.75]);
    // Lists that may repeat begin with 1 and 2, so that 20 is at rank 21 and 3 at rank 4.
    let report = data.judge(true).await.unwrap();
    let popularity = &report.makers[0].measures;
    assert_eq!(means(popularity.recall), [0.625, 0.625, 0.625]);
    let expected = (gain(4.0) * of_a + gain(3.0) + gain(5.0)) / 4.0;
    assert!((popularity.ndcg[0].mean - expected).abs() < 1e-12);
}

#[tokio::test]
async fn makers_are_compared_with_each_other_and_with_the_baselines() {
    let mut data = Data::new();
    data.make("true", &[TRUTH, &TRUTH.replace("\"c\", \"items\": [0]", "\"c\", \"items\": [7]")]);
    data.make("half", &["{\"entity_id\": \"a\", \"items\": [3, 2]}\n{\"id\": \"z\", \"items\": [400]}\n", "", ""]);
    let report = data.judge(false).await.unwrap();
    let [truth, half] = &report.makers[..2] else { panic!("{:?}", report.makers) };
    assert_eq!(truth.seeds.iter().map(|seed| seed.quality.measures.recall[0]).collect::<Vec<_>>(), [1.0, 0.75]);
    assert!((truth.measures.recall[0].mean - 0.875).abs() < 1e-12 && truth.measures.recall[0].half_width.is_some());
    let first = &half.seeds[0];
    assert_eq!((first.without_list, first.other_lists, first.in_history, first.longest), (3, 1, 1, 2));
    assert_eq!((first.quality.measures.recall[0], half.seeds[1].without_list), (0.125, 4));
    let pairs: Vec<(&str, &str)> = report.comparisons.iter().map(|p| (p.first.as_str(), p.second.as_str())).collect();
    let baselines = ["popularity", "Markov", "item-kNN"];
    let expected = baselines.map(|name| ("true", name)).into_iter().chain(baselines.map(|name| ("half", name)));
    assert_eq!(pairs, [("true", "half")].into_iter().chain(expected).collect::<Vec<_>>());
    // Two seeds against three make no pairs; a baseline has as many as the maker.
    assert!(report.comparisons[0].over_seeds.is_none());
    let over_seeds = report.comparisons[1].over_seeds.unwrap().recall[0];
    assert!((over_seeds.difference.mean - 0.25).abs() < 1e-12);
    // Of the users 1/2, 1, -1/2 and 0.
    let by_user = report.comparisons[1].by_user.recall[0].comparison;
    assert_eq!(by_user.difference, Mean::of(&[0.5, 1.0, -0.5, 0.0]));
    assert_eq!(by_user.verdict, Verdict::NotShown);
}

#[tokio::test]
async fn what_is_wrong_is_named_by_its_row_or_user() {
    let refused: [(&str, &str, &str); 7] = [
        ("truth.jsonl", "{\"id\": \"a\", \"items\": [3, 77]}\n", "truth.jsonl, row 1: item 77 is not in the catalogue"),
        ("truth.jsonl", "{\"id\": \"a\", \"items\": []}\n", "truth.jsonl: no user has a true item"),
        (
            "truth.jsonl",
            "{\"id\": \"a\", \"items\": [3]}\n{\"id\": \"a\", \"items\": [4]}\n",
            "truth.jsonl, row 2: user a is there twice",
        ),
        (
            "users.jsonl",
            "{\"id\": \"a\", \"history\": [{\"film\": 3}]}\n",
            "no interaction has that field; there is film",
        ),
        ("users.jsonl", "{\"id\": \"a\", \"history\": [{\"item\": 300}]}\n", "no user has an item of the catalogue"),
        (
            "users.jsonl",
            "{\"id\": \"a\", \"history\": [{\"item\": 3}]}\n{\"id\": \"a\", \"history\": [{\"item\": 4}]}\n",
            "users.jsonl: user a is there twice",
        ),
        (
            "items.jsonl",
            "{\"id\": 3, \"identifier\": [1]}\n{\"id\": 3, \"identifier\": [2]}\n",
            "row 2: column \"id\" holds 3, the id of an earlier row",
        ),
    ];
    for (name, text, expected) in refused {
        let data = Data::new();
        data.write(name, text);
        let error = data.judge(false).await.unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    for (table, expected) in [
        ("{\"id\": \"b\", \"items\": [77]}\n", "row 1: the list of user b: item 77 is not in the catalogue"),
        ("{\"id\": \"b\", \"items\": [7, 8, 7]}\n", "row 1: the list of user b has item 7 twice"),
        ("{\"id\": \"b\", \"items\": [7]}\n{\"id\": \"b\", \"items\": [8]}\n", "row 2: user b has two lists"),
    ] {
        let mut data = Data::new();
        data.make("maker", &[table]);
        let error = data.judge(false).await.unwrap_err();
        assert!(error.starts_with("[[eval.lists.makers]] \"maker\": ") && error.contains(expected), "{error}");
    }
    let mut data = Data::new();
    let nowhere = data.dir.path().join("out").display().to_string();
    data.config.makers.push(MakerConfig { name: "maker".to_owned(), paths: vec![nowhere] });
    let error = data.judge(false).await.unwrap_err();
    assert!(error.contains("out: no complete night of lists (no _SUCCESS below recommendations/)"), "{error}");
}
