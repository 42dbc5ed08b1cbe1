//! Embeddings of users and items, which training makes and ranking judges.

/// Vectors of all users and items.
#[derive(Debug, Clone, PartialEq)]
pub struct Embeddings {
    /// Values of a vector.
    pub dimension: usize,
    /// One row per user, row-major.
    pub users: Vec<f32>,
    /// One row per item, row-major.
    pub items: Vec<f32>,
}
