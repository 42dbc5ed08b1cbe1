//! The kernels as functions that a GPU launches.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::{
    Result,
    cuda::{
        WrapErr as _,
        cudarc::{
            driver::{CudaFunction, CudaModule, CudaStream},
            nvrtc::Ptx,
        },
    },
};

const KERNELS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// Kernels of a device, so that the driver is asked for each name once.
struct Functions {
    module: Arc<CudaModule>,
    known: HashMap<[&'static str; 2], CudaFunction>,
}

/// Of the devices by number. A driver keeps what it loaded for a device as long as the process has that open.
static DEVICES: Mutex<Vec<(usize, Functions)>> = Mutex::new(Vec::new());

/// A kernel for a dtype.
pub(super) fn function(stream: &CudaStream, kernel: &'static str, dtype: &'static str) -> Result<CudaFunction> {
    let device = stream.context().ordinal();
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let at = match devices.iter().position(|(number, _)| *number == device) {
        Some(at) => at,
        None => {
            let module = stream.context().load_module(Ptx::from_binary(KERNELS.to_vec())).w()?;
            devices.push((device, Functions { module, known: HashMap::new() }));
            devices.len() - 1
        }
    };
    let Functions { module, known } = &mut devices[at].1;
    if let Some(function) = known.get(&[kernel, dtype]) {
        return Ok(function.clone());
    }
    let function = module.load_function(&format!("{kernel}_{dtype}")).w()?;
    Ok(known.entry([kernel, dtype]).or_insert(function).clone())
}
