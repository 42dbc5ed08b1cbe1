//! The algorithms of speculative decoding, and nothing else: pools of earlier texts, drafting from them, draft trees,
//! their verification, and the trie of item identifiers.
//!
//! A text is generated in steps. Each step drafts a tree of likely continuations
//! ([`DraftContext::draft`]), lets the target model score all its nodes in one forward, and keeps the
//! longest branch that the model agrees with ([`verify()`]).
//!
//! The crate knows no tensor, file, clock, thread or serialisation. It maps bytes and tokens to bytes and tokens, and
//! the same input gives the same output everywhere.

mod accuracies;
mod alignment;
mod beams;
mod blend;
mod code_shares;
mod draft;
mod frequent;
mod growth;
mod leaf_shares;
mod list_sampling;
mod listed;
mod lookahead;
mod neighbours;
mod pool;
mod pool_builder;
mod race;
mod refine;
mod rejection;
mod runners_up;
mod sampling;
mod sealed;
mod sources;
mod stochastic_beam;
mod suffix;
mod temporary;
mod tree;
mod trie;
mod verify;

pub use accuracies::Accuracies;
pub use alignment::Alignment;
pub use beams::{Beam, BeamSearch, Expected, Normalisation, Ranked, Uniform};
pub use code_shares::{CodeShares, UserCodes, build_code_pool};
pub use draft::{DraftContext, Drafter, DrafterError, ORDER_MAX};
pub use leaf_shares::{LeafShares, UserShares};
pub use list_sampling::{ListTrial, accept_list, accept_list_published, list_weights, sample_list};
pub use listed::{LikelyLists, ListContext, Listed};
pub use neighbours::{Method, Neighbours, NeighboursError, NeighboursOptions, build_neighbours};
pub use pool::{Pool, PoolError, PoolMeta, TOKENS_MAX, VOCABULARY_MAX};
pub use pool_builder::build_pool;
pub use refine::{Calibration, Refined, Terms, Verdict, log_odds, sharpened};
pub use rejection::{Trial, accept_given, accept_sampled, sample};
pub use runners_up::{PoolText, RUNNERS_UP_MAX, RunnerUp};
pub use sampling::{Draw, NOISE_BLOCK, Noise, Sampling, SamplingError, arrival};
pub use sources::SourceWeights;
pub use stochastic_beam::{Perturbed, perturbed_children};
pub use tree::{DraftTree, ROOT_PARENT, Source, chain_parents};
pub use trie::{
    Allowed, AllowedChildren, CODES_MAX, LEVELS_MAX, Seen, Stock, Trie, TrieError, TrieItem, TrieMeta, build_trie,
};
pub use verify::{BETA_MIN, Candidate, PolicyError, Prediction, TargetScores, Verification, Verified, verify};

/// A token id of the target model's tokenizer.
pub type Token = u32;
