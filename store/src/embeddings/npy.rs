//! The rows of an `.npy` matrix with their ids, one per line of a text file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Lines, Read, Seek};

use bytes::Bytes;
use laser_schema::EntityId;
use ndarray::{ArrayView2, s};
use ndarray_npy::ViewNpyExt;

use super::{BATCH_ROWS, EmbeddingBatch, EmbeddingError, NpyFiles};
use crate::map::map;

/// A matrix whose file is mapped, so that it may be larger than the memory.
#[derive(Debug)]
pub(super) struct NpyReader {
    files: NpyFiles,
    matrix: Bytes,
    is_double: bool,
    shape: [usize; 2],
    ids: Lines<BufReader<File>>,
    /// Rows read so far, without the padding.
    read: usize,
}

impl NpyReader {
    /// Opens both files; there must be as many ids as rows after the padding.
    pub(super) async fn open(files: NpyFiles) -> Result<Self, EmbeddingError> {
        let wrong = |reason: String| EmbeddingError::Npy { file: files.npy.url().to_owned(), reason };
        let matrix = map(&files.npy.open().await?).map_err(|e| wrong(e.to_string()))?;
        let is_double = ArrayView2::<f64>::view_npy(&matrix).is_ok();
        let shape = match is_double {
            true => ArrayView2::<f64>::view_npy(&matrix).map(|view| view.dim()),
            false => ArrayView2::<f32>::view_npy(&matrix).map(|view| view.dim()),
        };
        let (rows, dimension) = shape.map_err(|e| wrong(e.to_string()))?;
        if dimension == 0 {
            return Err(wrong("its rows have no values".into()));
        }
        let mut ids = BufReader::with_capacity(1 << 20, files.ids.open().await?);
        let found = count_lines(&mut ids).map_err(|e| EmbeddingError::Ids {
            file: files.ids.url().to_owned(),
            line: 1,
            reason: e.to_string(),
        })?;
        let left = rows.saturating_sub(files.skip_rows);
        if left != found {
            return Err(EmbeddingError::Count {
                npy: files.npy.url().to_owned(),
                rows,
                skip_rows: files.skip_rows,
                left,
                ids: files.ids.url().to_owned(),
                found,
            });
        }
        Ok(Self { files, matrix, is_double, shape: [rows, dimension], ids: ids.lines(), read: 0 })
    }

    /// The next rows, or `None` at the end.
    pub(super) fn next_batch(&mut self) -> Result<Option<EmbeddingBatch>, EmbeddingError> {
        let [rows, dimension] = self.shape;
        let first = self.files.skip_rows + self.read;
        let last = rows.min(first + BATCH_ROWS);
        if first >= last {
            return Ok(None);
        }
        let mut batch = EmbeddingBatch::new(dimension);
        for line in (self.read as u64 + 1..).take(last - first) {
            batch.rows.push(line);
            batch.ids.push(self.next_id(line)?);
        }
        batch.values = self.values(first..last)?;
        if let Some(at) = batch.values.iter().position(|value| !value.is_finite()) {
            return Err(EmbeddingError::Row {
                file: self.files.npy.url().to_owned(),
                row: (first + at / dimension) as u64,
                reason: format!("value {} at position {}; embeddings must be finite", batch.values[at], at % dimension),
            });
        }
        self.read += last - first;
        Ok(Some(batch))
    }

    fn next_id(&mut self, line: u64) -> Result<EntityId, EmbeddingError> {
        let wrong = |reason: String| EmbeddingError::Ids { file: self.files.ids.url().to_owned(), line, reason };
        let id = self.ids.next().transpose().map_err(|e| wrong(e.to_string()))?.unwrap_or_default();
        match id.trim() {
            "" => Err(wrong("empty; every row of the matrix needs an id".into())),
            id => EntityId::Text(id.to_owned()).into_type(self.files.id_type).map_err(|e| wrong(e.to_string())),
        }
    }

    /// The values of some rows in single precision, row by row, whichever way the matrix is stored.
    fn values(&self, rows: std::ops::Range<usize>) -> Result<Vec<f32>, EmbeddingError> {
        let wrong = |e: ndarray_npy::ViewNpyError| EmbeddingError::Npy {
            file: self.files.npy.url().to_owned(),
            reason: e.to_string(),
        };
        #[expect(clippy::cast_possible_truncation, reason = "embeddings are single precision")]
        Ok(match self.is_double {
            true => {
                let view = ArrayView2::<f64>::view_npy(&self.matrix).map_err(wrong)?;
                view.slice(s![rows, ..]).iter().map(|value| *value as f32).collect()
            }
            false => {
                let view = ArrayView2::<f32>::view_npy(&self.matrix).map_err(wrong)?;
                view.slice(s![rows, ..]).iter().copied().collect()
            }
        })
    }
}

/// The lines of a file, which is at its beginning again afterwards.
fn count_lines(file: &mut BufReader<File>) -> io::Result<usize> {
    let mut found = 0;
    for line in file.by_ref().split(b'\n') {
        line?;
        found += 1;
    }
    file.rewind()?;
    Ok(found)
}
