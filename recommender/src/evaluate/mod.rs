//! `laser eval`: what embeddings and texts are worth to recommender models, and how good lists are, on the user's own
//! interactions.

mod attributes;
mod config;
mod ctr;
mod knowledge;
mod leak;
mod lists;
mod ranking;
mod report;

pub use config::{AttributesConfig, EvalConfig, IdsSource, KnowledgeConfig, Split};
pub use ctr::ctr;
pub use knowledge::Form;
pub use leak::instant;
pub use lists::{ListsEvalConfig, ListsPair, ListsReport, ListsSource, MakerConfig, MakerRow, SeedRow, lists};
pub use ranking::{Method, RankingReport, ranking};
pub use report::{Coverage, CtrReport, GroupRow, Pair, PartSummary, Row};
