//! Texts of the night itself, as drafts for those that no pool is for, or where the pools have few texts. A first night
//! has no pools, and what a model writes of one user foretells much of what it writes of the next.
//!
//! Each worker knows the texts that it wrote itself. They become a pool when there are [`FIRST`] of a kind, and again
//! whenever there are twice as many, up to [`MOST`]. That pool is built in 0.1 s, and all of them in twice that.
//!
//! What drafts from them is verified strictly, whatever the rule. Otherwise a text would depend on which others its
//! worker wrote before, and guards, which judge a pool before it is used, could not judge this one. So a first night's
//! texts are what plain decoding gives. For the same reason they never replace a pool in two cases:
//!
//! - Drafts do not adapt. There, and only there, a relaxed text depends on its entity alone.
//! - Guards hold back a pool's texts until its audit is judged. A worker that has outgrown the pools would audit such a
//!   pool without drafting from it, and other workers would then generate with a pool that nobody has judged.

use std::collections::{HashMap, HashSet};

use laser_decode::{Pool, PoolError, PoolMeta, Token, build_pool};
use laser_schema::{EntityId, Kind};

/// Texts of a kind from which the first pool is built.
const FIRST: usize = 16;

/// Texts of a kind that are kept, at most: as many as a pool has by default.
const MOST: usize = 10_000;

/// Tonight's texts of a kind replace its pools when they are so many times as many as all pools have. Four times as
/// many accept a quarter to a half more (docs/performance.md, "First nights"); what a relaxed rule accepts more than a
/// strict one is a quarter.
const TIMES: usize = 4;

/// The texts that a worker has written of a night.
pub(super) struct Tonight {
    /// What their pools are, but for the kind in their names; none where nothing is drafted from pools.
    meta: Option<PoolMeta>,
    /// Texts that replace a pool, at least; none where no pool is ever replaced.
    replacing: Option<usize>,
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
    /// Of a generator whose [pools](crate::generate::TextGenerator::pool_meta) would be these, beside those that there
    /// are, which the night's texts may replace or not.
    pub(super) fn new<'a>(meta: Option<PoolMeta>, may_replace: bool, pools: impl Iterator<Item = &'a Pool>) -> Self {
        let texts = TIMES * pools.map(Pool::texts).sum::<usize>();
        Self { meta, replacing: (may_replace && texts <= MOST).then_some(texts), kinds: HashMap::new() }
    }

    /// Whether texts draft from those of the night: they have no pool, or the night has far outgrown the pools.
    pub(super) fn replaces(&self, has_pool: bool, kind: Kind) -> bool {
        match has_pool {
            false => self.meta.is_some(),
            true => self.pool(kind).zip(self.replacing).is_some_and(|(tonight, least)| tonight.texts() >= least),
        }
    }

    /// A pool of the texts of a kind, as soon as there are enough.
    pub(super) fn pool(&self, kind: Kind) -> Option<Pool> {
        self.kinds.get(&kind)?.pool.clone()
    }

    /// Adds a text that has been written, unless the night's never replace the pool that such texts have.
    pub(super) fn add(&mut self, has_pool: bool, (kind, id): (Kind, &EntityId), tokens: &[Token]) {
        let Some(meta) = &self.meta else { return };
        if has_pool && self.replacing.is_none() {
            return;
        }
        let written = self.kinds.entry(kind).or_default();
        if written.texts.len() == MOST {
            return;
        }
        written.texts.push((id.clone(), tokens.to_vec()));
        let count = written.texts.len();
        if count == MOST || (count.is_power_of_two() && count >= FIRST) {
            written.pool = pool(meta, kind, written.texts.iter().map(|(_, tokens)| tokens));
        }
    }

    /// A pool of all texts of a kind but those of some entities: their texts are made once more for an audit, whose
    /// drafts must not know them.
    pub(super) fn without<'a>(&self, kind: Kind, ids: impl Iterator<Item = &'a EntityId>) -> Option<Pool> {
        let (meta, written) = (self.meta.as_ref()?, self.kinds.get(&kind)?);
        written.pool.as_ref()?;
        let ids: HashSet<&EntityId> = ids.collect();
        let others = written.texts.iter().filter(|(id, _)| !ids.contains(id));
        pool(meta, kind, others.map(|(_, tokens)| tokens))
    }
}

/// The pool of these texts. Without one they are generated all the same. Each kind's has a name of its own, by which
/// the draft budget keeps what it learns.
fn pool<'a>(meta: &PoolMeta, kind: Kind, texts: impl Iterator<Item = &'a Vec<Token>>) -> Option<Pool> {
    let meta = PoolMeta { name: format!("{}-{kind}", meta.name), ..meta.clone() };
    let built = build_pool(&meta, texts.cloned()).and_then(|bytes| Pool::open(bytes.into()));
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

    fn text(number: usize) -> Vec<Token> {
        vec![3, u32::try_from(number).unwrap() + 10]
    }

    fn pool_of(texts: usize) -> Pool {
        let texts: Vec<Vec<Token>> = (0..texts).map(text).collect();
        pool(&meta(), Kind::User, texts.iter()).unwrap()
    }

    fn texts(pool: Option<Pool>) -> usize {
        pool.map_or(0, |pool| pool.texts())
    }

    #[test]
    fn a_pool_grows_by_doubling_up_to_the_most_texts() {
        let mut tonight = Tonight::new(Some(meta()), true, [].iter());
        let mut sizes = Vec::new();
        for number in 0..MOST + 1_000 {
            tonight.add(false, (Kind::User, &id(number)), &text(number));
            sizes.push(texts(tonight.pool(Kind::User)));
        }
        sizes.dedup();
        assert_eq!(sizes, [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, MOST]);
        assert_eq!(texts(tonight.pool(Kind::Item)), 0);
    }

    #[test]
    fn a_small_pool_is_replaced_when_the_night_has_outgrown_it() {
        let mut tonight = Tonight::new(Some(meta()), true, [pool_of(15), pool_of(5)].iter());
        assert!(tonight.replaces(false, Kind::User) && !tonight.replaces(true, Kind::User));
        let replaced = (0..200).find(|&number| {
            tonight.add(true, (Kind::User, &id(number)), &text(number));
            tonight.replaces(true, Kind::User)
        });
        assert_eq!(replaced, Some(127), "the first pool of at least 80 texts");
        assert!(!tonight.replaces(true, Kind::Item));
        // Nothing is kept beside pools that it never outgrows, but for texts that have none.
        let mut tonight = Tonight::new(Some(meta()), true, [pool_of(MOST / TIMES + 1)].iter());
        for number in 0..FIRST {
            tonight.add(true, (Kind::User, &id(number)), &text(number));
            tonight.add(false, (Kind::Item, &id(number)), &text(number));
        }
        assert_eq!([Kind::User, Kind::Item].map(|kind| texts(tonight.pool(kind))), [0, FIRST]);
    }

    #[test]
    fn users_and_items_have_pools_of_different_names() {
        let mut tonight = Tonight::new(Some(meta()), true, [].iter());
        for number in 0..FIRST {
            Kind::ALL.into_iter().for_each(|kind| tonight.add(false, (kind, &id(number)), &text(number)));
        }
        let names = Kind::ALL.map(|kind| tonight.pool(kind).unwrap().name().to_owned());
        assert_eq!(names, ["tonight-user", "tonight-item"]);
        assert_eq!(tonight.without(Kind::Item, [].iter()).unwrap().name(), "tonight-item");
    }

    #[test]
    fn no_pool_is_replaced_where_none_may_be() {
        let mut tonight = Tonight::new(Some(meta()), false, [pool_of(1)].iter());
        for number in 0..FIRST {
            tonight.add(true, (Kind::User, &id(number)), &text(number));
            tonight.add(false, (Kind::Item, &id(number)), &text(number));
        }
        assert!(!tonight.replaces(true, Kind::User) && tonight.replaces(false, Kind::Item));
        assert_eq!([Kind::User, Kind::Item].map(|kind| texts(tonight.pool(kind))), [0, FIRST]);
    }

    #[test]
    fn an_audit_does_not_know_the_texts_that_it_makes_again() {
        let mut tonight = Tonight::new(Some(meta()), true, [].iter());
        let audited = [id(3), id(7), id(99)];
        (0..FIRST - 1).for_each(|number| tonight.add(false, (Kind::User, &id(number)), &text(number)));
        assert_eq!(texts(tonight.without(Kind::User, audited.iter())), 0, "none has been drafted from");
        // Another sample of an entity is left out with the first one.
        tonight.add(false, (Kind::User, &id(7)), &[10, 20, 40]);
        assert_eq!(texts(tonight.without(Kind::User, audited.iter())), FIRST - 3);
        assert_eq!(texts(tonight.pool(Kind::User)), FIRST);
        assert_eq!(texts(tonight.without(Kind::Item, audited.iter())), 0);
    }

    #[test]
    fn nothing_is_kept_where_nothing_is_drafted_from_pools() {
        let mut tonight = Tonight::new(None, true, [].iter());
        (0..FIRST).for_each(|number| tonight.add(false, (Kind::User, &id(number)), &[10]));
        assert!(tonight.kinds.is_empty() && !tonight.replaces(false, Kind::User));
        assert!(tonight.pool(Kind::User).is_none() && tonight.without(Kind::User, [].iter()).is_none());
    }

    #[test]
    fn texts_that_no_pool_takes_are_written_without_one() {
        let mut tonight = Tonight::new(Some(PoolMeta { vocab_size: 5, ..meta() }), true, [].iter());
        (0..FIRST).for_each(|number| tonight.add(false, (Kind::User, &id(number)), &[7]));
        assert!(tonight.pool(Kind::User).is_none());
    }
}
