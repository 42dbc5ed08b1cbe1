//! The model to load, its precision and its device.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use candle_core::{DType, Device, quantized::GgmlDType};
use laser_schema::DeviceOption;
use mistralrs_quant::{IsqBits, IsqType};
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};

use crate::{error::EngineError, gpu};

/// How to load a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOptions {
    /// Model directory (config.json, safetensors), or a .gguf file.
    pub path: PathBuf,
    /// A folder of weights that work on the model's features, EAGLE's layer, Medusa's heads or an acceptance head: not
    /// the model is loaded, but these.
    pub drafts: Option<PathBuf>,
    /// Precision of weights and activations.
    pub dtype: DTypeOption,
    /// Quantise the linear layers while loading: `q4k`, `q8_0`, …, any name that mistralrs knows.
    pub isq: Option<String>,
    /// Where to run.
    pub device: DeviceOption,
    /// Threads of a forward on the CPU, and of what is divided between forwards; none: as many as rayon takes, which is
    /// `RAYON_NUM_THREADS` or the process's cores.
    pub threads: Option<usize>,
    /// Megabytes (2^20 bytes) that keys and values of all sequences may take; none: on a GPU four fifths of what the
    /// weights leave free, on a CPU no bound.
    pub cache_mb: Option<usize>,
}

impl EngineOptions {
    /// The model at `path` in f32 on the CPU.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let (dtype, device) = (DTypeOption::default(), DeviceOption::default());
        Self { path: path.into(), drafts: None, dtype, isq: None, device, threads: None, cache_mb: None }
    }

    /// The threads that forwards run on, which all engines of the process share that ask for as many: a model and its
    /// draft models take turns, and a thread of the one that still looks for work would keep one of the other waiting.
    pub(super) fn thread_pool(&self) -> Result<Arc<ThreadPool>, EngineError> {
        static POOLS: Mutex<Vec<(Option<usize>, Weak<ThreadPool>)>> = Mutex::new(Vec::new());
        let refused = |message: String| EngineError::InvalidOption {
            option: "threads",
            value: self.threads.map_or_else(String::new, |threads| threads.to_string()),
            message,
        };
        match (self.threads, self.device) {
            (Some(0), _) => return Err(refused("expected at least 1".into())),
            (Some(_), DeviceOption::Cuda(_)) => {
                return Err(refused("of the CPU engine: leave it out where the model runs on a GPU".into()));
            }
            _ => {}
        }
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|(_, pool)| pool.strong_count() > 0);
        let known = pools.iter().find(|(threads, _)| *threads == self.threads);
        if let Some(pool) = known.and_then(|(_, pool)| pool.upgrade()) {
            return Ok(pool);
        }
        let pool = ThreadPoolBuilder::new().num_threads(self.threads.unwrap_or(0));
        let pool = pool.thread_name(|thread| format!("engine-{thread}")).build();
        let pool = Arc::new(pool.map_err(|error| refused(error.to_string()))?);
        pools.push((self.threads, Arc::downgrade(&pool)));
        Ok(pool)
    }

    /// The device, once the precision is known to work there.
    pub(super) fn device(&self) -> Result<Device, EngineError> {
        match self.device {
            DeviceOption::Cpu if self.dtype == DTypeOption::Bf16 && self.isq.is_some() => {
                Err(EngineError::InvalidOption {
                    option: "dtype",
                    value: self.dtype.to_string(),
                    message: "with isq the CPU has no bf16 activations: choose f32 or f16".into(),
                })
            }
            DeviceOption::Cpu => Ok(Device::Cpu),
            DeviceOption::Cuda(index) => gpu::open(index).map_err(|error| EngineError::InvalidOption {
                option: "device",
                value: self.device.to_string(),
                message: error.to_string(),
            }),
        }
    }

    /// The quantisation asked for, if any.
    pub(super) fn isq_type(&self, device: &Device) -> Result<Option<IsqType>, EngineError> {
        let Some(name) = &self.isq else {
            return Ok(None);
        };
        let refused = |message: String| EngineError::InvalidOption { option: "isq", value: name.clone(), message };
        let isq = quantisation(name, device).ok_or_else(|| {
            let names = QUANTISATIONS.map(|(name, _)| name).join(", ");
            refused(format!("expected bits (2, 3, 4, 5, 6 or 8) or one of {names}"))
        })?;
        match unfit_for_gpus(isq, self.dtype).filter(|_| matches!(self.device, DeviceOption::Cuda(_))) {
            Some(reason) => Err(refused(format!("it does not run on GPUs: {reason}"))),
            None => Ok(Some(isq)),
        }
    }
}

/// Why a GPU does not run a quantisation of mistral.rs 0.8.1, and what to choose.
fn unfit_for_gpus(isq: IsqType, dtype: DTypeOption) -> Option<&'static str> {
    match isq {
        IsqType::F8E4M3 => Some("its products take no trees; choose q8_0"),
        IsqType::HQQ4 | IsqType::HQQ8 => {
            Some("a build for GPUs has none of it for the CPU, which the self-test compares with; choose q4k or q8_0")
        }
        IsqType::MXFP4 if dtype == DTypeOption::F32 => Some("its products are of 16 bits; choose dtype bf16 or f16"),
        _ => None,
    }
}

/// Quantisations that mistral.rs applies while loading on CPUs and NVIDIA GPUs, by their names there.
const QUANTISATIONS: [(&str, IsqType); 14] = [
    ("q4_0", IsqType::Q4_0),
    ("q4_1", IsqType::Q4_1),
    ("q5_0", IsqType::Q5_0),
    ("q5_1", IsqType::Q5_1),
    ("q8_0", IsqType::Q8_0),
    ("q2k", IsqType::Q2K),
    ("q3k", IsqType::Q3K),
    ("q4k", IsqType::Q4K),
    ("q5k", IsqType::Q5K),
    ("q6k", IsqType::Q6K),
    ("hqq4", IsqType::HQQ4),
    ("hqq8", IsqType::HQQ8),
    ("fp8", IsqType::F8E4M3),
    ("mxfp4", IsqType::MXFP4),
];

/// The quantisation of that name, or the one that suits `device` for a number of bits.
fn quantisation(name: &str, device: &Device) -> Option<IsqType> {
    let name = name.to_lowercase();
    if let Ok(bits) = IsqBits::try_from(name.as_str()) {
        return Some(bits.resolve(device));
    }
    let named = QUANTISATIONS.iter().find(|(known, _)| *known == name)?;
    Some(named.1)
}

/// The quantisation that makes blocks of a type, if one does.
pub(super) fn name_of(dtype: GgmlDType) -> Option<&'static str> {
    let makes = |isq: IsqType| GgmlDType::try_from(isq).is_ok_and(|made| made == dtype);
    QUANTISATIONS.iter().find(|(_, isq)| makes(*isq)).map(|(name, _)| *name)
}

/// Precision of the weights that are not quantised, of the activations and of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeOption {
    /// 32 bits: exact enough that strict output equals plain greedy decoding.
    #[default]
    F32,
    /// 16 bits; on CPUs slower than f32 and bf16.
    F16,
    /// 16 bits with the range of f32; on CPUs of the weights only, with f32 activations and cache.
    Bf16,
}

impl DTypeOption {
    /// The tensor type.
    pub(super) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

impl fmt::Display for DTypeOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dtype().as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precisions_and_devices_are_words() {
        let words = r#"["bf16","cuda:1"]"#;
        let options: (DTypeOption, DeviceOption) = serde_json::from_str(words).unwrap();
        assert_eq!(options, (DTypeOption::Bf16, DeviceOption::Cuda(1)));
        assert_eq!(serde_json::to_string(&options).unwrap(), words);
        for (words, expected) in
            [(r#"["f32","tpu"]"#, "expected cpu, cuda or cuda:INDEX"), (r#"["f64","cpu"]"#, "unknown variant `f64`")]
        {
            let error = serde_json::from_str::<(DTypeOption, DeviceOption)>(words).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn engines_that_ask_for_as_many_threads_share_them() {
        let pool = |threads| EngineOptions { threads, ..EngineOptions::new("m") }.thread_pool().unwrap();
        let three = pool(Some(3));
        assert_eq!(three.current_num_threads(), 3);
        assert!(Arc::ptr_eq(&three, &pool(Some(3))));
        assert!(!Arc::ptr_eq(&three, &pool(Some(2))));
        let refused = EngineOptions { threads: Some(0), ..EngineOptions::new("m") }.thread_pool().unwrap_err();
        assert_eq!(refused.to_string(), "option threads = \"0\": expected at least 1");
    }

    #[test]
    fn blocks_have_the_name_of_what_makes_them() {
        let names = [GgmlDType::Q8_0, GgmlDType::Q3K, GgmlDType::Q4_1, GgmlDType::F16].map(name_of);
        assert_eq!(names, [Some("q8_0"), Some("q3k"), Some("q4_1"), None]);
    }

    #[test]
    fn quantised_bf16_on_the_cpu_and_unknown_quantisation_are_refused() {
        let mut options = EngineOptions::new("m");
        options.dtype = DTypeOption::Bf16;
        assert!(options.device().is_ok());
        options.isq = Some("q9".into());
        assert_eq!(
            options.device().unwrap_err().to_string(),
            "option dtype = \"bf16\": with isq the CPU has no bf16 activations: choose f32 or f16"
        );
        let error = options.isq_type(&Device::Cpu).unwrap_err().to_string();
        assert!(error.starts_with("option isq = \"q9\": expected bits"), "{error}");
    }
}
