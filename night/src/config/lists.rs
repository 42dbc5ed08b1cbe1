//! `[lists]`: a night that makes lists of items in place of texts.

use anyhow::{Result, ensure};
use laser_decode::{Method, Normalisation as Relative};
use laser_schema::Digest;
use laser_schema::job::Policy;
use laser_schema::lists::{ITEMS_MAX, ListRows, ListSpec, Normalisation, Ties};
use laser_store::catalogue::CatalogueTable;
use laser_worker::lists::{ListDraft, ListOptions, ListSampling};
use serde::{Deserialize, Serialize};

use super::Config;

/// Most steps ahead that are drafted for.
const STEPS_MAX: usize = 3;

/// `[lists]`: part of the specification, but for what the output's rows are and what is drafted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListsConfig {
    /// The items with their identifiers.
    pub catalogue: CatalogueTable,
    /// A table of items that must not be listed, with the catalogue's column of ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out_of_stock: Option<String>,
    /// The field of a history's interactions that names the item.
    pub item: String,
    /// Items of a list.
    pub items: usize,
    /// The users' column with the number of items of each one's list; a user without it gets `items`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub items_from: Option<String>,
    /// Beams of the search; as many as items if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// What a code's probability is relative to.
    pub normalisation: Normalisation,
    /// Whether items of a user's history may be listed.
    pub repeat: bool,
    /// What becomes of items that share an identifier.
    pub ties: Ties,
    /// What a row of the output is.
    #[serde(skip_serializing_if = "ListRows::is_user")]
    pub rows: ListRows,
    /// How lists are drawn at a temperature.
    pub sampling: ListSamplingKind,
    /// With `atspeed-published`: prefixes that are drafted for a step.
    pub drafted: usize,
    /// What is drafted.
    pub draft: ListDraftKind,
    /// Prefixes that are drafted for a user and step, at most.
    pub nodes: usize,
    /// Steps ahead that are drafted for, at most.
    pub steps: usize,
}

/// `[lists] sampling`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ListSamplingKind {
    /// Without replacement from the model's distribution; no draft changes a list.
    #[default]
    StochasticBeam,
    /// AtSpeed's relaxed sampling.
    #[serde(rename = "atspeed")]
    AtSpeed,
    /// AtSpeed's relaxed sampling as its authors published it.
    #[serde(rename = "atspeed-published")]
    AtSpeedPublished,
}

/// `[lists] draft`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ListDraftKind {
    /// Nothing: one step per forward.
    None,
    /// What the trie has behind the beams.
    Trie,
    /// Of that first what the night's lists so far had, of users whose last items have the same first codes.
    #[default]
    Listed,
    /// What leads to items that many users have.
    Popularity,
    /// What leads to items that most often follow the user's last one.
    Markov,
    /// What leads to items that users of the same items have.
    Knn,
    /// What followed the last codes of the user's history, and of the beam, in all histories.
    Retrieval,
    /// Whichever of these, and of the draft model, is expected to save most.
    Auto,
}

impl ListDraftKind {
    fn draft(self) -> ListDraft {
        match self {
            Self::None => ListDraft::None,
            Self::Trie => ListDraft::Trie,
            Self::Listed => ListDraft::Listed,
            Self::Popularity => ListDraft::Counted(Method::Popularity),
            Self::Markov => ListDraft::Counted(Method::Markov),
            Self::Knn => ListDraft::Counted(Method::Knn),
            Self::Retrieval => ListDraft::Retrieval,
            Self::Auto => ListDraft::Auto,
        }
    }
}

/// The files of a run that say for drafts what the histories of all users say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HistoryFiles {
    /// Counts of items, for popularity, Markov chain and item-kNN.
    pub counted: bool,
    /// The histories as codes, for retrieval.
    pub codes: bool,
}

impl Default for ListsConfig {
    fn default() -> Self {
        Self {
            catalogue: CatalogueTable::default(),
            out_of_stock: None,
            item: "item".into(),
            items: 20,
            items_from: None,
            width: None,
            normalisation: Normalisation::default(),
            repeat: false,
            ties: Ties::default(),
            rows: ListRows::default(),
            sampling: ListSamplingKind::default(),
            drafted: 40,
            draft: ListDraftKind::default(),
            nodes: 256,
            steps: 3,
        }
    }
}

impl ListsConfig {
    /// What drafts need.
    pub(crate) fn history_files(&self) -> HistoryFiles {
        match self.draft.draft() {
            ListDraft::None | ListDraft::Trie | ListDraft::Listed => HistoryFiles::default(),
            ListDraft::Counted(_) => HistoryFiles { counted: true, codes: false },
            ListDraft::Retrieval => HistoryFiles { counted: false, codes: true },
            ListDraft::Auto => HistoryFiles { counted: true, codes: true },
        }
    }

    fn width(&self) -> usize {
        self.width.unwrap_or(self.items)
    }

    /// Checks what the types leave open.
    ///
    /// # Errors
    /// Naming the key and what to write instead.
    pub(super) fn validate(&self) -> Result<()> {
        ensure!(
            !self.catalogue.path.is_empty(),
            "[lists.catalogue] path: not set; give a table of items with their identifiers"
        );
        ensure!((1..=ITEMS_MAX).contains(&self.items), "[lists] items = {}: expected 1 to {ITEMS_MAX}", self.items);
        ensure!(
            self.width() >= self.items,
            "[lists] width = {}: expected at least as many beams as items, {}",
            self.width(),
            self.items
        );
        ensure!(
            self.sampling != ListSamplingKind::AtSpeedPublished || self.drafted > self.width(),
            "[lists] drafted = {}: sampling = \"atspeed-published\" drafts more prefixes for a step than there are \
             beams, {}; \"atspeed\" drafts as many",
            self.drafted,
            self.width()
        );
        ensure!(
            self.items_from.is_none() || self.sampling == ListSamplingKind::StochasticBeam,
            "[lists] items_from: sampling = \"stochastic-beam\" alone draws lists of different lengths; choose it, or \
             remove items_from"
        );
        ensure!((1..=STEPS_MAX).contains(&self.steps), "[lists] steps = {}: expected 1 to {STEPS_MAX}", self.steps);
        Ok(())
    }

    /// Refuses what only texts have.
    ///
    /// # Errors
    /// Naming the key.
    pub(crate) fn check(&self, config: &Config) -> Result<()> {
        let refused = [
            ("[generate] top_k", config.generate.top_k.is_some()),
            ("[generate] top_p", config.generate.top_p.is_some()),
            ("[generate] samples", config.generate.samples > 1),
            ("[encoder]", config.encoder.is_some()),
            ("[guards]", config.guards.is_some()),
            ("[demo]", config.demo.is_some()),
            ("[output] runners_up", config.output.runners_up > 0),
            ("[draft] alignment", config.draft.alignment > 0),
            ("[draft.model] acceptance_head", config.draft.model.iter().any(|model| model.acceptance_head.is_some())),
            ("[draft.model] stop_threshold", config.draft.model.iter().any(|model| model.stop_threshold.is_some())),
            ("a second [[draft.model]]", config.draft.model.len() > 1),
        ];
        for (key, is_set) in refused {
            ensure!(!is_set, "{key}: is for texts, and [lists] makes none; remove it, or [lists]");
        }
        ensure!(
            self.sampling == ListSamplingKind::StochasticBeam || config.generate.temperature > 0.0,
            "[lists] sampling: says how lists are drawn; set [generate] temperature, or remove it"
        );
        ensure!(
            self.sampling == ListSamplingKind::StochasticBeam || !config.draft.is_adaptive(),
            "[lists] sampling: drafts decide such a list, and here measured costs decide what is drafted, so that \
             another run would have other lists; set [draft] adaptive = false, or remove [lists] sampling"
        );
        ensure!(
            self.draft != ListDraftKind::Auto || config.draft.is_adaptive(),
            "[lists] draft = \"auto\": chooses by measured costs; set [draft] adaptive = true and leave out [draft] \
             method, or name what is drafted, such as \"knn\""
        );
        ensure!(
            config.model.engine == super::EngineKind::Tree,
            "[model] engine: lists need \"tree\", whose trees the beams are"
        );
        Ok(())
    }

    /// What decides lists, given the digests of the trie and of the items out of stock.
    pub(crate) fn spec(&self, trie: Digest, out_of_stock: Option<Digest>) -> ListSpec {
        ListSpec {
            trie,
            out_of_stock,
            items: self.items,
            items_from: self.items_from.clone(),
            width: self.width(),
            normalisation: self.normalisation,
            repeat: self.repeat,
            ties: self.ties,
        }
    }

    /// How drafts are verified, as the specification has it.
    pub(crate) fn policy(&self) -> Policy {
        match self.sampling {
            // A list is that of the plain search, whatever is drafted.
            ListSamplingKind::StochasticBeam => Policy::Strict,
            ListSamplingKind::AtSpeed => Policy::AtSpeed,
            ListSamplingKind::AtSpeedPublished => Policy::AtSpeedPublished { drafted: self.drafted },
        }
    }

    /// How lists are made, without the cost of forwards.
    pub(crate) fn options(&self, config: &Config) -> ListOptions {
        ListOptions {
            items: self.items,
            width: self.width(),
            normalisation: match self.normalisation {
                Normalisation::Vocabulary => Relative::Vocabulary,
                Normalisation::Allowed => Relative::Allowed,
            },
            repeat: self.repeat,
            all_ties: self.ties == Ties::All,
            temperature: (config.generate.temperature != 0.0).then(|| f64::from(config.generate.temperature)),
            sampling: match self.sampling {
                ListSamplingKind::StochasticBeam => ListSampling::StochasticBeam,
                ListSamplingKind::AtSpeed => ListSampling::AtSpeed,
                ListSamplingKind::AtSpeedPublished => ListSampling::Published(self.drafted),
            },
            draft: self.draft.draft(),
            nodes: self.nodes,
            steps: self.steps,
            batch: config.generate.batch,
            step_tokens: config.generate.step_tokens(config.model.device),
            cost: None,
        }
    }
}
