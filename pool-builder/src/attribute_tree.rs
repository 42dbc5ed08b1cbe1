//! Attribute groups (LASER 3.2): entities are grouped by an attribute, and groups above a size are subdivided by
//! further attributes.
//!
//! One rule makes every split. An attribute *splits* a set of entities if at least two of its values have `min_group`
//! entities each; the values with fewer form one part together, the rest. The attribute used is the first of the given
//! order that splits, or the *best*: the one whose largest part is the smallest, ties by name. (This skips attributes
//! such as titles, whose values are all rare.) The set of all entities is always split; a part only while it is above
//! `max_group`, and each attribute at most once on a path. The rest of a part is a group too if it reaches `min_group`.
//! The rest of the whole set has no group, because a pool of everything exists anyway.
//!
//! A list counts by its first element, a number by its value (1 and 1.0 are one group). A missing value is a value like
//! any other: the group "unknown".

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{Attributes, GroupingConfig};

/// The key of a missing value.
const UNKNOWN: &str = "";

/// Rules that lead from attributes to a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AttributeTree {
    /// This group, numbered from 0 in the order of the tree.
    Group(usize),
    /// One branch per value.
    Split {
        /// The attribute that decides.
        attribute: String,
        /// Branch by value; a missing value is the empty text.
        values: BTreeMap<String, AttributeTree>,
        /// The branch of all other values, known or not; without it they have no group.
        #[serde(skip_serializing_if = "Option::is_none")]
        rest: Option<Box<AttributeTree>>,
    },
}

impl AttributeTree {
    /// Returns the group of an entity with these attributes.
    pub(crate) fn group(&self, attributes: &Map<String, Value>) -> Option<usize> {
        match self {
            Self::Group(group) => Some(*group),
            Self::Split { attribute, values, rest } => {
                let key = attributes.get(attribute).map_or_else(String::new, key);
                values.get(&key).or(rest.as_deref())?.group(attributes)
            }
        }
    }
}

/// Returns the text that a value groups by; empty for values that count as missing.
fn key(value: &Value) -> String {
    match value {
        Value::Null => UNKNOWN.to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(list) => list.first().map_or_else(String::new, key),
        Value::Number(number) => match number.as_f64() {
            Some(whole) if whole.fract() == 0.0 && whole.abs() < 1e15 => format!("{whole:.0}"),
            _ => number.to_string(),
        },
        Value::Bool(_) | Value::Object(_) => value.to_string(),
    }
}

/// The attributes of entities of one kind, by column: 4 bytes per value, and each distinct value once.
#[derive(Debug)]
pub(crate) struct AttributeColumns {
    wanted: Option<BTreeSet<String>>,
    names: BTreeSet<String>,
    columns: BTreeMap<String, Column>,
    rows: usize,
}

/// The code of the value per row; code 0 is the missing value.
#[derive(Debug)]
struct Column {
    codes: HashMap<String, u32>,
    rows: Vec<u32>,
}

impl AttributeColumns {
    /// Keeps the attributes of the given order, or all of them for the best.
    pub(crate) fn new(attributes: &Attributes) -> Self {
        let wanted = match attributes {
            Attributes::Best(_) => None,
            Attributes::Order(order) => Some(order.iter().cloned().collect()),
        };
        Self { wanted, names: BTreeSet::new(), columns: BTreeMap::new(), rows: 0 }
    }

    /// Appends an entity. If it is not `sampled`, only the names of its attributes are kept.
    pub(crate) fn push(&mut self, attributes: &Map<String, Value>, sampled: bool) {
        for (name, value) in attributes {
            if !self.names.contains(name) {
                self.names.insert(name.clone());
            }
            if sampled && self.wanted.as_ref().is_none_or(|wanted| wanted.contains(name)) {
                let column = self.columns.entry(name.clone()).or_insert_with(Column::new);
                column.rows.resize(self.rows, 0);
                column.push(key(value));
            }
        }
        self.rows += usize::from(sampled);
    }

    /// Returns a name of the order that no entity has, or nothing if all exist.
    pub(crate) fn unknown<'a>(&self, attributes: &'a Attributes) -> Option<&'a str> {
        let Attributes::Order(order) = attributes else {
            return None;
        };
        order.iter().map(String::as_str).find(|&name| !self.names.contains(name))
    }

    /// Iterates over the names of all attributes that some entity has.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }
}

impl Column {
    fn new() -> Self {
        Self { codes: HashMap::from([(UNKNOWN.to_owned(), 0)]), rows: Vec::new() }
    }

    fn push(&mut self, key: String) {
        let next = u32::try_from(self.codes.len()).unwrap_or(0);
        self.rows.push(*self.codes.entry(key).or_insert(next));
    }

    fn parts(&self, rows: &[usize], min_group: usize) -> Parts<'_> {
        let mut by_code: HashMap<u32, Vec<usize>> = HashMap::new();
        for &row in rows {
            by_code.entry(self.rows.get(row).copied().unwrap_or(0)).or_default().push(row);
        }
        let mut parts = Parts { values: BTreeMap::new(), rest: Vec::new() };
        for (value, code) in &self.codes {
            match by_code.remove(code) {
                Some(rows) if rows.len() >= min_group => drop(parts.values.insert(value, rows)),
                Some(rows) => parts.rest.extend(rows),
                None => {}
            }
        }
        parts
    }
}

/// A set of entities divided by the values of an attribute.
struct Parts<'a> {
    values: BTreeMap<&'a str, Vec<usize>>,
    rest: Vec<usize>,
}

impl Parts<'_> {
    fn largest(&self) -> usize {
        self.values.values().map(Vec::len).fold(self.rest.len(), usize::max)
    }
}

/// A tree and the label of each of its groups, such as `genres = Drama, decade = 1990`.
pub(crate) type Grown = (AttributeTree, Vec<String>);

/// Grows the tree of entities of which `columns` holds a share; none if no attribute splits them.
pub(crate) fn grow(columns: &AttributeColumns, config: &GroupingConfig, share: f64) -> Option<Grown> {
    let config = &of_sample(config, share);
    let names = match &config.attributes {
        Attributes::Order(order) => order.iter().map(String::as_str).collect(),
        Attributes::Best(_) => columns.columns.keys().map(String::as_str).collect::<Vec<_>>(),
    };
    let mut grower = Grower { columns, config, labels: Vec::new() };
    let all: Vec<usize> = (0..columns.rows).collect();
    let tree = grower.split(&all, "", &names)?;
    Some((tree, grower.labels))
}

/// Entities of a sample that a group has at least, unless groups may be smaller anyway: with fewer, an attribute that
/// is unique, such as a name, would split a large catalogue into groups of one entity.
const SAMPLED_MIN: usize = 10;

/// Returns the configuration with its group sizes scaled to the sample.
fn of_sample(config: &GroupingConfig, share: f64) -> GroupingConfig {
    #[expect(clippy::cast_possible_truncation, reason = "a share of a usize is at most that usize")]
    let scaled = |size: usize| ((size as f64 * share).round() as usize).max(1);
    let min_group = scaled(config.min_group).max(SAMPLED_MIN.min(config.min_group));
    GroupingConfig { max_group: scaled(config.max_group).max(min_group), min_group, ..config.clone() }
}

struct Grower<'a> {
    columns: &'a AttributeColumns,
    config: &'a GroupingConfig,
    labels: Vec<String>,
}

impl<'a> Grower<'a> {
    /// Splits `rows`, labelled `label` (empty for all rows), if one of `names` splits them.
    fn split(&mut self, rows: &[usize], label: &str, names: &[&'a str]) -> Option<AttributeTree> {
        let (attribute, parts) = self.choose(rows, names)?;
        let names: Vec<&str> = names.iter().copied().filter(|&name| name != attribute).collect();
        let below = |of: &str| {
            if label.is_empty() { of.to_owned() } else { format!("{label}, {of}") }
        };
        let mut values = BTreeMap::new();
        for (value, rows) in parts.values {
            let of = match value {
                UNKNOWN => format!("{attribute} unknown"),
                value => format!("{attribute} = {value}"),
            };
            values.insert(value.to_owned(), self.node(&rows, &below(&of), &names));
        }
        let has_rest = !label.is_empty() && parts.rest.len() >= self.config.min_group;
        let rest = has_rest.then(|| {
            let label = below(&format!("other {attribute}"));
            Box::new(self.node(&parts.rest, &label, &names))
        });
        Some(AttributeTree::Split { attribute: attribute.to_owned(), values, rest })
    }

    fn node(&mut self, rows: &[usize], label: &str, names: &[&'a str]) -> AttributeTree {
        let large = rows.len() > self.config.max_group;
        let split = if large { self.split(rows, label, names) } else { None };
        split.unwrap_or_else(|| {
            self.labels.push(label.to_owned());
            AttributeTree::Group(self.labels.len() - 1)
        })
    }

    fn choose(&self, rows: &[usize], names: &[&'a str]) -> Option<(&'a str, Parts<'a>)> {
        let mut splits = names.iter().filter_map(|&name| {
            let parts = self.columns.columns.get(name)?.parts(rows, self.config.min_group);
            (parts.values.len() >= 2).then_some((name, parts))
        });
        match self.config.attributes {
            Attributes::Order(_) => splits.next(),
            Attributes::Best(_) => splits.min_by_key(|(_, parts)| parts.largest()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::Best;

    fn attributes(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    /// 60 films: 40 dramas of two decades and 20 comedies of one, each with its own title.
    fn films() -> Vec<Map<String, Value>> {
        let film = |i: usize| {
            let genres = if i.is_multiple_of(3) { json!(["Comedy", "Drama"]) } else { json!(["Drama"]) };
            let decade = if i.is_multiple_of(3) { 1990.0 } else { [1980.0, 1990.0][i % 2] };
            attributes(json!({"genres": genres, "decade": decade, "title": format!("film {i}")}))
        };
        (0..60).map(film).collect()
    }

    fn columns(entities: &[Map<String, Value>], order: &Attributes) -> AttributeColumns {
        let mut columns = AttributeColumns::new(order);
        entities.iter().for_each(|entity| columns.push(entity, true));
        columns
    }

    fn order(names: &[&str]) -> Attributes {
        Attributes::Order(names.iter().map(|&name| name.to_owned()).collect())
    }

    fn labels(attributes: Attributes, max_group: usize, min_group: usize) -> Option<Vec<String>> {
        let columns = columns(&films(), &attributes);
        let config = GroupingConfig { attributes, max_group, min_group, ..Default::default() };
        grow(&columns, &config, 1.0).map(|(_, labels)| labels)
    }

    #[test]
    fn groups_above_the_size_are_subdivided() {
        let by_genre = ["genres = Comedy", "genres = Drama"];
        let by_both = ["genres = Comedy", "genres = Drama, decade = 1980", "genres = Drama, decade = 1990"];
        let genres_decade = || order(&["genres", "decade"]);
        assert_eq!(labels(genres_decade(), 40, 5).unwrap(), by_genre);
        assert_eq!(labels(genres_decade(), 39, 5).unwrap(), by_both);
        assert_eq!(labels(order(&["genres"]), 39, 5).unwrap(), by_genre);
    }

    #[test]
    fn best_takes_the_attribute_with_the_smallest_largest_part() {
        // decade: parts of 20 and 40; genres: 20 and 40, so the name decides; title: nothing but rest.
        let best = || Attributes::Best(Best::Best);
        assert_eq!(labels(best(), 60, 5).unwrap(), ["decade = 1980", "decade = 1990"]);
        // Within 1990 (20 comedies and 20 dramas) genres splits.
        let expected = ["decade = 1980", "decade = 1990, genres = Comedy", "decade = 1990, genres = Drama"];
        assert_eq!(labels(best(), 30, 5).unwrap(), expected);
        assert_eq!(labels(best(), 30, 31), None);
    }

    #[test]
    fn an_attribute_that_does_not_split_is_passed_over() {
        assert_eq!(labels(order(&["title", "genres"]), 60, 5).unwrap().len(), 2);
        assert_eq!(labels(order(&["title"]), 60, 5), None);
    }

    #[test]
    fn a_unique_attribute_is_passed_over_in_a_small_sample_of_many() {
        // Of 1,200 films 60 are held, so groups of 20 would be groups of one among them.
        let attributes = Attributes::Best(Best::Best);
        let columns = columns(&films(), &attributes);
        let config = GroupingConfig { attributes, max_group: 1_000, min_group: 20, ..Default::default() };
        let (_, labels) = grow(&columns, &config, 0.05).unwrap();
        assert_eq!(labels, ["decade = 1980", "decade = 1990"]);
    }

    #[test]
    fn rare_values_share_the_rest_below_the_root_and_have_no_group_at_it() {
        let mut entities = Vec::new();
        for (genre, city, count) in
            [("Drama", "A", 10), ("Drama", "B", 10), ("Drama", "C", 3), ("Drama", "D", 3), ("War", "A", 2)]
        {
            let entity = attributes(json!({"genre": genre, "city": city}));
            entities.extend(std::iter::repeat_n(entity, count));
        }
        entities.extend(vec![attributes(json!({"city": "A"})); 6]);
        let attributes_order = order(&["genre", "city"]);
        let columns = columns(&entities, &attributes_order);
        let config = GroupingConfig { attributes: attributes_order, max_group: 20, min_group: 5, ..Default::default() };
        let (tree, labels) = grow(&columns, &config, 1.0).unwrap();
        let expected =
            ["genre unknown", "genre = Drama, city = A", "genre = Drama, city = B", "genre = Drama, other city"];
        assert_eq!(labels, expected);
        let cases = [
            (json!({"genre": "Drama", "city": "B"}), Some(2)),
            (json!({"genre": "Drama", "city": "never seen"}), Some(3)),
            (json!({"genre": ["Drama", "War"]}), Some(3)),
            (json!({"genre": null, "city": "A"}), Some(0)),
            (json!({"genre": []}), Some(0)),
            (json!({"genre": "War", "city": "A"}), None),
        ];
        for (entity, group) in cases {
            assert_eq!(tree.group(&attributes(entity.clone())), group, "{entity}");
        }
    }

    #[test]
    fn numbers_group_by_value() {
        let cases = [(json!(1995), "1995"), (json!(1995.0), "1995"), (json!(0.5), "0.5"), (json!(-3), "-3")];
        for (value, expected) in cases {
            assert_eq!(key(&value), expected);
        }
        assert_eq!(key(&json!(true)), "true");
    }

    #[test]
    fn unknown_attributes_are_found() {
        let missing = order(&["genres", "genre"]);
        let columns = columns(&films(), &missing);
        assert_eq!(columns.unknown(&missing), Some("genre"));
        assert_eq!(columns.names().collect::<Vec<_>>(), ["decade", "genres", "title"]);
    }

    #[test]
    fn the_order_of_entities_does_not_matter() {
        let config = GroupingConfig { max_group: 30, min_group: 5, ..Default::default() };
        let mut entities = films();
        let grown = grow(&columns(&entities, &config.attributes), &config, 1.0);
        entities.reverse();
        assert_eq!(grow(&columns(&entities, &config.attributes), &config, 1.0), grown);
    }
}
