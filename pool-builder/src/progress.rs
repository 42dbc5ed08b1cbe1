//! What a long build tells while it runs.

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
    /// In words, for a progress display.
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

/// How far a stage has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildProgress {
    /// The stage.
    pub stage: Stage,
    /// How many of its units are done.
    pub done: u64,
    /// How many there are, where that is known.
    pub total: Option<u64>,
}

/// Called at most once a batch.
pub type Progress<'a> = &'a mut (dyn FnMut(BuildProgress) + Send);
