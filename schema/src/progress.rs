//! How far a command is.

/// Shows how far a command is.
pub trait Progress: Send {
    /// Begins a stage; the one before is over.
    fn stage(&mut self, name: &str);

    /// The stage has come to `done` of `total`, if that is known; `detail` says how.
    fn update(&mut self, done: u64, total: Option<u64>, detail: &str);

    /// The stage has ended with this result.
    fn finish_with(&mut self, result: &str);
}

/// Shows nothing.
impl Progress for () {
    fn stage(&mut self, _: &str) {}

    fn update(&mut self, _: u64, _: Option<u64>, _: &str) {}

    fn finish_with(&mut self, _: &str) {}
}
