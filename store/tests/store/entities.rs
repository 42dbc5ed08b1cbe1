//! Entity tables: equal content in every format, and every fault by file and row.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, FixedSizeListArray, Float32Array, Int64Array, RecordBatch, StringArray, TimestampMillisecondArray,
};
use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
use laser_schema::entity::IdType;
use laser_schema::{Columns, Entity, EntityId, EntityTable, History, Kind};
use laser_store::join::{Join, JoinError};
use laser_store::table::to_batch;
use laser_store::{EntityReader, RowError, table};
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};
use tempfile::TempDir;

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> EntityTable {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let path = path.to_str().unwrap().to_owned();
        EntityTable { path, kind: None, columns: Columns::default() }
    }

    fn lines(&self, rows: &[Value]) -> EntityTable {
        let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
        self.write("table.jsonl", text)
    }

    fn batch(&self, columns: Vec<(&str, ArrayRef)>) -> EntityTable {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        self.write("table.parquet", writer.into_inner().unwrap())
    }
}

async fn all(mut reader: EntityReader) -> Result<Vec<Entity>, RowError> {
    let mut all = Vec::new();
    while let Some(batch) = reader.next_batch().await? {
        all.extend(batch);
    }
    Ok(all)
}

async fn read(table: &EntityTable) -> Result<Vec<Entity>, RowError> {
    let all = all(EntityReader::open(table).await?).await?;
    match check_ids(table).await {
        Err(JoinError::Entity(error)) => Err(error),
        ids => {
            ids.unwrap();
            Ok(all)
        }
    }
}

async fn check_ids(table: &EntityTable) -> Result<(), JoinError> {
    let join = Join::new(std::slice::from_ref(table), 1 << 20).await?;
    join.finish(&mut |_, _, _| {}).map(drop)
}

/// The table is refused with a message that ends (after its path) so.
#[track_caller]
fn check(result: Result<Vec<Entity>, RowError>, expected: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(expected), "expected {expected:?} in {error:?}");
}

fn history_type() -> DataType {
    let fields = vec![
        Field::new("title", DataType::Utf8, true),
        Field::new("rating", DataType::Float64, true),
        Field::new("timestamp", DataType::Int64, true),
    ];
    DataType::List(Arc::new(Field::new("item", DataType::Struct(fields.into()), true)))
}

/// The rows as CSV: strings as they are, everything else as JSON, null as an empty cell.
fn csv_of(schema: &Schema, rows: &[Value]) -> Vec<u8> {
    let mut csv = csv::Writer::from_writer(Vec::new());
    csv.write_record(schema.fields().iter().map(|f| f.name())).unwrap();
    for row in rows {
        let cell = |field: &Arc<Field>| match row.get(field.name()) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
        };
        csv.write_record(schema.fields().iter().map(cell)).unwrap();
    }
    csv.into_inner().unwrap()
}

#[tokio::test]
async fn equal_content_gives_equal_entities_in_every_format() {
    let rows = [
        json!({"id": 1, "kind": "user", "attributes": {"age": 25, "langs": ["en", "sv"]},
            "city": "Umeå, \"SE\"", "interactions": 9, "embedding": [0.1, -2.5],
            "history": [{"title": "B", "rating": 4.5, "timestamp": 20},
                {"title": "A", "rating": null, "timestamp": 10}]}),
        json!({"id": 2, "kind": "item", "attributes": null, "city": null, "interactions": null,
            "embedding": null, "history": null}),
        json!({"id": 3, "kind": "user", "attributes": {}, "history": []}),
    ];
    let attributes = vec![
        Field::new("age", DataType::Int64, true),
        Field::new_list("langs", Field::new("item", DataType::Utf8, true), true),
    ];
    let schema = Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("kind", DataType::Utf8, false),
        Field::new("attributes", DataType::Struct(attributes.into()), true),
        Field::new("city", DataType::Utf8, true),
        Field::new("interactions", DataType::Int32, true),
        Field::new_list("embedding", Field::new("item", DataType::Float32, true), true),
        Field::new("history", history_type(), true),
    ]));
    assert_eq!(to_batch(&schema, &rows).unwrap().num_rows(), 3);
    let files = Files::new();
    let parquet = files.write("t.parquet", table::encode("t", schema.clone(), &rows, &[]).unwrap());
    let jsonl = files.lines(&rows);
    let mut csv = files.write("t.csv", csv_of(&schema, &rows));
    csv.columns.id_type = Some(IdType::Int64);

    let entities = read(&jsonl).await.unwrap();
    assert_eq!(read(&parquet).await.unwrap(), entities);
    assert_eq!(read(&csv).await.unwrap(), entities);
    let user = &entities[0];
    assert_eq!((&user.id, user.kind, user.interactions), (&EntityId::Int(1), Kind::User, 9));
    assert_eq!(Value::from(user.attributes.clone()), json!({"age": 25, "city": "Umeå, \"SE\"", "langs": ["en", "sv"]}));
    assert_eq!(user.embedding, Some(vec![0.1, -2.5]));
    let titles: Vec<_> = user.history.iter().map(|h| h.field("title").unwrap()).collect();
    assert_eq!(titles, ["A", "B"]);
    assert!(user.history.iter().next().unwrap().field("rating").is_none(), "null is absent");
}

#[tokio::test]
async fn histories_of_a_parquet_column_are_those_of_the_same_lines() {
    let rows = [
        json!({"id": 1, "history": [
            {"title": "C", "tags": ["a", null], "when": 3.5, "timestamp": 1, "made": {"by": "Ana Ek"}},
            {"title": "B", "when": 2.5},
            {"title": null, "tags": [], "when": 2.25, "timestamp": 9}]}),
        json!({"id": 2, "history": null}),
        json!({"id": 3, "history": []}),
        json!({"id": 4, "history": [{"title": "no time"}, {"title": "B", "when": 1.5}, {"timestamp": 0}]}),
        json!({"id": 5, "history": [{"timestamp": 2}, {"title": "by the other", "timestamp": 1}]}),
    ];
    let tags = DataType::List(Arc::new(Field::new("item", DataType::Utf8, true)));
    let made = DataType::Struct(vec![Field::new("by", DataType::Utf8, true)].into());
    let columns = [("timestamp", DataType::Int64), ("tags", tags), ("title", DataType::Utf8), ("made", made)];
    let columns = columns.into_iter().chain([("when", DataType::Float64)]);
    let fields: Vec<Field> = columns.map(|(name, of)| Field::new(name, of, true)).collect();
    let element = Arc::new(Field::new("item", DataType::Struct(fields.into()), true));
    let files = Files::new();
    for history in [DataType::List(element.clone()), DataType::LargeList(element)] {
        let id = Field::new("id", DataType::Int64, false);
        let schema = Arc::new(Schema::new(vec![id, Field::new("history", history, true)]));
        let timed = |table: EntityTable| {
            let columns = Columns { timestamp: "when".into(), ..Columns::default() };
            EntityTable { kind: Some(Kind::User), columns, ..table }
        };
        let parquet = |rows| timed(files.write("t.parquet", table::encode("t", schema.clone(), rows, &[]).unwrap()));
        let read_back = read(&parquet(&rows[..])).await.unwrap();
        assert_eq!(read_back, read(&timed(files.lines(&rows))).await.unwrap());
        let titles: Vec<_> = read_back[0].history.iter().map(|one| one.item("title")).collect();
        assert_eq!(titles, [None, Some("B".to_owned()), Some("C".to_owned())]);
        let missing = [json!({"id": 1, "history": []}), json!({"id": 2, "history": [{"title": "A"}, null]})];
        let told = "row 2: column \"history\" holds the element null; a history is a list of objects or of titles";
        check(read(&parquet(&missing[..])).await, told);
        check(read(&timed(files.lines(&missing))).await, told);
    }
}

#[tokio::test]
async fn histories_are_counted_as_if_they_were_read() {
    let liked = |title: &str| json!({"title": title, "rating": 4.5, "timestamp": title.len()});
    let titles = DataType::List(Arc::new(Field::new("item", DataType::Utf8, true)));
    let text = json!([liked("A"), liked("BC")]).to_string();
    let lists = |of: &dyn Fn(&str) -> Value| json!([of("A"), of("BC"), of("D")]);
    // What is no list in the file is read whole.
    let cases = [
        (history_type(), lists(&liked), true),
        (titles, lists(&|title| json!(title)), true),
        (DataType::Utf8, json!(text), false),
    ];
    for (history_type, history, counted) in cases {
        let rows = [
            json!({"id": 1, "kind": "user", "history": history, "city": "Lund"}),
            json!({"id": 2, "kind": "user", "history": null, "city": "Ystad", "interactions": 1}),
            json!({"id": 3, "kind": "item", "history": history, "interactions": 2}),
            json!({"id": 4, "kind": "item", "history": history, "interactions": 9}),
        ];
        let schema = Arc::new(Schema::new(vec![
            Field::new("id", DataType::Int64, false),
            Field::new("kind", DataType::Utf8, false),
            Field::new("history", history_type, true),
            Field::new("city", DataType::Utf8, true),
            Field::new("interactions", DataType::Int32, true),
        ]));
        let files = Files::new();
        let table = files.write("t.parquet", table::encode("t", schema, &rows, &[]).unwrap());
        let mut expected = read(&table).await.unwrap();
        assert_eq!(expected[1].interactions, 1);
        assert_eq!(expected[3].interactions, 9);
        if counted {
            expected.iter_mut().for_each(|entity| entity.history = History::default());
        }
        let reader = EntityReader::open_counting(&table).await.unwrap();
        assert_eq!(all(reader).await.unwrap(), expected);
    }
}

#[tokio::test]
async fn columns_are_mapped_and_a_configured_kind_needs_no_column() {
    let files = Files::new();
    let rows = [json!({"uid": "007", "seen": [{"t": "X", "when": 2}, {"t": "Y", "when": 1}]})];
    let mut table = files.lines(&rows);
    table.kind = Some(Kind::User);
    table.columns =
        Columns { id: "uid".into(), history: "seen".into(), timestamp: "when".into(), ..Columns::default() };
    let entity = read(&table).await.unwrap().remove(0);
    assert_eq!((entity.id, entity.interactions), (EntityId::Text("007".into()), 2));
    assert_eq!(entity.history.iter().next().unwrap().fields()["t"], "Y");
    assert!(entity.attributes.is_empty());
    table.columns.id_type = Some(IdType::Int64);
    assert_eq!(read(&table).await.unwrap()[0].id, EntityId::Int(7));
}

#[tokio::test]
async fn tables_of_many_batches_are_read_whole_and_their_rows_counted_through() {
    let files = Files::new();
    let mut rows: Vec<Value> = (0..2500).map(|id| json!({"id": id, "kind": "item"})).collect();
    assert_eq!(read(&files.lines(&rows)).await.unwrap().len(), 2500);
    rows[2400]["kind"] = "film".into();
    check(read(&files.lines(&rows)).await, "table.jsonl, row 2401: column \"kind\" is \"film\"; expected user or item");
    rows[2300] = json!("text");
    check(read(&files.lines(&rows)).await, "row 2301: not a JSON object");
    let mut csv = "id,kind\n".to_owned();
    (0..1500).for_each(|id| csv += &format!("{id},user\n"));
    assert_eq!(read(&files.write("t.csv", &csv)).await.unwrap().len(), 1500);
    check(read(&files.write("t.csv", csv + "7,8,9\n")).await, "t.csv, row 1501: CSV error");
}

/// An item's row with one value set.
fn with(key: &str, value: Value) -> Value {
    let mut row = json!({"id": 2, "kind": "item"});
    row[key] = value;
    row
}

/// Each row, the second of its table, is refused by file, row and reason.
async fn check_rows(cases: &[(Value, &str)]) {
    let files = Files::new();
    for (row, expected) in cases {
        let table = files.lines(&[json!({"id": 1, "kind": "user"}), row.clone()]);
        let expected = format!("{}, row 2: {expected}", table.path);
        check(read(&table).await, &expected);
    }
}

#[tokio::test]
async fn a_wrong_id_or_kind_is_named_by_row() {
    check_rows(&[
        (json!({"kind": "user"}), "column \"id\" is empty; every entity needs an id"),
        (with("id", Value::Null), "column \"id\" is empty"),
        (with("id", "".into()), "column \"id\" is empty"),
        (with("id", 1.5.into()), "column \"id\" holds 1.5; an id is a string or int64"),
        (with("id", u64::MAX.into()), "column \"id\" holds 18446744073709551615; an id is a string or int64"),
        (json!({"id": 1, "kind": "user"}), "user id 1 appears twice; ids must be unique over all tables"),
        (
            json!({"id": "x", "kind": "user"}),
            "user id x is string, but the users before have int64 ids; set [input.columns] id_type",
        ),
        (with("kind", "User".into()), "column \"kind\" is \"User\"; expected user or item"),
        (with("kind", Value::Null), "column \"kind\" is empty; expected user or item"),
        (json!({"id": 2}), "column \"kind\" is empty"),
    ])
    .await;
}

#[tokio::test]
async fn a_wrong_value_is_named_by_row() {
    check_rows(&[
        (with("history", 5.into()), "column \"history\" holds 5; a history is a list of objects or of titles"),
        (with("history", "Heat".into()), "column \"history\" holds text that is not JSON"),
        (with("history", json!([1])), "column \"history\" holds the element 1"),
        (
            with("history", json!([{"timestamp": "yesterday"}])),
            "column \"history\" holds the timestamp \"yesterday\", which is neither a number nor ISO 8601",
        ),
        (with("history", json!([{"timestamp": [1]}])), "column \"history\" holds the timestamp [1]"),
        (
            with("interactions", (-1).into()),
            "column \"interactions\" is -1; a number of interactions is an integer from 0",
        ),
        (with("interactions", 2.5.into()), "column \"interactions\" is 2.5"),
        (with("interactions", "many".into()), "column \"interactions\" is \"many\""),
        (
            with("embedding", json!([0.5, null])),
            "column \"embedding\" holds NaN or null at position 1; an embedding is a list of finite floats",
        ),
        (with("embedding", json!([1e300])), "column \"embedding\" holds NaN or 1e+300 at position 0"),
        (with("embedding", json!({"x": 1})), "column \"embedding\" holds {\"x\":1}"),
        (with("attributes", json!([1])), "column \"attributes\" holds [1]; attributes are a struct or a JSON object"),
    ])
    .await;
}

#[tokio::test]
async fn ids_that_are_not_of_the_type_asked_for_are_named_by_row() {
    let files = Files::new();
    let mut table = files.lines(&[json!({"id": "x1"})]);
    (table.kind, table.columns.id_type) = (Some(Kind::User), Some(IdType::Int64));
    check(read(&table).await, "row 1: id \"x1\" is not an int64, which id_type asks for");
    check(read(&files.write("t.csv", "id,kind\n1,user\n,user\n")).await, "t.csv, row 2: column \"id\" is empty");
    check(read(&files.write("t.csv", "id,kind\n1,user\n1,user\n")).await, "t.csv, row 2: user id 1 appears twice");
}

#[tokio::test]
async fn a_wrong_parquet_column_or_value_is_named() {
    let files = Files::new();
    let ids = || Arc::new(Int64Array::from(vec![1, 2])) as ArrayRef;
    let kinds = || Arc::new(StringArray::from(vec!["user", "user"])) as ArrayRef;
    let table = files.batch(vec![("id", ids()), ("kind", kinds()), ("history", ids())]);
    check(
        read(&table).await,
        "table.parquet: cannot be read: column \"history\" is Int64; a history must be a list of structs",
    );
    let values = Float32Array::from(vec![0.5, 1.0, f32::NAN, 2.0]);
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let vectors = FixedSizeListArray::new(item, 2, Arc::new(values), None);
    let table = files.batch(vec![("id", ids()), ("kind", kinds()), ("embedding", Arc::new(vectors))]);
    check(read(&table).await, "row 2: column \"embedding\" holds NaN or null at position 0");
    let table = files.batch(vec![("id", Arc::new(Int64Array::from(vec![Some(4), None])) as _), ("kind", kinds())]);
    check(read(&table).await, "row 2: column \"id\" is empty");
    let table = files.batch(vec![("id", Arc::new(Int64Array::from(vec![4, 4])) as _), ("kind", kinds())]);
    check(read(&table).await, "row 2: user id 4 appears twice");
    let table = files.batch(vec![
        ("id", ids()),
        ("kind", kinds()),
        ("interactions", Arc::new(Int64Array::from(vec![3, -3])) as _),
    ]);
    check(read(&table).await, "row 2: column \"interactions\" is -3");
}

#[tokio::test]
async fn a_wrong_file_is_named() {
    let files = Files::new();
    let ids = Arc::new(Int64Array::from(vec![1])) as ArrayRef;
    let table = files.batch(vec![("user_id", ids.clone()), ("kind", ids)]);
    check(
        read(&table).await,
        "table.parquet: no column \"id\"; it has user_id, kind. Set [input.columns] id to the right name",
    );
    let whole = std::fs::read(&table.path).unwrap();
    for (name, bytes, expected) in [
        ("t.csv", &b"id,age\n1,2\n"[..], "t.csv: no column \"kind\"; it has id, age. Set [input.columns] kind"),
        ("t.csv", b"", "t.csv: no column \"id\"; it has "),
        ("t.tsv", b"id\n", "t.tsv: the format is told by the extension: expected .parquet, .csv, .jsonl or .ndjson"),
        ("cut.parquet", &whole[..whole.len() / 2], "cut.parquet: not readable as Parquet"),
        ("empty.parquet", b"", "empty.parquet: not readable as Parquet"),
        ("text.parquet", b"id,kind\n1,user\n", "text.parquet: not readable as Parquet"),
    ] {
        check(read(&files.write(name, bytes)).await, expected);
    }
    let mut missing = files.write("t.csv", "");
    for name in ["no.csv", "no.jsonl", "no.parquet"] {
        missing.path = files.0.path().join(name).to_str().unwrap().to_owned();
        check(read(&missing).await, name);
    }
    assert!(read(&files.write("t.jsonl", "")).await.unwrap().is_empty());
}

#[tokio::test]
async fn timestamps_of_every_form_order_the_history() {
    let files = Files::new();
    for (early, late) in [
        (json!(9), json!(10)),
        (json!(1.25), json!(1.5)),
        (json!("9"), json!("10")),
        (json!("2001-01-02"), json!("2001-01-10")),
        (json!("2001-01-02 23:00:00"), json!("2001-01-03 01:00:00")),
        (json!("2001-01-02T03:04:05Z"), json!("2001-01-02T01:04:06-03:00")),
        (json!("2001-01-02T03:04:05.25Z"), json!("2001-01-02T03:04:05.5Z")),
        (json!("2001-01-02T03:04:05"), json!("2001-01-02T03:04:05.000001")),
    ] {
        let history = json!([{"title": "late", "timestamp": late}, {"title": "early", "timestamp": early}]);
        let row = json!({"id": 1, "kind": "user", "history": history});
        let entity = read(&files.lines(&[row])).await.unwrap().remove(0);
        assert_eq!(entity.history.iter().next().unwrap().fields()["title"], "early", "{early} {late}");
    }
    // Equal ones, and a history of which one has none, stay as they are.
    for history in [
        json!([{"title": "early", "timestamp": 5}, {"title": "late", "timestamp": 5}]),
        json!([{"title": "early", "timestamp": 5}, {"title": "late"}, {"timestamp": 1}]),
        json!(["early", "late"]),
    ] {
        let row = json!({"id": 1, "kind": "user", "history": history});
        let entity = read(&files.lines(&[row])).await.unwrap().remove(0);
        assert_eq!(entity.history.iter().next().unwrap().fields()["title"], "early");
    }
}

#[tokio::test]
async fn arrow_timestamps_order_the_history() {
    use arrow::array::{ListArray, StructArray};
    use arrow::buffer::OffsetBuffer;
    let zones = [None, Some("UTC".into()), Some("Europe/Stockholm".into())];
    for zone in zones {
        let times = TimestampMillisecondArray::from(vec![1_500, 1_250]).with_timezone_opt(zone.clone());
        let time = DataType::Timestamp(TimeUnit::Millisecond, zone);
        let fields = vec![Field::new("title", DataType::Utf8, true), Field::new("timestamp", time, true)];
        let titles = Arc::new(StringArray::from(vec!["late", "early"])) as ArrayRef;
        let events = StructArray::new(fields.into(), vec![titles, Arc::new(times)], None);
        let item = Arc::new(Field::new("item", events.data_type().clone(), true));
        let list = ListArray::new(item, OffsetBuffer::from_lengths([2]), Arc::new(events), None);
        let files = Files::new();
        let mut table =
            files.batch(vec![("id", Arc::new(Int64Array::from(vec![1])) as ArrayRef), ("history", Arc::new(list))]);
        table.kind = Some(Kind::User);
        let entity = read(&table).await.unwrap().remove(0);
        assert_eq!(entity.history.iter().next().unwrap().fields()["title"], "early");
    }
}
