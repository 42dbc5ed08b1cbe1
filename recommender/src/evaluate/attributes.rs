//! Attributes of the entity tables as features: one bag of values per attribute.

use std::sync::Arc;

use anyhow::{Result, ensure};
use laser_schema::Kind;
use laser_store::EntityReader;
use serde_json::Value;

use super::AttributesConfig;
use super::knowledge::Entities;
use crate::ctr::{Bags, Feature, Variant};

/// The variant's name.
const ATTRIBUTES: &str = "attributes";

/// Reads the attributes of the users and items of the interactions.
///
/// # Errors
/// A table that cannot be read, and a name that no entity has a value of.
pub(super) async fn attributes(config: &AttributesConfig, entities: &Entities) -> Result<Variant> {
    let mut values = Kind::ALL.map(|kind| vec![vec![Vec::new(); entities[kind as usize].len()]; config.names.len()]);
    for table in &config.entities {
        let mut reader = EntityReader::open_counting(table).await?;
        while let Some(batch) = reader.next_batch().await? {
            for mut entity in batch {
                let Some(place) = entities[entity.kind as usize].find(&entity.id.to_string()) else {
                    continue;
                };
                for (name, rows) in config.names.iter().zip(&mut values[entity.kind as usize]) {
                    rows[place] = texts(entity.attributes.remove(name).unwrap_or_default());
                }
            }
        }
    }
    let mut variant = Variant { name: ATTRIBUTES.to_owned(), ..Variant::default() };
    for (number, name) in config.names.iter().enumerate() {
        let mut is_known = false;
        for kind in Kind::ALL {
            let bags = Feature::Bags(Bags::of_values(&values[kind as usize][number]).into());
            if bags.known() > 0 {
                is_known = true;
                variant.features[kind as usize].push(Arc::new(bags));
            }
        }
        ensure!(
            is_known,
            "[eval.attributes] names: no two users or items of [interactions] share a value of {name:?}; name an \
             attribute of the tables"
        );
    }
    Ok(variant)
}

/// The values of a list, or the one value.
fn texts(value: Value) -> Vec<String> {
    match value {
        Value::Null => Vec::new(),
        Value::Array(values) => values.into_iter().flat_map(texts).collect(),
        Value::String(text) => vec![text],
        other => vec![other.to_string()],
    }
}
