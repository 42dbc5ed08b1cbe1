//! What an entity is worth to its owner, by `[run] priority`: an expression over its columns.
//!
//! The expression is one of Jinja's, like what stands between `{{` and `}}` in a template. It sees each attribute by
//! its name, and `interactions`, `kind` and `id`. It sees no history, so that values can be read without one.

use laser_schema::job::Priority;
use laser_schema::{Entity, EntityTable, Kind};
use laser_store::entities::EntityReader;
use laser_store::parallel;
use laser_store::rows::RowError;
use minijinja::{Environment, Expression, UndefinedBehavior, Value, context};
use rayon::prelude::*;

use crate::prompt::fields::{keys, object};

/// Why entities have no value.
#[derive(Debug, thiserror::Error)]
pub enum PriorityError {
    /// The expression is not one, or fails on an entity.
    #[error("[run] priority = {expression:?}{entity}: {reason}")]
    Expression {
        /// The expression as configured.
        expression: String,
        /// Kind and id, if there is one to blame.
        entity: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// An entity table.
    #[error(transparent)]
    Entity(#[from] RowError),
}

/// Gives entities their value.
#[derive(Debug)]
pub struct Valuation {
    environment: Environment<'static>,
    priority: Priority,
}

impl Valuation {
    /// Checks the expression.
    ///
    /// # Errors
    /// If it is none.
    pub fn new(priority: Priority) -> Result<Self, PriorityError> {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        let valuation = Self { environment, priority };
        valuation.compile()?;
        Ok(valuation)
    }

    /// What it was made from.
    pub fn priority(&self) -> &Priority {
        &self.priority
    }

    fn compile(&self) -> Result<Expression<'_, '_>, PriorityError> {
        let compiled = self.environment.compile_expression(&self.priority.expression);
        compiled.map_err(|error| self.error(String::new(), told(&error)))
    }

    /// Values the first entities of each table, to find a wrong expression before anything is written.
    ///
    /// # Errors
    /// [`PriorityError`].
    pub async fn check(&self, tables: &[EntityTable]) -> Result<(), PriorityError> {
        for table in tables {
            let mut reader = EntityReader::open_counting(table).await?;
            let entities = reader.next_batch().await?.unwrap_or_default();
            self.values(&entities.iter().collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// The values of entities: finite, and at least 0.
    ///
    /// # Errors
    /// [`PriorityError::Expression`] of the first entity without such a value.
    pub fn values(&self, entities: &[&Entity]) -> Result<Vec<f64>, PriorityError> {
        let compiled = self.compile()?;
        let evaluated = entities.par_iter().map(|entity| {
            let value = compiled.eval(columns(entity)).map_err(|error| told(&error));
            value.and_then(number).map_err(|reason| self.failed(entity, &reason))
        });
        parallel::try_collect(evaluated)
    }

    fn failed(&self, entity: &Entity, reason: &str) -> PriorityError {
        let mut available = keys(&object(&entity.attributes));
        available.push("interactions".to_owned());
        let reason = format!(
            "{reason}. There are {}. For what only some entities have give a default, as in `revenue | default(0)`",
            available.join(", ")
        );
        self.error(format!(", {} {}", entity.kind, entity.id), reason)
    }

    fn error(&self, entity: String, reason: String) -> PriorityError {
        PriorityError::Expression { expression: self.priority.expression.clone(), entity, reason }
    }
}

/// What the expression sees. A column called `kind`, `id` or `interactions` is mapped and no attribute.
fn columns(entity: &Entity) -> Value {
    let kind = match entity.kind {
        Kind::User => "user",
        Kind::Item => "item",
    };
    context! {
        kind,
        id => entity.id.to_string(),
        interactions => entity.interactions,
        ..object(&entity.attributes)
    }
}

/// A value as a number; text of a CSV file is one if it reads as one.
fn number(value: Value) -> Result<f64, String> {
    if value.is_undefined() {
        return Err("it has no such column".to_owned());
    }
    let number = match value.as_str() {
        Some(text) => text.parse().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    let valid = number.filter(|number| number.is_finite() && *number >= 0.0);
    valid.ok_or_else(|| format!("its value is {value}; expected a finite number that is at least 0"))
}

fn told(error: &minijinja::Error) -> String {
    error.detail().map_or_else(|| error.kind().to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use laser_schema::{EntityId, History};
    use serde_json::{Value as Json, json};

    use super::*;

    fn value(expression: &str, attributes: Json) -> Result<f64, String> {
        let Json::Object(attributes) = attributes else { panic!("an object") };
        let id = EntityId::Int(7);
        let entity =
            Entity { id, kind: Kind::User, attributes, history: History::default(), interactions: 3, embedding: None };
        let priority = Priority { expression: expression.to_owned(), bands: 4 };
        let valuation = Valuation::new(priority).map_err(|error| error.to_string())?;
        valuation.values(&[&entity]).map(|values| values[0]).map_err(|error| error.to_string())
    }

    #[test]
    fn columns_and_expressions_of_them_are_values() {
        for (expression, expected) in [
            ("revenue", 2.5),
            ("interactions", 3.0),
            ("revenue * 2 + interactions", 8.0),
            ("revenue if kind == 'user' else sales", 2.5),
            ("sales | default(0)", 0.0),
            ("text", 12.5),
            ("[revenue, 1] | max", 2.5),
        ] {
            assert_eq!(value(expression, json!({"revenue": 2.5, "text": "12.5"})), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn what_has_no_value_is_told_with_the_entity_and_its_columns() {
        for (expression, expected) in [
            ("sales", "user 7: it has no such column. There are empty"),
            ("1 - revenue", "its value is -1.5"),
            ("word", "its value is many; expected a finite number"),
            ("revenue / 0 * 0", "expected a finite number"),
            ("revenue +", "[run] priority = \"revenue +\": "),
        ] {
            let error = value(expression, json!({"revenue": 2.5, "word": "many", "empty": [1]})).unwrap_err();
            assert!(error.contains(expected), "{expression}: {error}");
        }
    }
}
