//! Nights of lists: from histories and a catalogue to a model, lists, and what the next night decodes again.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Output;
use std::sync::OnceLock;

use laser_schema::EntityId;
use laser_store::part::decode_part;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::distributed::{Nats, Process};
use crate::faults::start_and_kill;
use crate::ids::{embedding, write_embeddings};
use crate::{
    Workspace, assert_contains, assert_exit, assert_prints, assert_refused, laser, only, parts, set, stderr, stdout,
};

/// The night's folder.
const FOLDER: &str = "out/recommendations/kind=user/dt=2026-01-02";

const ITEMS: i64 = 48;
const USERS: i64 = 60;

/// What a lists night has beside the output.
const LISTS: &str = r#"
[model]
path = "MODEL"
[[input]]
path = "DIR/users.jsonl"
kind = "user"
[output]
path = "DIR/out"
[prompt]
user = "lists/codes"
max_history = 4
[generate]
batch = 3
[lists]
items = 5
[lists.catalogue]
path = "DIR/items.jsonl"
[recommender]
output = "DIR/model"
[recommender.model]
hidden_size = 32
intermediate_size = 64
layers = 1
heads = 2
kv_heads = 2
max_items = 4
dropout = 0.0
epochs = 30
patience = 30
batch_tokens = 64
learning_rate = 0.005
[run]
date = "2026-01-02"
shard_rows = 16
audit_share = 0.0
"#;

/// The items of a catalogue of three levels, of which the last two share an identifier.
pub(crate) fn items() -> String {
    let codes = |item: i64| [item % 4, item / 4 % 4, item / 16];
    let codes = |item: i64| codes(item.min(ITEMS - 2));
    (0..ITEMS).map(|item| json!({ "id": item, "identifier": codes(item) }).to_string() + "\n").collect()
}

/// The same with titles.
fn titled_items() -> String {
    items().lines().map(|line| line.replace('}', ",\"name\":\"The film\"}\n")).collect()
}

/// Users who go from each item to one of the two behind it; those of `longer` have one item more.
pub(crate) fn users(longer: i64) -> String {
    let row = |user: i64| {
        let length = 3 + user % 6 + i64::from(user < longer);
        let steps = (0..length).scan(user * 7 % ITEMS, |item, at| {
            *item = (*item + 1 + (user + at) % 2) % ITEMS;
            Some(json!({ "item": *item }))
        });
        json!({ "id": format!("u{user}"), "history": steps.collect::<Vec<Value>>() }).to_string() + "\n"
    };
    (0..USERS).map(row).collect()
}

/// A model that all tests share, and where it is.
pub(crate) fn model() -> &'static PathBuf {
    static MODEL: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = MODEL.get_or_init(|| {
        let workspace = untrained();
        assert_prints(&train(&workspace, &[]), &["a recommender; use it with [model] path", "(kept)", "all codes"]);
        let path = workspace.path("model");
        (workspace.dir, path)
    });
    path
}

pub(crate) fn untrained() -> Workspace {
    let workspace = Workspace { dir: tempfile::tempdir().unwrap(), environment: Vec::new() };
    workspace.configure(&[&LISTS.replace("MODEL", "DIR/model")]);
    fs::write(workspace.path("items.jsonl"), items()).unwrap();
    fs::write(workspace.path("users.jsonl"), users(0)).unwrap();
    workspace
}

pub(crate) fn workspace() -> Workspace {
    let workspace = untrained();
    workspace.configure(&[&LISTS.replace("MODEL", model().to_str().unwrap())]);
    workspace
}

fn train(workspace: &Workspace, settings: &[&str]) -> Output {
    let mut command = laser();
    command.args(["train", "recommender"]).arg(workspace.path("laser.toml")).args(set(settings));
    command.output().unwrap()
}

/// A user's list: items and scores.
pub(crate) type List = (Vec<EntityId>, Vec<f64>);

/// The lists of a night, and which run made each.
fn lists(workspace: &Workspace, date: &str) -> BTreeMap<String, (List, String)> {
    let mut lists = BTreeMap::new();
    let folder = workspace.path(&format!("out/recommendations/kind=user/dt={date}"));
    for (_, bytes) in parts(&folder) {
        for row in decode_part("part", bytes.into()).unwrap().0 {
            let list = ((row.items, row.scores), row.generated_by);
            assert!(lists.insert(row.entity_id.to_string(), list).is_none(), "{} twice", row.entity_id);
        }
    }
    assert_eq!(Ok(USERS), i64::try_from(lists.len()));
    lists
}

/// The same without the runs.
pub(crate) fn only_lists(workspace: &Workspace, date: &str) -> BTreeMap<String, List> {
    lists(workspace, date).into_iter().map(|(user, (list, _))| (user, list)).collect()
}

#[test]
fn lists_come_of_histories_and_are_decoded_again_where_these_change() {
    let night = workspace();
    assert_exit(&night.run(&[]), 0);
    assert_exit(&night.verify(), 0);
    let first = lists(&night, "2026-01-02");
    for (user, ((items, scores), _)) in &first {
        assert!(items.len() == 5 && scores.is_sorted_by(|a, b| a >= b) && scores[0] < 0.0, "{user}: {items:?}");
    }
    // Most users go to one of the two items behind their last one.
    let histories = users(0);
    let hits = histories.lines().filter(|line| {
        let user: Value = serde_json::from_str(line).unwrap();
        let last = user["history"].as_array().unwrap().last().unwrap()["item"].as_i64().unwrap();
        let ((items, _), _) = &first[user["id"].as_str().unwrap()];
        items[..2].iter().any(|item| [1, 2].map(|step| EntityId::Int((last + step) % ITEMS)).contains(item))
    });
    // By chance it would be 5.
    let hits = hits.count();
    assert!(hits > 24, "{hits} of {USERS}");
    let own_draft = format!("draft.model=[{{path='{}'}}]", model().display());
    // Whatever is drafted, batched and sharded, the lists are those of the plain search.
    for settings in [
        ["lists.draft=none", "generate.batch=1", "run.shard_rows=7"],
        ["draft.adaptive=false", "generate.batch=7", "generate.step_tokens=40"],
        ["draft.adaptive=false", "lists.draft=popularity", "lists.steps=1"],
        ["draft.adaptive=false", "lists.draft=markov", "lists.nodes=9"],
        ["draft.adaptive=true", "lists.draft=knn", "generate.batch=4"],
        ["draft.adaptive=false", "lists.draft=retrieval", "generate.batch=4"],
        ["draft.adaptive=true", "lists.draft=auto", "generate.batch=4"],
        ["draft.adaptive=false", &own_draft, "lists.nodes=12"],
        ["draft.adaptive=true", &own_draft, "lists.draft=none"],
    ] {
        let other = workspace();
        assert_exit(&other.run(&settings), 0);
        assert_eq!(only_lists(&other, "2026-01-02"), only_lists(&night, "2026-01-02"), "{settings:?}");
    }
    // The next night ten users have gone on.
    fs::write(night.path("users.jsonl"), users(10)).unwrap();
    let latest = "previous=[{path='latest'}]";
    let next = night.run(&["run.date=2026-01-03", latest, "draft.adaptive=false"]);
    assert_prints(&next, &["10 lists generated", "50 unchanged"]);
    // Drafts by their previous lists change nothing.
    let without_past = workspace();
    fs::write(without_past.path("users.jsonl"), users(10)).unwrap();
    assert_exit(&without_past.run(&["run.date=2026-01-03", "lists.draft=none"]), 0);
    assert_eq!(only_lists(&without_past, "2026-01-03"), only_lists(&night, "2026-01-03"));
    let second = lists(&night, "2026-01-03");
    let carried = second.iter().filter(|(user, (list, run))| (list, run) == (&first[*user].0, &first[*user].1));
    assert_eq!(carried.count(), 50);
    // Another list of what is out of stock decodes all of them again, and nothing of it is listed.
    let out = first["u20"].0.0[0].to_string();
    let unknown = 4000;
    fs::write(night.path("out_of_stock.jsonl"), format!("{{\"id\": {unknown}}}\n{{\"id\": {out}}}\n")).unwrap();
    let stock = format!("lists.out_of_stock={}", night.path("out_of_stock.jsonl").display());
    let all_again = night.run(&["run.date=2026-01-04", latest, &stock, "draft.adaptive=false"]);
    assert_prints(&all_again, &["60 lists generated"]);
    assert_contains(&stderr(&all_again), &["items out of stock, not in the catalogue", "unknown=1 of=2"]);
    assert_exit(&without_past.run(&["run.date=2026-01-04", "lists.draft=none", &stock]), 0);
    assert_eq!(only_lists(&without_past, "2026-01-04"), only_lists(&night, "2026-01-04"));
    for (user, (items, _)) in only_lists(&night, "2026-01-04") {
        assert!(items.len() == 5 && items.iter().all(|item| item.to_string() != out), "{user}: {items:?}");
    }
    assert_exit(&night.verify(), 0);
}

#[test]
fn summary_and_report_tell_of_the_audit_and_name_items() {
    let night = workspace();
    fs::write(night.path("items.jsonl"), titled_items()).unwrap();
    let settings = ["run.audit_share=1.0", "lists.catalogue.title=name", "draft.adaptive=false"];
    let night_run = night.run(&settings);
    assert_contains(&stderr(&night_run), &["48 items, identifiers of 3 codes; 2 items share theirs, all of them"]);
    let words = ["Audit of 60 lists, plain beam search against this run", "100% of the lists the same", " The film ("];
    assert_prints(&night_run, &words);
    let doctor = night.command("doctor", &[]).output().unwrap();
    assert_contains(&stdout(&doctor), &["48 items, identifiers of 3 codes", "catalogue "]);
    let page = night.path("report.html");
    let report = laser().arg("report").arg(night.path("out")).arg("-o").arg(&page).output().unwrap();
    assert_exit(&report, 0);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<td class=\"text\">The film</td>") && page.contains("Audited lists"), "{page}");
    fs::write(night.path("items.jsonl"), items()).unwrap();
    assert_refused(&night.run(&settings), &["items.jsonl", "no item has a \"name\"; set [lists.catalogue] title"]);
}

#[test]
fn identifiers_that_laser_ids_makes_are_learnt_and_listed() {
    let night = untrained();
    let embeddings = night.path("embeddings.parquet");
    let item = |item: i64| (item, embedding(usize::try_from(item).unwrap(), item.unsigned_abs()));
    write_embeddings(&embeddings, &(0..ITEMS).map(item).collect::<Vec<_>>());
    let mut ids = night.command("ids", &["ids.clusters=4", "ids.levels=4"]);
    assert_exit(&ids.arg(&embeddings).args(["--kind", "item"]).output().unwrap(), 0);
    let folder = only(&night.path("out/knowledge_ids/kind=item/dt=2026-01-02"));
    let path = format!("lists.catalogue.path={}", folder.display());
    let columns = ["lists.catalogue.id=entity_id", "lists.catalogue.identifier=knowledge_ids"];
    let catalogue = [path.as_str(), columns[0], columns[1], "lists.catalogue.distinct=true"];
    let model = format!("model.path={}", night.path("model").display());
    let settings = [&catalogue[..], &["recommender.model.epochs=3", &model]].concat();
    assert_exit(&train(&night, &settings), 0);
    assert_exit(&night.run(&settings), 0);
    assert_exit(&night.verify(), 0);
    for (user, (items, _)) in only_lists(&night, "2026-01-02") {
        assert_eq!(items.len(), 5, "{user}: {items:?}");
    }
    fs::remove_file(folder.join("_SUCCESS")).unwrap();
    assert_refused(&night.run(&settings), &["[lists.catalogue]", "no complete folder knowledge_ids/kind=item"]);
}

#[test]
fn the_shipped_configuration_trains_and_makes_lists() {
    let night = untrained();
    let config = std::path::absolute("configs/lists.toml").unwrap();
    let tables =
        ["input=[{path='users.jsonl', kind='user'}]", "lists.catalogue.path=items.jsonl", "run.date=2026-01-02"];
    let run = |command: &[&str], settings: &[&str]| {
        let mut laser = laser();
        laser.current_dir(night.dir.path()).args(command).arg(&config).args(set(&tables)).args(set(settings));
        laser.output().unwrap()
    };
    let small = |section: &str| {
        let sizes = ["hidden_size=32", "intermediate_size=64", "layers=1", "heads=2", "kv_heads=2", "epochs=2"];
        sizes.map(|size| format!("{section}.{size}"))
    };
    let (model, draft) = (small("recommender.model"), small("recommender.draft.model"));
    let sizes: Vec<&str> = model.iter().chain(&draft).map(String::as_str).collect();
    assert_prints(&run(&["train", "recommender"], &sizes), &["a recommender; use it with [model] path"]);
    assert_exit(&run(&["train", "draft", "--for", "recommendation"], &sizes), 0);
    let drafted = [&sizes[..], &["draft.model=[{path='recommender-draft'}]"]].concat();
    assert_prints(&run(&["run"], &drafted), &["60 entities, 60 lists generated"]);
    assert_exit(&laser().arg("verify").arg(night.path("output/lists")).output().unwrap(), 0);
}

#[test]
fn a_row_for_each_item_holds_the_lists_and_carries_into_a_row_for_each_user() {
    let (night, users) = (workspace(), workspace());
    let latest = "previous=[{path='latest'}]";
    assert_exit(&night.run(&["lists.rows=item"]), 0);
    assert_exit(&users.run(&[]), 0);
    assert_exit(&night.verify(), 0);
    assert_eq!(lists(&night, "2026-01-02").len(), 60);
    assert_eq!(only_lists(&night, "2026-01-02"), only_lists(&users, "2026-01-02"));
    let run = |workspace: &Workspace| only(&workspace.path(FOLDER)).file_name().unwrap().to_owned();
    assert_ne!(run(&night), run(&users), "a run of its own");
    for (date, rows) in [("2026-01-03", "user"), ("2026-01-04", "item")] {
        let settings = [format!("run.date={date}"), format!("lists.rows={rows}")];
        let next = night.run(&[&settings[0], &settings[1], latest]);
        assert_prints(&next, &["0 lists generated", "60 unchanged"]);
        assert_eq!(lists(&night, date), lists(&night, "2026-01-02"));
    }
    assert_exit(&night.verify(), 0);
}

#[test]
fn a_column_says_how_many_items_each_user_gets() {
    let with = |items: &dyn Fn(i64) -> Value| -> String {
        let row = |(user, line): (i64, &str)| {
            let mut row: Value = serde_json::from_str(line).unwrap();
            row["slots"] = items(user);
            row.to_string() + "\n"
        };
        (0..).zip(users(0).lines()).map(row).collect()
    };
    let lengths = |night: &Workspace, date: &str| -> BTreeMap<String, usize> {
        only_lists(night, date).into_iter().map(|(user, (items, _))| (user, items.len())).collect()
    };
    let (night, alike) = (workspace(), workspace());
    // Every third user has no number of its own.
    let slots = |user: i64| if user % 3 == 0 { Value::Null } else { json!(1 + user % 9) };
    fs::write(night.path("users.jsonl"), with(&slots)).unwrap();
    let settings = ["lists.items_from=slots", "lists.width=15", "run.audit_share=0.5"];
    assert_prints(&night.run(&settings), &["60 lists generated", "100% of the lists the same"]);
    assert_exit(&night.verify(), 0);
    for (user, length) in lengths(&night, "2026-01-02") {
        let number: i64 = user[1..].parse().unwrap();
        assert_eq!(Some(length as u64), slots(number).as_u64().or(Some(5)), "{user}");
    }
    // A list of as many items as all have is the one that is made of them all.
    assert_exit(&alike.run(&["lists.width=15"]), 0);
    let [own, all] = [&night, &alike].map(|night| only_lists(night, "2026-01-02"));
    let same = own.iter().filter(|(user, list)| list.0.len() == 5 && all[*user] == **list);
    assert_eq!(same.count(), own.values().filter(|list| list.0.len() == 5).count());
    // Whose number changes is decoded again.
    let more = |user: i64| if user < 4 { json!(12) } else { slots(user) };
    fs::write(night.path("users.jsonl"), with(&more)).unwrap();
    let next = ["run.date=2026-01-03", "previous=[{path='latest'}]", settings[0], settings[1]];
    assert_prints(&night.run(&next), &["4 lists generated", "56 unchanged"]);
    assert_eq!(lengths(&night, "2026-01-03")["u3"], 12);
    // A number that is none is a failed row, and the others go on.
    let wrong = |user: i64| if user == 7 { json!("many") } else { slots(user) };
    fs::write(night.path("users.jsonl"), with(&wrong)).unwrap();
    let next = ["run.date=2026-01-04", "output.min_coverage=0.9", settings[0], settings[1]];
    assert_exit(&night.run(&next), 0);
    let errors =
        fs::read_to_string(only(&night.path("out/recommendations/kind=user/dt=2026-01-04")).join("_errors.jsonl"));
    assert_contains(&errors.unwrap(), &["u7", "slots = \\\"many\\\": expected a whole number of items from 1 to 1000"]);
    assert_refused(
        &night.run(&["run.date=2026-01-05", "lists.items_from=slot"]),
        &["[lists] items_from", "users.jsonl: none of the first 60 users has \"slot\"; there are {\"slots\"}"],
    );
    let drawn = ["generate.temperature=1", "lists.sampling=atspeed", settings[0]];
    assert_refused(&night.run(&drawn), &["[lists] items_from: sampling = \"stochastic-beam\" alone"]);
}

#[test]
fn a_killed_night_and_workers_make_the_lists_of_one_process() {
    let quiet = workspace();
    assert_exit(&quiet.run(&[]), 0);
    let expected = only_lists(&quiet, "2026-01-02");
    let killed = workspace();
    for shards in [1, 2] {
        start_and_kill(killed.command("run", &[]), shards);
    }
    assert_exit(&killed.run(&[]), 0);
    assert_eq!(only_lists(&killed, "2026-01-02"), expected);

    let (nats, shared) = (Nats::start("LASER_NATS_NEW", ""), workspace());
    let queue = format!("queue.url=nats://127.0.0.1:{}", nats.port());
    let start = |subcommand: &str, settings: &[&str]| {
        Process::start(shared.command(subcommand, &[&[queue.as_str(), "queue.lease_seconds=3"], settings].concat()))
    };
    let coordinator = start("coordinator", &["lists.draft=markov"]);
    coordinator.wait_for("queued shards", 1);
    let workers = ["lists.draft=knn", "lists.draft=none"].map(|setting| start("worker", &[setting]));
    coordinator.assert_ends(0);
    workers.into_iter().for_each(|worker| drop(Process::terminate(worker)));
    assert_exit(&shared.verify(), 0);
    assert_eq!(only_lists(&shared, "2026-01-02"), expected);
}

#[test]
fn lists_that_are_drawn_are_the_same_whatever_is_drafted_and_others_with_another_seed() {
    let drawn = |settings: &[&str]| {
        let night = workspace();
        assert_exit(&night.run(&[&["generate.temperature=0.8"], settings].concat()), 0);
        assert_exit(&night.verify(), 0);
        only_lists(&night, "2026-01-02")
    };
    let expected = drawn(&["lists.draft=none"]);
    let own_draft = format!("draft.model=[{{path='{}'}}]", model().display());
    assert_eq!(drawn(&["draft.adaptive=false", "lists.draft=knn", "generate.batch=2"]), expected);
    assert_eq!(drawn(&["draft.adaptive=false", "lists.draft=retrieval", "lists.steps=2"]), expected);
    assert_eq!(drawn(&["draft.adaptive=false", &own_draft, "lists.nodes=15"]), expected);
    for (sampling, policy) in [("atspeed", "atspeed"), ("atspeed-published", "atspeed-published(drafted=40)")] {
        let night = workspace();
        let sampling = format!("lists.sampling={sampling}");
        let settings =
            ["generate.temperature=0.8", &sampling, "draft.adaptive=false", &own_draft, "run.audit_share=0.2"];
        assert_prints(&night.run(&settings), &["60 lists generated", "Audit of "]);
        assert_exit(&night.verify(), 0);
        for (_, bytes) in parts(&night.path(FOLDER)) {
            assert!(decode_part("part", bytes.into()).unwrap().0.iter().all(|row| row.policy == policy));
        }
    }
    let other = drawn(&["generate.seed=5"]);
    let differ = expected.iter().filter(|(user, list)| other[*user].0 != list.0).count();
    assert!(differ > 50, "{differ} of {USERS}");
}

#[test]
fn damaged_files_of_histories_are_refused_and_missing_ones_made_anew() {
    for (draft, name) in [("lists.draft=retrieval", "histories.pool"), ("lists.draft=knn", "items.counted")] {
        let night = workspace();
        let settings = [draft, "run.shard_rows=1"];
        start_and_kill(night.command("run", &settings), 1);
        let file = only(&night.path("out/runs")).join(name);
        let mut bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() - 4]).unwrap();
        assert_refused(&night.run(&settings), &[name, "truncated or damaged", "or set [lists] draft = \"trie\""]);
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, bytes).unwrap();
        assert_refused(&night.run(&settings), &[name, "is damaged: checksum"]);
        fs::remove_file(&file).unwrap();
        assert_exit(&night.run(&settings), 0);
        assert!(file.exists());
    }
}

#[test]
fn nothing_is_left_of_the_run_of_a_night_that_is_not_kept() {
    let night = workspace();
    fs::write(night.path("items.jsonl"), titled_items()).unwrap();
    fs::write(night.path("stock.jsonl"), "{\"id\": 7}\n").unwrap();
    let stock = format!("lists.out_of_stock={}", night.path("stock.jsonl").display());
    let files = ["lists.catalogue.title=name", &stock, "lists.draft=auto", "draft.adaptive=true"];
    let settings = [&files[..], &["run.audit_share=0.2", "output.keep_nights=2"]].concat();
    let command = |subcommand: &str, day: u32| {
        let mut command = night.command(subcommand, &settings);
        command.args(["--set", &format!("run.date=2026-01-{day:02}")]);
        command
    };
    assert_exit(&command("plan", 2).args(["--estimate", "--sample", "30"]).output().unwrap(), 0);
    assert_exit(&command("run", 2).output().unwrap(), 0);
    let run = only(&night.path("out/runs"));
    let of_lists = ["items.trie", "out_of_stock.json", "titles.parquet", "items.counted", "histories.pool"];
    for name in of_lists.into_iter().chain(["estimate.json", "audits"]) {
        assert!(run.join(name).exists(), "{name}");
    }
    for day in [3, 4] {
        assert_exit(&command("run", day).output().unwrap(), 0);
    }
    assert!(!run.exists());
    assert_prints(&command("prune", 4).output().unwrap(), &["0 outdated runs"]);
    let status = command("status", 4).output().unwrap();
    assert_prints(&status, &["2026-01-03-", "2026-01-04-"]);
    assert!(!stdout(&status).contains("not planned yet"));
}

#[test]
fn what_no_list_can_be_made_of_is_refused() {
    let night = workspace();
    let refuse = |settings: &[&str], words: &[&str]| assert_refused(&night.run(settings), words);
    refuse(&["lists.width=3"], &["[lists] width = 3: expected at least as many beams as items, 5"]);
    refuse(&["lists.item=film"], &["[lists] item = \"film\"", "no interaction has that field"]);
    refuse(&["generate.temperature=0.5", "generate.top_k=3"], &["[generate] top_k: is for texts"]);
    refuse(&["output.runners_up=2"], &["[output] runners_up: is for texts"]);
    refuse(&["draft.alignment=2"], &["[draft] alignment: is for texts"]);
    refuse(&["lists.sampling=atspeed"], &["[lists] sampling: says how lists are drawn; set [generate] temperature"]);
    let by_cost = ["generate.temperature=1", "lists.sampling=atspeed"];
    refuse(&by_cost, &["[lists] sampling: drafts decide such a list", "set [draft] adaptive = false"]);
    let published = ["generate.temperature=1", "lists.sampling=atspeed-published", "lists.drafted=5"];
    refuse(&published, &["[lists] drafted = 5", "more prefixes for a step than there are beams, 5"]);
    refuse(&["lists.steps=4"], &["[lists] steps = 4: expected 1 to 3"]);
    let auto = ["lists.draft=auto", "draft.adaptive=false"];
    refuse(&auto, &["[lists] draft = \"auto\": chooses by measured costs; set [draft] adaptive = true"]);
    let text_draft = format!("draft.model=[{{path='{}'}}]", crate::fixture().display());
    refuse(&[&text_draft], &["[draft.model] path", "must have the tokenizer of the model"]);
    fs::write(night.path("out.jsonl"), "{\"id\": 4000}\n").unwrap();
    let stock = format!("lists.out_of_stock={}", night.path("out.jsonl").display());
    refuse(
        &[&stock],
        &["[lists] out_of_stock", "out.jsonl: none of its 1 items is in the catalogue, the first is 4000"],
    );
    let text_model = format!("model.path={}", crate::fixture().display());
    refuse(&[&text_model], &["[lists.catalogue]", "items.jsonl, row 1: code \"<a_0>\" of item 0 is no token"]);
    fs::write(night.path("items.jsonl"), items() + "{\"id\": 99, \"identifier\": [1, 0, 7]}\n").unwrap();
    let unknown = "items.jsonl, row 49: code \"<c_7>\" of item 99 is no token of the model; leave the item out";
    refuse(&[], &["[lists.catalogue]", unknown, "laser train recommender"]);
    fs::write(night.path("items.jsonl"), items() + "{\"id\": 99, \"identifier\": [1]}\n").unwrap();
    refuse(&[], &["items.jsonl, row 49", "holds 1 codes; the rows before have 3"]);
    let again = items().lines().last().unwrap().to_owned();
    fs::write(night.path("items.jsonl"), items() + &again + "\n").unwrap();
    refuse(&[], &["items.jsonl, row 49", "the id of an earlier row; each item has one row"]);
    assert!(!night.path("out/recommendations").exists());
}
