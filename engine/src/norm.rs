//! RMS norm.

use candle_core::{Result, Tensor};

use crate::workspace::Workspace;

/// x / rms(x) · weight over rows of x, with `eps` added to the mean square.
#[derive(Debug)]
pub(super) struct Norm {
    weight: Tensor,
    eps: f32,
}

impl Norm {
    #[expect(clippy::cast_possible_truncation, reason = "norms compute in f32")]
    pub(super) fn new(weight: Tensor, eps: f64) -> Self {
        Self { weight, eps: eps as f32 }
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(x, &self.weight, self.eps)
    }

    /// The norm of x, `[nodes, width]`, on a GPU in the workspace's memory.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a GPU has a workspace"))]
    pub(super) fn first(&self, x: &Tensor, workspace: &mut Workspace) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return crate::cuda::layer::add_norm(x, None, self.parts(), workspace);
        }
        self.forward(x)
    }

    /// x + y, which on a GPU takes the place of x, and its norm.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a GPU has a workspace"))]
    pub(super) fn add(&self, x: Tensor, y: &Tensor, workspace: &mut Workspace) -> Result<(Tensor, Tensor)> {
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let normed = crate::cuda::layer::add_norm(&x, Some(y), self.parts(), workspace)?;
            return Ok((x, normed));
        }
        let sum = (x + y)?;
        let normed = self.forward(&sum)?;
        Ok((sum, normed))
    }

    #[cfg(feature = "cuda")]
    pub(super) fn parts(&self) -> (&Tensor, f32) {
        (&self.weight, self.eps)
    }
}
