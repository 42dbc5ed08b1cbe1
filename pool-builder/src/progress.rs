//! The progress of a long build.

/// A step of building or tuning pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Reading the entity tables; counts entities.
    ReadEntities,
    /// Fitting clusters and attribute groups; counts kinds.
    Group,
    /// Routing every entity; counts entities.
    Route,
    /// Reading and sampling previous texts; counts texts.
    ReadTexts,
    /// Tokenising the sampled texts; counts texts.
    Tokenise,
    /// Building and writing pools; counts pools.
    WritePools,
    /// Replaying held-out texts; counts replays.
    Replay,
}

impl Stage {
    /// Returns the stage in words, for a progress display.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ReadEntities => "reading entities",
            Self::Group => "grouping",
            Self::Route => "routing",
            Self::ReadTexts => "reading previous texts",
            Self::Tokenise => "tokenising",
            Self::WritePools => "writing pools",
            Self::Replay => "replaying",
        }
    }
}

/// The progress of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildProgress {
    /// The stage.
    pub stage: Stage,
    /// Number of units done.
    pub done: u64,
    /// Total number of units, if known.
    pub total: Option<u64>,
}

/// Called at most once per batch.
pub type Progress<'a> = &'a mut (dyn FnMut(BuildProgress) + Send);
