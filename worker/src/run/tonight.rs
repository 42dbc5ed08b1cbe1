//! Texts of the night itself, as drafts for those that no pool is for. On a first night there is none, and what a model
//! writes of one user foretells much of what it writes of the next.
//!
//! Each worker knows the texts that it wrote itself. They become a pool when there are [`FIRST`] of a kind, and again
//! whenever there are twice as many, up to [`MOST`]. That pool is built in 0.1 s, and all of them in twice that.
//!
//! What drafts from them is verified strictly, whatever the rule. Otherwise a text would depend on which others its
//! worker wrote before, and guards, which judge a pool before it is used, could not judge this one. So a first night's
//! texts are what plain decoding gives.

use std::collections::{HashMap, HashSet};

use laser_decode::{Pool, PoolError, PoolMeta, Token, build_pool};
use laser_schema::{EntityId, Kind};

/// Texts of a kind from which the first pool is built.
const FIRST: usize = 16;

/// Texts of a kind that are kept, at most: as many as a pool has by default.
const MOST: usize = 10_000;

/// The texts that a worker has written of a night.
pub(super) struct Tonight {
    /// What their pools are; none where nothing is drafted from pools.
    meta: Option<PoolMeta>,
    kinds: HashMap<Kind, Written>,
}

/// The texts of a kind.
#[derive(Default)]
struct Written {
    texts: Vec<(EntityId, Vec<Token>)>,
    /// That of the texts so far, or of the first half of them and more.
    pool: Option<Pool>,
}

impl Tonight {
    /// Of a generator whose [pools](crate::generate::TextGenerator::pool_meta) are these.
    pub(super) fn new(meta: Option<PoolMeta>) -> Self {
        Self { meta, kinds: HashMap::new() }
    }

    /// Whether texts without a pool draft from those of the night.
    pub(super) fn is_kept(&self) -> bool {
        self.meta.is_some()
    }

    /// A pool of the texts of a kind, as soon as there are enough.
    pub(super) fn pool(&self, kind: Kind) -> Option<Pool> {
        self.kinds.get(&kind)?.pool.clone()
    }

    /// Adds a text that has been written.
    pub(super) fn add(&mut self, kind: Kind, id: &EntityId, tokens: &[Token]) {
        let Some(meta) = &self.meta else { return };
        let written = self.kinds.entry(kind).or_default();
        if written.texts.len() == MOST {
            return;
        }
        written.texts.push((id.clone(), tokens.to_vec()));
        let count = written.texts.len();
        if count == MOST || (count.is_power_of_two() && count >= FIRST) {
            written.pool = pool(meta, written.texts.iter().map(|(_, tokens)| tokens));
        }
    }

    /// A pool of all texts of a kind but those of some entities: their texts are made once more for an audit, whose
    /// drafts must not know them.
    pub(super) fn without<'a>(&self, kind: Kind, ids: impl Iterator<Item = &'a EntityId>) -> Option<Pool> {
        let (meta, written) = (self.meta.as_ref()?, self.kinds.get(&kind)?);
        let ids: HashSet<&EntityId> = ids.collect();
        let others = written.texts.iter().filter(|(id, _)| !ids.contains(id));
        written.pool.as_ref().and_then(|_| pool(meta, others.map(|(_, tokens)| tokens)))
    }
}

/// The pool of these texts. Without one they are generated all the same.
fn pool<'a>(meta: &PoolMeta, texts: impl Iterator<Item = &'a Vec<Token>>) -> Option<Pool> {
    let built = build_pool(meta, texts.cloned()).and_then(|bytes| Pool::open(bytes.into()));
    built.inspect_err(|error: &PoolError| tracing::warn!(%error, "no pool of tonight's texts")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta() -> PoolMeta {
        PoolMeta { name: "tonight".into(), tokenizer: [0; 32], vocab_size: 100_000, end_of_text: 2 }
    }

    fn id(number: usize) -> EntityId {
        EntityId::Int(i64::try_from(number).unwrap())
    }

    fn texts(pool: Option<Pool>) -> usize {
        pool.map_or(0, |pool| pool.texts())
    }

    #[test]
    fn a_pool_grows_by_doubling_up_to_the_most_texts() {
        let mut tonight = Tonight::new(Some(meta()));
        let mut sizes = Vec::new();
        for number in 0..MOST + 1_000 {
            tonight.add(Kind::User, &id(number), &[3, u32::try_from(number).unwrap() + 10]);
            sizes.push(texts(tonight.pool(Kind::User)));
        }
        sizes.dedup();
        assert_eq!(sizes, [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, MOST]);
        assert_eq!(texts(tonight.pool(Kind::Item)), 0);
    }

    #[test]
    fn an_audit_does_not_know_the_texts_that_it_makes_again() {
        let mut tonight = Tonight::new(Some(meta()));
        let audited = [id(3), id(7), id(99)];
        (0..FIRST - 1).for_each(|number| tonight.add(Kind::User, &id(number), &[10, 20, 30]));
        assert_eq!(texts(tonight.without(Kind::User, audited.iter())), 0, "none has been drafted from");
        // Another sample of an entity is left out with the first one.
        tonight.add(Kind::User, &id(7), &[10, 20, 40]);
        assert_eq!(texts(tonight.without(Kind::User, audited.iter())), FIRST - 3);
        assert_eq!(texts(tonight.pool(Kind::User)), FIRST);
        assert_eq!(texts(tonight.without(Kind::Item, audited.iter())), 0);
    }

    #[test]
    fn nothing_is_kept_where_nothing_is_drafted_from_pools() {
        let mut tonight = Tonight::new(None);
        (0..FIRST).for_each(|number| tonight.add(Kind::User, &id(number), &[10]));
        assert!(tonight.kinds.is_empty() && !tonight.is_kept());
        assert!(tonight.pool(Kind::User).is_none() && tonight.without(Kind::User, [].iter()).is_none());
    }

    #[test]
    fn texts_that_no_pool_takes_are_written_without_one() {
        let mut tonight = Tonight::new(Some(PoolMeta { vocab_size: 5, ..meta() }));
        (0..FIRST).for_each(|number| tonight.add(Kind::User, &id(number), &[7]));
        assert!(tonight.pool(Kind::User).is_none());
    }
}
