//! Recommender models that Laser trains itself: collaborative embeddings (LightGCN) and the CTR models of the evidence.
