//! The naive decoder, and the drafters, pools and requests that are held against it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use laser_decode::{
    Candidate, Drafter, Draw, Noise, Pool, PoolMeta, Prediction, ROOT_PARENT, TargetScores, Verification, build_pool,
};
use laser_engine::{Engine, FakeEngine, FakeOptions, Segment};
use laser_model::Tokenizer;
use laser_schema::audit::Proposer;
use laser_worker::generate::{
    Finished, GenerateError, GenerateOptions, Generated, Generator, Request, StopReason, TextError, TextGenerator,
};

use crate::watch::{Log, Mischief, Watched};

/// The fixture tokenizer's, which the fake shares so that its texts can be decoded.
pub(crate) const VOCABULARY: u32 = 4096;
pub(crate) const END: u32 = 1;

pub(crate) fn fixture() -> PathBuf {
    std::path::absolute("../fixtures/profile-lm").unwrap()
}

pub(crate) fn tokenizer() -> Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let open = || Tokenizer::open(&fixture().join("tokenizer.json")).unwrap();
    TOKENIZER.get_or_init(open).clone()
}

pub(crate) fn fake_options() -> FakeOptions {
    FakeOptions { vocab_size: VOCABULARY, eos: END, ..FakeOptions::default() }
}

pub(crate) fn fake() -> FakeEngine {
    FakeEngine::new(fake_options())
}

pub(crate) fn options() -> GenerateOptions {
    GenerateOptions {
        drafter: Drafter::default(),
        alignment: 0,
        nodes: 16,
        verification: Verification::Strict,
        sampling: None,
        batch: 4,
        step_tokens: 64,
        max_new_tokens: 40,
        end_of_text: vec![END],
        stop: Vec::new(),
        shared_prefixes: true,
        budget: None,
    }
}

pub(crate) fn drafters() -> [Drafter; 5] {
    [
        Drafter::None,
        Drafter::PromptLookup { max_ngram: 4 },
        Drafter::Lookahead { window: 3, ngram: 3, guesses: 2 },
        Drafter::RawFrequency { max_ngram: 4 },
        Drafter::default(),
    ]
}

/// Holds a drafter to have had something accepted exactly if it had nodes to draft. What lookahead's window comes upon
/// may be wrong in all of some texts.
#[track_caller]
pub(crate) fn assert_speculates(drafter: Drafter, nodes: usize, accepted: u32) {
    let speculates = drafter != Drafter::None && nodes > 0;
    let is_unlucky = matches!(drafter, Drafter::Lookahead { .. }) && accepted == 0;
    assert!(is_unlucky || (accepted > 0) == speculates, "{drafter:?} with {nodes} nodes: {accepted}");
}

pub(crate) fn request(id: u64, prompt: &[u32]) -> Request {
    Request { id, prompt: prompt.to_vec(), key: id, ..Request::default() }
}

pub(crate) fn pool(texts: &[Vec<u32>]) -> Pool {
    let meta = PoolMeta {
        name: "test".into(),
        tokenizer: tokenizer().fingerprint(),
        vocab_size: VOCABULARY,
        end_of_text: END,
    };
    let bytes = build_pool(&meta, texts.to_vec()).unwrap();
    Pool::open(Bytes::from(bytes)).unwrap()
}

/// Token ids that look random; `seed` tells them apart.
pub(crate) fn tokens(seed: u32, count: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        3 + state % (VOCABULARY - 3)
    };
    (0..count).map(|_| next()).collect()
}

/// Prompts of 1 to 40 tokens, of which those of 20 or more begin alike, and one that has been continued before.
pub(crate) fn prompts() -> Vec<Vec<u32>> {
    let prefix = tokens(99, 18);
    let tail = |(seed, length): (u32, usize)| {
        let own = tokens(seed, length);
        if length < 3 { own } else { [prefix.clone(), own].concat() }
    };
    let mut prompts: Vec<_> = (0..).zip([5, 22, 1, 12, 3, 2]).map(tail).collect();
    let start = tokens(7, 6);
    let text = naive(&mut fake(), &start, &options()).tokens;
    prompts.push([&start, &text[..20], &start].concat());
    prompts
}

/// One forward after a context: a chain of one token at a time, nothing else.
pub(crate) struct Naive<'a> {
    engine: &'a mut dyn Engine,
    slot: usize,
    top_k: usize,
    /// How the token after the first one is drawn.
    draw: Option<Draw>,
    /// What the model says after the last token.
    pub(crate) prediction: Prediction,
}

impl<'a> Naive<'a> {
    pub(crate) fn new(engine: &'a mut dyn Engine, top_k: usize) -> Self {
        let slot = engine.open(engine.info().max_positions).unwrap();
        Self { engine, slot, top_k, draw: None, prediction: Prediction::default() }
    }

    pub(crate) fn drawing(engine: &'a mut dyn Engine, top_k: usize, draw: Draw) -> Self {
        let mut naive = Self::new(engine, top_k);
        naive.draw = Some(draw);
        naive
    }

    pub(crate) fn feed(&mut self, token: u32) -> Vec<Candidate> {
        let segment = Segment {
            slot: self.slot,
            tokens: &[token],
            parents: &[ROOT_PARENT],
            scored_from: 0,
            draw: self.draw,
            ..Segment::default()
        };
        let scores = self.engine.step(&[segment], self.top_k).unwrap();
        self.engine.commit(self.slot, &[0]).unwrap();
        self.prediction = scores[0].prediction(0);
        scores[0].top(0).to_vec()
    }

    pub(crate) fn feed_all(&mut self, tokens: &[u32]) -> Vec<Candidate> {
        tokens.iter().fold(Vec::new(), |_, token| self.feed(*token))
    }
}

impl Drop for Naive<'_> {
    fn drop(&mut self) {
        self.engine.close(self.slot);
    }
}

/// What plain decoding gives.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NaiveText {
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    pub(crate) stop: StopReason,
    pub(crate) log_probability: f64,
    /// Differences between the first and the second log probability at each token.
    pub(crate) gaps: Vec<f32>,
    /// Where the token was less than 95 % sure: its place with itself, and with the best of the others.
    pub(crate) runners_up: Vec<(usize, u32)>,
}

pub(crate) fn naive(engine: &mut dyn Engine, prompt: &[u32], options: &GenerateOptions) -> NaiveText {
    naive_of(0, engine, prompt, options)
}

/// The text of this key, where texts are drawn.
pub(crate) fn naive_of(key: u64, engine: &mut dyn Engine, prompt: &[u32], options: &GenerateOptions) -> NaiveText {
    let max = options.max_new_tokens.min(engine.info().max_positions - prompt.len());
    let decode = |tokens: &[u32]| tokenizer().decode(tokens).unwrap();
    let mut naive = Naive::new(engine, 2);
    let noise = Noise::new(key).before(prompt.len() - 1);
    naive.draw = options.sampling.map(|sampling| Draw { sampling, noise });
    let (mut out, mut gaps, mut runners_up, mut log_probability) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
    let mut top = naive.feed_all(prompt);
    let (text, stop) = loop {
        let choice = naive.prediction.choice;
        if choice.log_probability.exp() < 0.95 {
            let other = top.iter().find(|other| other.token != choice.token);
            runners_up.extend([Some(&choice), other].into_iter().flatten().map(|c| (out.len(), c.token)));
        }
        out.push(choice.token);
        log_probability += f64::from(choice.log_probability);
        gaps.push(top[0].log_probability - top[1].log_probability);
        let text = decode(&out);
        if options.end_of_text.contains(&choice.token) {
            break (decode(&out[..out.len() - 1]), StopReason::End);
        }
        if let Some(cut) = options.stop.iter().filter_map(|s| text.find(s.as_str())).min() {
            break (text[..cut].to_owned(), StopReason::Stop);
        }
        if out.len() == max {
            // Without a last character of which there are some bytes only.
            break (text.trim_end_matches(char::REPLACEMENT_CHARACTER).to_owned(), StopReason::Length);
        }
        top = naive.feed(choice.token);
    };
    NaiveText { tokens: out, text, stop, log_probability, gaps, runners_up }
}

/// A generator on a watched fake.
pub(crate) fn watched(fake: FakeOptions, mischief: Mischief, options: GenerateOptions) -> (Generator, Arc<Mutex<Log>>) {
    let (engine, log) = Watched::new(FakeEngine::new(fake), mischief);
    (Generator::new(Box::new(engine), tokenizer(), options), log)
}

/// Runs all requests to their ends, by id.
pub(crate) fn try_run(
    generator: &mut Generator,
    requests: impl IntoIterator<Item = Request>,
) -> Result<Vec<Result<Generated, TextError>>, GenerateError> {
    let mut ended: Vec<Finished> = Vec::new();
    requests.into_iter().for_each(|request| generator.submit(request));
    while generator.load() > 0 {
        ended.extend(generator.step()?);
    }
    ended.sort_by_key(|finished| finished.id);
    Ok(ended.into_iter().map(|finished| finished.result).collect())
}

pub(crate) fn run(
    generator: &mut Generator,
    requests: impl IntoIterator<Item = Request>,
) -> Vec<Result<Generated, TextError>> {
    try_run(generator, requests).unwrap()
}

/// The text is the naive decoder's, and its figures add up.
#[track_caller]
pub(crate) fn assert_naive(got: &Generated, expected: &NaiveText, what: &str) {
    assert_eq!(got.tokens, expected.tokens, "{what}");
    assert_eq!(got.text, expected.text, "{what}");
    assert_eq!(got.stop, expected.stop, "{what}");
    assert!((got.log_probability - expected.log_probability).abs() < 1e-3, "{what}");
    assert_eq!(got.relaxed, 0, "{what}");
    assert_figures(got, what);
}

/// Every forward emits what it accepted and one token more, but for a last one that ends within its draft.
#[track_caller]
pub(crate) fn assert_figures(got: &Generated, what: &str) {
    let accepted: usize = got.step_accepted.iter().map(|a| *a as usize).sum();
    let without_bonus = accepted + got.step_accepted.len() - got.tokens.len();
    let ended_in_draft = got.stop != StopReason::Length && *got.step_accepted.last().unwrap() > 0;
    assert!(without_bonus == 0 || (without_bonus == 1 && ended_in_draft), "{what}: {got:?}");
    assert!(accepted as u64 <= got.drafted, "{what}");
    assert_eq!(got.origins.len(), got.tokens.len(), "{what}");
    let drafted = got.origins.iter().filter(|o| o.source != Proposer::Target);
    assert_eq!(drafted.count(), accepted, "{what}");
    let relaxed = got.origins.iter().filter(|o| o.relaxed);
    assert_eq!(relaxed.count() as u64, got.relaxed, "{what}");
}
