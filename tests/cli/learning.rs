//! Models trained on interactions: `laser embed`, `laser eval`, and what they refuse.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{assert_exit, assert_prints, assert_refused, laser, set, stdout};

/// Users of two tastes and items of two kinds; who likes what shows in ratings and in who has seen what.
struct Data {
    dir: TempDir,
}

const USERS: u32 = 24;
const ITEMS: u32 = 30;

/// In training on so few rows nothing else matters than that it is quick.
const CONFIG: &str = r#"
[embed]
dimension = 8
layers = 1
batch = 256
epochs = 20
learning_rate = 0.02
validation = 0.2
test = 0.2
[eval]
seeds = 2
[eval.training]
history = 4
dimension = 4
hidden = [8]
batch = 64
epochs = 4
learning_rate = 0.01
"#;

impl Data {
    fn new() -> Self {
        let data = Self { dir: tempfile::tempdir().unwrap() };
        let mut csv = "user,item,rating,timestamp\n".to_owned();
        for step in 0..20 {
            for user in 0..USERS {
                // 7 has no factor in common with the number of items: a user sees none twice.
                let item = (user + step * 7) % ITEMS;
                let rating = if item % 2 == user % 2 { 5 } else { 2 };
                writeln!(csv, "{user},{item},{rating},{}", 1000 + step * USERS + user).unwrap();
            }
        }
        data.write("interactions.csv", &csv);
        data.configure("");
        data
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// The configuration with a further part, in which `DIR` is the folder.
    fn configure(&self, more: &str) {
        let dir = self.dir.path().to_str().unwrap();
        let table = format!("[interactions]\npath = \"{dir}/interactions.csv\"\n");
        let text = format!("{table}{CONFIG}{}", more.replace("DIR", dir));
        self.write("laser.toml", &text);
    }

    fn laser(&self, command: &[&str], settings: &[&str]) -> Output {
        let mut laser = laser();
        // Models that are not there look like hub ids, and no hub is to be asked.
        laser.env("HF_HUB_OFFLINE", "1");
        laser.current_dir(self.dir.path()).args(command).args(set(settings)).output().unwrap()
    }

    fn json(&self, command: &str, settings: &[&str]) -> Value {
        let output = self.laser(&["eval", command, "laser.toml", "--json"], settings);
        assert_exit(&output, 0);
        serde_json::from_str(&stdout(&output)).unwrap()
    }

    #[track_caller]
    fn refuses(&self, command: &[&str], settings: &[&str], expected: &str) {
        assert_refused(&self.laser(command, settings), &[expected]);
    }

    /// Embeddings and ids that tell the two kinds of items apart, and users whose histories end before step 15.
    fn write_knowledge(&self) {
        let (mut vectors, mut ids, mut users) = (String::new(), String::new(), String::new());
        for item in 0..ITEMS {
            let kind = item % 2;
            let vector = [f64::from(kind), 0.3, f64::from(item) / 100.0];
            writeln!(vectors, "{}", json!({"id": item, "embedding": vector})).unwrap();
            writeln!(ids, "{}", json!({"entity_id": item, "knowledge_ids": [kind, 3]})).unwrap();
        }
        for user in 0..USERS {
            let history = [json!({"title": "A", "timestamp": 1000 + user})];
            writeln!(users, "{}", json!({"id": user, "history": history})).unwrap();
        }
        let text = |item: u32| json!({"id": item, "text": format!("A film of kind {}, number {item}.", item % 2)});
        self.write("texts.jsonl", &(0..ITEMS).map(|item| text(item).to_string() + "\n").collect::<String>());
        self.write("items.jsonl", &vectors);
        self.write("ids.jsonl", &ids);
        self.write("users.jsonl", &users);
    }
}

const CTR: [&str; 3] = ["eval", "ctr", "laser.toml"];

/// The texts of a key in each row.
fn texts<'a>(rows: &'a [Value], key: &str) -> Vec<&'a str> {
    rows.iter().map(|row| row[key].as_str().unwrap()).collect()
}

const KNOWLEDGE: &str = r#"
[[eval.knowledge]]
name = "texts"
item_embeddings = { table = "DIR/items.jsonl" }
item_ids = { table = "DIR/ids.jsonl" }
user_ids = { table = "DIR/ids.jsonl" }
entities = [{ path = "DIR/users.jsonl", kind = "user" }]
[[eval.knowledge]]
name = "others"
item_embeddings = { table = "DIR/items.jsonl" }
"#;

#[test]
fn the_same_command_writes_the_same_embeddings() {
    let data = Data::new();
    let embed = |dir: &str, settings: &[&str]| {
        let output = data.laser(&["embed", "laser.toml", "-o", dir], settings);
        assert_prints(&output, &["24 users: "]);
        ["users", "items"].map(|name| fs::read(data.path(&format!("{dir}/{name}.parquet"))).unwrap())
    };
    let first = embed("a", &[]);
    assert_eq!(first, embed("b", &[]));
    assert_ne!(first, embed("c", &["embed.seed=2"]));
}

#[test]
fn three_methods_are_compared_on_one_split() {
    let data = Data::new();
    let report = data.json("embed", &[]);
    assert_eq!(report["by_time"], true);
    assert_eq!(report["train"], 288);
    let methods = report["methods"].as_array().unwrap();
    assert_eq!(texts(methods, "name"), ["popularity", "matrix factorisation (BPR)", "LightGCN"]);
    for method in methods {
        assert_eq!(method["quality"]["users"], USERS);
    }
}

#[test]
fn knowledge_is_judged_against_none_and_against_other_knowledge() {
    let data = Data::new();
    data.write_knowledge();
    data.configure(KNOWLEDGE);
    let report = data.json("ctr", &[]);
    let of_din = |list: &str| -> Vec<Value> {
        let all = report[list].as_array().unwrap().iter();
        all.filter(|row| row["model"] == "din").cloned().collect()
    };
    let rows = of_din("results");
    assert_eq!(texts(&rows, "variant"), ["no knowledge", "texts, embedding", "texts, ids", "others, embedding"]);
    assert!(rows[0]["gain"].is_null() && rows[1]["gain"]["verdict"].is_string());
    let pairs = of_din("pairs");
    assert_eq!((&pairs[0]["first"], &pairs[0]["second"]), (&json!("texts"), &json!("others")));
    // The same vectors, trained the same way.
    assert_eq!(pairs[0]["auc"]["difference"]["mean"], 0.0);
    assert_eq!(pairs[0]["auc"]["verdict"], "equivalent");
    assert_eq!(report["runs"].as_array().unwrap().len(), 2 * 4 * 2);
    assert_eq!(report["knowledge"][1]["users"], 1.0);
    let text = data.laser(&["eval", "ctr", "laser.toml", "--markdown"], &["eval.models=[\"din\"]"]);
    assert_prints(&text, &["| DIN   |"]);
}

#[test]
fn knowledge_from_after_the_split_is_refused() {
    let data = Data::new();
    data.write_knowledge();
    data.configure(KNOWLEDGE);
    let late = json!({"id": 7, "history": [{"title": "A", "timestamp": 1004}, {"title": "B", "timestamp": 1400}]});
    let users = fs::read_to_string(data.path("users.jsonl")).unwrap();
    data.write("users.jsonl", &format!("{users}{late}\n"));
    data.refuses(
        &CTR,
        &[],
        "users.jsonl, row 25: the history of user 7 has an interaction at 1400, but training ends \
         at 1384: \"texts\" knows what it is tested on",
    );
    // By user, 7's own training ends at 1000 + 16 · 24 + 7.
    data.refuses(&CTR, &["eval.split_by=user"], "at 1400, but training ends at 1391");
    let untimed = json!({"id": 7, "history": [{"title": "A"}]});
    data.write("users.jsonl", &format!("{users}{untimed}\n"));
    data.refuses(&CTR, &[], "row 25: an interaction in the history of user 7 has no timestamp");
    data.configure(&KNOWLEDGE.replace("entities =", "#"));
    data.refuses(&CTR, &[], "set entities to the tables that the texts of users were written from");
}

#[test]
fn bad_interactions_and_configurations_are_refused_by_name() {
    let data = Data::new();
    let cases: [(&[&str], &[&str], &str); 10] = [
        (
            &CTR,
            &["interactions.rating=stars"],
            "no column \"stars\"; it has user, item, rating, timestamp. Set [interactions] rating",
        ),
        (&CTR, &["interactions.timestamp=when"], "Set [interactions] timestamp"),
        (&CTR, &["eval.positive_rating=1.0"], "interactions of the train part are positive"),
        (&CTR, &["eval.validation_until=0.5"], "[eval] validation_until = 0.5: expected more than train_until = 0.8"),
        (&CTR, &["eval.train_until=5000", "eval.validation_until=6000"], "the validation part has no interactions"),
        (&CTR, &["eval.seeds=1"], "[eval] seeds = 1: expected at least 2"),
        (&CTR, &["eval.training.dropout=1.0"], "[eval.training] dropout = 1"),
        (&["eval", "embed", "laser.toml"], &["embed.layers=0"], "[embed] layers = 0"),
        (&["embed", "laser.toml", "-o", "out"], &["embed.validation=0.01"], "no user has enough interactions"),
        (&["embed", "laser.toml", "-o", "out"], &["embed.min_rating=9.0"], "lower [embed] min_rating"),
    ];
    for (command, settings, expected) in cases {
        data.refuses(command, settings, expected);
    }
    assert!(!data.path("out").exists(), "something was written");
    data.write("interactions.csv", "user,item,rating,timestamp\n1,2,NaN,5\n");
    data.refuses(&CTR, &[], "interactions.csv, row 1: column \"rating\" holds \"NaN\"");
    data.write("laser.toml", "");
    data.refuses(&CTR, &[], "[interactions] path: not set");
}

/// Attributes of items, and the settings of a split by item.
const COLD: &str = r#"
[eval.attributes]
entities = [{ path = "DIR/attributes.jsonl", kind = "item" }]
names = ["genre", "colour"]
[[eval.knowledge]]
name = "texts"
item_texts = "DIR/texts.jsonl"
item_embeddings = { table = "DIR/items.jsonl" }
item_ids = { table = "DIR/ids.jsonl" }
"#;

const BY_ITEM: [&str; 3] = ["eval.split_by=item", "eval.item_share=0.3", "eval.training.content_in_history=true"];

impl Data {
    fn write_attributes(&self) {
        let row =
            |item: u32| json!({"id": item, "genre": [(item % 2).to_string(), "any"], "colour": item % 3}).to_string();
        self.write("attributes.jsonl", &(0..ITEMS).map(row).collect::<Vec<_>>().join("\n"));
    }
}

#[test]
fn new_items_are_judged_apart_and_need_no_timestamps() {
    let data = Data::new();
    data.write_knowledge();
    data.write_attributes();
    data.configure(COLD);
    let csv = fs::read_to_string(data.path("interactions.csv")).unwrap();
    let untimed = csv.lines().map(|line| line.rsplit_once(',').unwrap().0.to_owned() + "\n");
    data.write("interactions.csv", &untimed.collect::<String>());
    let report = data.json("ctr", &BY_ITEM);
    let rows = report["results"].as_array().unwrap();
    let forms = ["texts, words", "texts, embedding", "texts, ids"];
    let expected = [&["no knowledge", "attributes"], &forms[..], &["attributes and texts, words"]].concat();
    assert_eq!(texts(&rows[..6], "variant"), expected);
    let groups = rows[2]["groups"].as_array().unwrap();
    assert_eq!(texts(groups, "group"), ["cold (0)", "warm", "1-5", "6-20", "more"]);
    assert!(groups[0]["impressions"].as_f64().unwrap() > 50.0, "{groups:?}");
    assert!(groups[0]["gain_over_attributes"]["verdict"].is_string(), "{groups:?}");
    assert!(rows[1]["groups"][0]["gain_over_attributes"].is_null());
    assert!(report["ends"].is_null());
    assert!(report["parts"][2]["items_trained"].as_f64().unwrap() < 0.9);
    let text = data.laser(&["eval", "ctr", "laser.toml"], &BY_ITEM);
    assert_prints(&text, &["AUC cold (0)", "over attributes"]);
}

#[test]
fn a_split_by_item_refuses_what_knows_the_held_out_items() {
    let data = Data::new();
    data.write_knowledge();
    data.write_attributes();
    data.configure(KNOWLEDGE);
    data.refuses(&CTR, &BY_ITEM, "texts of users tell about the items that split_by = \"item\" holds out");
    data.configure(&KNOWLEDGE.replace("user_ids", "# "));
    data.refuses(&CTR, &BY_ITEM, "users.jsonl, row 1: user 0 has a history");
    data.configure(COLD);
    data.refuses(&CTR, &[BY_ITEM[0], "eval.train_until=1200"], "expected a share such as 0.8");
    data.refuses(&CTR, &[BY_ITEM[0], "eval.item_share=0.7"], "[eval] item_share = 0.7");
    data.refuses(&CTR, &["eval.attributes.names=[\"genre\", \"size\"]"], "share a value of \"size\"");
    data.write("texts.jsonl", "{\"id\": 1, \"text\": \"A film.\"}\n{\"id\": 1, \"text\": \"The same.\"}\n");
    data.refuses(&CTR, &BY_ITEM, "texts.jsonl: item 1 is there twice");
    data.write("texts.jsonl", "{\"id\": 1, \"text\": \"A film.\"}\n");
    data.refuses(&CTR, &BY_ITEM, "texts.jsonl: no word is in three texts; give texts of more items");
    data.write("texts.jsonl", "{\"id\": 1, \"words\": \"A film.\"}\n");
    data.refuses(&CTR, &BY_ITEM, "texts.jsonl, row 1: expected {\"id\": …");
}

#[test]
fn the_configurations_of_the_documented_tables_are_valid_but_for_their_data() {
    let data = Data::new();
    let folder = std::path::absolute("configs/bench").unwrap();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let config = path.to_str().unwrap();
        let (command, missing): (&[&str], _) = if text.contains("[eval]") {
            (&["eval", "ctr", config], "data/interactions.parquet: no such file")
        } else if text.contains("[eval.lists]") {
            (&["eval", "lists", config], "[lists.catalogue]: ")
        } else if text.contains("[model]") {
            (&["plan", config], "[model] path: model \"")
        } else {
            (&["eval", "embed", config], "data/interactions.parquet: no such file")
        };
        data.refuses(command, &[], missing);
    }
}
