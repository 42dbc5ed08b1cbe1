//! What a user did with items, or an item with users: rows of named fields, which are read where they are.
//!
//! Histories are most of an entity table. A prompt needs some fields of some interactions, so values are made only of
//! what is asked for: of a Parquet column they stay in its batch until then.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::value::{seconds, whole};

/// The field that orders a history.
pub const TIMESTAMP: &str = "timestamp";

/// Rows of named fields. A field without a value, or with null, is absent.
pub trait Interactions: fmt::Debug + Send + Sync {
    /// A field of a row.
    fn field(&self, row: usize, name: &str) -> Option<Value>;

    /// Gives all fields of a row, each once.
    fn each(&self, row: usize, found: &mut dyn FnMut(&str, Value));
}

impl Interactions for Vec<Map<String, Value>> {
    fn field(&self, row: usize, name: &str) -> Option<Value> {
        self.get(row)?.get(name).filter(|value| !value.is_null()).cloned()
    }

    fn each(&self, row: usize, found: &mut dyn FnMut(&str, Value)) {
        let fields = self.get(row).into_iter().flatten();
        fields.filter(|(_, value)| !value.is_null()).for_each(|(name, value)| found(name, value.clone()));
    }
}

/// One interaction: named fields (title, genres, …), of which Laser itself reads two.
#[derive(Debug, Clone)]
pub struct Interaction {
    rows: Arc<dyn Interactions>,
    row: usize,
}

impl Interaction {
    /// A field, for prompt templates.
    pub fn field(&self, name: &str) -> Option<Value> {
        self.rows.field(self.row, name)
    }

    /// Gives everything that the input says about it, each field once.
    pub fn each(&self, found: &mut dyn FnMut(&str, Value)) {
        self.rows.each(self.row, found);
    }

    /// Everything that the input says about it.
    pub fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        self.each(&mut |name, value| {
            fields.insert(name.to_owned(), value);
        });
        fields
    }

    /// Seconds or any other unit that orders interactions, if the input has a timestamp.
    pub fn timestamp(&self) -> Option<f64> {
        timestamp(&self.field(TIMESTAMP)?)
    }

    /// The id of the item in a field, as text whatever type the column has.
    pub fn item(&self, field: &str) -> Option<String> {
        match self.field(field)? {
            Value::String(id) => Some(id),
            Value::Number(id) => Some(whole(&id).map_or_else(|| id.to_string(), |id| id.to_string())),
            _ => None,
        }
    }
}

/// Seconds or any other unit that orders interactions: a number, or a text as [`seconds`] reads it.
pub fn timestamp(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => seconds(text),
        _ => None,
    }
}

impl Serialize for Interaction {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (mut map, mut written) = (serializer.serialize_map(None)?, Ok(()));
        self.rows.each(self.row, &mut |name, value| {
            if written.is_ok() {
                written = map.serialize_entry(name, &value);
            }
        });
        written?;
        map.end()
    }
}

/// The interactions of an entity, oldest first. Cloning is cheap, and keeps all rows of the batch in memory.
#[derive(Clone)]
pub struct History {
    rows: Arc<dyn Interactions>,
    /// The interactions' rows.
    order: Arc<[u32]>,
}

impl History {
    /// The interactions of these rows.
    pub fn new(rows: Arc<dyn Interactions>, order: impl Into<Arc<[u32]>>) -> Self {
        Self { rows, order: order.into() }
    }

    /// The same interactions, oldest first if all have a timestamp. What happened at the same time stays in its order.
    ///
    /// # Errors
    /// The first timestamp that is none.
    pub fn by_time(self) -> Result<Self, Value> {
        let mut timed = Vec::with_capacity(self.len());
        for &row in self.order.iter() {
            if let Some(value) = self.rows.field(row as usize, TIMESTAMP) {
                timed.push((timestamp(&value).ok_or(value)?, row));
            }
        }
        if timed.len() < self.len() || timed.is_sorted_by(|(a, _), (b, _)| a <= b) {
            return Ok(self);
        }
        timed.sort_by(|(a, _), (b, _)| a.partial_cmp(b).unwrap_or(Ordering::Equal));
        let order: Vec<u32> = timed.into_iter().map(|(_, row)| row).collect();
        Ok(Self::new(self.rows, order))
    }

    /// Those that `keeps` takes.
    pub fn filter(&self, keeps: impl Fn(&Interaction) -> bool) -> Self {
        let kept = self.order.iter().zip(self.iter()).filter(|(_, interaction)| keeps(interaction));
        Self::new(self.rows.clone(), kept.map(|(row, _)| *row).collect::<Vec<_>>())
    }

    /// The first `count`, and the others.
    pub fn split_at(&self, count: usize) -> (Self, Self) {
        let (first, others) = self.order.split_at(count.min(self.len()));
        (Self::new(self.rows.clone(), first), Self::new(self.rows.clone(), others))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// All of them.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Interaction> + ExactSizeIterator + Clone + '_ {
        self.order.iter().map(|row| Interaction { rows: self.rows.clone(), row: *row as usize })
    }

    /// The ids in `field`, of the interactions that have one there; see [`Interaction::item`].
    pub fn items(&self, field: &str) -> impl Iterator<Item = String> {
        self.iter().filter_map(move |interaction| interaction.item(field))
    }
}

impl Default for History {
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl From<Vec<Map<String, Value>>> for History {
    fn from(rows: Vec<Map<String, Value>>) -> Self {
        let order: Vec<u32> = (0..).take(rows.len()).collect();
        Self::new(Arc::new(rows), order)
    }
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|interaction| interaction.fields())).finish()
    }
}

impl PartialEq for History {
    fn eq(&self, other: &Self) -> bool {
        let fields = |history: &Self| history.iter().map(|interaction| interaction.fields()).collect::<Vec<_>>();
        self.len() == other.len() && fields(self) == fields(other)
    }
}

impl Serialize for History {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.len()))?;
        for interaction in self.iter() {
            list.serialize_element(&interaction)?;
        }
        list.end()
    }
}
