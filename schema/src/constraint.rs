//! What texts may be: a JSON schema, a regular expression or a grammar that each of them follows.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::parsed::ParsedField;

/// The key of a schema under which the grammar compiler finds how JSON is to be written.
const LAYOUT: &str = "x-guidance";

/// What every text of a run follows, whole: part of the specification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Constraint {
    /// A JSON schema.
    Schema(Value),
    /// A regular expression.
    Regex(String),
    /// A grammar in llguidance's dialect of Lark.
    Grammar(String),
}

impl Constraint {
    /// That of a schema. Unless the schema says otherwise, JSON is written on one line with `", "` and `": "`, as
    /// Python's `json.dumps` writes it: with free whitespace every separator would be the model's choice and cost a
    /// forward, and a small model may write spaces without end.
    pub fn of_schema(mut schema: Value) -> Self {
        if let Value::Object(schema) = &mut schema {
            let layout = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
            schema.entry(LAYOUT).or_insert(layout);
        }
        Self::Schema(schema)
    }

    /// The fields of the column `parsed`, if texts are JSON objects.
    pub fn parsed(&self) -> Option<Vec<ParsedField>> {
        match self {
            Self::Schema(schema) => ParsedField::of_schema(schema),
            Self::Regex(_) | Self::Grammar(_) => None,
        }
    }

    /// The key of `[generate]` that sets it.
    pub fn key(&self) -> &'static str {
        match self {
            Self::Schema(_) => "schema",
            Self::Regex(_) => "regex",
            Self::Grammar(_) => "grammar",
        }
    }
}
