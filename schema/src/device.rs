//! Where tensors live.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where the tensors live: `cpu`, `cuda` or `cuda:INDEX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceOption {
    /// The processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU by index; needs the `cuda` feature.
    Cuda(usize),
}

impl fmt::Display for DeviceOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for DeviceOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let index = match text {
            "cpu" => return Ok(Self::Cpu),
            "cuda" => Some(0),
            _ => text.strip_prefix("cuda:").and_then(|index| index.parse().ok()),
        };
        index.map(Self::Cuda).ok_or_else(|| format!("unknown device {text:?}: expected cpu, cuda or cuda:INDEX"))
    }
}

impl TryFrom<String> for DeviceOption {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceOption> for String {
    fn from(device: DeviceOption) -> Self {
        device.to_string()
    }
}
