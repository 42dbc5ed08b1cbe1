//! Nights of lists: histories against the catalogue, what is carried, and what is published.

use jiff::civil::date;
use laser_coordinator::catalogue::CatalogueItem;
use laser_coordinator::finalise::{FinaliseError, Published, Terms, publish, seal};
use laser_coordinator::plan::list_digest;
use laser_delta::Table;
use laser_schema::entity::IdType;
use laser_schema::job::{Action, Plan, ShardRow};
use laser_schema::knowledge::KnowledgeRecord;
use laser_schema::layout::DataSet;
use laser_schema::lists::{ListSpec, Normalisation, Ties};
use laser_schema::manifest::{ERRORS, SUCCESS};
use laser_schema::{Digest, EntityId, Kind};
use laser_store::Location;
use laser_store::data_set::verify;
use laser_store::part::decode_part;
use laser_store::previous::{PreviousSource, latest};
use serde_json::{Value, json};

use crate::support::*;

/// The row of a user.
async fn row(output: &Location, plan: &Plan, id: i64) -> ShardRow {
    let mut rows = all_rows(output, plan, Action::Generate).await.into_iter();
    rows.find(|row| row.entity_id == EntityId::Int(id)).unwrap()
}

/// Users, carried and generated.
fn counts(plan: &Plan) -> (u64, u64, u64) {
    let counts = plan.counts[&Kind::User];
    (counts.entities, counts.carried, counts.generate)
}

/// The night after one of lists that is published, with its output as its past.
async fn second_night() -> (Night, Location) {
    let mut night = Night::of_lists();
    let output = night.output("out");
    finish(&output, &night.plan(&output).await).await;
    night.run = "night-2".into();
    night.date = date(2026, 11, 21);
    night.set_previous(output.url(), None, None);
    (night, output)
}

#[tokio::test]
async fn a_row_has_the_items_that_the_catalogue_has() {
    let mut night = Night::of_lists();
    let histories = [
        json!([{"item": 3}, {"item": "5"}, {"item": 98}, {"item": 3, "title": "Again"}]),
        json!([{"item": 98}, {"item": null}, {"title": "Without an item"}]),
        json!([]),
    ];
    let users = (0..).zip(&histories).map(|(id, history)| json!({"id": id, "history": history}));
    night.write_table("users.jsonl", Kind::User, users.collect::<Vec<Value>>());
    night.template = "of {% for h in history %}{{ h.identifier }}{{ h.title | default('') }}{% endfor %}".into();
    let output = night.output("out");
    let plan = night.plan(&output).await;
    assert_eq!(counts(&plan), (3, 0, 3));
    assert_eq!(plan.counts[&Kind::User].unknown_items, 4);
    assert_eq!(plan.ids, [(Kind::User, IdType::Int64), (Kind::Item, IdType::Int64)].into());
    let names: Vec<&str> = plan.shards.iter().map(|job| job.input.as_str()).collect();
    assert_eq!(names, ["shards/user-00000.parquet"]);
    assert_eq!(plan.shards[0].output, "recommendations/kind=user/dt=2026-11-20/run=night-1/part-00000.parquet");

    let known = row(&output, &plan, 0).await;
    assert_eq!((known.history.as_slice(), known.pool.as_str()), ([3, 5, 3].as_slice(), ""));
    assert_eq!(known.prompt_digest, list_digest(&known.prompt, &[3, 5, 3], None));
    // All that is left of the others is where the model begins.
    for id in [1, 2] {
        let unknown = row(&output, &plan, id).await;
        assert_eq!((unknown.history.as_slice(), unknown.error), ([].as_slice(), None));
        assert!(!unknown.prompt.is_empty() && unknown.prompt.len() < known.prompt.len());
        assert_ne!(unknown.prompt_digest, known.prompt_digest);
    }
    // The same prompt in words.
    let words = [json!({"id": 0, "history": [{"item": 1, "title": "<3><5><3>Again"}]})];
    night.write_table("users.jsonl", Kind::User, words);
    night.template = "of {{ history[0].title }}".into();
    let output = night.output("words");
    let plan = night.plan(&output).await;
    assert_eq!(row(&output, &plan, 0).await.prompt, known.prompt);
}

#[tokio::test]
async fn a_list_is_carried_while_history_trie_and_specification_are_the_same() {
    let (mut night, output) = second_night().await;
    // User 5 buys again; of user 6 only what nobody knows is different; user 30 is new.
    let users = (0..31).map(|id| match id {
        5 => json!({"id": 5, "history": [{"item": 5}, {"item": 5}, {"item": 1}]}),
        6 => json!({"id": 6, "history": [{"item": 97}, {"item": 6}, {"item": 5}]}),
        id => buyer(id),
    });
    night.write_table("users.jsonl", Kind::User, users);
    let plan = night.plan(&output).await;
    assert_eq!(counts(&plan), (31, 29, 2));
    let generated = all_rows(&output, &plan, Action::Generate).await;
    let ids: Vec<_> = generated.iter().map(|row| (&row.entity_id, &row.previous_items[..])).collect();
    assert_eq!(ids, [(&EntityId::Int(5), &[6, 3][..]), (&EntityId::Int(30), &[])]);
    assert!(generated.iter().all(|row| row.previous.is_none()), "a list is no text");
    finish(&output, &plan).await;
    let folder = output.join(&plan.partition(Kind::User));
    assert_eq!(verify(&folder).await.unwrap().faults, [""; 0]);
    let carried = plan.shards.iter().find(|job| job.action == Action::Carry).unwrap();
    let (rows, info) = decode_part(&carried.output, output.join(&carried.output).read().await.unwrap()).unwrap();
    assert_eq!((info.carried, rows[0].generated_by.as_str()), (rows.len() as u64, "night-1"));
    assert_eq!(rows[0].items, [6, 3].map(EntityId::Int));

    let original = night.spec.clone();
    type Change = fn(&mut Night);
    let changes: [Change; 9] = [
        |night| night.spec.lists = Some(ListSpec { trie: Digest::of(b"another"), ..lists() }),
        |night| night.spec.lists = Some(ListSpec { out_of_stock: Some(Digest::of(b"some")), ..lists() }),
        |night| night.spec.lists = Some(ListSpec { items: 1, ..lists() }),
        |night| night.spec.lists = Some(ListSpec { width: 9, ..lists() }),
        |night| night.spec.lists = Some(ListSpec { normalisation: Normalisation::Allowed, ..lists() }),
        |night| night.spec.lists = Some(ListSpec { repeat: true, ..lists() }),
        |night| night.spec.lists = Some(ListSpec { ties: Ties::First, ..lists() }),
        |night| night.spec.model = Digest::of(b"another"),
        |night| night.carry_forward = false,
    ];
    for change in changes {
        change(&mut night);
        assert_eq!(counts(&night.try_plan(None).await.unwrap()), (31, 0, 31));
        (night.spec, night.carry_forward) = (original.clone(), true);
    }
}

#[tokio::test]
async fn a_row_has_what_the_catalogue_still_has_of_the_previous_list() {
    let (mut night, output) = second_night().await;
    // Another catalogue decodes all lists again; item 6 has left it, and item 3 has another number.
    night.spec.lists = Some(ListSpec { trie: Digest::of(b"another"), ..lists() });
    night.catalogue.remove("6");
    night.catalogue.insert("3".into(), CatalogueItem { number: 8, identifier: "<3>".into() });
    let plan = night.plan(&output).await;
    let rows = all_rows(&output, &plan, Action::Generate).await;
    assert_eq!(rows.len(), 30);
    assert!(rows.iter().all(|row| row.previous_items == [8]));
    night.previous.clear();
    let first_night = night.output("without");
    let plan = night.plan(&first_night).await;
    let rows = all_rows(&first_night, &plan, Action::Generate).await;
    assert!(rows.len() == 30 && rows.iter().all(|row| row.previous_items.is_empty()));
}

/// What was bought long ago must not be listed either.
#[tokio::test]
async fn a_history_counts_beyond_what_the_prompt_says_of_it() {
    let mut night = Night::of_lists();
    night.template = "all alike".into();
    let output = night.output("out");
    finish(&output, &night.plan(&output).await).await;
    (night.run, night.date) = ("night-2".into(), date(2026, 11, 21));
    night.set_previous(output.url(), None, None);
    assert_eq!(counts(&night.try_plan(None).await.unwrap()), (30, 30, 0));
    night.catalogue.insert("99".into(), CatalogueItem { number: 9, identifier: "<9>".into() });
    assert_eq!(counts(&night.try_plan(None).await.unwrap()), (30, 0, 30));
}

#[tokio::test]
async fn an_input_that_no_lists_can_be_made_of_is_refused() {
    let mut night = Night::of_lists();
    night.item_field = "film".into();
    night.assert_refused(&["[lists] item = \"film\": no interaction has that field; there is item"]).await;
    night.item_field = "item".into();
    night.write_table("more.jsonl", Kind::User, [json!({"id": 50}), json!({"id": 51, "history": ["Heat"]})]);
    night.try_plan(None).await.unwrap();
    night.write_table("items.jsonl", Kind::Item, [json!({"id": "i7"})]);
    night.assert_refused(&["items.jsonl: item i7: lists are made for users; leave items out of [[input]]"]).await;
}

/// Texts and lists are published side by side, and neither is the other's past.
#[tokio::test]
async fn lists_and_texts_share_an_output() {
    let (lists, output) = second_night().await;
    let mut texts = Night::new();
    texts.run = "texts-1".into();
    texts.set_previous(output.url(), None, None);
    texts.date = lists.date;
    texts.assert_refused(&["no complete earlier output (no _SUCCESS below profiles/)"]).await;
    texts.previous.clear();
    texts.date = date(2026, 11, 20);
    finish(&output, &texts.plan(&output).await).await;
    let folders = async |data_set| latest(&output, data_set, date(2026, 11, 21)).await.unwrap();
    assert_eq!(folders(DataSet::Recommendations).await, ["recommendations/kind=user/dt=2026-11-20/run=night-1"]);
    assert_eq!(folders(DataSet::Profiles).await.len(), 2);
    assert_eq!(counts(&lists.try_plan(None).await.unwrap()), (30, 30, 0));
    let of_texts = output.join("profiles/kind=user/dt=2026-11-20/run=texts-1");
    let mut wrong = lists;
    wrong.previous = vec![PreviousSource { path: of_texts.url().to_owned(), kind: None, id_type: None }];
    wrong.assert_refused(&["holds profiles, expected recommendations"]).await;
}

#[tokio::test]
async fn a_published_night_of_lists_is_whole_and_its_figures_add_up() {
    let night = Night::of_lists();
    let output = night.output("out");
    let plan = night.plan(&output).await;
    work(&output, &plan).await;
    let manifest = complete(publish_users(&output, &plan, 1.0).await.unwrap());
    assert_eq!((manifest.data_set, manifest.rows, manifest.entities), (DataSet::Recommendations, 30, 30));
    assert_eq!(manifest.figures.keys().collect::<Vec<_>>(), [""]);
    let figures = manifest.figures[""];
    assert_eq!((figures.texts, figures.tokens, figures.forwards, figures.accepted), (30, 0, 90, 30));
    assert!((figures.forwards_per_text() - 3.0).abs() < 1e-9 && (figures.texts_per_second() - 2.0).abs() < 1e-9);
    let folder = output.join(&plan.partition(Kind::User));
    let report = verify(&folder).await.unwrap();
    assert_eq!((report.rows, report.faults.as_slice()), (30, [].as_slice()), "{report:?}");
}

#[tokio::test]
async fn a_night_of_lists_is_sealed_at_its_deadline() {
    let night = Night::of_lists();
    let output = night.output("out");
    let plan = night.plan(&output).await;
    work(&output, &plan).await;
    let run = planned(&output, &plan);
    output.join(&plan.shards[1].output).remove().await.unwrap();
    assert_eq!(publish_users(&output, &plan, 0.5).await.unwrap(), Published::Incomplete { missing: 1 });
    assert_eq!(seal(&run, "too late").await.unwrap(), 1);
    let manifest = complete(publish_users(&output, &plan, 0.5).await.unwrap());
    assert_eq!((manifest.rows, manifest.errors), (26, 4));
    let folder = output.join(&plan.partition(Kind::User));
    assert_eq!(verify(&folder).await.unwrap().faults, [""; 0]);
    let errors = String::from_utf8(folder.join(ERRORS).read().await.unwrap().to_vec()).unwrap();
    assert_eq!(errors.matches("\"stage\":\"deadline\",\"reason\":\"too late\"").count(), 4, "{errors}");
}

#[tokio::test]
async fn a_part_of_texts_keeps_lists_from_being_published() {
    let night = Night::of_lists();
    let output = night.output("out");
    let plan = night.plan(&output).await;
    work(&output, &plan).await;
    let job = &plan.shards[0];
    let part = output.join(&job.output);
    let (rows, _) = decode_part(&job.output, part.read().await.unwrap()).unwrap();
    let mut of_texts = plan.clone();
    of_texts.spec.lists = None;
    let texts = rows.into_iter().map(|row| KnowledgeRecord {
        text: "A text".into(),
        items: Vec::new(),
        scores: Vec::new(),
        ..row
    });
    part.write(encode(&of_texts, job, &texts.collect::<Vec<_>>(), Vec::new(), 0)).await.unwrap();
    let error = publish_users(&output, &plan, 0.0).await.unwrap_err();
    assert!(matches!(error, FinaliseError::Content { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains(&job.output), "{error}");
    assert!(error.contains("holds texts, the run was planned for lists of int64 ids"), "{error}");
    let success = output.join(&plan.partition(Kind::User)).join(SUCCESS);
    assert!(!success.exists().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_night_of_lists_is_a_commit_of_its_own_delta_table() {
    let night = Night::of_lists();
    let output = night.output("out");
    let plan = night.plan(&output).await;
    work(&output, &plan).await;
    let terms = Terms { delta: true, ..Terms::coverage(1.0) };
    complete(publish(&planned(&output, &plan), Kind::User, &terms).await.unwrap());
    let table = |data_set| Table::new(&output, data_set, Kind::User);
    assert_eq!(table(DataSet::Recommendations).verify().await.unwrap(), Some(Vec::new()));
    assert_eq!(table(DataSet::Profiles).verify().await.unwrap(), None);
}
