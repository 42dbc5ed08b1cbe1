//! What a training needs to be taken up again: weights, the optimiser's moments, and how far it is.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, ensure};
use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use tempfile::Builder;

use crate::epoch::Epoch;

/// The key of [`State`] in the file's metadata.
const STATE: &str = "state";

/// How far a training is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    /// What the training is a function of.
    pub(crate) identity: String,
    /// Steps of the optimiser.
    pub(crate) updates: i32,
    /// Steps of the epoch after those of `history`, and the sums over their places.
    pub(crate) step: usize,
    pub(crate) loss_sum: f64,
    pub(crate) places: usize,
    /// Seconds of that epoch before this process.
    pub(crate) seconds: f64,
    /// The epochs that are over.
    pub(crate) history: Vec<Epoch>,
}

impl State {
    /// At the beginning.
    pub(crate) fn new(identity: String) -> Self {
        Self { identity, updates: 0, step: 0, loss_sum: 0.0, places: 0, seconds: 0.0, history: Vec::new() }
    }
}

/// A training between two steps.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub(crate) state: State,
    /// By name: the weights, the moments, and the weights of the best epoch.
    pub(crate) tensors: Vec<(String, Tensor)>,
}

impl Checkpoint {
    /// Writes the file, which is whole or as it was before.
    pub(crate) fn write(&self, file: &Path) -> Result<()> {
        let state = HashMap::from([(STATE.to_owned(), serde_json::to_string(&self.state)?)]);
        write_tensors(file, &self.tensors, Some(state))
    }

    /// Reads the file, if it is there.
    pub(crate) fn read(file: &Path, device: &Device) -> Result<Option<Self>> {
        if !file.exists() {
            return Ok(None);
        }
        let damaged = || format!("{}: not a checkpoint of a training; remove it to begin anew", file.display());
        let read = || -> Result<Self> {
            let bytes = fs::read(file)?;
            let (_, metadata) = SafeTensors::read_metadata(&bytes)?;
            let state = metadata.metadata().as_ref().and_then(|map| map.get(STATE)).context("no state")?;
            let state = serde_json::from_str(state)?;
            let tensors = SafeTensors::deserialize(&bytes)?;
            let tensors = tensors.tensors().into_iter().map(|(name, view)| Ok((name, tensor(&view, device)?)));
            Ok(Self { state, tensors: tensors.collect::<Result<_>>()? })
        };
        read().with_context(damaged).map(Some)
    }

    /// The tensor of this name and shape.
    pub(crate) fn tensor(&self, name: &str, like: &Tensor) -> Result<Tensor> {
        let found = self.tensors.iter().find(|(known, _)| known == name);
        let (_, found) = found.ok_or_else(|| anyhow!("the checkpoint has no {name}; remove it to begin anew"))?;
        ensure!(found.dims() == like.dims(), "the checkpoint's {name} has another shape; remove it to begin anew");
        Ok(found.clone())
    }
}

fn tensor(view: &TensorView<'_>, device: &Device) -> Result<Tensor> {
    ensure!(view.dtype() == Dtype::F32, "a tensor of {:?}", view.dtype());
    // The bytes of a file lie anywhere.
    let values: Vec<f32> = view.data().chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    Ok(Tensor::from_vec(values, view.shape(), device)?)
}

/// Writes tensors as safetensors, those of numbers in f32; the file is whole or as it was before.
pub(crate) fn write_tensors(
    file: &Path,
    tensors: &[(String, Tensor)],
    metadata: Option<HashMap<String, String>>,
) -> Result<()> {
    let bytes = |tensor: &Tensor| -> candle_core::Result<(Dtype, Vec<u8>)> {
        Ok(match tensor.dtype() {
            DType::U32 => (Dtype::U32, bytemuck::cast_slice(&tensor.to_vec1::<u32>()?).to_vec()),
            _ => {
                let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                (Dtype::F32, bytemuck::cast_slice(&values).to_vec())
            }
        })
    };
    let values = tensors.iter().map(|(name, tensor)| Ok((name, tensor.dims().to_vec(), bytes(tensor)?)));
    let values: Vec<_> = values.collect::<candle_core::Result<_>>()?;
    let views = values
        .iter()
        .map(|(name, shape, (dtype, bytes))| Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes)?)));
    let views: Vec<_> = views.collect::<Result<_, safetensors::SafeTensorError>>()?;
    write_whole(file, &safetensors::serialize(views, metadata)?)
}

/// Writes a file that is whole or as it was before. Who may read it is as the system has it for new files: workers may
/// have accounts of their own, and temporary files are private.
pub(crate) fn write_whole(file: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> Result<()> {
        let folder = file.parent().context("not a file")?;
        let create = |path: &Path| File::options().write(true).create_new(true).open(path);
        let temporary = Builder::new().make_in(folder, create)?;
        fs::write(temporary.path(), bytes)?;
        temporary.as_file().sync_all()?;
        temporary.persist(file)?;
        Ok(())
    };
    write().with_context(|| format!("{}: cannot be written", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("written");
        for content in ["first", "second, longer", "third"] {
            write_whole(&file, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), content);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn whoever_may_read_other_new_files_may_read_what_is_written() {
        use std::os::unix::fs::PermissionsExt as _;

        let folder = tempfile::tempdir().unwrap();
        let [written, other] = ["written", "other"].map(|name| folder.path().join(name));
        write_whole(&written, b"weights").unwrap();
        fs::write(&other, b"weights").unwrap();
        let [written, other] = [written, other].map(|file| fs::metadata(file).unwrap().permissions().mode());
        assert_eq!(written & 0o777, other & 0o777);
    }
}
