//! Attention of draft trees in one kernel of our own, `engine/cuda/tree.cu`.

use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp3, Device, Layout, Result, Shape, Tensor,
    backend::BackendStorage,
    bail,
    cuda::{
        CudaDType, CudaStorageSlice, WrapErr,
        cudarc::driver::{CudaSlice, DeviceRepr, LaunchConfig, PushKernelArg},
    },
};
use laser_cpu::{Batch, Span};

use crate::arena::{Arena, SequenceId, number};

const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/tree.ptx"));

/// Queries of a block, keys of a step of it, and the widest head, as in tree.cu.
const QUERIES: usize = 8;
const KEYS: usize = 32;
const HEAD_MAX: usize = 256;

/// How the nodes of a step attend; the same for all layers.
#[derive(Debug)]
pub(super) struct TreeAttend {
    /// The tiles of all blocks, then row numbers and ancestors' bits of each sequence, in words of 32 bits.
    plan: Tensor,
    tiles: usize,
}

impl TreeAttend {
    /// For a step whose nodes have the arena's rows from `start` on, and heads of which `shared` have one key head.
    pub(super) fn plan(
        batch: &Batch<'_>,
        (arena, sequences): (&Arena, &[SequenceId]),
        (start, shared): (usize, usize),
        device: &Device,
    ) -> Result<Self> {
        let tiles: usize = batch.spans.iter().map(|span| (span.parents.len() * shared).div_ceil(QUERIES)).sum();
        let (mut plan, mut words) = (Vec::new(), Vec::new());
        for (span, &sequence) in batch.spans.iter().zip(sequences) {
            let nodes = span.parents.len();
            let rows = 6 * tiles + words.len();
            words.extend_from_slice(&arena.rows_of(sequence)[..span.cached]);
            words.extend((number(start + span.offset)..).take(nodes));
            let bits = 6 * tiles + words.len();
            (0..nodes).for_each(|node| words.extend(seen(span, node)));
            for first in (0..nodes * shared).step_by(QUERIES) {
                plan.extend([span.offset, nodes, span.cached, rows, bits, first].map(number));
            }
        }
        plan.append(&mut words);
        Ok(Self { plan: Tensor::new(plan, device)?, tiles })
    }

    /// Rows `[nodes, heads · head_dim]` for scaled queries `[nodes, heads, head_dim]` over all keys and values of a
    /// layer, `[kv_heads, rows, head_dim]`, all contiguous.
    pub(super) fn attend(&self, queries: &Tensor, (keys, values): &(Tensor, Tensor)) -> Result<Tensor> {
        queries.apply_op3_no_bwd(keys, values, self)
    }

    fn launch<T: CudaDType + DeviceRepr>(
        &self,
        name: &str,
        [queries, keys, values]: [&CudaSlice<T>; 3],
        layouts: [&Layout; 3],
        device: &CudaDevice,
    ) -> Result<(CudaStorage, Shape)> {
        let (nodes, heads, dim) = layouts[0].shape().dims3()?;
        let (kv_heads, rows, _) = layouts[1].shape().dims3()?;
        if dim > HEAD_MAX || layouts.iter().any(|layout| layout.contiguous_offsets().is_none_or(|at| at.0 != 0)) {
            bail!("attention wants contiguous tensors and heads of at most {HEAD_MAX}: {layouts:?}");
        }
        let (plan, _) = self.plan.storage_and_layout();
        let candle_core::Storage::Cuda(plan) = &*plan else { bail!("the plan is not on the GPU") };
        let function = device.get_or_load_custom_func(name, "laser_tree", PTX)?;
        #[expect(unsafe_code, reason = "the kernel writes all of it")]
        // SAFETY: every query is in one tile.
        let attended = unsafe { device.alloc::<T>(nodes * heads * dim)? };
        let config = LaunchConfig {
            grid_dim: (number(self.tiles), number(kv_heads), 1),
            block_dim: (128, 1, 1),
            shared_mem_bytes: number(4 * (QUERIES * dim + KEYS * (dim + 1) + 2 * QUERIES * KEYS)),
        };
        let sizes = [rows, heads, kv_heads, dim].map(number);
        let mut builder = function.builder();
        builder.arg(queries).arg(keys).arg(values).arg(&attended).arg(plan.as_cuda_slice::<u32>()?);
        sizes.iter().for_each(|size| {
            builder.arg(size);
        });
        #[expect(unsafe_code, reason = "a kernel's arguments are not checked")]
        // SAFETY: they are those of tree.cu, and the plan names rows and nodes that there are.
        unsafe {
            builder.launch(config).w()?;
        }
        let shape = Shape::from((nodes, heads * dim));
        Ok((CudaStorage::wrap_cuda_slice(attended, device.clone()), shape))
    }
}

impl CustomOp3 for TreeAttend {
    fn name(&self) -> &'static str {
        "tree_attend"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("the kernel is for GPUs")
    }

    fn cuda_fwd(
        &self,
        queries: &CudaStorage,
        queries_layout: &Layout,
        keys: &CudaStorage,
        keys_layout: &Layout,
        values: &CudaStorage,
        values_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        use CudaStorageSlice::{BF16, F16, F32};
        let layouts = [queries_layout, keys_layout, values_layout];
        let device = queries.device();
        match (&queries.slice, &keys.slice, &values.slice) {
            (F32(q), F32(k), F32(v)) => self.launch("tree_attend_f32", [q, k, v], layouts, device),
            (F16(q), F16(k), F16(v)) => self.launch("tree_attend_f16", [q, k, v], layouts, device),
            (BF16(q), BF16(k), BF16(v)) => self.launch("tree_attend_bf16", [q, k, v], layouts, device),
            _ => bail!("attention of {:?} over {:?} and {:?}", queries.dtype(), keys.dtype(), values.dtype()),
        }
    }
}

/// The nodes of a sequence that a node sees, in words of 32.
#[expect(clippy::cast_possible_truncation, reason = "a word is half of one of 64 bits")]
fn seen(span: &Span<'_>, node: usize) -> impl Iterator<Item = u32> {
    let hidden = span.hidden(node);
    let nodes = span.parents.len();
    (0..nodes.div_ceil(32)).map(move |word| {
        let bits = (hidden[word / 2] >> (word % 2 * 32)) as u32;
        let exist = u32::MAX >> (32 - (nodes - 32 * word).min(32));
        !bits & exist
    })
}
