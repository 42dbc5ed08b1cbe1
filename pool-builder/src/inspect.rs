//! `laser pools inspect`: the contents of a pool set as data for the command line to print.

use laser_decode::{Pool, Token};
use laser_schema::{Digest, Kind};
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::clusters::Clustering;
use crate::error::PoolsError;
use crate::open::OpenPools;
use crate::pool_set::{EmbeddingCounts, GroupStatistics, KindGroups, PoolEntry, TextCounts};
use crate::router::Group;

/// The contents of a pool set.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// The set's digest.
    pub digest: Digest,
    /// Fingerprint of the tokenizer.
    pub tokenizer: Digest,
    /// The previous texts.
    pub texts: TextCounts,
    /// The groups of each kind.
    pub kinds: Vec<KindInspection>,
    /// The pools.
    pub pools: Vec<PoolInspection>,
}

/// The groups of one kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KindInspection {
    /// The kind.
    pub kind: Kind,
    /// Number of entities.
    pub entities: u64,
    /// How the clusters were chosen: the numbers tried, silhouettes, the number used.
    pub clustering: Option<Clustering>,
    /// The embeddings.
    pub embeddings: Option<EmbeddingCounts>,
    /// The groups.
    pub groups: Vec<GroupInspection>,
}

/// One group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupInspection {
    /// The group.
    #[serde(flatten)]
    pub group: Group,
    /// The sizes of the group.
    #[serde(flatten)]
    pub statistics: GroupStatistics,
}

/// One pool.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolInspection {
    /// What `pools.json` says of it.
    #[serde(flatten)]
    pub entry: PoolEntry,
    /// Bytes per token.
    pub bytes_per_token: f64,
    /// Tokens whose runners-up are known.
    pub contested: usize,
    /// The most frequent branches, most frequent first.
    pub branches: Vec<Branch>,
}

/// A sequence of tokens that occurs in a pool.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Branch {
    /// The tokens as text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// Number of occurrences.
    pub count: u32,
}

/// Inspects all pools, listing the `branches` most frequent sequences of `branch_tokens` tokens of each. Takes a pass
/// over every pool.
///
/// # Errors
/// If the tokenizer cannot decode a branch.
pub fn inspect(
    pools: &OpenPools,
    tokenizer: &Tokenizer,
    branch_tokens: usize,
    branches: usize,
) -> Result<Inspection, PoolsError> {
    let set = pools.set();
    let mut inspected = Vec::with_capacity(set.pools.len());
    for entry in &set.pools {
        let Some(pool) = pools.pool(&entry.name) else {
            continue;
        };
        inspected.push(PoolInspection {
            entry: entry.clone(),
            bytes_per_token: entry.bytes as f64 / entry.tokens.max(1) as f64,
            contested: pool.contested(),
            branches: top_branches(&pool, tokenizer, branch_tokens, branches)?,
        });
    }
    Ok(Inspection {
        digest: pools.digest().clone(),
        tokenizer: set.tokenizer.clone(),
        texts: set.texts.clone(),
        kinds: set.kinds.iter().map(|(&kind, groups)| inspect_kind(kind, groups)).collect(),
        pools: inspected,
    })
}

fn inspect_kind(kind: Kind, groups: &KindGroups) -> KindInspection {
    let group = |(group, statistics): (&Group, &GroupStatistics)| GroupInspection {
        group: group.clone(),
        statistics: statistics.clone(),
    };
    KindInspection {
        kind,
        entities: groups.entities,
        clustering: groups.clustering.clone(),
        embeddings: groups.embeddings.clone(),
        groups: groups.router.groups().iter().zip(&groups.statistics).map(group).collect(),
    }
}

fn top_branches(pool: &Pool, tokenizer: &Tokenizer, length: usize, limit: usize) -> Result<Vec<Branch>, PoolsError> {
    let decoded = |(tokens, count): (Vec<Token>, u32)| {
        let text = tokenizer.decode(&tokens, false).map_err(PoolsError::Tokenizer)?;
        Ok(Branch { text, tokens, count })
    };
    pool.top_branches(length, limit).into_iter().map(decoded).collect()
}
