//! What is compared: lists of ways to generate the same texts.
//!
//! The first of each list is plain decoding, which all others are measured against.

use laser_decode::{Drafter, PolicyError, Verification};
use laser_schema::Kind;
use laser_worker::generate::GenerateOptions;

use super::pools::PoolScheme;
use super::{DraftRule, SetupArgs};

/// Longest match of prompt lookup, as published for PLD.
const LOOKUP_NGRAM: usize = 3;

/// Better-ranked tokens beside one that is copied from the prompt, at most, as in AASD (arXiv:2505.13204, 3.2).
const ALIGNMENT: usize = 2;

/// Lookahead decoding as its authors' README sets it: a window of 7, n-grams of 5 and 7 guesses.
const LOOKAHEAD: Drafter = Drafter::Lookahead { window: 7, ngram: 5, guesses: 7 };

/// Nodes of an adaptive tree, at most.
pub(super) const ADAPTIVE_NODES: usize = 32;

/// The adaptive variants of [`batch`]: on a pool of all texts, and on one that predicts nothing.
pub(super) const ADAPTIVE: &str = "adaptive";
pub(super) const ADVERSARIAL: &str = "adaptive, no pool predicts";

/// Which of the draft models a variant has, and forwards per step of each.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Drafts {
    pub(super) indices: Vec<usize>,
    pub(super) forwards: usize,
    /// Whether trees follow what is measured of each of Medusa's heads.
    pub(super) has_measured_tree: bool,
    /// The threshold at which drafts stop, if they do.
    pub(super) stop_threshold: Option<f32>,
}

/// One way to generate texts.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Variant {
    pub(super) name: String,
    pub(super) drafter: Drafter,
    /// Better-ranked tokens beside one that is copied from the prompt, at most.
    pub(super) alignment: usize,
    pub(super) nodes: usize,
    pub(super) verification: Verification,
    /// What is drafted from beside prompt and output.
    pub(super) pools: Option<PoolScheme>,
    /// Whether the user's own old text is a branch of its own.
    pub(super) own_previous: bool,
    /// Whether `nodes` is a bound only, and each step drafts what pays.
    pub(super) adaptive: bool,
    /// Whether prompts begin from the prefix that they share.
    pub(super) shared_prefixes: bool,
    pub(super) drafts: Drafts,
}

impl Variant {
    pub(super) fn plain() -> Self {
        Self {
            name: "vanilla".into(),
            drafter: Drafter::None,
            alignment: 0,
            nodes: 0,
            verification: Verification::Strict,
            pools: None,
            own_previous: false,
            adaptive: false,
            shared_prefixes: true,
            drafts: Drafts::default(),
        }
    }

    /// Plain decoding where every prompt is computed whole.
    fn whole_prompts() -> Self {
        Self { name: "whole prompts".into(), shared_prefixes: false, ..Self::plain() }
    }

    /// Prompt lookup.
    pub(super) fn lookup(setup: &SetupArgs) -> Self {
        Self {
            name: "PLD".into(),
            drafter: Drafter::PromptLookup { max_ngram: LOOKUP_NGRAM },
            nodes: setup.nodes,
            ..Self::plain()
        }
    }

    /// The same with alignment sampling.
    pub(super) fn aligned(self, name: &str) -> Self {
        Self { name: name.into(), alignment: ALIGNMENT, ..self }
    }

    /// Lookahead decoding, with as many nodes as it can use.
    pub(super) fn lookahead() -> Self {
        let nodes = LOOKAHEAD.most_nodes().unwrap_or_default();
        Self { name: "Lookahead".into(), drafter: LOOKAHEAD, nodes, ..Self::plain() }
    }

    pub(super) fn pooled(name: impl Into<String>, setup: &SetupArgs, pools: PoolScheme) -> Self {
        Self {
            name: name.into(),
            drafter: setup.drafter.drafter(),
            nodes: setup.nodes,
            verification: Verification::Strict,
            pools: Some(pools),
            own_previous: setup.own_previous,
            ..Self::plain()
        }
    }

    /// The same with the paper's rule: the most frequent branches (3.3).
    pub(super) fn by_frequency(self, name: &str) -> Self {
        Self { name: name.into(), drafter: DraftRule::RawFrequency.drafter(), ..self }
    }

    /// The same with trees of whatever size pays.
    pub(super) fn adaptive(self, name: &str) -> Self {
        Self { name: name.into(), nodes: ADAPTIVE_NODES, adaptive: true, ..self }
    }

    pub(super) fn verified(self, verification: Verification) -> Self {
        Self { verification, ..self }
    }

    /// `base` with what the variant changes.
    pub(super) fn options(&self, base: &GenerateOptions) -> GenerateOptions {
        GenerateOptions {
            drafter: self.drafter,
            alignment: self.alignment,
            nodes: self.nodes,
            verification: self.verification,
            budget: base.budget.clone().filter(|_| self.adaptive),
            shared_prefixes: self.shared_prefixes,
            ..base.clone()
        }
    }

    /// Whether the texts must be those of plain decoding.
    pub(super) fn is_strict(&self) -> bool {
        self.verification == Verification::Strict
    }
}

/// Those of the paper's main table and ablation; ReSD is GRP, one global pool and strict. For users, who have
/// an old text, also the one thing that the paper leaves to the pool: that text as a branch of its own.
pub(super) fn paper(setup: &SetupArgs, kind: Kind) -> Result<Vec<Variant>, PolicyError> {
    let relaxed = Verification::relaxed(setup.k, setup.p)?;
    let custom = PoolScheme::Custom { max_texts: setup.pool_texts };
    let pooled = |name: &str, pools| Variant::pooled(name, setup, pools);
    let mut variants = vec![
        Variant::plain(),
        Variant::whole_prompts(),
        Variant::lookup(setup),
        pooled("", PoolScheme::Global).by_frequency("ReSD, paper's rule"),
        pooled("GRP (ReSD)", PoolScheme::Global),
        pooled("RRP", PoolScheme::Random),
        pooled("CRP", custom),
        pooled("RV+GRP", PoolScheme::Global).verified(relaxed),
        pooled("RV+RRP", PoolScheme::Random).verified(relaxed),
        pooled("", custom).verified(relaxed).by_frequency("LASER, paper's rule"),
        pooled("LASER (RV+CRP)", custom).verified(relaxed),
        pooled("", custom).verified(relaxed).adaptive("LASER adaptive"),
    ];
    if kind == Kind::User && !setup.own_previous {
        let laser = pooled("LASER+own", custom).verified(relaxed);
        variants.push(Variant { own_previous: true, ..laser });
    }
    Ok(variants)
}

/// Policies of verification: LASER's, AASD's for tokens of every source, and Medusa's, here for greedy texts. With p
/// alone k is ⌈1/p⌉, which is no bound: no more tokens than that can each have a probability above p.
pub(super) fn ablation(setup: &SetupArgs) -> Result<Vec<Variant>, PolicyError> {
    let custom = PoolScheme::Custom { max_texts: setup.pool_texts };
    let pooled = |name: String| Variant::pooled(name, setup, custom);
    let mut variants = vec![Variant::plain(), pooled("strict".into())];
    for k in [2, 3, 5] {
        variants.push(pooled(format!("top-{k}")).verified(Verification::relaxed(k, 0.0)?));
    }
    for (p, k) in [(0.05, 20), (0.1, 10), (0.2, 5), (0.3, 4)] {
        variants.push(pooled(format!("p > {p}")).verified(Verification::relaxed(k, p)?));
    }
    for p in [0.05, 0.1, 0.2, 0.3] {
        let relaxed = Verification::relaxed(setup.k, p)?;
        variants.push(pooled(format!("RV {}, {p}", setup.k)).verified(relaxed));
    }
    for beta in [0.02, 0.05, 0.1, 0.2, 0.3] {
        let conditional = Verification::conditional(0.1, beta, true)?;
        variants.push(pooled(format!("conditional 0.1, {beta}")).verified(conditional));
    }
    // With the paper's δ of 0.3 the entropy decides nearly everywhere, so another ε changes little.
    for (epsilon, delta) in [(0.09, 0.3), (0.1, 1.0), (0.2, 1.0), (0.3, 1.0)] {
        let typical = Verification::typical(epsilon, delta)?;
        variants.push(pooled(format!("typical {epsilon}, {delta}")).verified(typical));
    }
    Ok(variants)
}

/// Plain decoding, prompt lookup, trees of fixed sizes and adaptive ones, all relaxed and from one pool; then adaptive
/// trees from a pool that predicts nothing.
pub(super) fn batch(setup: &SetupArgs, trees: &[usize]) -> Result<Vec<Variant>, PolicyError> {
    let relaxed = Verification::relaxed(setup.k, setup.p)?;
    let tree = |name: String, nodes, pools| Variant { nodes, ..Variant::pooled(name, setup, pools).verified(relaxed) };
    let most = trees.iter().max().copied().unwrap_or(setup.nodes);
    let adaptive = |name: &str, pools| Variant { adaptive: true, ..tree(name.to_owned(), most, pools) };
    let mut variants = vec![Variant::plain(), Variant::lookup(setup)];
    variants.extend(trees.iter().map(|&nodes| tree(format!("tree {nodes}"), nodes, PoolScheme::Global)));
    variants.push(adaptive(ADAPTIVE, PoolScheme::Global));
    variants.push(adaptive(ADVERSARIAL, PoolScheme::Shuffled));
    Ok(variants)
}

/// Pools of several sizes, then trees of several sizes.
pub(super) fn sweep(setup: &SetupArgs, sizes: &[usize], trees: &[usize]) -> Result<Vec<Variant>, PolicyError> {
    let relaxed = Verification::relaxed(setup.k, setup.p)?;
    let pooled =
        |name: String, max_texts| Variant::pooled(name, setup, PoolScheme::Custom { max_texts }).verified(relaxed);
    let sizes = sizes.iter().map(|&size| pooled(format!("pool {size}"), size));
    let trees = trees.iter().map(|&nodes| Variant { nodes, ..pooled(format!("tree {nodes}"), setup.pool_texts) });
    let adaptive = pooled(String::new(), setup.pool_texts).adaptive("tree adaptive");
    Ok(std::iter::once(Variant::plain()).chain(sizes).chain(trees).chain([adaptive]).collect())
}
