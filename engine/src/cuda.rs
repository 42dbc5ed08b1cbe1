//! Kernels of our own, `engine/cuda/*.cu`, on candle's tensors.
//!
//! They run on candle's stream, which gives a tensor's memory back behind the kernels that have it.

pub(super) mod attend;
pub(super) mod blocks;
mod functions;
pub(super) mod layer;
mod product;
pub(super) mod rows;
mod splits;
pub(super) mod top_k;
pub(super) mod workspace;

use candle_core::{
    DType, Device, Result, Shape, Storage, Tensor, bail,
    cuda::{
        CudaStorageSlice, WrapErr,
        cudarc::driver::{CudaStream, DevicePtr as _, LaunchConfig, PushKernelArg as _},
    },
};

use crate::arena::number;

/// A launch of a kernel, whose parameters are tensors, then sizes, then floats.
struct Launch<'a> {
    /// The kernel without the suffix of its dtype, which is the first tensor's.
    kernel: &'static str,
    /// Contiguous, or none for a null pointer. Rows of matrices may be further apart, for kernels that take how far.
    tensors: &'a [Option<&'a Tensor>],
    sizes: &'a [usize],
    floats: &'a [f32],
    grid: (usize, usize),
    /// Threads of a block.
    threads: usize,
    /// Floats that the threads of a block share.
    shared: usize,
}

impl Launch<'_> {
    fn run(&self, device: &Device) -> Result<()> {
        self.run_split(1, device)
    }

    /// With a third dimension of the grid.
    fn run_split(&self, splits: usize, device: &Device) -> Result<()> {
        let cuda = device.as_cuda_device()?;
        let stream = cuda.cuda_stream();
        let suffix = match self.tensors.iter().flatten().next().map(|tensor| tensor.dtype()) {
            Some(DType::F32) => "f32",
            Some(DType::F16) => "f16",
            Some(DType::BF16) => "bf16",
            Some(DType::U8) => "u8",
            other => bail!("{} has no kernel for {other:?}", self.kernel),
        };
        let function = functions::function(&stream, self.kernel, suffix)?;
        let address = |tensor: &Option<&Tensor>| tensor.map_or(Ok(0), |tensor| Ok(memory(tensor, &stream)?.0));
        let addresses: Vec<u64> = self.tensors.iter().map(address).collect::<Result<_>>()?;
        let sizes: Vec<u32> = self.sizes.iter().copied().map(number).collect();
        let mut builder = stream.launch_builder(&function);
        addresses.iter().for_each(|address| _ = builder.arg(address));
        sizes.iter().for_each(|size| _ = builder.arg(size));
        self.floats.iter().for_each(|float| _ = builder.arg(float));
        let config = LaunchConfig {
            grid_dim: (number(self.grid.0), number(self.grid.1), number(splits)),
            block_dim: (number(self.threads), 1, 1),
            shared_mem_bytes: number(4 * self.shared),
        };
        #[expect(unsafe_code, reason = "a kernel's parameters are not checked")]
        // SAFETY: callers give those of the kernel, as engine/cuda has them.
        unsafe {
            builder.launch(config).w()?;
        }
        Ok(())
    }
}

/// Where a tensor begins on the device whose elements lie side by side, or those of each row do, and how many elements
/// there is memory for from there on.
fn memory(tensor: &Tensor, stream: &CudaStream) -> Result<(u64, usize)> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cuda(storage), true) = (&*storage, layout.is_contiguous() || matches!(layout.stride(), [_, 1]))
    else {
        bail!("a kernel wants contiguous tensors on its GPU: {layout:?}");
    };
    let (start, elements) = match &storage.slice {
        CudaStorageSlice::F32(slice) => (slice.device_ptr(stream).0, slice.len()),
        CudaStorageSlice::F16(slice) => (slice.device_ptr(stream).0, slice.len()),
        CudaStorageSlice::BF16(slice) => (slice.device_ptr(stream).0, slice.len()),
        CudaStorageSlice::U32(slice) => (slice.device_ptr(stream).0, slice.len()),
        CudaStorageSlice::U8(slice) => (slice.device_ptr(stream).0, slice.len()),
        _ => bail!("no kernel takes {:?}", tensor.dtype()),
    };
    let offset = layout.start_offset();
    Ok((start + (offset * tensor.dtype().size_in_bytes()) as u64, elements - offset))
}

/// A tensor that a kernel is going to write.
fn output_of(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    #[expect(unsafe_code, reason = "zeros would cost a launch")]
    // SAFETY: whoever calls this launches a kernel that writes every element, before anything reads one.
    unsafe {
        Tensor::empty(shape, dtype, device)
    }
}
