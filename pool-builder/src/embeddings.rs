//! Embeddings of users and items that are not in the entity table: `.npy` with a list of ids, or a
//! table of ids and embeddings.
//!
//! Every embedding is finite and all have one dimension. Held in memory: 4 bytes a value, and the ids.

use std::collections::HashMap;
use std::io::Cursor;

use laser_schema::{
    Columns, Entity, EntityError, EntityId, EntityReader, EntityTable, Kind, Location,
    LocationError,
};
use ndarray::Array2;
use ndarray_npy::{ReadNpyError, ReadNpyExt};

use crate::config::{EmbeddingSource, PoolsConfig};

/// Why embeddings could not be read.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddingError {
    /// The file itself.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The table, or one row of it.
    #[error(transparent)]
    Table(#[from] EntityError),
    /// Not a matrix.
    #[error(
        "{file}: expected an .npy file of float32 or float64 of shape [rows, dimension]: {reason}"
    )]
    Npy {
        /// The file.
        file: String,
        /// What the reader said.
        reason: String,
    },
    /// A value is NaN or infinite.
    #[error("{file}, row {row}: value {value} at position {position}; embeddings must be finite")]
    NotFinite {
        /// The file.
        file: String,
        /// Counted from 0, as numpy does, padding included.
        row: usize,
        /// Counted from 0.
        position: usize,
        /// The value.
        value: f32,
    },
    /// The list of ids does not belong to the matrix.
    #[error(
        "{npy} has {rows} rows, {left} of them after skip_rows = {skip_rows}, but {ids} has {found} ids; \
         there must be one id for each row"
    )]
    Ids {
        /// The matrix.
        npy: String,
        /// All its rows.
        rows: usize,
        /// The padding.
        skip_rows: usize,
        /// The rows without the padding.
        left: usize,
        /// The list.
        ids: String,
        /// How many ids it has.
        found: usize,
    },
    /// One id has two embeddings.
    #[error("{file}, line {line}: id {id} appears twice; ids must be unique")]
    DuplicateId {
        /// The list.
        file: String,
        /// Counted from 1.
        line: usize,
        /// The id.
        id: String,
    },
    /// An embedding is longer or shorter than those before it.
    #[error(
        "{file}, row {row}: embedding of {id} has {found} values, those before have {expected}"
    )]
    Dimension {
        /// The table.
        file: String,
        /// Counted from 1.
        row: u64,
        /// The entity.
        id: EntityId,
        /// The dimension of the rows before.
        expected: usize,
        /// Its own.
        found: usize,
    },
    /// A row without embedding in a table of embeddings.
    #[error("{file}, row {row}: {id} has no embedding in column {column:?}")]
    Missing {
        /// The table.
        file: String,
        /// Counted from 1.
        row: u64,
        /// The entity.
        id: EntityId,
        /// The column.
        column: String,
    },
}

/// Embeddings by entity id. Ids match by their text, so that `7` of a list is the int64 7 of a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Embeddings {
    file: String,
    dimension: usize,
    rows: HashMap<String, usize>,
    values: Vec<f32>,
}

impl Embeddings {
    /// Reads all embeddings of `kind` from `source`.
    ///
    /// # Errors
    /// See [`EmbeddingError`].
    pub async fn read(source: &EmbeddingSource, kind: Kind) -> Result<Self, EmbeddingError> {
        match source {
            EmbeddingSource::Npy {
                npy,
                ids,
                skip_rows,
            } => read_npy(npy, ids, *skip_rows).await,
            EmbeddingSource::Table {
                table,
                id,
                embedding,
            } => read_table(table, id, embedding, kind).await,
        }
    }

    /// The embedding of an entity, if there is one.
    pub fn get(&self, id: &EntityId) -> Option<&[f32]> {
        let row = match id {
            EntityId::Text(id) => self.rows.get(id),
            EntityId::Int(id) => self.rows.get(&id.to_string()),
        }?;
        self.values
            .get(row * self.dimension..(row + 1) * self.dimension)
    }

    /// How many entities have an embedding.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether no entity has one.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// How many values an embedding has.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// The file they were read from.
    pub fn file(&self) -> &str {
        &self.file
    }
}

/// The embeddings of both kinds, as configured: whatever routes entities needs them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EntityEmbeddings {
    user: Option<Embeddings>,
    item: Option<Embeddings>,
}

impl EntityEmbeddings {
    /// Reads those that the configuration names and whose kind's grouping uses them.
    ///
    /// # Errors
    /// See [`EmbeddingError`].
    pub async fn read(config: &PoolsConfig) -> Result<Self, EmbeddingError> {
        let mut embeddings = Self::default();
        for kind in Kind::ALL {
            let grouping = config.of(kind);
            let Some(source) = &grouping.embeddings else {
                continue;
            };
            if !grouping.grouping.has_clusters() {
                continue;
            }
            let read = Some(Embeddings::read(source, kind).await?);
            match kind {
                Kind::User => embeddings.user = read,
                Kind::Item => embeddings.item = read,
            }
        }
        Ok(embeddings)
    }

    /// Those of one kind, if they are not in the entity table.
    pub fn of(&self, kind: Kind) -> Option<&Embeddings> {
        match kind {
            Kind::User => self.user.as_ref(),
            Kind::Item => self.item.as_ref(),
        }
    }

    /// The embedding of an entity: from the configured source, else its own.
    pub fn get<'a>(&'a self, entity: &'a Entity) -> Option<&'a [f32]> {
        match self.of(entity.kind) {
            Some(embeddings) => embeddings.get(&entity.id),
            None => entity.embedding.as_deref(),
        }
    }
}

async fn read_npy(npy: &str, ids: &str, skip_rows: usize) -> Result<Embeddings, EmbeddingError> {
    let matrix = read_matrix(npy).await?;
    let (rows, dimension) = matrix.dim();
    let list = Location::parse(ids)?.read().await?;
    let list = String::from_utf8_lossy(&list);
    let names: Vec<&str> = list.lines().map(str::trim).collect();
    let left = rows.saturating_sub(skip_rows);
    if left != names.len() {
        return Err(EmbeddingError::Ids {
            npy: npy.to_owned(),
            rows,
            skip_rows,
            left,
            ids: ids.to_owned(),
            found: names.len(),
        });
    }
    let mut by_id = HashMap::with_capacity(names.len());
    for (row, name) in names.into_iter().enumerate() {
        if by_id.insert(name.to_owned(), row).is_some() {
            return Err(EmbeddingError::DuplicateId {
                file: ids.to_owned(),
                line: row + 1,
                id: name.to_owned(),
            });
        }
    }
    let mut values = Vec::with_capacity(left * dimension);
    for (row, embedding) in matrix.rows().into_iter().enumerate().skip(skip_rows) {
        if let Some(position) = embedding.iter().position(|value| !value.is_finite()) {
            let value = embedding[position];
            return Err(EmbeddingError::NotFinite {
                file: npy.to_owned(),
                row,
                position,
                value,
            });
        }
        values.extend(embedding);
    }
    Ok(Embeddings {
        file: npy.to_owned(),
        dimension,
        rows: by_id,
        values,
    })
}

async fn read_matrix(file: &str) -> Result<Array2<f32>, EmbeddingError> {
    let bytes = Location::parse(file)?.read().await?;
    let matrix = match Array2::<f32>::read_npy(Cursor::new(&bytes)) {
        Err(ReadNpyError::WrongDescriptor(_)) => {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "embeddings are single precision"
            )]
            let narrowed = |value: f64| value as f32;
            Array2::<f64>::read_npy(Cursor::new(&bytes)).map(|matrix| matrix.mapv(narrowed))
        }
        matrix => matrix,
    };
    matrix.map_err(|e| EmbeddingError::Npy {
        file: file.to_owned(),
        reason: e.to_string(),
    })
}

async fn read_table(
    table: &str,
    id: &str,
    embedding: &str,
    kind: Kind,
) -> Result<Embeddings, EmbeddingError> {
    let columns = Columns {
        id: id.into(),
        embedding: embedding.into(),
        ..Columns::default()
    };
    let contract = EntityTable {
        path: table.to_owned(),
        kind: Some(kind),
        columns,
    };
    let mut reader = EntityReader::open(&contract).await?;
    let file = table.to_owned();
    let mut read = Embeddings {
        file,
        dimension: 0,
        rows: HashMap::new(),
        values: Vec::new(),
    };
    let mut row = 0;
    while let Some(entities) = reader.next_batch().await? {
        for entity in entities {
            row += 1;
            if entity.kind == kind {
                read.push(entity, row, embedding)?;
            }
        }
    }
    Ok(read)
}

impl Embeddings {
    /// Appends a row of a table; the reader has made sure that its values are finite and its id new.
    fn push(&mut self, entity: Entity, row: u64, column: &str) -> Result<(), EmbeddingError> {
        let (file, id) = (self.file.clone(), entity.id);
        let Some(values) = entity.embedding else {
            return Err(EmbeddingError::Missing {
                file,
                row,
                id,
                column: column.to_owned(),
            });
        };
        if self.rows.is_empty() {
            self.dimension = values.len();
        }
        if values.len() != self.dimension {
            let (expected, found) = (self.dimension, values.len());
            return Err(EmbeddingError::Dimension {
                file,
                row,
                id,
                expected,
                found,
            });
        }
        self.rows.insert(id.to_string(), self.rows.len());
        self.values.extend(values);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ndarray::{ShapeBuilder, array};
    use ndarray_npy::{WritableElement, WriteNpyExt};

    use super::*;

    fn write_npy<T: WritableElement>(path: &Path, matrix: &Array2<T>) {
        matrix
            .write_npy(std::fs::File::create(path).unwrap())
            .unwrap();
    }

    async fn read(dir: &Path, ids: &str, skip_rows: usize) -> Result<Embeddings, String> {
        std::fs::write(dir.join("ids.txt"), ids).unwrap();
        let source = EmbeddingSource::Npy {
            npy: dir.join("e.npy").to_str().unwrap().into(),
            ids: dir.join("ids.txt").to_str().unwrap().into(),
            skip_rows,
        };
        Embeddings::read(&source, Kind::User)
            .await
            .map_err(|e| e.to_string())
    }

    #[tokio::test]
    async fn rows_follow_their_ids_after_the_padding() {
        let dir = tempfile::tempdir().unwrap();
        write_npy(
            &dir.path().join("e.npy"),
            &array![[0.0f32, 0.0], [1.0, 2.0], [3.0, 4.0]],
        );
        let embeddings = read(dir.path(), "7\nx\n", 1).await.unwrap();
        assert_eq!(
            embeddings.get(&EntityId::Int(7)),
            Some([1.0, 2.0].as_slice())
        );
        assert_eq!(
            embeddings.get(&EntityId::Text("x".into())),
            Some([3.0, 4.0].as_slice())
        );
        assert_eq!(embeddings.get(&EntityId::Int(8)), None);
        assert_eq!((embeddings.len(), embeddings.dimension()), (2, 2));
    }

    #[tokio::test]
    async fn double_precision_and_column_order_read_alike() {
        let dir = tempfile::tempdir().unwrap();
        let mut matrix = Array2::<f64>::zeros((2, 2).f());
        matrix.assign(&array![[1.0, 2.0], [3.0, 4.0]]);
        write_npy(&dir.path().join("e.npy"), &matrix);
        let embeddings = read(dir.path(), "1\n2", 0).await.unwrap();
        assert_eq!(
            embeddings.get(&EntityId::Int(2)),
            Some([3.0, 4.0].as_slice())
        );
    }

    #[tokio::test]
    async fn bad_matrices_and_lists_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let npy = dir.path().join("e.npy");
        write_npy(&npy, &array![[1.0f32, 2.0], [3.0, f32::NAN]]);
        let error = read(dir.path(), "1\n2", 0).await.unwrap_err();
        assert!(
            error.contains("e.npy, row 1: value NaN at position 1"),
            "{error}"
        );
        let error = read(dir.path(), "1\n2\n3", 0).await.unwrap_err();
        assert!(error.contains("2 rows, 2 of them after skip_rows = 0") && error.contains("3 ids"));
        let error = read(dir.path(), "1\n2", 5).await.unwrap_err();
        assert!(error.contains("0 of them after skip_rows = 5"), "{error}");
        let error = read(dir.path(), "1\n1", 0).await.unwrap_err();
        assert!(
            error.contains("ids.txt, line 2: id 1 appears twice"),
            "{error}"
        );
        write_npy(&npy, &array![[1i64, 2], [3, 4]]);
        let error = read(dir.path(), "1\n2", 0).await.unwrap_err();
        assert!(error.contains("float32 or float64"), "{error}");
        std::fs::remove_file(&npy).unwrap();
        let error = read(dir.path(), "1\n2", 0).await.unwrap_err();
        assert!(error.ends_with("e.npy: no such file or object"), "{error}");
    }

    async fn read_lines(dir: &Path, lines: &str) -> Result<Embeddings, String> {
        let table = dir.join("e.jsonl");
        std::fs::write(&table, lines).unwrap();
        let source = EmbeddingSource::Table {
            table: table.to_str().unwrap().into(),
            id: "movie".into(),
            embedding: "vector".into(),
        };
        Embeddings::read(&source, Kind::Item)
            .await
            .map_err(|e| e.to_string())
    }

    #[tokio::test]
    async fn bad_table_rows_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let good = r#"{"movie": 1, "vector": [1.0, 2.0]}"#;
        let embeddings = read_lines(dir.path(), good).await.unwrap();
        assert_eq!(
            embeddings.get(&EntityId::Int(1)),
            Some([1.0, 2.0].as_slice())
        );
        let cases = [
            (
                r#"{"movie": 2, "vector": [1.0]}"#,
                "row 2: embedding of 2 has 1 values",
            ),
            (
                r#"{"movie": 2, "vector": [1.0, null]}"#,
                "row 2: column \"vector\" holds NaN",
            ),
            (
                r#"{"movie": 2}"#,
                "row 2: 2 has no embedding in column \"vector\"",
            ),
        ];
        for (bad, message) in cases {
            let error = read_lines(dir.path(), &format!("{good}\n{bad}"))
                .await
                .unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
