//! The GPU path on a driver without a device: what it calls and how often, and that it gives everything back.
//!
//! `tests/cuda.sh` builds the driver (tests/cuda/driver.cpp, which says what wrong calls it finds) and runs these
//! tests. Nothing is computed there, so scores mean nothing here. The tests take turns, since the process has one
//! device.

use candle_core::quantized::GgmlDType;
use laser_decode::{Draw, Noise, ROOT_PARENT, Sampling};
use laser_engine::{Asked, DTypeOption, Engine, EngineError, EngineOptions, MaskedNode, Segment, Slot};
use laser_schema::DeviceOption;
use serde_json::json;

use crate::{
    driver::{Counts, Driver, Kernels, more},
    models::{Random, TinyModel},
    support::{chain, path, random_tree},
};

/// What is counted for every architecture.
const PRECISIONS: [(DTypeOption, Option<&str>); 6] = [
    (DTypeOption::F32, None),
    (DTypeOption::F16, None),
    (DTypeOption::Bf16, None),
    (DTypeOption::F32, Some("q8_0")),
    (DTypeOption::F16, Some("q4k")),
    (DTypeOption::Bf16, Some("q4k")),
];

const ACTIVATIONS: [DTypeOption; 3] = [DTypeOption::F32, DTypeOption::F16, DTypeOption::Bf16];

/// The others that GPUs run.
const OTHER_QUANTISATIONS: [&str; 9] = ["q4_0", "q4_1", "q5_0", "q5_1", "q2k", "q3k", "q5k", "q6k", "mxfp4"];

/// One model per architecture, with as many layers and inputs that K-quants can store.
fn models(layers: usize) -> Vec<(&'static str, TinyModel)> {
    ["Llama", "Mistral", "Qwen2", "Qwen3"]
        .map(|name| {
            let sizes = json!({
                "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers, "head_dim": 64,
                "max_position_embeddings": 1024,
            });
            (name, TinyModel::new(name, sizes))
        })
        .into()
}

fn load(model: &TinyModel, (dtype, isq): (DTypeOption, Option<&str>)) -> Result<Box<dyn Engine>, EngineError> {
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path(), false);
    laser_engine::load(&options(directory.path(), (dtype, isq)))
}

fn options(path: &std::path::Path, (dtype, isq): (DTypeOption, Option<&str>)) -> EngineOptions {
    let isq = isq.map(Into::into);
    EngineOptions { device: DeviceOption::Cuda(0), dtype, isq, ..EngineOptions::new(path) }
}

/// A sequence of a schedule.
struct Sequence {
    slot: Slot,
    capacity: usize,
}

/// One step of segments (slot, tokens, parents and the first scored node); keeps the path to the last node of each.
fn step(engine: &mut dyn Engine, segments: &[(Slot, Vec<u32>, Vec<u32>, usize)], top_k: usize) {
    let parts: Vec<Segment<'_>> = segments
        .iter()
        .map(|(slot, tokens, parents, scored_from)| Segment {
            slot: *slot,
            tokens,
            parents,
            scored_from: *scored_from,
            ..Segment::default()
        })
        .collect();
    engine.step(&parts, top_k).unwrap();
    for (slot, tokens, parents, _) in segments {
        engine.commit(*slot, &path(parents, tokens.len() - 1)).unwrap();
    }
}

#[test]
fn schedules_of_every_architecture_and_precision_run_and_give_their_memory_back() {
    let driver = Driver::take();
    let live = live_bytes(&driver);
    let of_every_architecture =
        models(2).into_iter().flat_map(|model| PRECISIONS.map(|precision| (model.1.clone(), precision)));
    let other = OTHER_QUANTISATIONS.map(|isq| (models(2)[0].1.clone(), (DTypeOption::Bf16, Some(isq))));
    for (model, precision) in of_every_architecture.chain(other) {
        let before = driver.counts();
        let mut engine = load(&model, precision).unwrap();
        let name = engine.info().architecture.clone();
        walk(engine.as_mut());
        drop(engine);
        let counts = driver.counts();
        driver.assert_no_error();
        assert_eq!(counts.live_bytes, live, "{name} in {precision:?}");
        assert!(counts.launches > before.launches + 500, "{name} in {precision:?}: {counts:?}");
    }
}

/// The beams of a list, which ask for codes, and a drawn tree whose next tokens are held to a mask; with features.
fn walk_held(engine: &mut dyn Engine) {
    engine.keep_features();
    engine.keep_logits();
    let mut random = Random::new(12);
    let slot = engine.open(120).unwrap();
    step(engine, &[(slot, random.tokens(20), chain(20), 19)], TOP_K);
    let (tokens, parents) = random_tree(&mut random, 8);
    let tokens_asked: Vec<u32> = random.tokens(24);
    let ends: Vec<usize> = (1..=8).map(|node| 3 * node).collect();
    let asked = Asked { tokens: &tokens_asked, ends: &ends };
    engine.step(&[Segment { slot, tokens: &tokens, parents: &parents, asked, ..Segment::default() }], TOP_K).unwrap();
    engine.hold(slot, &path(&parents, 7)).unwrap();
    let draw = Some(Draw { sampling: Sampling::new(0.8, Some(9), 0.9).unwrap(), noise: Noise::new(5) });
    let more = random.tokens(2);
    let next = Segment { slot, tokens: &more, parents: &[0, 0], draw, ..Segment::default() };
    let scores = engine.step(&[next], TOP_K).unwrap();
    assert_eq!(scores[0].feature(0).len(), engine.info().hidden_size);
    let held = path(&parents, 7).len();
    let node = MaskedNode { slot, node: 1, mask: &[0xff], draw };
    engine.masked(&[node, MaskedNode { draw: None, ..node }], 3).unwrap();
    engine.commit(slot, &[0, held]).unwrap();
    engine.close(slot);
}

#[test]
fn beams_masks_draws_and_features_run_and_give_their_memory_back() {
    let driver = Driver::take();
    walk_held(load(&models(1)[0].1, PRECISIONS[0]).unwrap().as_mut());
    let live = live_bytes(&driver);
    for (name, model) in models(2) {
        for precision in PRECISIONS {
            let mut engine = load(&model, precision).unwrap();
            walk_held(engine.as_mut());
            drop(engine);
            driver.assert_no_error();
            assert_eq!(driver.counts().live_bytes, live, "{name} in {precision:?}");
        }
    }
}

#[test]
fn gguf_files_run_and_give_their_memory_back() {
    let driver = Driver::take();
    let live = live_bytes(&driver);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    // As llama.cpp mixes blocks: the parts of one product differ.
    let mixed = |name: &str| match name.contains("attn_v") || name.contains("ffn_down") {
        true => GgmlDType::Q6K,
        false => GgmlDType::Q4K,
    };
    let types: [fn(&str) -> GgmlDType; 3] = [|_| GgmlDType::F32, |_| GgmlDType::Q8_0, mixed];
    for (name, model) in models(2) {
        for (dtype, types) in ACTIVATIONS.into_iter().flat_map(|dtype| types.map(|types| (dtype, types))) {
            model.write_mixed_gguf(&file, types);
            let mut engine = laser_engine::load(&options(&file, (dtype, None))).unwrap();
            walk(engine.as_mut());
            drop(engine);
            driver.assert_no_error();
            let of = types("blk.0.attn_v.weight");
            assert_eq!(driver.counts().live_bytes, live, "{name}, {of:?} with {dtype:?}");
        }
    }
}

#[test]
fn products_with_blocks_of_several_types_are_one() {
    let driver = Driver::take();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    let types = |name: &str| if name.contains("attn_v") { GgmlDType::Q6K } else { GgmlDType::Q4K };
    let launches = [2, 3].map(|layers| {
        models(layers)[0].1.write_mixed_gguf(&file, types);
        let mut engine = laser_engine::load(&options(&file, (DTypeOption::F16, None))).unwrap();
        let mut random = Random::new(15);
        let slot = engine.open(100).unwrap();
        let mut next = |engine: &mut dyn Engine| step(engine, &[(slot, random.tokens(20), chain(20), 19)], TOP_K);
        next(engine.as_mut());
        let before = driver.counts();
        next(engine.as_mut());
        (driver.counts() - before).launches
    });
    assert_eq!(launches[1] - launches[0], layer_most((DTypeOption::F16, Some("q4k")), 20)[0]);
    driver.assert_no_error();
}

#[test]
fn quantisations_that_no_gpu_runs_are_refused_by_name() {
    let driver = Driver::take();
    for (dtype, isq, remedy) in [
        (DTypeOption::Bf16, "fp8", "choose q8_0"),
        (DTypeOption::Bf16, "hqq4", "choose q4k or q8_0"),
        (DTypeOption::F32, "hqq8", "choose q4k or q8_0"),
        (DTypeOption::F32, "mxfp4", "choose dtype bf16 or f16"),
    ] {
        match load(&models(1)[0].1, (dtype, Some(isq))) {
            Err(EngineError::InvalidOption { option: "isq", message, .. }) => {
                assert!(message.contains("GPU") && message.contains(remedy), "{message}");
            }
            other => panic!("{isq}: {:?}", other.map(|engine| engine.info().clone())),
        }
    }
    driver.assert_no_error();
}

/// Memory in use once mistralrs has made what it keeps.
fn live_bytes(driver: &Driver) -> i64 {
    walk(load(&models(1)[0].1, PRECISIONS[0]).unwrap().as_mut());
    driver.counts().live_bytes
}

/// A random schedule: opens, forks, closes, and steps of prefill chunks, trees and single tokens, as nights have them.
fn walk(engine: &mut dyn Engine) {
    let mut random = Random::new(11);
    let mut open: Vec<Sequence> = Vec::new();
    for _ in 0..40 {
        match random.below(4) {
            0 | 1 if open.len() < 6 => {
                let capacity = 8 + random.below(150);
                open.push(Sequence { slot: engine.open(capacity).unwrap(), capacity });
            }
            2 if !open.is_empty() => {
                let from = open[random.below(open.len())].slot;
                let length = random.below(engine.cached(from) + 1);
                let capacity = length + 1 + random.below(100);
                open.push(Sequence { slot: engine.fork(from, length, capacity).unwrap(), capacity });
            }
            3 if open.len() > 3 => engine.close(open.swap_remove(random.below(open.len())).slot),
            _ => {}
        }
        let mut segments = Vec::new();
        for &Sequence { slot, capacity } in &open {
            let room = (capacity - engine.cached(slot)).min([1, 14, 70][random.below(3)]);
            if room > 0 && random.below(4) > 0 {
                let nodes = 1 + random.below(room);
                let (tokens, parents) = random_tree(&mut random, nodes);
                let scored_from = [0, nodes - 1, nodes][random.below(3)];
                segments.push((slot, tokens, parents, scored_from));
            }
        }
        step(engine, &segments, 4);
    }
    open.into_iter().for_each(|sequence| engine.close(sequence.slot));
}

/// A step whose calls are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// 64 tokens of a prompt and 40 of another, none scored.
    Chunk,
    /// Trees of 16 nodes below three sequences.
    Trees,
    /// The next token of three sequences.
    Single,
    /// 150 tokens of a prompt for which rows must move.
    Moving,
}

impl Kind {
    fn nodes(self) -> usize {
        match self {
            Self::Chunk => 104,
            Self::Trees => 48,
            Self::Single => 3,
            Self::Moving => 150,
        }
    }
}

const TOP_K: usize = 4;

/// The calls of one step of each kind, and the launches of each kernel.
fn steps(driver: &Driver, model: &TinyModel, precision: (DTypeOption, Option<&str>)) -> Vec<(Kind, Counts, Kernels)> {
    let mut engine = load(model, precision).unwrap();
    let engine = engine.as_mut();
    let mut random = Random::new(3);
    let (a, b) = (engine.open(200).unwrap(), engine.open(200).unwrap());
    // The first step makes the arena, and memory for outputs of as many rows as any step has that is counted.
    let first = engine.open(150).unwrap();
    step(engine, &[(first, random.tokens(150), chain(150), 150)], TOP_K);
    engine.close(first);
    let mut found = Vec::new();
    let mut counted = |kind, engine: &mut dyn Engine, segments: &[_]| {
        let (before, kernels_before) = (driver.counts(), driver.kernels());
        step(engine, segments, TOP_K);
        found.push((kind, driver.counts() - before, more(driver.kernels(), &kernels_before)));
    };
    let chunk = |slot, nodes, random: &mut Random| (slot, random.tokens(nodes), chain(nodes), nodes);
    step(engine, &[chunk(a, 10, &mut random), chunk(b, 10, &mut random)], TOP_K);
    counted(Kind::Chunk, engine, &[chunk(a, 64, &mut random), chunk(b, 40, &mut random)]);
    let c = engine.fork(a, 50, 100).unwrap();
    let tree = |slot, random: &mut Random| {
        let (tokens, mut parents) = random_tree(random, 16);
        parents[15] = ROOT_PARENT;
        (slot, tokens, parents, 0)
    };
    counted(Kind::Trees, engine, &[a, b, c].map(|slot| tree(slot, &mut random)));
    counted(Kind::Single, engine, &[a, b, c].map(|slot| (slot, random.tokens(1), chain(1), 0)));
    let (d, e) = (engine.open(250).unwrap(), engine.open(250).unwrap());
    step(engine, &[chunk(d, 240, &mut random)], TOP_K);
    counted(Kind::Moving, engine, &[chunk(e, 150, &mut random)]);
    found
}

/// Launches, uploads, allocations and copies of a step, at most.
type Calls = [i64; 4];

/// Nodes that are multiplied with blocks as they are.
const FEW_NODES: usize = 64;

/// Calls of a layer, whatever the architecture: four products and five kernels of our own. More than a few nodes, and
/// activations of 32 bits, are multiplied with blocks that a launch makes dense before.
fn layer_most((dtype, isq): (DTypeOption, Option<&str>), nodes: usize) -> Calls {
    match isq {
        Some(_) if nodes > FEW_NODES || dtype == DTypeOption::F32 => [13, 0, 0, 0],
        _ => [9, 0, 0, 0],
    }
}

/// Calls beside the layers: of embedding, angles, ancestors, vocabulary and the search for [`TOP_K`] candidates.
const REST_MOST: Calls = [7, 3, 8, 2];

/// Calls of a layer for which rows move, and of the rest.
const MOVING: [Calls; 2] = [[2, 0, 2, 0], [0, 1, 1, 0]];

fn sum(a: Calls, b: Calls) -> Calls {
    std::array::from_fn(|call| a[call] + b[call])
}

#[test]
fn a_step_makes_at_most_so_many_calls() {
    let driver = Driver::take();
    for ((name, two), (_, three)) in models(2).iter().zip(&models(3)) {
        for precision in PRECISIONS {
            let (two, three) = (steps(&driver, two, precision), steps(&driver, three, precision));
            for ((kind, two, kernels), (_, three, more_kernels)) in two.into_iter().zip(three) {
                let layer = three - two;
                let rest = two - layer - layer;
                // For whoever has to find out why a number grew.
                println!("{name} in {precision:?}, {kind:?}: a layer {layer:?}, the rest {rest:?}");
                println!("  kernels of a layer {:?}", more(more_kernels, &kernels));
                check(&layer, &rest, kind, (name, precision));
            }
        }
    }
    driver.assert_no_error();
}

fn check_calls(counts: &Counts, most: Calls, place: &str) {
    let calls = [counts.launches, counts.uploads, counts.allocations, counts.copies];
    assert!(calls.iter().zip(most).all(|(calls, most)| *calls <= most), "{place}, at most {most:?}");
}

fn check(layer: &Counts, rest: &Counts, kind: Kind, (name, precision): (&str, (DTypeOption, Option<&str>))) {
    let moving = if kind == Kind::Moving { MOVING } else { [[0; 4]; 2] };
    let most = [sum(layer_most(precision, kind.nodes()), moving[0]), sum(REST_MOST, moving[1])];
    for (counts, most, part) in [(layer, most[0], "a layer"), (rest, most[1], "the rest")] {
        let place = format!("{part} of {kind:?}, {name} in {precision:?}: {counts:?}");
        check_calls(counts, most, &place);
        assert_eq!(counts.events, 0, "{place}");
    }
    // A step ends when the device has done it: with its candidates where nodes are scored.
    let end = if kind == Kind::Trees || kind == Kind::Single { (1, 0) } else { (0, 1) };
    let waits = |counts: &Counts| (counts.downloads, counts.synchronisations);
    assert_eq!((waits(layer), waits(rest)), ((0, 0), end), "{kind:?}, {name} in {precision:?}");
}

#[test]
fn a_device_that_the_kernels_are_not_compiled_for_is_refused() {
    let driver = Driver::take();
    let model = &models(1)[0].1;
    for capability in [75, 90] {
        driver.set_capability(capability);
        let refused = load(model, PRECISIONS[2]).map(|engine| engine.info().device.clone()).unwrap_err().to_string();
        let remedy = format!("CUDA_COMPUTE_CAP={capability}");
        assert!(refused.contains("built for 8.0") && refused.contains(&remedy), "{refused}");
    }
    driver.set_capability(86);
    walk(load(model, PRECISIONS[2]).unwrap().as_mut());
    driver.assert_no_error();
}

#[test]
fn freed_memory_stays_in_the_pool() {
    let driver = Driver::take();
    driver.keep_nothing();
    let _engine = load(&models(1)[0].1, PRECISIONS[0]).unwrap();
    assert!(driver.keeps_all());
}

#[test]
fn commits_forks_and_closes_call_nothing() {
    let driver = Driver::take();
    let mut engine = load(&models(2)[0].1, PRECISIONS[0]).unwrap();
    let mut random = Random::new(7);
    let slot = engine.open(100).unwrap();
    let (tokens, parents) = random_tree(&mut random, 30);
    let segment = Segment { slot, tokens: &tokens, parents: &parents, scored_from: 0, ..Segment::default() };
    engine.step(&[segment], TOP_K).unwrap();
    let before = driver.counts();
    engine.commit(slot, &path(&parents, 29)).unwrap();
    let fork = engine.fork(slot, 1, 50).unwrap();
    engine.close(slot);
    engine.close(fork);
    assert_eq!(driver.counts(), before);
}

#[test]
fn a_step_of_a_shape_that_was_seen_looks_no_algorithm_up() {
    let driver = Driver::take();
    let mut engine = load(&models(2)[0].1, (DTypeOption::Bf16, None)).unwrap();
    let mut random = Random::new(13);
    let slot = engine.open(150).unwrap();
    let mut lookups = |nodes| {
        let before = driver.counts();
        step(engine.as_mut(), &[(slot, random.tokens(nodes), chain(nodes), nodes - 12)], TOP_K);
        (driver.counts() - before).lookups
    };
    // Four products of a layer and the vocabulary's, of 16 and of 32 rows; the last layer has 12 rows that are scored.
    assert_eq!([lookups(16), lookups(16), lookups(28), lookups(13), lookups(29)], [5, 0, 4, 0, 0]);
    driver.assert_no_error();
}

/// Heads of 64 in 16 bits, few nodes and 600 rows: blocks share the context, and leave what they found in memory that
/// the next step has as well.
#[test]
fn a_long_context_that_blocks_share_costs_no_call_more() {
    let driver = Driver::take();
    let mut engine = load(&models(2)[0].1, (DTypeOption::Bf16, None)).unwrap();
    let mut random = Random::new(14);
    let slot = engine.open(650).unwrap();
    step(engine.as_mut(), &[(slot, random.tokens(600), chain(600), 600)], TOP_K);
    let mut counted = || {
        let (tokens, parents) = random_tree(&mut random, 16);
        let before = driver.counts();
        let segment = Segment { slot, tokens: &tokens, parents: &parents, ..Segment::default() };
        engine.step(&[segment], TOP_K).unwrap();
        engine.commit(slot, &[0]).unwrap();
        driver.counts() - before
    };
    let first = counted();
    let second = counted();
    // Partial results and counters, which are made zero once.
    assert!(first.allocations > second.allocations && first.copies == second.copies + 1, "{first:?}, then {second:?}");
    let layer = layer_most((DTypeOption::Bf16, None), 16);
    check_calls(&second, sum(sum(layer, layer), REST_MOST), &format!("{second:?}"));
    driver.assert_no_error();
}

#[test]
fn a_step_of_many_sequences_uploads_at_most_so_much() {
    let driver = Driver::take();
    let mut engine = load(&models(2)[0].1, (DTypeOption::Bf16, None)).unwrap();
    let mut random = Random::new(8);
    let prefix = engine.open(600).unwrap();
    step(engine.as_mut(), &[(prefix, random.tokens(600), chain(600), 600)], TOP_K);
    let trees: Vec<_> = (0..64)
        .map(|_| {
            let slot = engine.fork(prefix, 600, 616).unwrap();
            let (tokens, parents) = random_tree(&mut random, 16);
            (slot, tokens, parents, 0)
        })
        .collect();
    let before = driver.counts();
    step(engine.as_mut(), &trees, TOP_K);
    let counts = driver.counts() - before;
    println!("{counts:?}");
    assert!(counts.uploaded_bytes <= 1_000_000, "{counts:?}");
    driver.assert_no_error();
}

#[test]
fn a_step_without_memory_fails_alone() {
    let driver = Driver::take();
    let mut engine = load(&models(2)[2].1, (DTypeOption::F16, None)).unwrap();
    let mut random = Random::new(9);
    let slot = engine.open(100).unwrap();
    let mut part = |nodes| (slot, random.tokens(nodes), chain(nodes), nodes - 1);
    step(engine.as_mut(), &[part(20)], TOP_K);
    // More rows than outputs have memory for.
    let (_, tokens, parents, scored_from) = part(80);
    let segment = Segment { slot, tokens: &tokens, parents: &parents, scored_from, ..Segment::default() };
    for spare in [0, 10_000, 100_000] {
        driver.set_memory(driver.counts().live_bytes + spare);
        let error = engine.step(&[segment], TOP_K).unwrap_err();
        assert!(matches!(error, EngineError::Tensor(_)), "{error}");
        assert_eq!(engine.cached(slot), 20);
    }
    driver.set_memory(1 << 30);
    step(engine.as_mut(), &[(slot, tokens.clone(), parents.clone(), scored_from)], TOP_K);
    assert_eq!(engine.cached(slot), 100);
    driver.assert_no_error();
}

#[test]
fn a_device_that_computes_nothing_fails_the_self_test() {
    let driver = Driver::take();
    for (name, model) in models(2) {
        let directory = tempfile::tempdir().unwrap();
        model.write(directory.path(), false);
        for precision in PRECISIONS {
            match laser_engine::selftest(&options(directory.path(), precision)) {
                Err(EngineError::SelfTest { .. }) => {}
                other => panic!("{name} in {precision:?}: {other:?}"),
            }
        }
    }
    driver.assert_no_error();
}

#[test]
fn the_memory_of_a_dropped_model_is_free_for_the_next() {
    let driver = Driver::take();
    driver.set_memory(driver.counts().live_bytes + (64 << 20));
    let admitted = || {
        let mut engine = load(&models(2)[0].1, (DTypeOption::F32, None)).unwrap();
        let open: Vec<Slot> = (0..100).map_while(|_| engine.open(1000).ok()).collect();
        let mut random = Random::new(6);
        step(engine.as_mut(), &[(open[0], random.tokens(100), chain(100), 99)], TOP_K);
        open.len()
    };
    assert_eq!(admitted(), admitted());
}

#[test]
fn sequences_beyond_free_memory_are_refused_when_they_open() {
    let driver = Driver::take();
    let before = driver.counts();
    driver.set_memory(before.live_bytes + (64 << 20));
    let mut engine = load(&models(2)[0].1, (DTypeOption::F32, None)).unwrap();
    let opened: Vec<_> = (0..100).map(|_| engine.open(1000)).collect();
    let (open, refused): (Vec<_>, Vec<_>) = opened.into_iter().partition(Result::is_ok);
    assert!(refused.iter().all(|error| matches!(error, Err(EngineError::CacheFull { .. }))), "{refused:?}");
    // 1,000 tokens take 2.5 MB with their reserve, of four fifths of some 50 MB.
    assert!((12..20).contains(&open.len()), "{}", open.len());
    // What was admitted has room to the end, also while rows move.
    let open: Vec<Slot> = open.into_iter().flatten().collect();
    let mut random = Random::new(5);
    for &slot in open.iter().cycle().take(10 * open.len()) {
        step(engine.as_mut(), &[(slot, random.tokens(100), chain(100), 99)], TOP_K);
    }
    assert_eq!(driver.counts().refusals, before.refusals);
    driver.assert_no_error();
}
