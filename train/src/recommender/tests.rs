//! Recommenders of a catalogue in which the last item decides the next.

use std::fs;

use candle_core::Device;
use laser_decode::{TargetScores as _, Token, chain_parents};
use laser_engine::{EngineOptions, Segment, load};
use laser_model::ModelFiles;
use laser_schema::DeviceOption;
use tempfile::TempDir;

mod drafts;

use super::*;
use crate::batch::Batch;
use crate::course::Trained;
use crate::layer::Shape;
use crate::network::Network;
use crate::recommender::history::lessons;

const ITEMS: u32 = 30;

/// The codes of an item: 3, 5 and 2 at the three levels.
fn codes(item: u32) -> Vec<String> {
    vec![format!("<a_{}>", item / 10), format!("<b_{}>", item / 2 % 5), format!("<c_{}>", item % 2)]
}

fn catalogue() -> Catalogue {
    let items: Vec<Vec<String>> = (0..ITEMS).map(codes).collect();
    let vocabulary = CodeVocabulary::of_identifiers(items.iter().map(Vec::as_slice)).unwrap();
    let identifiers = items.iter().map(|codes| vocabulary.tokens(codes).unwrap()).collect();
    Catalogue::new(vocabulary, identifiers).unwrap()
}

/// Walks from every item; what counts are the items but the first, which nothing decides.
fn histories(from: u32, to: u32) -> Vec<History> {
    let walk = |seed: u32| {
        let items = std::iter::successors(Some(seed % ITEMS), |item| Some((item + 7) % ITEMS));
        History { items: items.take(4 + seed as usize % 5).collect(), counts_from: 1 }
    };
    (from..to).map(walk).collect()
}

fn options() -> RecommenderOptions {
    RecommenderOptions {
        max_items: 4,
        hidden_size: 32,
        intermediate_size: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        dropout: 0.0,
        epochs: 2,
        patience: 100,
        batch_tokens: 256,
        learning_rate: 0.01,
        weight_decay: 0.0,
        ..RecommenderOptions::default()
    }
}

/// Trains until so many steps are made, or to the end.
fn run(
    folder: &TempDir,
    options: &RecommenderOptions,
    target: Option<&TempDir>,
    steps: usize,
) -> anyhow::Result<Option<Trained>> {
    let target = target.map(|folder| RecommenderTarget { folder: folder.path(), digest: "the target", lists: None });
    run_for(folder, options, target, steps)
}

fn run_for(
    folder: &TempDir,
    options: &RecommenderOptions,
    target: Option<RecommenderTarget<'_>>,
    steps: usize,
) -> anyhow::Result<Option<Trained>> {
    let (catalogue, [learned, held_out]) = (catalogue(), sets());
    let job = RecommenderJob {
        options,
        folder: folder.path(),
        catalogue: &catalogue,
        learned: &learned,
        held_out: &held_out,
        target,
        device: DeviceOption::Cpu,
    };
    let left = std::cell::Cell::new(steps);
    train_recommender(&job, &mut (), &|| left.replace(left.get().saturating_sub(1)) == 0)
}

/// The histories to learn from and to measure on.
fn sets() -> [Vec<History>; 2] {
    [histories(0, 150), histories(200, 230)]
}

fn weights(folder: &TempDir) -> Vec<u8> {
    fs::read(folder.path().join("model.safetensors")).unwrap()
}

#[test]
fn a_recommender_learns_which_item_follows() {
    for constrained in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let options = RecommenderOptions { epochs: 80, constrained, ..options() };
        let kept = run(&folder, &options, None, usize::MAX).unwrap().unwrap().kept;
        assert!(kept.held_out_loss < 0.02 && kept.loss < 0.05, "{constrained}: {kept:?}");
        let shares = ["first code", "all codes", "overlap"].map(|name| kept.share(name));
        assert_eq!(shares, [Some(1.0), Some(1.0), None], "{constrained}: {kept:?}");
    }
}

#[test]
fn a_training_that_is_stopped_again_and_again_gives_the_same_weights() {
    let folders = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let options = RecommenderOptions { dropout: 0.1, ..options() };
    let whole = run(&folders[0], &options, None, usize::MAX).unwrap().unwrap();
    let mut stops = 0;
    let stopped = loop {
        match run(&folders[1], &options, None, 5).unwrap() {
            Some(trained) => break trained,
            None => stops += 1,
        }
    };
    assert!(stops > 2 && whole.is_new && stopped.is_new, "{stops}");
    run(&folders[2], &options, None, usize::MAX).unwrap().unwrap();
    run(&folders[3], &RecommenderOptions { seed: 1, ..options.clone() }, None, usize::MAX).unwrap().unwrap();
    let [first, second, third, fourth] = folders.each_ref().map(weights);
    assert!(first == second && first == third && first != fourth);
    // The same call finds it; another one is told.
    assert!(!run(&folders[0], &options, None, 0).unwrap().unwrap().is_new);
    let error = run(&folders[0], &RecommenderOptions { layers: 1, ..options }, None, 0).unwrap_err().to_string();
    assert!(error.contains("holds a recommender of another training"), "{error}");
}

#[test]
fn training_ends_when_nothing_has_become_better_for_a_while() {
    let folder = tempfile::tempdir().unwrap();
    // It learns nothing with weights that hardly move, but for what rounding brings.
    let options = RecommenderOptions { epochs: 50, patience: 2, learning_rate: 1e-12, ..options() };
    let trained = run(&folder, &options, None, usize::MAX).unwrap().unwrap();
    assert_eq!(trained.history.len(), trained.kept.epoch + 2, "{:?}", trained.history);
}

/// The engine that generates computes what was trained, and reads what [`Catalogue::prompt`] writes.
#[test]
fn the_engine_computes_what_the_network_does() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder, &options(), None, usize::MAX).unwrap().unwrap();
    let catalogue = catalogue();
    let size = catalogue.vocabulary().size();
    let network = Network::model(Shape::llama([32, 64], 2, [4, 2]), (size, true), 9, &Device::Cpu).unwrap();
    let tensors = candle_core::safetensors::load(folder.path().join("model.safetensors"), &Device::Cpu).unwrap();
    for (name, weight) in network.weights() {
        weight.set(&tensors[&name]).unwrap();
    }
    let mut engine = load(&EngineOptions::new(folder.path())).unwrap();
    let history = History { items: vec![3, 29, 0, 11, 8], counts_from: 4 };
    let lessons = lessons(std::slice::from_ref(&history), &catalogue, 4).unwrap();
    assert_eq!(lessons[0].tokens[..lessons[0].prompt], catalogue.prompt(&history.items[..4], 4).unwrap());
    assert_eq!(lessons[0].tokens.len(), engine.info().max_positions);
    let batch = Batch::new(&[&lessons[0]], &Device::Cpu).unwrap();
    let logits = &network.forward(&batch, 1).unwrap()[0].logits;
    let expected = candle_nn::ops::log_softmax(logits, 1).unwrap().to_vec2::<f32>().unwrap();

    let (tokens, scored_from) = (&lessons[0].tokens, lessons[0].prompt - 1);
    let slot = engine.open(tokens.len()).unwrap();
    let parents: Vec<u32> = chain_parents(tokens.len()).collect();
    let segment = Segment { slot, tokens, parents: &parents, scored_from, ..Segment::default() };
    let scores = engine.step(&[segment], size).unwrap();
    for (place, expected) in expected.iter().enumerate() {
        let top = scores[0].top(scored_from + place);
        assert!(top.len() > 5, "{}", top.len());
        for candidate in top {
            let difference = expected[candidate.token as usize] - candidate.log_probability;
            assert!(difference.abs() < 1e-4, "place {place}, token {}: {difference}", candidate.token);
        }
    }
}

#[test]
fn the_folder_is_a_model_whose_tokenizer_reads_codes_without_spaces() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder, &options(), None, usize::MAX).unwrap().unwrap();
    let catalogue = catalogue();
    let model = ModelFiles::open(folder.path()).unwrap();
    assert_eq!((model.bos, model.end_of_text.as_slice(), model.max_positions), (Some(1), [2].as_slice(), Some(16)));
    let history = [3, 29, 0];
    let text: String = history.iter().map(|&item| codes(item).concat()).collect();
    let prompt = catalogue.prompt(&history, 4).unwrap();
    assert_eq!(model.tokenizer.encode(&text, true).unwrap(), prompt);
    assert_eq!(model.tokenizer.encode(&text, false).unwrap(), prompt[1..]);
    assert_eq!(model.tokenizer.decode(&prompt).unwrap(), text);
    assert_eq!(model.tokenizer.encode("<a_9>?<b_1>", false).unwrap().iter().filter(|&&token| token == 0).count(), 2);
    assert_eq!(model.tokenizer.vocab_size(), catalogue.vocabulary().size());
    assert_eq!(CodeVocabulary::open(folder.path()).unwrap(), *catalogue.vocabulary());
    let belongs = RecommenderBelongs::open(folder.path()).unwrap().unwrap();
    assert_eq!((belongs.levels, belongs.max_items), (vec![3, 5, 2], 4));
    assert_eq!(belongs.identifiers, catalogue.digest().to_string());
}

#[test]
fn prompts_have_the_codes_of_the_last_items() {
    let catalogue = catalogue();
    let of = |history: &[u32], max_items| catalogue.prompt(history, max_items).unwrap();
    let text = |tokens: &[Token]| {
        tokens.iter().map(|&token| catalogue.vocabulary().code(token).unwrap_or("*").to_owned()).collect::<String>()
    };
    assert_eq!(of(&[], 3), [1]);
    assert_eq!(text(&of(&[5, 13, 29], 2)), "*<a_1><b_1><c_1><a_2><b_4><c_1>");
    assert_eq!(of(&[13, 29], 2), of(&[5, 13, 29], 2));
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |options: RecommenderOptions, target: Option<&TempDir>| {
        run(&folder, &options, target, 1).unwrap_err().to_string()
    };
    let error = refused(RecommenderOptions { kv_heads: 3, ..options() }, None);
    assert!(error.contains("kv_heads = 3: expected a number that divides heads = 4"), "{error}");
    let error = refused(RecommenderOptions { dropout: 1.0, ..options() }, None);
    assert!(error.contains("dropout = 1: expected a share"), "{error}");
    let error = refused(RecommenderOptions { loss: RecommenderLoss::TvdKd, ..options() }, None);
    assert!(error.contains("needs a target"), "{error}");
    let error = refused(RecommenderOptions { loss: RecommenderLoss::AtSpeedR, ..options() }, Some(&folder));
    assert!(error.contains("loss = \"atspeed-r\" needs the lists of a target"), "{error}");

    let target = tempfile::tempdir().unwrap();
    run(&target, &RecommenderOptions { max_items: 3, epochs: 1, ..options() }, None, usize::MAX).unwrap().unwrap();
    let drafts = RecommenderOptions { loss: RecommenderLoss::WordKd, ..options() };
    let error = refused(drafts.clone(), Some(&target));
    assert!(error.contains("13 positions, but a history and its next item take up to 16; lower max_items"), "{error}");
    let file = target.path().join("tokenizer.json");
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("<c_1>", "<c_2>")).unwrap();
    let error = refused(RecommenderOptions { max_items: 3, ..drafts }, Some(&target));
    assert!(error.contains("its codes are others than those of the identifiers: it does not know <c_1>"), "{error}");
}

#[test]
fn histories_that_cannot_be_read_are_refused() {
    let catalogue = catalogue();
    let identifiers = vec![vec![3, 6, 11], Vec::new()];
    let gappy = Catalogue::new(catalogue.vocabulary().clone(), identifiers).unwrap();
    let refused = |catalogue: &Catalogue, items: &[u32], counts_from| {
        let history = History { items: items.to_vec(), counts_from };
        format!("{:#}", lessons(&[history], catalogue, 4).unwrap_err())
    };
    let error = refused(&gappy, &[0, 1], 0);
    assert!(error.contains("history 0: item 1: has no identifier; leave it out"), "{error}");
    let error = refused(&gappy, &[0, 2], 0);
    assert!(error.contains("item 2: is not in the catalogue"), "{error}");
    assert!(refused(&catalogue, &[], 0).contains("history 0 is empty"));
    assert!(refused(&catalogue, &[3, 4], 2).contains("counts from item 2 of 2 on"));
    let error = Catalogue::new(catalogue.vocabulary().clone(), vec![vec![3, 11, 6]]).unwrap_err().to_string();
    assert!(error.contains("item 0: token 11 is not among the 5 of level 2, which begin at 6"), "{error}");
}

#[test]
fn codes_that_no_tokenizer_could_tell_apart_are_refused() {
    let of = |levels: &[&[&str]]| {
        CodeVocabulary::new(levels.iter().map(|codes| codes.iter().map(|&code| code.to_owned()).collect()).collect())
    };
    let error = of(&[&["<a_1>"], &["<b 1>"]]).unwrap_err().to_string();
    assert!(error.contains("\"<b 1>\": expected a code of the form <a_47>"), "{error}");
    assert!(of(&[&["<a_1>"], &["<a_1>"]]).unwrap_err().to_string().contains("<a_1>: is a code already"));
    assert!(of(&[&["<s>"]]).unwrap_err().to_string().contains("<s>: is a code already"));
    assert!(of(&[&["<a_1>"], &[]]).unwrap_err().to_string().contains("level 2 of the identifiers has no codes"));
    let known = of(&[&["<a_1>"], &["<b_1>"]]).unwrap();
    let error = |codes: &[&str]| known.tokens(&codes.iter().map(|&c| c.to_owned()).collect::<Vec<_>>()).unwrap_err();
    assert!(error(&["<b_1>", "<a_1>"]).to_string().contains("<b_1>: a code of level 2, found at level 1"));
    assert!(error(&["<a_1>", "<b_2>"]).to_string().contains("<b_2>: not among the 1 codes of level 2"));
    assert!(error(&["<a_1>"]).to_string().contains("<a_1>: 1 codes, expected 2"));
}
