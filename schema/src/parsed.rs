//! The columns that a JSON schema makes of its texts: the struct `parsed`.
//!
//! A field has a type of its own where the schema gives it one of `string`, `integer`, `number`, `boolean`, an array of
//! these or an object with properties: directly, behind a `$ref` within the schema, or as `anyOf` of one such schema
//! and `null`. Everything else is JSON in a string.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The name of the column.
pub const PARSED_COLUMN: &str = "parsed";

/// Objects and arrays within each other that become structs and lists, at most; a schema that refers to itself has no
/// end.
const DEPTH_MAX: usize = 8;

/// A field of the struct.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParsedField {
    /// The property's name.
    pub name: String,
    /// Its type.
    #[serde(rename = "type")]
    pub data_type: ParsedType,
    /// Whether it may be null: the property is optional, or may be `null` itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nullable: bool,
}

/// The type of a field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParsedType {
    /// Text.
    String,
    /// A signed integer of 64 bits.
    Integer,
    /// A double.
    Number,
    /// True or false.
    Boolean,
    /// A list.
    List {
        /// The type of its items.
        items: Box<ParsedType>,
        /// Whether they may be null.
        nullable: bool,
    },
    /// A struct.
    Object(Vec<ParsedField>),
    /// JSON as text: whatever has no type of its own.
    Json,
}

impl ParsedField {
    /// The fields of a schema whose root is an object with properties; none of another.
    pub fn of_schema(schema: &Value) -> Option<Vec<Self>> {
        let (data_type, nullable) = type_of(schema, schema, 0);
        match data_type {
            ParsedType::Object(fields) if !nullable => Some(fields),
            _ => None,
        }
    }
}

/// The type of a schema's values, and whether they may be null.
fn type_of(schema: &Value, root: &Value, depth: usize) -> (ParsedType, bool) {
    let json = (ParsedType::Json, true);
    if depth > DEPTH_MAX {
        return json;
    }
    if let Some(target) = referred(schema, root) {
        return type_of(target, root, depth + 1);
    }
    if let Some(inner) = optional(schema) {
        return (type_of(inner, root, depth + 1).0, true);
    }
    // Combinations, and values that are listed, may be of any type.
    if ["anyOf", "oneOf", "allOf", "$ref"].iter().any(|key| schema.get(key).is_some()) {
        return json;
    }
    let (name, nullable) = match &schema["type"] {
        Value::String(name) => (name.as_str(), false),
        Value::Array(names) => match without_null(names) {
            Some(name) => (name, names.len() > 1),
            None => return json,
        },
        _ => match values(schema) {
            Some(name) => (name, false),
            None => return json,
        },
    };
    let data_type = match name {
        "string" => ParsedType::String,
        "integer" => ParsedType::Integer,
        "number" => ParsedType::Number,
        "boolean" => ParsedType::Boolean,
        "array" => match schema.get("items") {
            Some(items) if schema.get("prefixItems").is_none() => {
                let (items, nullable) = type_of(items, root, depth + 1);
                ParsedType::List { items: Box::new(items), nullable }
            }
            _ => ParsedType::Json,
        },
        "object" => match schema["properties"].as_object() {
            Some(properties) if !properties.is_empty() => {
                ParsedType::Object(fields(properties, &schema["required"], (root, depth)))
            }
            _ => ParsedType::Json,
        },
        _ => return json,
    };
    (data_type, nullable)
}

fn fields(properties: &Map<String, Value>, required: &Value, (root, depth): (&Value, usize)) -> Vec<ParsedField> {
    let is_required = |name: &str| required.as_array().is_some_and(|names| names.iter().any(|found| found == name));
    let field = |(name, schema): (&String, &Value)| {
        let (data_type, nullable) = type_of(schema, root, depth + 1);
        ParsedField { name: name.clone(), data_type, nullable: nullable || !is_required(name) }
    };
    properties.iter().map(field).collect()
}

/// What a schema refers to, if that is in the same document.
fn referred<'a>(schema: &Value, root: &'a Value) -> Option<&'a Value> {
    root.pointer(schema.get("$ref")?.as_str()?.strip_prefix('#')?)
}

/// The one schema beside `null`.
fn optional(schema: &Value) -> Option<&Value> {
    let options = schema.get("anyOf").or(schema.get("oneOf"))?.as_array()?;
    let is_null = |option: &&Value| option["type"] == "null";
    let mut others = options.iter().filter(|option| !is_null(option));
    let other = others.next().filter(|_| options.iter().any(|option| is_null(&option)))?;
    others.next().is_none().then_some(other)
}

/// The one type beside `null`.
fn without_null(names: &[Value]) -> Option<&str> {
    let mut others = names.iter().filter_map(Value::as_str).filter(|name| *name != "null");
    let name = others.next()?;
    others.next().is_none().then_some(name)
}

/// The type of the values of `enum` or `const`, if they are all strings or all integers.
fn values(schema: &Value) -> Option<&'static str> {
    let values = match (schema.get("enum"), schema.get("const")) {
        (Some(Value::Array(values)), _) if !values.is_empty() => values.as_slice(),
        (None, Some(value)) => std::slice::from_ref(value),
        _ => return None,
    };
    let all = |is: fn(&Value) -> bool| values.iter().all(is);
    match () {
        () if all(Value::is_string) => Some("string"),
        () if all(Value::is_i64) => Some("integer"),
        () => None,
    }
}

/// A text as a row of the struct: properties that it has no field for are left out, and what is a field of JSON becomes
/// a string.
///
/// # Errors
/// The place and value that does not fit its field.
pub fn parse(text: &str, fields: &[ParsedField]) -> Result<Value, String> {
    let value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
    object(value, fields, "")
}

fn object(value: Value, fields: &[ParsedField], place: &str) -> Result<Value, String> {
    let Value::Object(mut properties) = value else {
        return Err(unfit(&value, "an object", place));
    };
    let field = |field: &ParsedField| {
        let place = if place.is_empty() { field.name.clone() } else { format!("{place}.{}", field.name) };
        let found = properties.remove(&field.name).unwrap_or_default();
        Ok((field.name.clone(), fitted(found, (&field.data_type, field.nullable), &place)?))
    };
    fields.iter().map(field).collect::<Result<Map<_, _>, _>>().map(Value::Object)
}

fn fitted(value: Value, (data_type, nullable): (&ParsedType, bool), place: &str) -> Result<Value, String> {
    if value.is_null() {
        return if nullable { Ok(value) } else { Err(unfit(&value, "a value", place)) };
    }
    match data_type {
        ParsedType::String if value.is_string() => Ok(value),
        ParsedType::Boolean if value.is_boolean() => Ok(value),
        ParsedType::Integer if value.is_i64() => Ok(value),
        ParsedType::Number if value.as_f64().is_some_and(f64::is_finite) => Ok(value),
        ParsedType::Json => Ok(Value::String(value.to_string())),
        ParsedType::Object(fields) => object(value, fields, place),
        ParsedType::List { items, nullable } => match value {
            Value::Array(values) => {
                let item = |(at, value)| fitted(value, (items, *nullable), &format!("{place}[{at}]"));
                values.into_iter().enumerate().map(item).collect::<Result<_, _>>().map(Value::Array)
            }
            other => Err(unfit(&other, "an array", place)),
        },
        ParsedType::String => Err(unfit(&value, "a string", place)),
        ParsedType::Boolean => Err(unfit(&value, "true or false", place)),
        ParsedType::Integer => Err(unfit(&value, "an integer of 64 bits; bound it by minimum and maximum", place)),
        ParsedType::Number => Err(unfit(&value, "a double", place)),
    }
}

fn unfit(value: &Value, expected: &str, place: &str) -> String {
    let place = if place.is_empty() { "the text" } else { place };
    format!("{place} is {value}, expected {expected}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn field(name: &str, data_type: ParsedType, nullable: bool) -> ParsedField {
        ParsedField { name: name.to_owned(), data_type, nullable }
    }

    fn list(items: ParsedType) -> ParsedType {
        ParsedType::List { items: Box::new(items), nullable: false }
    }

    #[test]
    fn a_schemas_properties_become_fields_and_what_has_no_type_becomes_json() {
        let schema = json!({
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "score": {"type": ["number", "null"]},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
                "home": {"$ref": "#/$defs/place"},
                "work": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
                "any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "map": {"type": "object", "additionalProperties": {"type": "string"}},
                "pair": {"type": "array", "prefixItems": [{"type": "string"}], "items": false},
                "level": {"const": 3},
                "open": {"type": "boolean"}
            },
            "required": ["name", "tags", "home", "work", "any", "level", "score"],
            "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
        });
        let place = ParsedType::Object(vec![field("city", ParsedType::String, false)]);
        let expected = vec![
            field("name", ParsedType::String, false),
            field("age", ParsedType::Integer, true),
            field("score", ParsedType::Number, true),
            field("tags", list(ParsedType::String), false),
            field("home", place.clone(), false),
            field("work", place, true),
            field("any", ParsedType::Json, true),
            field("map", ParsedType::Json, true),
            field("pair", ParsedType::Json, true),
            field("level", ParsedType::Integer, false),
            field("open", ParsedType::Boolean, true),
        ];
        assert_eq!(ParsedField::of_schema(&schema), Some(expected));
    }

    #[test]
    fn only_objects_with_properties_have_fields() {
        for schema in [json!(true), json!({"type": "object"}), json!({"type": "array", "items": {"type": "string"}})] {
            assert_eq!(ParsedField::of_schema(&schema), None, "{schema}");
        }
    }

    #[test]
    fn a_schema_that_refers_to_itself_ends_in_json() {
        let node = json!({"type": "object", "properties": {"next": {"$ref": "#"}}});
        let mut fields = ParsedField::of_schema(&node).unwrap();
        let mut depth = 0;
        while let ParsedType::Object(inner) = fields.remove(0).data_type {
            (fields, depth) = (inner, depth + 1);
        }
        assert!(depth > 1 && depth <= DEPTH_MAX, "{depth}");
    }

    #[test]
    fn texts_become_rows_and_what_does_not_fit_is_named() {
        let fields = [
            field("n", ParsedType::Integer, false),
            field("x", ParsedType::Number, true),
            field("j", ParsedType::Json, true),
            field("l", list(ParsedType::Object(vec![field("s", ParsedType::String, false)])), true),
        ];
        let parsed = parse(r#"{"n": 1, "extra": 2, "j": [1, {"a": null}], "l": [{"s": "é"}]}"#, &fields).unwrap();
        assert_eq!(parsed, json!({"n": 1, "x": null, "j": "[1,{\"a\":null}]", "l": [{"s": "é"}]}));
        for (text, part) in [
            ("{", "not JSON"),
            ("[]", "the text is [], expected an object"),
            (r#"{"x": 1}"#, "n is null, expected a value"),
            (r#"{"n": 18446744073709551615}"#, "n is 18446744073709551615, expected an integer of 64 bits"),
            (r#"{"n": 1, "x": 1e999}"#, "not JSON"),
            (r#"{"n": 1, "l": [{"s": 2}]}"#, "l[0].s is 2, expected a string"),
        ] {
            let error = parse(text, &fields).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
