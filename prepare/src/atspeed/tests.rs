//! AtSpeed's data sets, from small files and from Beauty where it is there.

use laser_schema::{Entity, EntityId, Kind};
use laser_store::Location;
use laser_store::catalogue::{Catalogue, CatalogueTable};
use laser_store::table::decode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::testing::{files, location, read_table, shared};

type File<'a> = (&'a str, &'a str);

/// Three items, and three users: one with all parts, one without a test, one with a test alone.
const GOOD: [File<'static>; 4] = [
    (
        "items.jsonl",
        r#"{"recid": 0, "asin": "B0", "sid": ["<a_4>", "<b_1>"], "title": "Soap", "brand": "Foam", "category": ["Beauty", "Bath"]}
{"recid": 1, "asin": "B1", "sid": ["<a_4>", "<b_0>"], "title": "Comb", "brand": "", "category": []}
{"recid": 2, "asin": "B2", "sid": ["<a_2>", "<b_1>"], "title": " "}
"#,
    ),
    ("sequential_train.txt", "7 1 3\n8 2\n5\n"),
    ("sequential_valid.txt", "7 2\n8 1 1\n5\n"),
    ("sequential_test.txt", "7 3 1\n8\n5 2\n"),
];

#[derive(Debug, PartialEq, Deserialize)]
struct SequenceRow {
    id: i64,
    items: Vec<i64>,
    held_out: Vec<i64>,
}

#[derive(Debug, PartialEq, Deserialize)]
struct TruthRow {
    id: i64,
    items: Vec<i64>,
}

#[derive(Debug, Deserialize)]
struct InteractionRow {
    user: i64,
    item: i64,
}

/// A data set's tables as they are read.
struct Prepared {
    summary: AtSpeedSummary,
    items: Vec<Entity>,
    users: Vec<Entity>,
    interactions: Vec<(i64, i64)>,
    sequences: Vec<SequenceRow>,
    truth: Vec<TruthRow>,
}

async fn rows<T: DeserializeOwned + Send>(written: &Written) -> Vec<T> {
    let bytes = Location::parse(&written.url).unwrap().read().await.unwrap();
    let rows: Vec<T> = decode(&written.url, bytes).unwrap();
    assert_eq!(rows.len() as u64, written.rows);
    rows
}

async fn read(dir: &Path, until: UntilPart) -> Result<Prepared> {
    let output = tempfile::tempdir().unwrap();
    let summary = atspeed(dir, &location(output.path()), until).await?;
    let [items, users] = [read_table(&summary.items.url).await, read_table(&summary.users.url).await];
    assert_eq!((items.len() as u64, users.len() as u64), (summary.items.rows, summary.users.rows));
    let (sequences, truth) = (rows(&summary.sequences).await, rows(&summary.truth).await);
    let interactions = rows::<InteractionRow>(&summary.interactions).await;
    let interactions = interactions.into_iter().map(|row| (row.user, row.item)).collect();
    Ok(Prepared { items, users, interactions, sequences, truth, summary })
}

/// A directory with these files, of which the last one of a name counts.
fn folder(input: &[File<'_>]) -> tempfile::TempDir {
    files(&input.iter().map(|(name, text)| (*name, text.as_bytes())).collect::<Vec<_>>())
}

async fn prepare(changed: &[File<'_>], until: UntilPart) -> Result<Prepared> {
    read(folder(&[&GOOD, changed].concat()).path(), until).await
}

fn histories(users: &[Entity]) -> Value {
    let history = |user: &Entity| user.history.iter().map(|i| json!(i)).collect::<Vec<Value>>();
    users.iter().map(|user| json!([user.id, history(user), user.interactions])).collect()
}

fn truth(id: i64, items: &[i64]) -> TruthRow {
    TruthRow { id, items: items.to_vec() }
}

#[tokio::test]
async fn histories_end_with_the_part_that_until_names_and_the_truth_is_the_next() {
    let [soap, comb, third] =
        [json!({"item": 1, "title": "Soap"}), json!({"item": 2, "title": "Comb"}), json!({"item": 3})];
    let found = prepare(&[], UntilPart::Valid).await.unwrap();
    assert_eq!(histories(&found.users), json!([[7, [soap, third, comb], 3], [8, [comb, soap, soap], 3]]));
    assert_eq!(found.interactions, [(7, 1), (7, 3), (7, 2), (8, 2), (8, 1), (8, 1)]);
    assert_eq!(found.truth, [truth(7, &[3, 1])]);
    assert_eq!((found.summary.without_history, found.summary.in_histories), (1, 6));

    let found = prepare(&[], UntilPart::Train).await.unwrap();
    assert_eq!(histories(&found.users), json!([[7, [soap, third], 2], [8, [comb], 1]]));
    assert_eq!(found.interactions, [(7, 1), (7, 3), (8, 2)]);
    assert_eq!(found.truth, [truth(7, &[2]), truth(8, &[1, 1])]);
    assert_eq!((found.summary.without_history, found.summary.in_histories), (1, 3));
}

#[tokio::test]
async fn items_have_the_numbers_of_the_sequences_and_count_what_histories_hold() {
    let found = prepare(&[], UntilPart::Valid).await.unwrap();
    let items: Value =
        found.items.iter().map(|item| json!([item.id, item.kind, item.attributes, item.interactions])).collect();
    let soap = json!({"identifier": ["<a_4>", "<b_1>"], "title": "Soap", "brand": "Foam",
        "categories": ["Beauty", "Bath"]});
    let comb = json!({"identifier": ["<a_4>", "<b_0>"], "title": "Comb"});
    let third = json!({"identifier": ["<a_2>", "<b_1>"]});
    let expected = json!([[1, "item", soap, 3], [2, "item", comb, 2], [3, "item", third, 1]]);
    assert_eq!(items, expected);
    let before = prepare(&[], UntilPart::Train).await.unwrap().items;
    assert_eq!(before.iter().map(|item| item.interactions).collect::<Vec<u64>>(), [1, 1, 1]);
}

#[tokio::test]
async fn sequences_hold_training_and_validation_whatever_until_says() {
    for until in [UntilPart::Train, UntilPart::Valid] {
        let found = prepare(&[], until).await.unwrap();
        let row = |id, items: &[i64], held_out: &[i64]| SequenceRow {
            id,
            items: items.to_vec(),
            held_out: held_out.to_vec(),
        };
        assert_eq!(found.sequences, [row(7, &[1, 3], &[2]), row(8, &[2], &[1, 1])]);
    }
}

/// A user who only validates has a history until then, but nothing to train on.
#[tokio::test]
async fn a_user_without_training_has_no_sequence() {
    let late = [("sequential_valid.txt", "7 2\n8\n5 3\n")];
    let found = prepare(&late, UntilPart::Valid).await.unwrap();
    assert_eq!(found.users.iter().map(|user| user.id.to_string()).collect::<Vec<_>>(), ["5", "7", "8"]);
    assert_eq!(found.sequences.iter().map(|row| row.id).collect::<Vec<_>>(), [7, 8]);
    assert_eq!(found.sequences[1].held_out, [0; 0]);
    assert_eq!(found.truth, [truth(5, &[2]), truth(7, &[3, 1])]);
    assert_eq!(found.summary.without_history, 0);
}

async fn catalogue(items: &Written) -> Catalogue {
    let table = CatalogueTable { path: items.url.clone(), ..CatalogueTable::default() };
    Catalogue::read(&table).await.unwrap()
}

#[tokio::test]
async fn the_items_are_a_catalogue_of_lists() {
    let (dir, output) = (folder(&GOOD), tempfile::tempdir().unwrap());
    let summary = atspeed(dir.path(), &location(output.path()), UntilPart::Valid).await.unwrap();
    let found = catalogue(&summary.items).await;
    assert_eq!(found.ids, [1, 2, 3].map(EntityId::Int));
    assert_eq!(found.codes, [["<a_2>", "<a_4>"], ["<b_0>", "<b_1>"]]);
    assert_eq!(found.identifiers, [1, 1, 1, 0, 0, 1]);
}

#[tokio::test]
async fn the_order_of_lines_changes_no_byte() {
    let other = [("sequential_train.txt", "5\n8 2\n7  1\t3\r\n\n"), ("sequential_test.txt", "5 2\n7 3 1\n8\n")];
    let mut tables = Vec::new();
    for changed in [&other[..], &[]] {
        let (dir, output) = (folder(&[&GOOD, changed].concat()), tempfile::tempdir().unwrap());
        let summary = atspeed(dir.path(), &location(output.path()), UntilPart::Valid).await.unwrap();
        let mut bytes = Vec::new();
        for table in [summary.items, summary.users, summary.interactions, summary.sequences, summary.truth] {
            bytes.push(Location::parse(&table.url).unwrap().read().await.unwrap());
        }
        tables.push(bytes);
    }
    assert_eq!(tables[0], tables[1]);
}

#[tokio::test]
async fn bad_lines_are_named_by_file_and_line() {
    const FIRST: &str = r#"{"recid": 0, "sid": ["<a_4>", "<b_1>"]}"#;
    let item = |line: &str| format!("{FIRST}\n{line}\n");
    let items = [
        (
            item(r#"{"recid": 2, "sid": ["x", "y"]}"#),
            "items.jsonl, line 2: recid 2; expected 1: sort the items by recid",
        ),
        (item(FIRST), "line 2: recid 0; expected 1"),
        (item(r#"{"recid": 1, "sid": ["x"]}"#), "line 2: sid has 1 codes; those before have 2"),
        (item(r#"{"recid": 1, "sid": []}"#), "line 2: sid has no code"),
        (item(r#"{"recid": 1, "sid": ["x", ""]}"#), "line 2: sid has no code, or an empty one"),
        (item(r#"{"recid": 1}"#), "line 2: not a JSON object with recid and sid: missing field `sid`"),
        (item(r#"{"recid": -1, "sid": ["x", "y"]}"#), "line 2: not a JSON object with recid and sid: invalid value"),
        ("\n".to_owned(), "items.jsonl: there is no item in this file"),
    ];
    let sequences = [
        (
            "sequential_train.txt",
            "7 1\n8 4\n5\n",
            "sequential_train.txt, line 2: item 4 is not in items.jsonl, which has items 1 to 3",
        ),
        (
            "sequential_train.txt",
            "7 0\n",
            "line 1: item 0 is not in items.jsonl, which has items 1 to 3: an item's number is its",
        ),
        ("sequential_train.txt", "7 1\n\nu8 2\n", "line 3: \"u8\" is not a number here (invalid digit"),
        ("sequential_valid.txt", "7 1 -2\n", "sequential_valid.txt, line 1: \"-2\" is not a number here"),
        ("sequential_train.txt", "7 1\n8 2\n7\n", "line 3: user 7 is there twice; put all its items in one line"),
        ("sequential_test.txt", "7 1\n8\n8\n", "sequential_test.txt, line 3: user 8 is there twice"),
        ("sequential_test.txt", "7 1\n9 1\n", "line 2: user 9 is not in sequential_train.txt; add a line 9 there"),
        (
            "sequential_valid.txt",
            "7 1\n8 1\n",
            "sequential_valid.txt: user 5 of sequential_train.txt is missing; add a line 5",
        ),
        ("sequential_train.txt", "", "sequential_valid.txt, line 1: user 7 is not in sequential_train.txt"),
    ];
    let items = items.iter().map(|(text, expected)| (("items.jsonl", text.as_str()), *expected));
    for (file, expected) in items.chain(sequences.map(|(name, text, expected)| ((name, text), expected))) {
        let error = prepare(&[file], UntilPart::Valid).await.err().unwrap().to_string();
        assert!(error.contains(expected), "expected {expected:?}, got {error:?}");
    }
}

#[tokio::test]
async fn nothing_is_written_for_a_data_set_that_is_refused() {
    let bare = "7\n8\n5\n";
    let cases: [(&[File<'_>], &str); 3] = [
        (&GOOD[..3], "no sequential_test.txt here; give a directory that holds items.jsonl, sequential_train.txt, "),
        (&GOOD[3..], "no items.jsonl, sequential_train.txt, sequential_valid.txt here"),
        (
            &[GOOD[0], ("sequential_train.txt", bare), ("sequential_valid.txt", bare), ("sequential_test.txt", bare)],
            "no user has an item before the truth",
        ),
    ];
    for (input, expected) in cases {
        let (dir, output) = (folder(input), tempfile::tempdir().unwrap());
        let error = atspeed(dir.path(), &location(output.path()), UntilPart::Valid).await.unwrap_err().to_string();
        assert!(error.contains(expected), "expected {expected:?}, got {error:?}");
        assert_eq!(std::fs::read_dir(output.path()).unwrap().count(), 0);
    }
}

/// What is known of Beauty, whose users all train: users, and for the validation and the test how many have a part
/// there.
#[tokio::test]
async fn beauty_gives_its_known_counts() {
    let Some(dir) = shared("data/atspeed-beauty") else { return };
    for (until, in_histories, with_truth, in_truth) in
        [(UntilPart::Train, 122_241, 4_295, 9_316), (UntilPart::Valid, 131_557, 3_553, 7_313)]
    {
        let found = read(&dir, until).await.unwrap();
        let AtSpeedSummary { users, without_history, items, sequences, truth, .. } = &found.summary;
        assert_eq!((users.rows, *without_history, items.rows, sequences.rows), (19_383, 0, 12_035, 19_383));
        assert_eq!((found.summary.in_histories, truth.rows), (in_histories, with_truth));
        let in_items: u64 = found.items.iter().map(|item| item.interactions).sum();
        let in_users: usize = found.users.iter().map(|user| user.history.len()).sum();
        assert_eq!((in_items, in_users as u64), (in_histories, in_histories));
        assert_eq!(found.truth.iter().map(|row| row.items.len()).sum::<usize>(), in_truth);
        assert_eq!(found.sequences.iter().map(|row| row.items.len()).sum::<usize>(), 122_241);
        assert_eq!(found.sequences.iter().map(|row| row.held_out.len()).sum::<usize>(), 9_316);
    }
}

/// Items that follow each other in a history resemble each other, which they would not if numbers began elsewhere.
#[tokio::test]
async fn neighbours_in_beauty_share_their_first_code() {
    let Some(dir) = shared("data/atspeed-beauty") else { return };
    let found = read(&dir, UntilPart::Valid).await.unwrap();
    assert!(found.items.iter().all(|item| item.kind == Kind::Item));
    let first = |item: i64| {
        let place = usize::try_from(item).unwrap().checked_sub(1)?;
        Some(&found.items.get(place)?.attributes["identifier"][0])
    };
    let share = |shift: i64| {
        let pairs = || found.sequences.iter().flat_map(|row| row.items.windows(2));
        let alike =
            pairs().filter(|pair| first(pair[0] + shift).is_some_and(|code| Some(code) == first(pair[1] + shift)));
        alike.count() as f64 / pairs().count() as f64
    };
    let (here, beside) = (share(0), share(1).max(share(-1)));
    assert!(here > 3.0 * beside, "{here} of the neighbours, {beside} with other numbers");
}
