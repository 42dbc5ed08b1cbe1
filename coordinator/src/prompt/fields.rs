//! The fields that a template sees of an entity: `id`, `kind`, `interactions`, `attributes` and `history`.
//!
//! An empty value (null, an empty string, an empty list) counts as absent, so `is defined` is the only test a template
//! needs. Whole numbers show no fraction, whatever type their column had.

use std::collections::BTreeSet;
use std::sync::Arc;

use laser_schema::value::whole;
use laser_schema::{Entity, EntityId, Interaction, Kind};
use minijinja::value::{Enumerator, Object};
use minijinja::{Value, context};
use serde_json::{Map, Value as Json};

/// An interaction as a template sees it: the few fields that are present. A list of them is found through sooner than a
/// map is made.
#[derive(Debug)]
struct Seen(Vec<(Box<str>, Value)>);

impl Seen {
    fn new(interaction: &Interaction) -> Self {
        let mut present = Vec::new();
        interaction.each(&mut |name, json| present.extend(value(&json).map(|value| (name.into(), value))));
        Self(present)
    }
}

impl Object for Seen {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.0.iter().find(|(name, _)| **name == *key).map(|(_, value)| value.clone())
    }

    /// In the order of the names, as a map is.
    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let names: BTreeSet<&str> = self.0.iter().map(|(name, _)| &**name).collect();
        Enumerator::Values(names.into_iter().map(Value::from).collect())
    }
}

/// An entity's fields as template values, made once for all renderings.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    source: &'a Entity,
    attributes: Value,
    /// The interactions that renderings have seen so far, newest first.
    latest: Vec<Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(entity: &'a Entity) -> Self {
        Self { source: entity, attributes: object(&entity.attributes), latest: Vec::new() }
    }

    pub(super) fn kind(&self) -> Kind {
        self.source.kind
    }

    /// Returns kind and id, for messages.
    pub(super) fn entity(&self) -> String {
        format!("{} {}", self.source.kind, self.source.id)
    }

    /// Returns the template's context with the latest `kept` interactions.
    pub(super) fn context(&mut self, kept: usize) -> Value {
        let newest_first = self.source.history.iter().rev().take(kept);
        let unseen = newest_first.skip(self.latest.len());
        self.latest.extend(unseen.map(|one| Value::from_object(Seen::new(&one))));
        let kept = self.latest.len().min(kept);
        let history: Vec<Value> = self.latest[..kept].iter().rev().cloned().collect();
        let id = match &self.source.id {
            EntityId::Int(id) => Value::from(*id),
            EntityId::Text(id) => Value::from(id.as_str()),
        };
        context! {
            id,
            kind => self.source.kind.as_str(),
            interactions => self.source.interactions,
            attributes => self.attributes.clone(),
            history => Value::from(history),
        }
    }

    /// Lists all fields as a template would write them.
    pub(super) fn available(&self) -> String {
        let mut names: Vec<String> = ["id", "kind", "interactions"].map(String::from).into();
        let history = self.source.history.iter();
        let of_history: BTreeSet<String> =
            history.flat_map(|one| Seen::new(&one).0).map(|(name, _)| name.into()).collect();
        let attributes = keys(&self.attributes).into_iter();
        names.extend(attributes.map(|name| format!("attributes.{name}")));
        let of_history: Vec<String> = of_history.into_iter().collect();
        names.push(match of_history.is_empty() {
            true => "history (empty)".into(),
            false => format!("history (each with some of {})", of_history.join(", ")),
        });
        names.join(", ")
    }
}

pub(crate) fn keys(object: &Value) -> Vec<String> {
    let keys = object.try_iter().into_iter().flatten();
    keys.map(|key| key.to_string()).collect()
}

pub(crate) fn object(fields: &Map<String, Json>) -> Value {
    let present = fields.iter().filter_map(|(name, json)| Some((name.clone(), value(json)?)));
    present.collect()
}

fn value(json: &Json) -> Option<Value> {
    match json {
        Json::Null => None,
        Json::Bool(flag) => Some(Value::from(*flag)),
        Json::Number(number) => Some(whole(number).map_or_else(|| Value::from_serialize(number), Value::from)),
        Json::String(text) => (!text.trim().is_empty()).then(|| Value::from(text.trim())),
        Json::Array(items) => {
            let items: Vec<Value> = items.iter().filter_map(value).collect();
            (!items.is_empty()).then(|| Value::from(items))
        }
        Json::Object(fields) => (!fields.is_empty()).then(|| object(fields)),
    }
}
