//! Time of building a pool and of drafting from it, on texts with the statistics of natural language: a
//! seeded walk over phrases whose words follow Zipf's law. `cargo bench -p laser-decode`; figures for
//! real texts come from `laser-bench replay` (docs/performance.md).

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput};
use laser_decode::{DraftContext, DraftTree, Drafter, Pool, PoolMeta, Token, build_pool};

const END: Token = 0;
const VOCAB: u32 = 8192;
const TEXT: usize = 200;

/// A multiplicative congruential generator: the same texts on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }

    /// A token of rank r with a probability in proportion to 1/r, nearly.
    fn zipf(&mut self) -> Token {
        let bits = self.below(13);
        let rank = (1 << bits) + self.below(1 << bits);
        Token::try_from(rank).unwrap_or(1).min(VOCAB - 1)
    }
}

/// Texts of phrases, taken by Zipf's law from a stock of 8,192 of 2 to 13 tokens.
fn texts(tokens: usize, seed: u64) -> Vec<Vec<Token>> {
    let mut stock = Random(7);
    let phrases: Vec<Vec<Token>> =
        (0..VOCAB).map(|_| (0..2 + stock.below(12)).map(|_| stock.zipf()).collect()).collect();
    let mut random = Random(seed);
    let mut text = || {
        let mut text = Vec::new();
        while text.len() < TEXT {
            text.extend(&phrases[random.zipf() as usize]);
        }
        text
    };
    (0..tokens / TEXT).map(|_| text()).collect()
}

fn meta() -> PoolMeta {
    PoolMeta { name: "bench".into(), tokenizer: [0; 32], vocab_size: VOCAB, end_of_text: END }
}

fn build(criterion: &mut Criterion) {
    let texts = texts(1_000_000, 1);
    let mut group = criterion.benchmark_group("build");
    group.throughput(Throughput::Elements(1_000_000)).sample_size(10);
    group.bench_function("1M tokens", |b| b.iter(|| build_pool(&meta(), black_box(texts.clone()))));
    group.finish();
}

fn draft(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("draft");
    for (name, tokens) in [("100k tokens", 100_000), ("1M tokens", 1_000_000)] {
        let bytes = build_pool(&meta(), texts(tokens, 1)).expect("the texts are of the vocabulary");
        let pool = Pool::open(bytes.into()).expect("a pool that was just built");
        let unseen = texts(100 * TEXT, 2);
        for nodes in [32, 64] {
            let mut tree = DraftTree::new();
            let mut places = unseen.iter().flat_map(|text| (8..TEXT).map(|at| &text[..at])).cycle();
            let mut context = || {
                let mut context = DraftContext::new(Drafter::default(), Some(pool.clone()), END);
                context.extend(places.by_ref().nth(16).unwrap_or(&[]));
                context
            };
            group.bench_function(format!("{nodes} nodes, {name}"), |b| {
                let step = |mut context: DraftContext| {
                    context.draft(nodes, &mut tree);
                    tree.drafted()
                };
                b.iter_batched(&mut context, step, BatchSize::SmallInput);
            });
        }
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    build(&mut criterion);
    draft(&mut criterion);
    criterion.final_summary();
}
