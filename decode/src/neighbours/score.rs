//! Scores of items for a history, by popularity, a Markov chain or item-kNN.

use super::Neighbours;

/// A recommender that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Method {
    /// How often an item occurs.
    Popularity,
    /// How often an item directly follows the last one of the history, as a share of all that follow it.
    Markov,
    /// The sum, over the history, of an item's cosine with each of its items, the later ones weighing more
    /// ([`NeighboursOptions::recency`](super::NeighboursOptions::recency)).
    Knn,
}

impl Method {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Popularity, Self::Markov, Self::Knn];

    /// The wording in tables.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Popularity => "popularity",
            Self::Markov => "Markov",
            Self::Knn => "item-kNN",
        }
    }
}

impl Neighbours {
    /// Writes all items of the catalogue but for those of the history, best first: `(item, score)`. See
    /// [`Self::best`].
    pub fn score(&self, method: Method, history: &[u32], into: &mut Vec<(u32, f32)>) {
        self.best(method, history, history, usize::MAX, into);
    }

    /// Writes the `limit` best items for a history, oldest first, that are not among `left_out`: `(item, score)`, best
    /// first. Ties go to the more popular item, then by number.
    ///
    /// What a method knows nothing of has the score 0, so behind a Markov chain's successors, or neighbours, the rest
    /// follows by popularity. Items of the history that are outside the catalogue are passed over. Costs O(m log m) for
    /// the m entries that the method reads, plus what is written and left out.
    pub fn best(&self, method: Method, history: &[u32], left_out: &[u32], limit: usize, into: &mut Vec<(u32, f32)>) {
        into.clear();
        match method {
            Method::Popularity => {}
            Method::Markov => into.extend(history.last().into_iter().flat_map(|&last| self.successors(last))),
            Method::Knn => self.sum_neighbours(history, into),
        }
        let mut left_out = left_out.to_vec();
        left_out.sort_unstable();
        into.retain(|(item, _)| left_out.binary_search(item).is_err());
        self.keep_best(limit, into);
        left_out.extend(into.iter().map(|&(item, _)| item));
        left_out.sort_unstable();
        let rest = self.popular().filter(|item| left_out.binary_search(item).is_err());
        let score = |item| if method == Method::Popularity { self.count(item) as f32 } else { 0.0 };
        into.extend(rest.take(limit - into.len()).map(|item| (item, score(item))));
    }

    /// Writes the weighted sum of the cosines of each item that is a neighbour of the history. The largest term is
    /// added first. Items so long ago that their weight rounds to 0 are passed over.
    fn sum_neighbours(&self, history: &[u32], into: &mut Vec<(u32, f32)>) {
        let recency = self.options().recency;
        let weights = std::iter::successors(Some(1.0f32), |weight| Some(weight * recency));
        for (&seen, weight) in history.iter().rev().zip(weights).take_while(|(_, weight)| *weight > 0.0) {
            let terms = self.neighbours(seen).map(|(item, cosine)| (item, weight * cosine));
            into.extend(terms.filter(|(_, term)| *term > 0.0));
        }
        into.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
        into.dedup_by(|next, sum| {
            let same = next.0 == sum.0;
            if same {
                sum.1 += next.1;
            }
            same
        });
    }

    /// Keeps the best items, in order.
    fn keep_best(&self, limit: usize, into: &mut Vec<(u32, f32)>) {
        let popularity = |item: u32| (std::cmp::Reverse(self.count(item)), item);
        let order =
            |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then_with(|| popularity(a.0).cmp(&popularity(b.0)));
        if into.len() > limit {
            into.select_nth_unstable_by(limit, order);
            into.truncate(limit);
        }
        into.sort_unstable_by(order);
    }
}
