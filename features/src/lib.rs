//! What a text is worth to a model: embeddings of texts and knowledge ids.

pub mod encoder;
