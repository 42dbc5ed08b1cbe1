//! How lists are made.

use laser_decode::{Method, Normalisation};

use crate::cost::StepCost;
use crate::generate::Request;

/// Prompts up to this many tokens have caches of the same size.
const SHORT: usize = 128;

/// What is drafted for lists without a draft model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ListDraft {
    /// Nothing.
    None,
    /// Continuations that the trie has: of the last codes few are left.
    Trie,
    /// Of those first what the lists so far had, of users with like histories, and what the user's own previous list
    /// had.
    #[default]
    Listed,
    /// Those that lead to items which the histories of all users make likely for this one.
    Counted(Method),
    /// Those that followed the last codes of the history, and of the beam, in the histories of all users.
    Retrieval,
    /// Whichever of these saves most at what forwards cost; where that is not known, each for some lists.
    Auto,
}

/// How lists are drawn at a temperature, and their drafts verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ListSampling {
    /// By stochastic beam search, strictly verified: no draft changes a list.
    #[default]
    StochasticBeam,
    /// At every step, and so are as many drafts as there are beams: AtSpeed's relaxed sampling
    /// ([`accept_list`](laser_decode::accept_list)).
    AtSpeed,
    /// At every step, and so are this many drafts, more than beams: what AtSpeed's authors published
    /// ([`accept_list_published`](laser_decode::accept_list_published)).
    Published(usize),
}

/// How lists are made.
#[derive(Debug, Clone)]
pub struct ListOptions {
    /// Items of a list, of a request that does not say another number.
    pub items: usize,
    /// Beams of a search for that many, at least as many; one for more items or fewer has them in proportion.
    pub width: usize,
    /// What a code's probability is relative to.
    pub normalisation: Normalisation,
    /// Draws lists at this temperature, above 0, by the noise of [`Request::key`](crate::generate::Request::key); the
    /// most probable ones are searched for if absent.
    pub temperature: Option<f64>,
    /// How they are drawn at a temperature.
    pub sampling: ListSampling,
    /// Whether items of the user's history may be listed.
    pub repeat: bool,
    /// Whether all items are listed that share an identifier, or only the first.
    pub all_ties: bool,
    /// What is drafted where no draft model is.
    pub draft: ListDraft,
    /// Drafted prefixes of a user and step, at most.
    pub nodes: usize,
    /// Steps ahead that are drafted for, at most.
    pub steps: usize,
    /// Lists that are worked on at a time; at least 1.
    pub batch: usize,
    /// Tokens of prompts in a step, at most; at least 1. Longer prompts are prefilled in chunks.
    pub step_tokens: usize,
    /// The cost of a forward, by which drafts are cut to what pays; the most is drafted if absent.
    pub cost: Option<StepCost>,
}

impl ListOptions {
    /// Items of a request's list.
    pub(super) fn items(&self, request: &Request) -> usize {
        request.items.unwrap_or(self.items)
    }

    /// Beams of a request's search.
    pub(super) fn width(&self, request: &Request) -> usize {
        (self.width * self.items(request)).div_ceil(self.items)
    }

    /// Tokens of the largest step of a model with so many positions: as many beams and drafted prefixes as there may be
    /// of every list, behind prompts.
    #[must_use]
    pub fn largest_step(&self, positions: usize) -> usize {
        (self.batch * positions).min(self.step_tokens) + self.batch * (self.width + self.nodes)
    }

    /// How many prefixes are drafted for each step, where that is not to be chosen.
    pub(super) fn drafted(&self) -> Option<usize> {
        match self.sampling {
            _ if self.temperature.is_none() => None,
            ListSampling::StochasticBeam => None,
            ListSampling::AtSpeed => Some(self.width),
            ListSampling::Published(drafted) => Some(drafted),
        }
    }

    /// What a cache may grow to: a prompt, and the prefixes of as many steps as an identifier has `levels`.
    ///
    /// Prompts are counted as if their lengths were powers of two, so that most caches have one size, and one that is
    /// closed serves the next list. A new one for 71M parameters and 256 drafted prefixes has 70 MB to be zeroed, which
    /// took a third of a list's time.
    pub(super) fn capacity(&self, request: &Request, levels: usize) -> usize {
        request.prompt.len().next_power_of_two().max(SHORT) + levels * (self.width(request) + self.nodes)
    }
}
