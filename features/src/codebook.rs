//! Codebooks: centroids that turn an embedding into a few small integers, its knowledge ids (LASER 4.4).
//!
//! An embedding is scaled to length 1 if so configured and cut into `codebooks` equal parts (product quantisation,
//! Jégou et al. 2011). The first id of a part is that of its nearest centroid; each further level does the same with
//! the remaining difference (residual quantisation). An entity has `codebooks * levels` ids, codebook by codebook, each
//! from 0 to `clusters - 1`. Finding them takes `clusters * dimension * levels` multiplications.
//!
//! The file is safetensors: an F32 tensor `codebook.C.level.L` of shape [clusters, dimension / codebooks] per position.
//! Its metadata hold the JSON of [`CodebookInfo`] (`laser.codebook`) and a BLAKE3 checksum of both
//! (`laser.codebook_digest`).

use std::collections::HashMap;

use laser_schema::ids::{CODEBOOK_VERSION, CodebookInfo};
use laser_schema::{Digest, EntityId};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::Deserialize;

/// The metadata's key of [`CodebookInfo`].
const INFO_KEY: &str = "laser.codebook";

/// The metadata's key of the digest of that text and all tensors.
const DIGEST_KEY: &str = "laser.codebook_digest";

/// Number of lanes in which a distance is summed, so that the compiler vectorises it. The sum of each lane is in order,
/// so equal inputs give equal bits on every machine.
const LANES: usize = 8;

/// The reasons why a file is not a codebook or an embedding has no ids.
#[derive(Debug, thiserror::Error)]
pub enum CodebookError {
    /// The bytes differ from what was written.
    #[error("{file}: not a codebook: {reason}; take another one with --previous, or --previous none to begin anew")]
    File {
        /// The file.
        file: String,
        /// The fault.
        reason: String,
    },
    /// The centroids do not have the shape that the information states.
    #[error("the codebook's centroids do not have the shape that it claims")]
    Shape,
    /// The embedding is from another encoder.
    #[error("the embedding of {id} has {found} values, the codebook's have {expected}")]
    Dimension {
        /// The entity.
        id: EntityId,
        /// The codebook's dimension.
        expected: usize,
        /// The embedding's.
        found: usize,
    },
    /// A value is NaN or infinite.
    #[error("the embedding of {id} holds NaN or infinity; embeddings must be finite")]
    NotFinite {
        /// The entity.
        id: EntityId,
    },
}

/// An embedding's ids.
#[derive(Debug, Clone, PartialEq)]
pub struct Coded {
    /// One id per position.
    pub ids: Vec<i64>,
    /// Squared distance between the (scaled) embedding and the point that the ids represent.
    pub distortion: f64,
}

/// Centroids with a description of their fit. Memory: 4 bytes per value of `clusters * dimension * levels`.
#[derive(Debug, Clone, PartialEq)]
pub struct Codebook {
    info: CodebookInfo,
    /// Centroids per position, row by row.
    centroids: Vec<Vec<f32>>,
}

impl Codebook {
    /// Creates a codebook of `centroids`, per position, row by row.
    ///
    /// # Errors
    /// [`CodebookError::Shape`] if they are not as `info` says.
    pub fn new(info: CodebookInfo, centroids: Vec<Vec<f32>>) -> Result<Self, CodebookError> {
        let is_cut = info.codebooks > 0 && info.dimension.is_multiple_of(info.codebooks);
        let length = info.clusters * info.dimension / info.codebooks.max(1);
        let is_whole = centroids.len() == info.places()
            && length > 0
            && centroids.iter().all(|c| c.len() == length)
            && centroids.iter().flatten().all(|value| value.is_finite());
        (is_cut && is_whole).then_some(Self { info, centroids }).ok_or(CodebookError::Shape)
    }

    /// Returns its shape and the description of its fit.
    pub fn info(&self) -> &CodebookInfo {
        &self.info
    }

    /// Returns the centroids of a position, row by row.
    ///
    /// # Panics
    /// If there is no such position.
    pub fn centroids(&self, place: usize) -> &[f32] {
        &self.centroids[place]
    }

    /// Returns the ids of an entity's embedding.
    ///
    /// # Errors
    /// [`CodebookError::Dimension`] and [`CodebookError::NotFinite`].
    pub fn code(&self, id: &EntityId, embedding: &[f32]) -> Result<Coded, CodebookError> {
        let (expected, found) = (self.info.dimension, embedding.len());
        if expected != found {
            let id = id.clone();
            return Err(CodebookError::Dimension { id, expected, found });
        }
        if !embedding.iter().all(|value| value.is_finite()) {
            return Err(CodebookError::NotFinite { id: id.clone() });
        }
        let mut rest = embedding.to_vec();
        if self.info.normalise {
            normalise(&mut rest);
        }
        let part = self.info.dimension / self.info.codebooks;
        let mut ids = Vec::with_capacity(self.info.places());
        for (rest, levels) in rest.chunks_mut(part).zip(self.centroids.chunks(self.info.levels)) {
            for centroids in levels {
                let (nearest, _) = nearest(centroids, rest);
                subtract(rest, &centroids[nearest * part..][..part]);
                ids.push(i64::try_from(nearest).unwrap_or(i64::MAX));
            }
        }
        let distortion = squared_norm(&rest);
        Ok(Coded { ids, distortion })
    }

    /// Returns the file's bytes.
    ///
    /// # Errors
    /// [`CodebookError::File`] if the format cannot hold it.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CodebookError> {
        self.write().map_err(|reason| CodebookError::File { file: "codebook".to_owned(), reason })
    }

    fn write(&self) -> Result<Vec<u8>, String> {
        let bytes = |values: &Vec<f32>| values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensors: Vec<Vec<u8>> = self.centroids.iter().map(bytes).collect();
        let info = serde_json::to_string(&self.info).map_err(|e| e.to_string())?;
        let digest = digest(&info, tensors.iter().map(Vec::as_slice));
        let shape = vec![self.info.clusters, self.info.dimension / self.info.codebooks];
        let views = names(&self.info).zip(&tensors).map(|(name, bytes)| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
            view.map(|view| (name, view)).map_err(|e| e.to_string())
        });
        let views: Vec<_> = views.collect::<Result<_, _>>()?;
        let metadata = [(INFO_KEY, info), (DIGEST_KEY, digest.to_string())];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value));
        safetensors::serialize(views, Some(HashMap::from(metadata))).map_err(|e| e.to_string())
    }

    /// Reads a file's bytes and checks every one of them.
    ///
    /// # Errors
    /// [`CodebookError::File`], naming `file`.
    pub fn from_bytes(file: &str, bytes: &[u8]) -> Result<Self, CodebookError> {
        Self::read(bytes).map_err(|reason| CodebookError::File { file: file.to_owned(), reason })
    }

    fn read(bytes: &[u8]) -> Result<Self, String> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
        let value = |key| header.metadata().as_ref().and_then(|m| m.get(key));
        let json = value(INFO_KEY).ok_or_else(|| format!("no {INFO_KEY} in its metadata"))?;
        let Version { version } = serde_json::from_str(json).map_err(|e| e.to_string())?;
        if version != CODEBOOK_VERSION {
            return Err(format!("version {version}, this Laser reads {CODEBOOK_VERSION}"));
        }
        let info: CodebookInfo = serde_json::from_str(json).map_err(|e| e.to_string())?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        let tensor = |name: String| tensors.tensor(&name).map_err(|e| e.to_string());
        let views: Vec<TensorView> = names(&info).map(tensor).collect::<Result<_, _>>()?;
        let digest = digest(json, views.iter().map(TensorView::data)).to_string();
        if value(DIGEST_KEY) != Some(&digest) {
            return Err("its bytes do not match its checksum".to_owned());
        }
        let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap_or_default());
        let values = |view: &TensorView| view.data().chunks_exact(4).map(value).collect();
        let centroids = views.iter().map(values).collect();
        Self::new(info, centroids).map_err(|e| e.to_string())
    }
}

/// The fields that must be readable in any version.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// Iterates over the tensors' names, by position.
fn names(info: &CodebookInfo) -> impl Iterator<Item = String> {
    let levels = info.levels;
    (0..info.codebooks)
        .flat_map(move |codebook| (0..levels).map(move |level| format!("codebook.{codebook}.level.{level}")))
}

fn digest<'a>(info: &'a str, tensors: impl Iterator<Item = &'a [u8]>) -> Digest {
    Digest::of_parts(std::iter::once(info.as_bytes()).chain(tensors))
}

/// Scales to length 1; zeros stay zeros.
pub(crate) fn normalise(values: &mut [f32]) {
    let square = |value: &f32| f64::from(*value).powi(2);
    let norm = values.iter().map(square).sum::<f64>().sqrt();
    if norm > 0.0 {
        for value in values {
            #[expect(clippy::cast_possible_truncation, reason = "at most 1")]
            let scaled = (f64::from(*value) / norm) as f32;
            *value = scaled;
        }
    }
}

pub(crate) fn subtract(from: &mut [f32], values: &[f32]) {
    for (from, value) in from.iter_mut().zip(values) {
        *from -= value;
    }
}

pub(crate) fn squared_norm(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum()
}

/// Returns the row of `centroids` nearest to `point` and its squared distance; ties go to the first.
pub(crate) fn nearest(centroids: &[f32], point: &[f32]) -> (usize, f32) {
    let mut best = (0, f32::INFINITY);
    for (row, centroid) in centroids.chunks_exact(point.len()).enumerate() {
        let distance = squared_distance(centroid, point);
        if distance < best.1 {
            best = (row, distance);
        }
    }
    best
}

pub(crate) fn squared_distance(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    let rest: f32 = rest.map(|(a, b)| (a - b) * (a - b)).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            let difference = a[lane] - b[lane];
            lanes[lane] += difference * difference;
        }
    }
    lanes.iter().sum::<f32>() + rest
}
