//! Time of finding the codes that may follow a prefix, in tries of 12 thousand to 10 million random identifiers of four
//! codes out of 256: in Laser's file, in the crate constraint-decoding-trie (STATIC, arXiv:2602.22647), and in a hash
//! map of all prefixes. All three do the same work on the same prefixes. `cargo bench -p laser-decode --bench trie`;
//! the other two take gigabytes for 10 million items, and a minute or two to be built.
#![expect(clippy::cast_possible_truncation, reason = "codes are below 256, and nodes are numbered in 32 bits")]

use std::collections::HashMap;
use std::hint::black_box;
use std::time::Instant;

use constraint_decoding_trie::decoder::ConstrainedDecoder;
use constraint_decoding_trie::transition::build_static_index;
use constraint_decoding_trie::types::{BeamState, StaticIndex};
use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, Criterion};
use laser_decode::{Allowed, Seen, Stock, Trie, TrieItem, TrieMeta, build_trie};

const LEVELS: usize = 4;
const CODES: usize = 256;
/// Width of the search.
const BEAMS: usize = 20;
/// Prefixes that are looked up in turn: many, so that those of a large trie are not in the caches.
const PLACES: usize = 1 << 20;

/// A multiplicative congruential generator: the same identifiers on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from(((self.0 >> 32) * u64::from(end)) >> 32).unwrap_or(0)
    }

    fn code(&mut self) -> u16 {
        u16::try_from(self.below(256)).unwrap_or(0)
    }
}

/// The same identifiers three times.
struct Tries {
    trie: Trie,
    peer: ConstrainedDecoder,
    map: HashMap<Vec<u16>, Vec<u16>>,
}

fn tries(items: u32) -> Tries {
    let mut random = Random(1);
    let codes: Vec<u16> = (0..items as usize * LEVELS).map(|_| random.code()).collect();
    let (trie, seconds) = trie(&codes);
    let (all_nodes, all_items) = (trie.nodes() as f64, f64::from(items));
    let size = |name: &str, bytes: usize, seconds: f64| {
        let (node, item) = (bytes as f64 / all_nodes, bytes as f64 / all_items);
        eprintln!("{name}: {node:.1} bytes per node, {item:.1} per item, built in {seconds:.1} s");
    };
    eprintln!("\n{items} items: {:?} nodes", (0..=LEVELS).map(|depth| trie.level(depth).len()).collect::<Vec<_>>());
    size("trie", trie.size_bytes(), seconds);
    size("trie, without ids and codes' names", node_bytes(&trie), seconds);
    let (verified, seconds) = timed(|| trie.verify());
    verified.expect("a trie that was just built");
    eprintln!("trie: verified in {seconds:.1} s");
    let (index, seconds) = timed(|| {
        let constraints: Vec<Vec<u32>> =
            codes.chunks_exact(LEVELS).map(|codes| codes.iter().map(|&code| code.into()).collect()).collect();
        build_static_index(&constraints, CODES as u32, LEVELS as u32, 2)
    });
    size("constraint-decoding-trie", peer_bytes(&index), seconds);
    let same = |node: &u32| index.sparse.children(*node).iter().map(|pair| pair[1]).eq(trie.children(*node));
    assert!(nodes(&trie, LEVELS - 1, 0).iter().all(same), "both number nodes breadth first");
    let (map, seconds) = timed(|| map(&trie));
    size("hash map", map_bytes(&map), seconds);
    Tries { trie, peer: ConstrainedDecoder::new(index, BEAMS, 1), map }
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed().as_secs_f64())
}

/// A trie, and how many seconds its building took.
fn trie(codes: &[u16]) -> (Trie, f64) {
    let table = |level: char| (0..CODES).map(|code| format!("<{level}_{code}>")).collect();
    let meta = TrieMeta { name: "bench".into(), integer_ids: true, codes: "abcd".chars().map(table).collect() };
    let ids: Vec<String> = (0..codes.len() / LEVELS).map(|item| item.to_string()).collect();
    let (bytes, seconds) = timed(|| {
        let items = ids.iter().zip(codes.chunks_exact(LEVELS)).map(|(id, codes)| TrieItem { id, codes });
        build_trie(&meta, items).expect("identifiers of the tables")
    });
    (Trie::open(bytes.into()).expect("a trie that was just built"), seconds)
}

fn map(trie: &Trie) -> HashMap<Vec<u16>, Vec<u16>> {
    let mut map = HashMap::new();
    let mut prefixes = vec![Vec::new()];
    for depth in 0..LEVELS {
        let mut longer = Vec::new();
        for (prefix, node) in prefixes.into_iter().zip(trie.level(depth)) {
            let codes = trie.codes_of(trie.children(node));
            if depth + 1 < LEVELS {
                longer.extend(codes.iter().map(|&code| [&prefix[..], &[code]].concat()));
            }
            map.insert(prefix, codes.to_vec());
        }
        prefixes = longer;
    }
    map
}

/// First children, first items and codes, as docs/formats.md has them.
fn node_bytes(trie: &Trie) -> usize {
    4 * (trie.nodes() + 2) + 2 * trie.nodes()
}

fn peer_bytes(index: &StaticIndex) -> usize {
    let (sparse, dense) = (&index.sparse, &index.dense);
    size_of_val(&sparse.row_pointers[..])
        + size_of_val(&sparse.data[..])
        + 8 * dense.bits.len()
        + 4 * dense.states.len()
}

/// Without what the allocator adds.
fn map_bytes(map: &HashMap<Vec<u16>, Vec<u16>>) -> usize {
    let lists = |(prefix, codes): (&Vec<u16>, &Vec<u16>)| 2 * (prefix.capacity() + codes.capacity());
    map.capacity() * 8 / 7 * (size_of::<(Vec<u16>, Vec<u16>)>() + 1) + map.iter().map(lists).sum::<usize>()
}

fn prefix(trie: &Trie, node: u32) -> Vec<u16> {
    let up = std::iter::successors(Some(node), |&node| trie.parent(node));
    let mut codes: Vec<u16> = up.take_while(|&node| node > 0).map(|node| trie.code(node)).collect();
    codes.reverse();
    codes
}

/// Random nodes of this depth.
fn nodes(trie: &Trie, depth: usize, seed: u64) -> Vec<u32> {
    let (level, mut random) = (trie.level(depth), Random(seed));
    (0..PLACES).map(|_| level.start + random.below(level.end - level.start)).collect()
}

fn sum(codes: &[u16]) -> u32 {
    codes.iter().map(|&code| u32::from(code)).sum()
}

/// All codes that may follow one prefix, read.
fn children(criterion: &mut Criterion, items: &str, tries: &Tries) {
    let Tries { trie, peer, map } = tries;
    let sparse = &peer.index.sparse;
    let depths: Vec<Vec<u32>> = (0..LEVELS).map(|depth| nodes(trie, depth, 2)).collect();
    let mixed = (0..PLACES).map(|place| depths[place % LEVELS][place]).collect();
    let cases =
        ["depth 0", "depth 1", "depth 2", "depth 3", "every depth"].into_iter().zip([depths, vec![mixed]].concat());
    for (case, nodes) in cases {
        let mut group = criterion.benchmark_group(format!("children of a node, {case}, {items}"));
        let prefixes: Vec<Vec<u16>> = nodes.iter().map(|&node| prefix(trie, node)).collect();
        let mut bench = |name: &str, work: &dyn Fn(usize) -> u32| in_turn(&mut group, name, work);
        bench("trie", &|at| sum(trie.codes_of(trie.children(nodes[at]))));
        for (name, out, seen) in [("all", 0, 0), ("50 seen", 0, 50), ("50 seen, 10 % out of stock", 10, 50)] {
            let stock = stock(trie, out);
            let seen = Seen::new(trie, &stock, &seen_leaves(trie, seen));
            let allowed = Allowed::new(trie, &stock, &seen);
            let children =
                |node: &u32| allowed.children_with_codes(*node).map(|(code, _)| u32::from(code)).sum::<u32>();
            bench(&format!("allowed, {name}"), &|at| children(&nodes[at]));
            bench(&format!("allowed, {name}, {BEAMS} nodes"), &|at| {
                let from = at * BEAMS % (PLACES - BEAMS);
                let nodes = &nodes[from..from + BEAMS];
                allowed.fetch(nodes.iter().copied());
                nodes.iter().map(children).sum()
            });
        }
        bench("constraint-decoding-trie, its table", &|at| {
            sparse.children(nodes[at]).iter().map(|[code, _]| code).sum()
        });
        bench("hash map", &|at| sum(&map[&prefixes[at]]));
        group.finish();
    }
}

/// Measures work at places in turn.
fn in_turn(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, work: &dyn Fn(usize) -> u32) {
    let mut at = 0;
    group.bench_function(name, |b| {
        b.iter(|| {
            at = (at + 1) % PLACES;
            work(black_box(at))
        });
    });
}

fn stock(trie: &Trie, percent: usize) -> Stock {
    let mut random = Random(3);
    Stock::without(trie, (0..trie.items() as u32).filter(|_| (random.below(100) as usize) < percent))
}

fn seen_leaves(trie: &Trie, seen: usize) -> Vec<u32> {
    let mut random = Random(4);
    (0..seen).map(|_| random.below(trie.leaves() as u32)).collect()
}

/// Other look-ups.
fn lookups(criterion: &mut Criterion, items: &str, trie: &Trie) {
    let mut group = criterion.benchmark_group(format!("look-ups, {items}"));
    let ids: Vec<String> = nodes(trie, LEVELS, 5).iter().map(|node| (node % trie.items() as u32).to_string()).collect();
    let leaves: Vec<u32> = nodes(trie, LEVELS, 6).iter().filter_map(|&node| trie.leaf_of_node(node)).collect();
    let prefixes: Vec<Vec<u16>> = nodes(trie, LEVELS, 7).iter().map(|&node| prefix(trie, node)).collect();
    in_turn(&mut group, "item of an id", &|at| trie.find(&ids[at]).unwrap_or(0));
    in_turn(&mut group, "path of a leaf", &|at| trie.path(leaves[at])[0]);
    in_turn(&mut group, "leaf of an identifier", &|at| trie.find_path(&prefixes[at]).unwrap_or(0));
    group.finish();
}

/// A beam: where it stands, and its score.
type Beam<At> = (At, f32);

/// The best of all continuations: their beams, codes and scores, and where their node was found.
fn best(candidates: &mut Vec<(f32, usize, u16, u32)>) -> &[(f32, usize, u16, u32)] {
    let worse = |a: &(f32, usize, u16, u32), b: &(f32, usize, u16, u32)| b.0.total_cmp(&a.0);
    if candidates.len() > BEAMS {
        candidates.select_nth_unstable_by(BEAMS, worse);
        candidates.truncate(BEAMS);
    }
    candidates.sort_unstable_by(worse);
    candidates
}

/// A step of a search over node numbers.
fn step<C: Iterator<Item = (u16, u32)>>(
    beams: &[Beam<u32>],
    scores: &[Vec<f32>],
    candidates: &mut Vec<(f32, usize, u16, u32)>,
    children: impl Fn(u32) -> C,
) -> Vec<Beam<u32>> {
    candidates.clear();
    for (beam, (&(node, score), scores)) in beams.iter().zip(scores).enumerate() {
        candidates.extend(children(node).map(|(code, child)| (score + scores[code as usize], beam, code, child)));
    }
    best(candidates).iter().map(|&(score, _, _, child)| (child, score)).collect()
}

/// The same where a beam is its prefix.
fn step_in_map(
    map: &HashMap<Vec<u16>, Vec<u16>>,
    beams: &[Beam<Vec<u16>>],
    scores: &[Vec<f32>],
    candidates: &mut Vec<(f32, usize, u16, u32)>,
) -> Vec<Beam<Vec<u16>>> {
    candidates.clear();
    for (beam, ((prefix, score), scores)) in beams.iter().zip(scores).enumerate() {
        candidates.extend(map[prefix].iter().map(|&code| (score + scores[code as usize], beam, code, 0)));
    }
    best(candidates).iter().map(|&(score, beam, code, _)| ([&beams[beam].0[..], &[code]].concat(), score)).collect()
}

/// One step of a search: the codes that may follow 20 prefixes are scored and the best 20 kept.
fn steps(criterion: &mut Criterion, items: &str, tries: &Tries) {
    let Tries { trie, peer, map } = tries;
    let sparse = &peer.index.sparse;
    let mut random = Random(8);
    let mut logits = || (0..CODES).map(|_| random.below(1 << 16) as f32 / 6_553.6).collect::<Vec<f32>>();
    let logits: Vec<Vec<f32>> = (0..BEAMS).map(|_| logits()).collect();
    let scores: Vec<Vec<f32>> = logits.iter().map(|logits| log_softmax(logits)).collect();
    let wide =
        vec![logits.iter().map(|logits| logits.iter().map(|&logit| logit.into()).collect()).collect::<Vec<Vec<f64>>>()];
    for depth in 1..LEVELS {
        let places = nodes(trie, depth, 9);
        let beams: Vec<Vec<Beam<u32>>> =
            places.chunks_exact(BEAMS).map(|beams| beams.iter().map(|&node| (node, -1.0)).collect()).collect();
        let prefixes: Vec<Vec<Beam<Vec<u16>>>> = (beams.iter())
            .map(|beams| beams.iter().map(|&(node, score)| (prefix(trie, node), score)).collect())
            .collect();
        let mut group = criterion.benchmark_group(format!("step of {BEAMS} beams, depth {depth}, {items}"));
        let mut candidates = Vec::new();
        let mut turn = (0..beams.len()).cycle();
        let mut next = || turn.next().unwrap_or(0);
        let in_trie = |node: u32| {
            let children = trie.children(node);
            trie.codes_of(children.clone()).iter().copied().zip(children)
        };
        group.bench_function("trie", |b| b.iter(|| step(&beams[next()], &scores, &mut candidates, in_trie)));
        group.bench_function("trie, with log-softmax", |b| {
            b.iter(|| {
                let scores: Vec<Vec<f32>> = logits.iter().map(|logits| log_softmax(logits)).collect();
                step(&beams[next()], &scores, &mut candidates, in_trie)
            });
        });
        let stock = stock(trie, 10);
        let seen = Seen::new(trie, &stock, &seen_leaves(trie, 50));
        group.bench_function("allowed, 50 seen, 10 % out of stock", |b| {
            b.iter(|| {
                let allowed = Allowed::new(trie, &stock, &seen);
                let children = |node: u32| allowed.children_with_codes(node);
                let beams = &beams[next()];
                allowed.fetch(beams.iter().map(|&(node, _)| node));
                step(beams, &scores, &mut candidates, children)
            });
        });
        group.bench_function("constraint-decoding-trie, its table", |b| {
            let children = |node: u32| sparse.children(node).iter().map(|&[code, next]| (code as u16, next));
            b.iter(|| step(&beams[next()], &scores, &mut candidates, children));
        });
        group.bench_function("constraint-decoding-trie, its step with log-softmax", |b| {
            let mut state = || state(&prefixes[next()], trie, depth);
            let step = |mut state: BeamState| {
                peer.step(&wide, &mut state, depth);
                state
            };
            b.iter_batched(&mut state, step, BatchSize::SmallInput);
        });
        group.bench_function("hash map", |b| {
            b.iter(|| step_in_map(map, &prefixes[next()], &scores, &mut candidates));
        });
        group.finish();
    }
}

/// The peer's state of a search.
fn state(beams: &[Beam<Vec<u16>>], trie: &Trie, depth: usize) -> BeamState {
    let mut state = BeamState::new(1, BEAMS);
    for (at, (prefix, score)) in beams.iter().enumerate() {
        // Down to its dense table's depth it knows prefixes only.
        state.nodes[0][at] = if depth < 2 { 0 } else { trie.find_path(prefix).unwrap_or(0) };
        state.tokens[0][at] = prefix.iter().map(|&code| code.into()).collect();
        state.scores[0][at] = f64::from(*score);
    }
    state
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().map(|logit| (logit - largest).exp()).sum();
    logits.iter().map(|logit| logit - largest - sum.ln()).collect()
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for (name, items) in [("12k items", 12_000), ("1M items", 1_000_000), ("10M items", 10_000_000)] {
        let tries = tries(items);
        children(&mut criterion, name, &tries);
        lookups(&mut criterion, name, &tries.trie);
        steps(&mut criterion, name, &tries);
    }
    criterion.final_summary();
}
