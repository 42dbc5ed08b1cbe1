//! What a list is expected to be without a draft model, by histories and by other lists.

use std::collections::HashMap;

use laser_decode::{Expected, ListContext, Listed, Method, Uniform, UserCodes};

use super::options::ListDraft;
use crate::catalogue::{Catalogue, Counted};
use crate::generate::Request;

/// Of a user's expected choices those that the own history makes likely; the others are everybody's.
const OWN: f64 = 0.5;

/// Items that a user's own history makes likely, at most.
const OWN_ITEMS: usize = 256;

/// What the histories of all users say of one user's next choices. Each source is asked once, when it first ranks.
#[derive(Default)]
pub(super) struct Expectation {
    /// Items with weights.
    likely: HashMap<Method, Vec<(u32, f32)>>,
    codes: Option<UserCodes>,
    context: Option<ListContext>,
}

impl Expectation {
    /// What is looked up for a user among other lists.
    pub(super) fn context(&mut self, request: &Request, catalogue: &Catalogue) -> &ListContext {
        let Request { history, previous_items, .. } = request;
        self.context.get_or_insert_with(|| ListContext::new(&catalogue.trie, history, previous_items))
    }

    /// Ranks by what a source expects for a request, or by what `listed` has; one that is not there expects all codes
    /// alike.
    pub(super) fn rank(
        &mut self,
        (draft, request): (ListDraft, &Request),
        (catalogue, listed): (&Catalogue, Option<&Listed>),
        rank: impl FnOnce(&mut dyn Expected),
    ) {
        if let (ListDraft::Listed, Some(listed)) = (draft, listed) {
            return rank(&mut listed.of_user(self.context(request, catalogue)));
        }
        let history = &request.history;
        match (draft, &catalogue.counted, &catalogue.codes) {
            (ListDraft::Counted(method), Some(counted), _) => {
                let likely = self.likely.entry(method).or_insert_with(|| likely(history, counted, method));
                rank(&mut counted.shares.of_user(likely, OWN));
            }
            (ListDraft::Retrieval, _, Some(codes)) => rank(self.codes.get_or_insert_with(|| codes.of_user(history))),
            _ => rank(&mut Uniform),
        }
    }
}

/// The items that a history makes likely, with weights, as drafts need them.
fn likely(history: &[u32], counted: &Counted, method: Method) -> Vec<(u32, f32)> {
    let mut likely = Vec::new();
    if method != Method::Popularity {
        counted.neighbours.best(method, history, &[], OWN_ITEMS, &mut likely);
    }
    likely
}
