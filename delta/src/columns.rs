//! The columns of parts as those of a table.

use arrow::datatypes::{DataType as ArrowType, Schema as ArrowSchema};
use delta_kernel::engine::arrow_conversion::TryFromArrow;
use delta_kernel::schema::{DataType, StructField, StructType};

/// The partition columns, outermost folder first: all that is in a part's path, since Polars refuses a path with other
/// columns than the table's. That of the kind is the same in all files of a table.
pub(crate) const PARTITION: [&str; 3] = ["kind", "dt", "run"];

/// Why a table cannot hold a column.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Misfit {
    #[error(
        "column {column} is a list of fixed size, which readers of Delta tables refuse; \
         embeddings need [encoder] layout = \"list\""
    )]
    FixedSize { column: String },
    #[error("column {column}: {reason}")]
    Unknown { column: String, reason: String },
    #[error("column {column} is of type {found}, in the table it is {expected}")]
    Changed { column: String, found: DataType, expected: DataType },
}

/// The columns of parts. All are nullable: a later night may have a column that earlier ones lack.
///
/// # Errors
/// A column that readers of Delta tables do not take.
pub(crate) fn columns(part: &ArrowSchema) -> Result<Vec<StructField>, Misfit> {
    let column = |field: &arrow::datatypes::FieldRef| {
        let name = field.name();
        if let ArrowType::FixedSizeList(..) = field.data_type() {
            return Err(Misfit::FixedSize { column: name.clone() });
        }
        let data_type = DataType::try_from_arrow(field.data_type())
            .map_err(|e| Misfit::Unknown { column: name.clone(), reason: e.to_string() })?;
        Ok(StructField::nullable(name, data_type))
    };
    part.fields().iter().map(column).collect()
}

/// The schema of a new table whose parts have these columns.
pub(crate) fn table_schema(columns: &[StructField]) -> Result<StructType, delta_kernel::KernelError> {
    let types = [DataType::STRING, DataType::DATE, DataType::STRING];
    let partition = PARTITION.into_iter().zip(types).map(|(name, data_type)| StructField::nullable(name, data_type));
    StructType::try_new(columns.iter().cloned().chain(partition))
}

/// A table's columns while nights are added to it.
#[derive(Debug)]
pub(crate) struct Columns {
    known: Vec<StructField>,
    new: usize,
}

impl Columns {
    pub(crate) fn of(table: &StructType) -> Self {
        Self { known: table.fields().cloned().collect(), new: 0 }
    }

    /// Makes room for parts with these columns.
    ///
    /// # Errors
    /// A column that the table has with another type; nothing is changed then.
    pub(crate) fn admit(&mut self, part: &[StructField]) -> Result<(), Misfit> {
        let known = |field: &StructField| self.known.iter().find(|known| known.name() == field.name());
        let mut new = Vec::new();
        for field in part {
            match known(field) {
                None => new.push(field.clone()),
                Some(known) if known.data_type() == field.data_type() => {}
                Some(known) => {
                    let (found, expected) = (field.data_type().clone(), known.data_type().clone());
                    return Err(Misfit::Changed { column: field.name().clone(), found, expected });
                }
            }
        }
        self.new += new.len();
        self.known.extend(new);
        Ok(())
    }

    /// The columns that the table lacks.
    pub(crate) fn into_new(self) -> Vec<StructField> {
        let Self { mut known, new } = self;
        known.split_off(known.len() - new)
    }
}
