//! Embeddings of users and items that are not in the entity table: `.npy` with a list of ids, or a
//! table of ids and embeddings.
//!
//! Every embedding is finite and all have one dimension. They stream into the [`Join`] that brings them to their
//! entities: memory is a thousand rows.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Split};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use laser_schema::{Columns, EntityId, EntityTable, Kind};
use laser_store::data_set::published_parts;
use laser_store::join::Join;
use laser_store::spill::SpillError;
use laser_store::{EntityReader, Location, LocationError, RowError};
use serde::Deserialize;

use crate::config::{EmbeddingSource, PoolsConfig};

/// Rows of a matrix read at a time.
const CHUNK_ROWS: usize = 1024;

/// Why embeddings could not be read.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddingError {
    /// The file itself.
    #[error(transparent)]
    Location(#[from] LocationError),
    /// The table, or one row of it.
    #[error(transparent)]
    Table(#[from] RowError),
    /// The local disk.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// Not a matrix.
    #[error("{file}: expected an .npy file of float32 or float64 of shape [rows, dimension]: {reason}")]
    Npy {
        /// The file.
        file: String,
        /// What the reader said.
        reason: String,
    },
    /// The list of ids cannot be read.
    #[error("{file}: cannot be read: {reason}")]
    List {
        /// The list.
        file: String,
        /// What went wrong.
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
    /// An embedding is longer or shorter than those before it.
    #[error("{file}, row {row}: embedding of {id} has {found} values, those before have {expected}")]
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
    /// A folder that is none of a published data set.
    #[error(
        "{folder}: neither a table (.parquet, .csv, .jsonl) nor a published folder of embeddings (with a _SUCCESS), such as \
         OUTPUT/embeddings/kind=user/dt=DATE/run=RUN"
    )]
    NotPublished {
        /// The folder.
        folder: String,
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

/// Gives `join` the embeddings that the configuration names, of kinds whose grouping uses them.
///
/// # Errors
/// See [`EmbeddingError`]; an id that is there twice is found when the join is finished.
pub async fn join_embeddings(config: &PoolsConfig, join: &mut Join) -> Result<(), EmbeddingError> {
    for kind in Kind::ALL {
        let grouping = config.of(kind);
        let Some(source) = &grouping.embeddings else {
            continue;
        };
        if !grouping.grouping.has_clusters() {
            continue;
        }
        match source {
            EmbeddingSource::Npy { npy, ids, .. } => join.use_embeddings(kind, npy, ids),
            EmbeddingSource::Table { table, .. } => join.use_embeddings(kind, table, table),
        }
        let mut push = |row, id: &str, embedding: &[f32]| {
            join.push_embedding(kind, row, id, embedding)?;
            Ok(())
        };
        read_embeddings(source, kind, &mut push).await?;
    }
    Ok(())
}

/// Takes the number of a row from 1, its id and its embedding.
pub type EmbeddingSink<'a> = dyn FnMut(u64, &str, &[f32]) -> Result<(), EmbeddingError> + Send + 'a;

/// Gives `sink` every embedding of a source, in its order.
///
/// # Errors
/// See [`EmbeddingError`], or what the sink fails with; that an id is there twice is the sink's to find.
pub async fn read_embeddings(
    source: &EmbeddingSource,
    kind: Kind,
    sink: &mut EmbeddingSink<'_>,
) -> Result<(), EmbeddingError> {
    match source {
        EmbeddingSource::Npy { npy, ids, skip_rows } => read_npy(npy, ids, *skip_rows, sink).await,
        EmbeddingSource::Table { table, id, embedding } => read_table(table, id, embedding, kind, sink).await,
    }
}

async fn read_npy(npy: &str, ids: &str, skip_rows: usize, sink: &mut EmbeddingSink<'_>) -> Result<(), EmbeddingError> {
    let mut rows = NpyEmbeddings::open(npy, ids, skip_rows).await?;
    while let Some(row) = rows.next_row()? {
        sink(row.line, &row.id, row.embedding)?;
    }
    Ok(())
}

/// A row of an `.npy` matrix.
#[derive(Debug, Clone)]
pub struct NpyRow<'a> {
    /// The line of its id in the list, from 1.
    pub line: u64,
    /// Its id as it stands there.
    pub id: String,
    /// Its values.
    pub embedding: &'a [f32],
}

/// The rows of an `.npy` matrix with their ids, one a line of a text file.
#[derive(Debug)]
pub struct NpyEmbeddings {
    matrix: Matrix,
    ids: String,
    names: Split<BufReader<File>>,
    row: usize,
    line: u64,
}

impl NpyEmbeddings {
    /// Opens both files; the first `skip_rows` rows of the matrix are padding.
    ///
    /// # Errors
    /// See [`EmbeddingError`]; there must be as many ids as rows.
    pub async fn open(npy: &str, ids: &str, skip_rows: usize) -> Result<Self, EmbeddingError> {
        let matrix = Matrix::open(npy).await?;
        let (rows, left) = (matrix.rows, matrix.rows.saturating_sub(skip_rows));
        let mut names = BufReader::with_capacity(1 << 20, Location::parse(ids)?.open().await?);
        let mut found = 0;
        for name in names.by_ref().split(b'\n') {
            name.map_err(|e| unreadable(ids, &e))?;
            found += 1;
        }
        if left != found {
            return Err(EmbeddingError::Ids { npy: npy.to_owned(), rows, skip_rows, left, ids: ids.to_owned(), found });
        }
        names.rewind().map_err(|e| unreadable(ids, &e))?;
        Ok(Self { matrix, ids: ids.to_owned(), names: names.split(b'\n'), row: skip_rows, line: 0 })
    }

    /// The next row, or `None` at the end.
    ///
    /// # Errors
    /// [`EmbeddingError::NotFinite`], and what cannot be read.
    pub fn next_row(&mut self) -> Result<Option<NpyRow<'_>>, EmbeddingError> {
        let Some(name) = self.names.next() else {
            return Ok(None);
        };
        let name = name.map_err(|e| unreadable(&self.ids, &e))?;
        let row = self.row;
        let file = self.matrix.name.clone();
        let embedding = self.matrix.row(row)?;
        if let Some(position) = embedding.iter().position(|value| !value.is_finite()) {
            return Err(EmbeddingError::NotFinite { file, row, position, value: embedding[position] });
        }
        self.row += 1;
        self.line += 1;
        let name = String::from_utf8_lossy(&name).trim().to_owned();
        Ok(Some(NpyRow { line: self.line, id: name, embedding }))
    }
}

fn unreadable(ids: &str, error: &io::Error) -> EmbeddingError {
    EmbeddingError::List { file: ids.to_owned(), reason: error.to_string() }
}

/// The rows of an `.npy` file, read [`CHUNK_ROWS`] at a time whichever way the matrix is stored.
#[derive(Debug)]
struct Matrix {
    name: String,
    file: File,
    rows: usize,
    dimension: usize,
    /// Stored column by column.
    by_column: bool,
    /// Bytes of a value.
    width: usize,
    decode: Decode,
    /// Where the values begin.
    start: u64,
    /// The rows in `values`, row by row.
    chunk: Range<usize>,
    values: Vec<f32>,
}

/// The header's dictionary, once it is JSON.
#[derive(Deserialize)]
struct Header {
    descr: String,
    fortran_order: bool,
    shape: Vec<usize>,
}

impl Matrix {
    async fn open(name: &str) -> Result<Self, EmbeddingError> {
        let file = Location::parse(name)?.open().await?;
        let wrong = |reason: String| EmbeddingError::Npy { file: name.to_owned(), reason };
        let (header, start) = read_header(&file).map_err(|e| wrong(e.to_string()))?;
        let &[rows, dimension] = header.shape.as_slice() else {
            return Err(wrong(format!("its shape is {:?}", header.shape)));
        };
        let (width, decode) = value_type(&header.descr).ok_or_else(|| wrong(format!("it holds {}", header.descr)))?;
        Ok(Self {
            name: name.to_owned(),
            file,
            rows,
            dimension,
            by_column: header.fortran_order,
            width,
            decode,
            start,
            chunk: 0..0,
            values: Vec::new(),
        })
    }

    fn row(&mut self, row: usize) -> Result<&[f32], EmbeddingError> {
        if !self.chunk.contains(&row) {
            self.chunk = row..self.rows.min(row + CHUNK_ROWS);
            self.read_chunk().map_err(|e| EmbeddingError::Npy { file: self.name.clone(), reason: e.to_string() })?;
        }
        let start = (row - self.chunk.start) * self.dimension;
        Ok(&self.values[start..start + self.dimension])
    }

    fn read_chunk(&mut self) -> io::Result<()> {
        let (first, rows) = (self.chunk.start, self.chunk.len());
        self.values.resize(rows * self.dimension, 0.0);
        if !self.by_column {
            let bytes = self.read_values(first * self.dimension, rows * self.dimension)?;
            for (value, bytes) in self.values.iter_mut().zip(bytes.chunks(self.width)) {
                *value = (self.decode)(bytes);
            }
            return Ok(());
        }
        for column in 0..self.dimension {
            let bytes = self.read_values(column * self.rows + first, rows)?;
            let values = self.values[column..].iter_mut().step_by(self.dimension);
            for (value, bytes) in values.zip(bytes.chunks(self.width)) {
                *value = (self.decode)(bytes);
            }
        }
        Ok(())
    }

    fn read_values(&self, from: usize, count: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; count * self.width];
        let start = self.start + (from * self.width) as u64;
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes)
    }
}

/// Magic, version 1.0 (a length of 2 bytes) or 2.0 and 3.0 (of 4), a Python dictionary; then the values.
fn read_header(file: &File) -> io::Result<(Header, u64)> {
    let mut preamble = [0; 12];
    file.read_exact_at(&mut preamble, 0)?;
    let (start, length) = match preamble {
        [0x93, b'N', b'U', b'M', b'P', b'Y', 1, 0, a, b, ..] => (10, u16::from_le_bytes([a, b]).into()),
        [0x93, b'N', b'U', b'M', b'P', b'Y', 2 | 3, 0, a, b, c, d] => (12, u32::from_le_bytes([a, b, c, d])),
        _ => {
            return Err(io::Error::other("it does not begin as an .npy file of version 1 to 3"));
        }
    };
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, start)?;
    let json = String::from_utf8_lossy(&header)
        .replace('\'', "\"")
        .replace('(', "[")
        .replace(",)", "]")
        .replace(')', "]")
        .replace("True", "true")
        .replace("False", "false")
        .replace(", }", "}");
    let header = serde_json::from_str(&json)?;
    Ok((header, start + u64::from(length)))
}

/// Reads a value from its bytes.
type Decode = fn(&[u8]) -> f32;

/// Bytes of a value and how to read it.
fn value_type(descr: &str) -> Option<(usize, Decode)> {
    let decode: (usize, Decode) = match descr {
        "<f4" => (4, |b| f32::from_le_bytes(b.try_into().unwrap_or_default())),
        ">f4" => (4, |b| f32::from_be_bytes(b.try_into().unwrap_or_default())),
        "<f8" => (8, |b| narrow(f64::from_le_bytes(b.try_into().unwrap_or_default()))),
        ">f8" => (8, |b| narrow(f64::from_be_bytes(b.try_into().unwrap_or_default()))),
        _ => return None,
    };
    Some(decode)
}

#[expect(clippy::cast_possible_truncation, reason = "embeddings are single precision")]
fn narrow(value: f64) -> f32 {
    value as f32
}

async fn read_table(
    table: &str,
    id: &str,
    embedding: &str,
    kind: Kind,
    sink: &mut EmbeddingSink<'_>,
) -> Result<(), EmbeddingError> {
    let columns = Columns { id: id.into(), embedding: embedding.into(), ..Columns::default() };
    let (mut rows, mut dimension) = (0, None);
    for path in tables(table).await? {
        let contract = EntityTable { path, kind: Some(kind), columns: columns.clone() };
        rows += read_rows(&contract, rows, &mut dimension, sink).await?;
    }
    Ok(())
}

/// The tables that a path stands for: itself, or the parts of a published folder.
async fn tables(path: &str) -> Result<Vec<String>, EmbeddingError> {
    let place = Location::parse(path)?;
    if !place.extension().is_empty() {
        return Ok(vec![path.to_owned()]);
    }
    let parts = published_parts(&place).await?;
    let parts = parts.ok_or_else(|| EmbeddingError::NotPublished { folder: path.to_owned() })?;
    Ok(parts.iter().map(|part| part.url().to_owned()).collect())
}

/// Gives `sink` the embeddings of one table; `before` rows were in other tables. Returns its rows.
async fn read_rows(
    table: &EntityTable,
    before: u64,
    dimension: &mut Option<usize>,
    sink: &mut EmbeddingSink<'_>,
) -> Result<u64, EmbeddingError> {
    let mut reader = EntityReader::open_embeddings(table).await?;
    let mut row = 0;
    while let Some(entities) = reader.next_batch().await? {
        for entity in entities {
            row += 1;
            if Some(entity.kind) != table.kind {
                continue;
            }
            let (id, file) = (entity.id, || table.path.clone());
            let Some(values) = entity.embedding else {
                return Err(EmbeddingError::Missing { file: file(), row, id, column: table.columns.embedding.clone() });
            };
            let (expected, found) = (*dimension.get_or_insert(values.len()), values.len());
            if expected != found {
                return Err(EmbeddingError::Dimension { file: file(), row, id, expected, found });
            }
            sink(before + row, &id.to_string(), &values)?;
        }
    }
    Ok(row)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ndarray::{Array2, ShapeBuilder, array};
    use ndarray_npy::{WritableElement, WriteNpyExt};
    use serde_json::json;

    use super::*;

    fn write_npy<T: WritableElement>(path: &Path, matrix: &Array2<T>) {
        matrix.write_npy(std::fs::File::create(path).unwrap()).unwrap();
    }

    type Embedded = Vec<Option<Vec<f32>>>;

    /// The embeddings of some users as the source has them.
    async fn read_source(dir: &Path, source: EmbeddingSource, users: &[serde_json::Value]) -> Result<Embedded, String> {
        let rows: String = users.iter().map(|id| format!("{{\"id\": {id}}}\n")).collect();
        let table = dir.join("users.jsonl");
        std::fs::write(&table, rows).unwrap();
        let table = EntityTable {
            path: table.to_str().unwrap().to_owned(),
            kind: Some(Kind::User),
            columns: Columns::default(),
        };
        let mut config = PoolsConfig::default();
        config.user.embeddings = Some(source);
        let mut join = Join::new(&[table], 0).await.unwrap();
        let read = join_embeddings(&config, &mut join).await;
        read.map_err(|e| e.to_string())?;
        let joined = join.finish(&mut |_, _, _| {}).map_err(|e| e.to_string())?;
        let users = joined.reader().next_batch().await.unwrap().unwrap();
        Ok(users.into_iter().map(|u| u.entity.embedding).collect())
    }

    async fn read(dir: &Path, ids: &str, skip_rows: usize, users: &[serde_json::Value]) -> Result<Embedded, String> {
        std::fs::write(dir.join("ids.txt"), ids).unwrap();
        let source = EmbeddingSource::Npy {
            npy: dir.join("e.npy").to_str().unwrap().into(),
            ids: dir.join("ids.txt").to_str().unwrap().into(),
            skip_rows,
        };
        read_source(dir, source, users).await
    }

    #[tokio::test]
    async fn rows_follow_their_ids_after_the_padding() {
        let dir = tempfile::tempdir().unwrap();
        write_npy(&dir.path().join("e.npy"), &array![[0.0f32, 0.0], [1.0, 2.0], [3.0, 4.0]]);
        let found = read(dir.path(), "7\nx\n", 1, &[json!(7), json!(8)]).await;
        assert_eq!(found.unwrap(), [Some(vec![1.0, 2.0]), None]);
        let found = read(dir.path(), "7\r\nx", 1, &[json!("x"), json!("7")]).await;
        assert_eq!(found.unwrap(), [Some(vec![3.0, 4.0]), Some(vec![1.0, 2.0])]);
    }

    #[tokio::test]
    async fn double_precision_and_column_order_read_alike() {
        let dir = tempfile::tempdir().unwrap();
        let rows = 2 * CHUNK_ROWS + 3;
        let value = |row: usize, column: usize| (3 * row + column) as f64;
        let ids: String = (0..rows).map(|id| format!("{id}\n")).collect();
        let last = json!(rows - 1);
        let expected = [0, 1].map(|column| narrow(value(rows - 1, column))).to_vec();
        for by_row in [true, false] {
            let mut matrix = Array2::<f64>::zeros((rows, 2).set_f(!by_row));
            matrix.indexed_iter_mut().for_each(|((row, column), v)| *v = value(row, column));
            write_npy(&dir.path().join("e.npy"), &matrix);
            let found = read(dir.path(), &ids, 0, &[last.clone(), json!(1)]).await;
            assert_eq!(found.unwrap(), [Some(expected.clone()), Some(vec![3.0, 4.0])]);
        }
    }

    #[tokio::test]
    async fn bad_matrices_and_lists_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let npy = dir.path().join("e.npy");
        write_npy(&npy, &array![[1.0f32, 2.0], [3.0, f32::NAN]]);
        let error = read(dir.path(), "1\n2", 0, &[json!(1)]).await.unwrap_err();
        assert!(error.contains("e.npy, row 1: value NaN at position 1"), "{error}");
        let error = read(dir.path(), "1\n2\n3", 0, &[json!(1)]).await.unwrap_err();
        assert!(error.contains("2 rows, 2 of them after skip_rows = 0") && error.contains("3 ids"));
        let error = read(dir.path(), "1\n2", 5, &[json!(1)]).await.unwrap_err();
        assert!(error.contains("0 of them after skip_rows = 5"), "{error}");
        write_npy(&npy, &array![[1.0f32, 2.0], [3.0, 4.0]]);
        let error = read(dir.path(), "1\n1", 0, &[json!(2)]).await.unwrap_err();
        assert!(error.contains("ids.txt, row 2: id 1 appears twice"), "{error}");
        write_npy(&npy, &array![[1i64, 2], [3, 4]]);
        let error = read(dir.path(), "1\n2", 0, &[json!(1)]).await.unwrap_err();
        assert!(error.contains("float32 or float64"), "{error}");
        std::fs::remove_file(&npy).unwrap();
        let error = read(dir.path(), "1\n2", 0, &[json!(1)]).await.unwrap_err();
        assert!(error.ends_with("e.npy: no such file or object"), "{error}");
    }

    #[tokio::test]
    async fn a_published_folder_is_read_part_by_part() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("run");
        std::fs::create_dir(&folder).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        write("a.jsonl", r#"{"entity_id": 1, "embedding": [1.0, 2.0]}"#);
        write("b.jsonl", r#"{"entity_id": 2, "embedding": [3.0, 4.0]}"#);
        write("left-over.jsonl", r#"{"entity_id": 3, "embedding": [5.0, 6.0]}"#);
        write("_manifest.json", r#"{"parts": [{"name": "a.jsonl"}, {"name": "b.jsonl"}]}"#);
        let source = || EmbeddingSource::Table {
            table: folder.to_str().unwrap().into(),
            id: "entity_id".into(),
            embedding: "embedding".into(),
        };
        let users = [json!(1), json!(2), json!(3)];
        let error = read_source(dir.path(), source(), &users).await.unwrap_err();
        assert!(error.contains("nor a published folder of embeddings (with a _SUCCESS)"), "{error}");
        write("_SUCCESS", "");
        let found = read_source(dir.path(), source(), &users).await.unwrap();
        assert_eq!(found, [Some(vec![1.0, 2.0]), Some(vec![3.0, 4.0]), None]);
        write("b.jsonl", r#"{"entity_id": 2, "embedding": [3.0]}"#);
        let error = read_source(dir.path(), source(), &users).await.unwrap_err();
        assert!(error.contains("b.jsonl, row 1: embedding of 2 has 1 values"), "{error}");
    }

    async fn read_lines(dir: &Path, lines: &str) -> Result<Embedded, String> {
        let table = dir.join("e.jsonl");
        std::fs::write(&table, lines).unwrap();
        let source = EmbeddingSource::Table {
            table: table.to_str().unwrap().into(),
            id: "movie".into(),
            embedding: "vector".into(),
        };
        read_source(dir, source, &[json!(1)]).await
    }

    #[tokio::test]
    async fn bad_table_rows_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let good = r#"{"movie": 1, "vector": [1.0, 2.0]}"#;
        let found = read_lines(dir.path(), good).await.unwrap();
        assert_eq!(found, [Some(vec![1.0, 2.0])]);
        let cases = [
            (r#"{"movie": 2, "vector": [1.0]}"#, "row 2: embedding of 2 has 1 values"),
            (r#"{"movie": 2, "vector": [1.0, null]}"#, "row 2: column \"vector\" holds NaN"),
            (good, "row 2: id 1 appears twice"),
            (r#"{"movie": 2}"#, "row 2: 2 has no embedding in column \"vector\""),
        ];
        for (bad, message) in cases {
            let error = read_lines(dir.path(), &format!("{good}\n{bad}")).await.unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
