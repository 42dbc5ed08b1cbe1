//! Searches against exhaustive ones, and speculative searches against plain ones.

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::trie::{Stock, Trie, TrieItem, TrieMeta, build_trie};

/// Splitmix64's finaliser.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Items of random codes, some of which share an identifier.
pub(crate) fn catalogue(levels: usize, codes: u16, items: u64, seed: u64) -> Trie {
    let names = |level: usize| (0..codes).map(|code| format!("<{level}_{code}>")).collect();
    let meta = TrieMeta { name: "test".into(), integer_ids: true, codes: (0..levels).map(names).collect() };
    let hash = |item: u64, level: usize| mix(seed ^ mix(item * 16 + level as u64));
    let code = |item: u64, level: usize| u16::try_from(hash(item, level) % u64::from(codes)).unwrap();
    let rows: Vec<(String, Vec<u16>)> =
        (0..items).map(|item| (item.to_string(), (0..levels).map(|level| code(item, level)).collect())).collect();
    let rows = rows.iter().map(|(id, codes)| TrieItem { id, codes });
    Trie::open(Bytes::from(build_trie(&meta, rows).unwrap())).unwrap()
}

pub(crate) fn leaf_of(trie: &Trie, item: u32) -> u32 {
    trie.leaf_of_item(item)
}

/// A target: log probabilities of a node's allowed children, over a vocabulary of which they are a part.
fn target(seed: u64, allowed: &Allowed<'_>, node: u32) -> Vec<f32> {
    let logit = |child: u32| (mix(seed ^ mix(u64::from(child))) % 1000) as f32 / 200.0;
    let all: f32 = allowed.trie().children(node).map(|child| logit(child).exp()).sum();
    allowed.children(node).map(|child| logit(child) - (all + 3.0).ln()).collect()
}

/// The best leaves by the sums of all their codes, without any search.
fn exhaustive(seed: u64, allowed: &Allowed<'_>, normalisation: Normalisation) -> Vec<Beam> {
    let mut level = vec![Beam { node: 0, score: 0.0, key: 0.0 }];
    for _ in 0..allowed.trie().levels() {
        let mut next = Vec::new();
        for beam in &level {
            let mut children: Vec<(u32, f32)> =
                allowed.children(beam.node).zip(target(seed, allowed, beam.node)).collect();
            if normalisation == Normalisation::Allowed {
                normalise(&mut children);
            }
            let score = |log: f32| beam.score + f64::from(log);
            next.extend(children.into_iter().map(|(node, log)| Beam { node, score: score(log), key: score(log) }));
        }
        level = next;
    }
    level.sort_by(Beam::order);
    level
}

/// Runs a search whose every call computes the missing beams and what is drafted. Returns the calls.
fn run(
    search: &mut BeamSearch,
    (seed, allowed): (u64, &Allowed<'_>),
    widths: &[usize],
    expected: &mut dyn Expected,
) -> usize {
    let levels = allowed.trie().levels();
    let mut calls = 0;
    while search.depth() < levels {
        let mut drafted: Vec<Ranked> = Vec::new();
        for &width in widths.iter().take(levels - search.depth() - 1) {
            drafted.push(search.candidates(allowed, drafted.last(), width, expected));
        }
        let drafted = drafted.iter().flat_map(Ranked::drafted).map(|beam| beam.node);
        let nodes: Vec<u32> = search.missing(allowed).chain(drafted).collect();
        nodes.iter().for_each(|&node| search.learn(allowed, node, &target(seed, allowed, node)));
        calls += 1;
        assert!(search.advance(allowed, levels) > 0);
    }
    calls
}

/// Guesses at random, so that drafts cover some beams and miss others.
struct Random(u64);

impl Expected for Random {
    fn log_shares(&mut self, _: u32, children: &[u32], into: &mut Vec<f32>) {
        into.extend(children.iter().map(|child| -((mix(self.0 ^ u64::from(*child)) % 100) as f32) / 20.0));
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_search_as_wide_as_the_catalogue_finds_the_best_of_all_items(
        seed in any::<u64>(),
        (levels, codes, items) in (1..5_usize, 2..9_u16, 1..120_u64),
        allowed_only in any::<bool>(),
        banned in 0..4_u32,
    ) {
        let normalisation = if allowed_only { Normalisation::Allowed } else { Normalisation::Vocabulary };
        let trie = catalogue(levels, codes, items, seed);
        let leaves = u32::try_from(trie.leaves()).unwrap();
        let stock = Stock::without(&trie, (0..leaves).filter(|leaf| leaf % 5 < banned && leaf % 5 != 4));
        let allowed = Allowed::new(&trie, &stock, &[0, 4]);
        let expected = exhaustive(seed, &allowed, normalisation);
        let mut search = BeamSearch::new(trie.leaves(), normalisation);
        if expected.is_empty() {
            prop_assert_eq!(allowed.count_below(0), 0);
            return Ok(());
        }
        run(&mut search, (seed, &allowed), &[], &mut Uniform);
        prop_assert_eq!(search.beams(), &expected[..]);
    }

    #[test]
    fn whatever_is_drafted_the_beams_are_those_of_the_plain_search(
        seed in any::<u64>(),
        (levels, codes, items) in (2..5_usize, 2..9_u16, 1..200_u64),
        (width, widths) in (1..12_usize, proptest::collection::vec(0..40_usize, 0..4)),
        allowed_only in any::<bool>(),
        drawn in any::<bool>(),
    ) {
        let normalisation = if allowed_only { Normalisation::Allowed } else { Normalisation::Vocabulary };
        let trie = catalogue(levels, codes, items, seed);
        let stock = Stock::all(&trie);
        let allowed = Allowed::new(&trie, &stock, &[]);
        let new = || {
            let search = BeamSearch::new(width, normalisation);
            if drawn { search.drawn_under(Noise::new(seed), 1.0) } else { search }
        };
        let (mut plain, mut speculative) = (new(), new());
        let calls = run(&mut plain, (seed, &allowed), &[], &mut Uniform);
        let fewer = run(&mut speculative, (seed, &allowed), &widths, &mut Random(seed));
        prop_assert!(fewer <= calls && calls <= levels);
        prop_assert_eq!(plain.beams(), speculative.beams());
        prop_assert_eq!(plain.beams().len(), width.min(trie.leaves()));
        // Completing the trie makes two steps of every call.
        let mut completed = new();
        let all = trie.nodes();
        prop_assert!(run(&mut completed, (seed, &allowed), &[all], &mut Uniform) <= levels.div_ceil(2));
        prop_assert_eq!(completed.beams(), plain.beams());
    }

    #[test]
    fn the_width_for_beams_is_the_least_that_drafts_them(
        seed in any::<u64>(),
        picks in proptest::collection::vec(any::<prop::sample::Index>(), 1..5),
    ) {
        let trie = catalogue(2, 12, 80, seed);
        let stock = Stock::all(&trie);
        let allowed = Allowed::new(&trie, &stock, &[]);
        let search = BeamSearch::new(4, Normalisation::Vocabulary);
        let ranked = |width: usize| search.candidates(&allowed, None, width, &mut Random(seed));
        let all = ranked(usize::MAX);
        let beams: Vec<Beam> = picks.iter().map(|pick| all.drafted()[pick.index(all.len())]).collect();
        let width = ranked(1).width_for(&beams).unwrap();
        let drafts_all = |width: usize| {
            let drafted = ranked(width);
            beams.iter().all(|beam| drafted.drafted().contains(beam))
        };
        prop_assert!(drafts_all(width) && !drafts_all(width - 1));
        let stranger = Beam { node: u32::MAX, ..beams[0] };
        prop_assert_eq!(all.width_for(&[stranger]), None);
    }
}

#[test]
fn a_code_without_alternatives_costs_no_call_among_allowed_ones() {
    // One item only: every code is forced.
    let trie = catalogue(4, 8, 1, 3);
    let stock = Stock::all(&trie);
    let allowed = Allowed::new(&trie, &stock, &[]);
    let mut search = BeamSearch::new(5, Normalisation::Allowed);
    assert_eq!(search.advance(&allowed, 4), 4);
    assert_eq!(search.beams(), [Beam { node: 4, score: 0.0, key: 0.0 }]);
    let mut search = BeamSearch::new(5, Normalisation::Vocabulary);
    assert_eq!(run(&mut search, (1, &allowed), &[], &mut Uniform), 4);
    assert!(search.beams()[0].score < 0.0);
}
