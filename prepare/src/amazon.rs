//! Reviews and product metadata in the JSON lines of the Amazon review data sets of 2014, 2018 and 2023.
//!
//! The vintages differ in names and shapes only: `reviewerID` or `user_id`, `asin` or `parent_asin`, `overall`
//! or `rating`, seconds in `unixReviewTime` or milliseconds in `timestamp`. They are told field by field, so that
//! any data set in this style is read. Ids are text, timestamps become seconds. Items are those that
//! were reviewed; metadata about others is passed over, since it is often a hundred times as much.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use laser_schema::Kind;
use laser_schema::entity::IdType;
use laser_store::Location;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::delimited::for_each_line;
use crate::table::{Written, filled, float32, history, int64, known, text, texts, write_entities};
use crate::{PrepareError, PrepareSummary, Result};

/// Reads reviews and, where given, metadata, and writes `users.parquet` and `items.parquet` to `output`.
///
/// # Errors
/// The first line that is not a review or a product; nothing is written then.
pub async fn amazon(reviews: &Path, metadata: Option<&Path>, output: &Location) -> Result<PrepareSummary> {
    let mut data = Amazon::default();
    for_each_line(reviews, |line| data.add_review(parse(line)?))?;
    if data.users.is_empty() {
        return Err(PrepareError::at(reviews, "there is no review in this file"));
    }
    if let Some(metadata) = metadata {
        for_each_line(metadata, |line| data.add_product(parse(line)?))?;
    }
    let interactions = data.items.iter().map(|item| item.reviews).sum();
    Ok(PrepareSummary {
        users_table: data.write_users(&output.join("users.parquet")).await?.url,
        items_table: data.write_items(&output.join("items.parquet")).await?.url,
        interactions_table: None,
        users: data.users.len() as u64,
        items: data.items.len() as u64,
        interactions,
        in_histories: interactions,
        untimed: 0,
    })
}

#[derive(Debug, Deserialize)]
struct ReviewLine {
    #[serde(alias = "reviewerID")]
    user_id: String,
    asin: Option<String>,
    parent_asin: Option<String>,
    #[serde(alias = "overall")]
    rating: f32,
    #[serde(rename = "unixReviewTime")]
    seconds: Option<i64>,
    #[serde(rename = "timestamp")]
    milliseconds: Option<i64>,
    summary: Option<String>,
    /// What 2023 calls the summary.
    title: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ProductLine {
    asin: Option<String>,
    parent_asin: Option<String>,
    title: Option<String>,
    brand: Option<String>,
    /// What 2023 calls the brand.
    store: Option<String>,
    /// 2014: lists of lists; 2023: a list.
    #[serde(default)]
    categories: Value,
    /// 2018: a list.
    #[serde(default)]
    category: Value,
    main_category: Option<String>,
    #[serde(default)]
    price: Value,
    #[serde(default)]
    description: Value,
}

#[derive(Debug, Default)]
struct Amazon {
    /// In the order of their first review.
    items: Vec<Item>,
    index: HashMap<String, u32>,
    users: BTreeMap<String, Vec<Review>>,
}

#[derive(Debug, Default)]
struct Item {
    id: String,
    reviews: u64,
    product: Product,
}

#[derive(Debug, Default, Serialize)]
struct Product {
    title: Option<String>,
    brand: Option<String>,
    categories: Option<Vec<String>>,
    price: Option<f32>,
    description: Option<String>,
}

#[derive(Debug)]
struct Review {
    item: u32,
    rating: f32,
    timestamp: Option<i64>,
    summary: Option<String>,
}

#[derive(Serialize)]
struct UserColumns<'a> {
    history: Vec<Reviewed<'a>>,
}

#[derive(Serialize)]
struct Reviewed<'a> {
    item: &'a str,
    title: Option<&'a str>,
    brand: Option<&'a str>,
    categories: Option<&'a [String]>,
    rating: f32,
    summary: Option<&'a str>,
    timestamp: Option<i64>,
}

impl Amazon {
    fn add_review(&mut self, line: ReviewLine) -> Result<(), String> {
        let id = item_id(line.parent_asin, line.asin)?;
        let item = match self.index.get(&id) {
            Some(&item) => item,
            None => self.add_item(id)?,
        };
        self.items[item as usize].reviews += 1;
        self.users.entry(line.user_id).or_default().push(Review {
            item,
            rating: line.rating,
            timestamp: line.seconds.or(line.milliseconds.map(|ms| ms.div_euclid(1000))),
            summary: filled(line.summary).or(filled(line.title)),
        });
        Ok(())
    }

    fn add_item(&mut self, id: String) -> Result<u32, String> {
        let item = u32::try_from(self.items.len()).map_err(|e| e.to_string())?;
        self.items.push(Item { id: id.clone(), ..Item::default() });
        self.index.insert(id, item);
        Ok(item)
    }

    /// The metadata of 2018 have products twice: the last one stands.
    fn add_product(&mut self, line: ProductLine) -> Result<(), String> {
        let id = item_id(line.parent_asin, line.asin)?;
        let Some(&item) = self.index.get(&id) else {
            return Ok(());
        };
        let mut categories = Vec::new();
        collect_texts(&line.categories, &mut categories);
        collect_texts(&line.category, &mut categories);
        if categories.is_empty() {
            categories.extend(filled(line.main_category));
        }
        let mut description = Vec::new();
        collect_texts(&line.description, &mut description);
        self.items[item as usize].product = Product {
            title: filled(line.title),
            brand: filled(line.brand).or(filled(line.store)),
            categories: known(categories),
            price: price(&line.price),
            description: Some(description.join(" ")).filter(|d| !d.is_empty()),
        };
        Ok(())
    }

    async fn write_users(&mut self, location: &Location) -> Result<Written> {
        let columns = vec![history(vec![
            text("item"),
            text("title"),
            text("brand"),
            texts("categories"),
            float32("rating"),
            text("summary"),
            int64("timestamp"),
        ])];
        self.users.values_mut().for_each(|reviews| reviews.sort_by_key(|review| review.timestamp));
        let rows = self.users.iter().map(|(id, reviews)| {
            let history = reviews.iter().map(|r| Reviewed::new(&self.items, r)).collect();
            (id, UserColumns { history }, reviews.len() as u64)
        });
        write_entities(location, (Kind::User, IdType::String), columns, rows).await
    }

    async fn write_items(&self, location: &Location) -> Result<Written> {
        let columns = vec![text("title"), text("brand"), texts("categories"), float32("price"), text("description")];
        let rows = self.items.iter().map(|item| (&item.id, &item.product, item.reviews));
        write_entities(location, (Kind::Item, IdType::String), columns, rows).await
    }
}

impl<'a> Reviewed<'a> {
    fn new(items: &'a [Item], review: &'a Review) -> Self {
        let item = &items[review.item as usize];
        Self {
            item: &item.id,
            title: item.product.title.as_deref(),
            brand: item.product.brand.as_deref(),
            categories: item.product.categories.as_deref(),
            rating: review.rating,
            summary: review.summary.as_deref(),
            timestamp: review.timestamp,
        }
    }
}

fn parse<T: DeserializeOwned>(line: &str) -> Result<T, String> {
    serde_json::from_str(line).map_err(|error| {
        if line.starts_with("{'") {
            "a Python literal, as the metadata of 2014 are published; rewrite the file as JSON lines \
             first (in Python: json.dumps(ast.literal_eval(line)))"
                .to_owned()
        } else if line.starts_with('\u{1f}') {
            "compressed data; unpack the file first (gunzip -k)".to_owned()
        } else {
            format!("not a JSON object of this kind: {error}")
        }
    })
}

/// Metadata of 2023 are by parent, the product whose variants share reviews.
fn item_id(parent: Option<String>, asin: Option<String>) -> Result<String, String> {
    filled(parent).or(filled(asin)).ok_or_else(|| "neither parent_asin nor asin is set".into())
}

/// The texts of a text, a list or a list of lists, each once.
fn collect_texts(value: &Value, texts: &mut Vec<String>) {
    match value {
        Value::String(text) if !text.trim().is_empty() && !texts.contains(text) => {
            texts.push(text.clone());
        }
        Value::Array(values) => values.iter().for_each(|value| collect_texts(value, texts)),
        _ => {}
    }
}

/// A number or `$1,299.00`; ranges, dashes and the page fragments of 2018 are no price.
fn price(value: &Value) -> Option<f32> {
    let text = match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.trim().trim_start_matches('$').replace(',', ""),
        _ => return None,
    };
    text.parse().ok().filter(|price: &f32| price.is_finite())
}

#[cfg(test)]
mod tests {
    use laser_schema::Entity;
    use serde_json::json;

    use super::*;
    use crate::testing::{files, location, read_table};

    async fn prepare(reviews: &str, meta: Option<&str>) -> Result<(PrepareSummary, Vec<Entity>, Vec<Entity>)> {
        let dir = files(&[("reviews.jsonl", reviews.as_bytes()), ("meta.jsonl", meta.unwrap_or_default().as_bytes())]);
        let [reviews, metadata] = ["reviews.jsonl", "meta.jsonl"].map(|name| dir.path().join(name));
        let summary = amazon(&reviews, meta.map(|_| metadata.as_path()), &location(dir.path())).await?;
        let users = read_table(&summary.users_table).await;
        let items = read_table(&summary.items_table).await;
        Ok((summary, users, items))
    }

    /// One user with two reviews, one product with metadata, in the words of each vintage.
    #[tokio::test]
    async fn the_vintages_of_2014_2018_and_2023_are_read_alike() {
        let vintages = [
            (
                r#"{"reviewerID":"U1","asin":"B1","overall":5.0,"summary":"","unixReviewTime":1400000000,"helpful":[0,0]}
{"reviewerID":"U1","asin":"B2","overall":4.0,"summary":"Clean","unixReviewTime":1300000000,"reviewText":"long"}"#,
                r#"{"asin":"B2","title":"Soap","brand":"Foam & Co","price":3.5,"categories":[["Beauty","Bath"],["Beauty"]],"description":"A bar. Of soap."}
{"asin":"B9","title":"Not reviewed"}"#,
            ),
            (
                r#"{"reviewerID":"U1","asin":"B1","overall":5,"unixReviewTime":1400000000,"verified":true}
{"reviewerID":"U1","asin":"B2","overall":4,"summary":"Clean","unixReviewTime":1300000000,"style":{"Size:":" 1"}}"#,
                r#"{"asin":"B2","title":"Soap, old","category":[],"price":""}
{"asin":"B2","title":"Soap","brand":"Foam & Co","price":"$3.50","category":["Beauty","Bath"],"description":["A bar.","Of soap."]}"#,
            ),
            (
                r#"{"user_id":"U1","asin":"X","parent_asin":"B1","rating":5.0,"title":" ","timestamp":1400000000123}
{"user_id":"U1","asin":"Y","parent_asin":"B2","rating":4.0,"title":"Clean","text":"long","timestamp":1300000000999}"#,
                r#"{"parent_asin":"B2","title":"Soap","store":"Foam & Co","price":3.5,"main_category":"All","categories":["Beauty","Bath"],"description":["A bar.","Of soap."]}"#,
            ),
        ];
        for (reviews, meta) in vintages {
            let (summary, users, items) = prepare(reviews, Some(meta)).await.unwrap();
            assert_eq!((summary.users, summary.items, summary.interactions), (1, 2, 2));
            assert_eq!(users[0].id.to_string(), "U1");
            let history: Vec<Value> = users[0].history.iter().map(|i| json!(i)).collect();
            let soap = json!({"item": "B2", "title": "Soap", "brand": "Foam & Co", "rating": 4.0,
                "categories": ["Beauty", "Bath"], "summary": "Clean", "timestamp": 1_300_000_000});
            assert_eq!(history[0], soap);
            assert_eq!(history[1], json!({"item": "B1", "rating": 5.0, "timestamp": 1_400_000_000}));
            let (id, product) = (items[1].id.to_string(), json!(items[1].attributes));
            let expected = json!({"title": "Soap", "brand": "Foam & Co", "price": 3.5,
                "categories": ["Beauty", "Bath"], "description": "A bar. Of soap."});
            assert_eq!((id.as_str(), product), ("B2", expected));
            assert_eq!(items[1].interactions, 1);
        }
    }

    #[tokio::test]
    async fn metadata_are_not_needed() {
        let reviews = r#"{"user_id":"U","asin":"B","rating":1.0}"#;
        let (_, users, items) = prepare(reviews, None).await.unwrap();
        assert_eq!(json!(users[0].history.iter().next()), json!({"item": "B", "rating": 1.0}));
        assert!(items[0].attributes.is_empty());
    }

    #[tokio::test]
    async fn bad_lines_are_named_by_file_and_line() {
        let good = r#"{"user_id":"U","asin":"B","rating":1.0}"#;
        let cases = [
            (
                format!("{good}\n{{\"user_id\":\"U\"}}"),
                None,
                "reviews.jsonl, line 2: not a JSON object of this kind: missing field `rating`",
            ),
            (format!("{good}\n\n{{"), None, "reviews.jsonl, line 3: not a JSON"),
            (r#"{"user_id":"U","rating":1.0}"#.to_owned(), None, "line 1: neither parent_asin nor asin"),
            ("\u{1f}\u{8b}".to_owned(), None, "line 1: compressed data; unpack"),
            (String::new(), None, "there is no review in this file"),
            (good.to_owned(), Some("{'asin': 'B'}"), "meta.jsonl, line 1: a Python literal"),
        ];
        for (reviews, meta, expected) in cases {
            let error = format!("{:#}", prepare(&reviews, meta).await.unwrap_err());
            assert!(error.contains(expected), "expected {expected:?}, got {error:?}");
        }
    }

    #[test]
    fn only_a_single_amount_is_a_price() {
        let cases = [
            (json!(3), Some(3.0)),
            (json!("$1,299.00"), Some(1299.0)),
            (json!("12.5"), Some(12.5)),
            (json!("$5.00 - $9.00"), None),
            (json!("—"), None),
            (json!("nan"), None),
            (json!(null), None),
        ];
        for (value, expected) in cases {
            assert_eq!(price(&value), expected, "{value}");
        }
    }
}
