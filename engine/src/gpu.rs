//! A GPU as the engine needs it.
//!
//! The kernels of candle and mistral.rs are compiled for one compute capability. On another one, mistral.rs' products
//! of up to eight rows do not start, and nothing says so: their outputs are whatever memory held. So such a GPU is
//! refused.

use candle_core::{Device, Result};

/// The GPU of that index, if its capability is one that the kernels run on.
#[cfg(feature = "cuda")]
pub(super) fn open(index: usize) -> Result<Device> {
    let device = Device::new_cuda(index)?;
    let cuda = device.as_cuda_device()?;
    let context = cuda.cuda_stream().context().clone();
    let capability = context.compute_capability().map_err(candle_core::Error::wrap)?;
    check_capability(env!("LASER_COMPUTE_CAPABILITY").parse().map_err(candle_core::Error::wrap)?, capability)?;
    #[expect(unsafe_code, reason = "candle leaves the order of streams to whoever turns its events off")]
    // SAFETY: candle's stream is the null stream. Kernels of mistral.rs run on the calling thread's stream, which waits
    // for the null stream and that for it. So no tensor needs the two events that it would otherwise make.
    unsafe {
        cuda.disable_event_tracking();
    }
    pool::keep_freed(&context)?;
    Ok(device)
}

/// candle's own error: it was built without CUDA.
#[cfg(not(feature = "cuda"))]
pub(super) fn open(index: usize) -> Result<Device> {
    Device::new_cuda(index)
}

/// Machine code runs on GPUs of the same major number whose minor one is not lower.
#[cfg(any(feature = "cuda", test))]
fn check_capability(compiled: i32, (major, minor): (i32, i32)) -> Result<()> {
    if compiled / 10 == major && compiled % 10 <= minor {
        return Ok(());
    }
    candle_core::bail!(
        "the GPU has compute capability {major}.{minor}, and this laser was built for {}.{}: build it with \
         CUDA_COMPUTE_CAP={major}{minor}",
        compiled / 10,
        compiled % 10
    )
}

/// Bytes that a GPU has free; none for a CPU.
#[cfg(feature = "cuda")]
pub(super) fn free_bytes(device: &Device) -> Result<Option<usize>> {
    let Device::Cuda(cuda) = device else {
        return Ok(None);
    };
    pool::free_bytes(cuda.cuda_stream().context()).map(Some)
}

#[cfg(not(feature = "cuda"))]
#[expect(clippy::unnecessary_wraps, reason = "asking a GPU can fail")]
pub(super) fn free_bytes(_: &Device) -> Result<Option<usize>> {
    Ok(None)
}

/// The pool of memory that tensors come from.
#[cfg(feature = "cuda")]
mod pool {
    use candle_core::{
        Error, Result,
        cuda::cudarc::driver::{
            CudaContext,
            result::{device::get_default_mem_pool, mem_pool},
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
        },
    };

    /// Keeps what tensors give back for the next ones. By default all of it returns to the system whenever somebody
    /// waits for the device.
    pub(super) fn keep_freed(context: &CudaContext) -> Result<()> {
        let mut all = u64::MAX;
        #[expect(unsafe_code, reason = "cudarc has no safe call for it")]
        // SAFETY: the device is open, and the attribute is a number of 64 bits.
        let kept = unsafe {
            get_default_mem_pool(context.cu_device()).and_then(|pool| {
                mem_pool::set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut all).cast())
            })
        };
        kept.map_err(Error::wrap)
    }

    /// Bytes that are free once the pool, too, has given back what no tensor has: otherwise the memory of a model that
    /// was dropped would count as taken.
    pub(super) fn free_bytes(context: &CudaContext) -> Result<usize> {
        context.synchronize().map_err(Error::wrap)?;
        #[expect(unsafe_code, reason = "cudarc has no safe call for it")]
        // SAFETY: the device is open.
        let trimmed = unsafe { get_default_mem_pool(context.cu_device()).and_then(|pool| mem_pool::trim_to(pool, 0)) };
        let info = trimmed.and_then(|()| context.mem_get_info());
        info.map(|(free, _)| free).map_err(Error::wrap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_run_on_their_capability_and_later_ones_of_its_major_number() {
        for (compiled, gpu, fits) in [
            (80, (8, 0), true),
            (80, (8, 9), true),
            (86, (8, 0), false),
            (80, (9, 0), false),
            (90, (8, 0), false),
            (120, (12, 0), true),
        ] {
            assert_eq!(check_capability(compiled, gpu).is_ok(), fits, "built for {compiled}, GPU of {gpu:?}");
        }
        let refused = check_capability(80, (9, 0)).unwrap_err().to_string();
        assert!(refused.contains("9.0") && refused.contains("CUDA_COMPUTE_CAP=90"), "{refused}");
    }
}
