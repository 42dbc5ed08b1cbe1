//! Comparisons end to end, on a few users and films and the fixture model, at the smallest scale that says something.

use std::path::Path;

use laser_engine::DRAFT_TOKENS;

use super::*;

mod lists;

/// The words of a command line.
fn parse(line: &str) -> Result<Command, clap::Error> {
    let words = std::iter::once("bench").chain(line.split_whitespace());
    Cli::try_parse_from(words).map(|cli| *cli.command)
}

fn fixture(name: &str) -> String {
    std::path::absolute("../fixtures").unwrap().join(name).display().to_string()
}

/// Small tables, and as few and short texts as will do.
fn setup(dir: &Path) -> SetupArgs {
    let [model, users, items] =
        ["profile-lm", "demo/small/tonight/users.parquet", "demo/small/tonight/items.parquet"].map(fixture);
    let output = dir.join("bench").display().to_string();
    let line = format!(
        "paper --users-table {users} --items-table {items} --model {model} --output {output} --chat false \
         --old-texts 8 --new-texts 5 --max-new-tokens 40 --min-history 4"
    );
    let Ok(Command::Paper(setup)) = parse(&line) else { unreachable!("the command is paper") };
    setup
}

#[tokio::test]
async fn all_variants_run_and_strict_ones_give_the_texts_of_plain_decoding() {
    let dir = tempfile::tempdir().unwrap();
    let setup = setup(dir.path());
    let report = paper::paper(&setup).await.unwrap();
    let text = report.render(Style::Text).unwrap();
    for kind in &report.kinds {
        let names: Vec<&str> = kind.rows.iter().map(|row| row.variant.as_str()).collect();
        let expected = [
            "vanilla", "whole prompts", "PLD", "ReSD, paper's rule", "GRP (ReSD)", "RRP", "CRP", "RV+GRP", "RV+RRP",
            "LASER, paper's rule", "LASER (RV+CRP)", "LASER adaptive", "LASER+own",
        ];
        let own = usize::from(kind.kind == laser_schema::Kind::User);
        assert_eq!(names, expected[..12 + own]);
        assert_eq!(kind.mismatches, [], "{text}");
        assert!(kind.rows[..7].iter().all(|row| row.identical == 5), "{text}");
        assert_eq!((kind.rows[0].aal, kind.rows[0].speedup), (0.0, 1.0));
        assert!(kind.rows[10].aal > 0.0, "{text}");
    }
    assert_eq!(report.kinds.len(), 2);
    assert_eq!(report.file_name(), "paper-user-item.json");
    let prompts = std::fs::read_to_string(setup.output.join("prompts-item.jsonl")).unwrap();
    assert_eq!(prompts.lines().count(), 5, "{prompts}");
}

#[tokio::test]
async fn old_knowledge_is_generated_once() {
    let dir = tempfile::tempdir().unwrap();
    let setup = SetupArgs { items_table: None, ..setup(dir.path()) };
    let first = paper::sweep(&setup, &[4, 6], &[2, 8]).await.unwrap();
    let file = setup.output.join("old-knowledge.jsonl");
    let old = std::fs::read(&file).unwrap();
    let names: Vec<&str> = first.kinds[0].rows.iter().map(|row| row.variant.as_str()).collect();
    assert_eq!(names, ["vanilla", "pool 4", "pool 6", "tree 2", "tree 8", "tree adaptive"]);
    let charts: Vec<String> = first.charts().into_iter().map(|(name, _)| name).collect();
    assert_eq!(charts, ["sweep-user.svg"]);
    let second = paper::sweep(&setup, &[4, 6], &[2, 8]).await.unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), old);
    let tokens = |report: &Report| -> Vec<u64> { report.kinds[0].rows.iter().map(|row| row.tokens).collect() };
    // The adaptive one's texts hang on measured times.
    assert_eq!(tokens(&first)[..5], tokens(&second)[..5]);
}

#[tokio::test]
async fn every_round_generates_the_texts_again() {
    let dir = tempfile::tempdir().unwrap();
    let once = SetupArgs { items_table: None, ..setup(dir.path()) };
    let report = paper::sweep(&once, &[4], &[2]).await.unwrap();
    let twice = paper::sweep(&SetupArgs { rounds: 2, ..once }, &[4], &[2]).await.unwrap();
    let text = twice.render(Style::Text).unwrap();
    assert!(text.contains("seed 1, 2 rounds\n") && !report.render(Style::Text).unwrap().contains("±"), "{text}");
    assert_eq!(twice.kinds[0].mismatches, [], "{text}");
    // The adaptive one's texts hang on measured times.
    for (one, two) in report.kinds[0].rows.iter().zip(&twice.kinds[0].rows).filter(|(row, _)| !row.adaptive) {
        assert_eq!((two.texts, two.tokens, two.aal), (2 * one.texts, 2 * one.tokens, one.aal), "{text}");
        assert_eq!(two.identical, 2 * one.identical, "{text}");
    }
    let json = serde_json::to_value(&twice.kinds[0]).unwrap();
    assert_eq!(json["rows"][0]["round_speedups"], serde_json::json!([1.0, 1.0]));
    assert_eq!(json["rows"][1]["round_speedups"].as_array().map(Vec::len), Some(2), "{json}");
}

#[tokio::test]
async fn a_padded_model_writes_the_same_texts() {
    let dir = tempfile::tempdir().unwrap();
    let texts_of = async |setup: SetupArgs| -> Vec<String> {
        paper::sweep(&setup, &[4], &[2]).await.unwrap();
        let lines = std::fs::read_to_string(setup.output.join("old-knowledge.jsonl")).unwrap();
        let lines = lines.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        lines.map(|line| line["text"].to_string()).collect()
    };
    let original = texts_of(setup(dir.path())).await;
    for (name, more) in [("deep", ""), ("wide", "--vocabulary 6000")] {
        let model = dir.path().join(name).display().to_string();
        let line = format!(
            "pad --model {} --output {model} --hidden 320 --layers 6 --heads 10 --intermediate 700 {more}",
            fixture("profile-lm")
        );
        let Ok(Command::Pad(options)) = parse(&line) else { unreachable!("the command is pad") };
        pad::pad(&options).unwrap();
        let setup = SetupArgs { model, output: dir.path().join(format!("{name}-texts")), ..setup(dir.path()) };
        assert_eq!(texts_of(setup.clone()).await, original, "{name}");
        // The small model's texts serve the padded one, and are there already.
        let borrowed = SetupArgs { old_model: Some(fixture("profile-lm")), output: dir.path().join("bench"), ..setup };
        assert_eq!(texts_of(borrowed).await, original, "{name}");
        let error = pad::pad(&options).unwrap_err().to_string();
        assert!(error.contains("exists; remove it"), "{error}");
    }
}

/// Tensors of these shapes with weights of no meaning. A draft model tells of every second token.
fn write_tensors(file: &Path, tensors: &[(&str, Vec<usize>)]) {
    use safetensors::{Dtype, tensor::TensorView};
    let bytes = |shape: &[usize]| -> Vec<u8> {
        let value = |at: usize| ((at * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.2;
        (0..shape.iter().product()).flat_map(|at| value(at).to_le_bytes()).collect()
    };
    let tokens = |shape: &[usize]| (0..shape[0]).flat_map(|at| u32::try_from(2 * at).unwrap().to_le_bytes()).collect();
    let content = |name: &str, shape: &[usize]| match name {
        DRAFT_TOKENS => (Dtype::U32, tokens(shape)),
        _ => (Dtype::F32, bytes(shape)),
    };
    let tensors: Vec<_> = tensors.iter().map(|(name, shape)| (name, content(name, shape), shape)).collect();
    let views = tensors
        .iter()
        .map(|(name, (dtype, bytes), shape)| (**name, TensorView::new(*dtype, (*shape).clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, file).unwrap();
}

/// An EAGLE layer and Medusa's heads with weights of no meaning, for the fixture model.
fn drafts_of_features(dir: &Path) -> [String; 2] {
    let config = std::fs::read_to_string(fixture("profile-lm/config.json")).unwrap();
    let model: serde_json::Value = serde_json::from_str(&config).unwrap();
    let size = |key: &str| usize::try_from(model[key].as_u64().unwrap()).unwrap();
    let (hidden, inner, heads) = (size("hidden_size"), size("intermediate_size"), size("num_attention_heads"));
    let keys = hidden / heads * size("num_key_value_heads");
    let write = |name: &str, file: &str, config: &serde_json::Value, tensors: Vec<(&str, Vec<usize>)>| {
        let folder = dir.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        write_tensors(&folder.join(file), &tensors);
        folder.display().to_string()
    };
    let mut layer = model.clone();
    layer["num_hidden_layers"] = 1.into();
    let of_layer = vec![
        ("fc.weight", vec![hidden, 2 * hidden]),
        ("fc.bias", vec![hidden]),
        ("layers.0.self_attn.q_proj.weight", vec![hidden, hidden]),
        ("layers.0.self_attn.k_proj.weight", vec![keys, hidden]),
        ("layers.0.self_attn.v_proj.weight", vec![keys, hidden]),
        ("layers.0.self_attn.o_proj.weight", vec![hidden, hidden]),
        ("layers.0.mlp.gate_proj.weight", vec![inner, hidden]),
        ("layers.0.mlp.up_proj.weight", vec![inner, hidden]),
        ("layers.0.mlp.down_proj.weight", vec![hidden, inner]),
        ("layers.0.post_attention_layernorm.weight", vec![hidden]),
        (DRAFT_TOKENS, vec![size("vocab_size") / 2]),
    ];
    let heads = serde_json::json!({ "medusa_num_heads": 2, "vocab_size": size("vocab_size") });
    let of_heads = vec![
        ("0.0.linear.weight", vec![hidden, hidden]),
        ("0.0.linear.bias", vec![hidden]),
        ("1.0.linear.weight", vec![hidden, hidden]),
        ("1.0.linear.bias", vec![hidden]),
        ("0.1.weight", vec![size("vocab_size"), hidden]),
        ("1.1.weight", vec![size("vocab_size"), hidden]),
        (DRAFT_TOKENS, vec![size("vocab_size") / 2]),
    ];
    [
        write("eagle", "model.safetensors", &layer, of_layer),
        write("medusa", "medusa_lm_head.safetensors", &heads, of_heads),
    ]
}

/// The tokens that a draft model tells of.
fn draft_tokens(file: &Path) -> Vec<u8> {
    let bytes = std::fs::read(file).unwrap();
    safetensors::SafeTensors::deserialize(&bytes).unwrap().tensor(DRAFT_TOKENS).unwrap().data().to_vec()
}

/// A copy of the fixture model.
fn copy_model(dir: &Path, name: &str) -> PathBuf {
    let folder = dir.join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for file in std::fs::read_dir(fixture("profile-lm")).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    folder
}

/// A model of the fixture's shape and tokenizer whose weights have no meaning.
fn stranger(dir: &Path) -> String {
    let folder = copy_model(dir, "stranger");
    let file = folder.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let shapes: Vec<(&str, Vec<usize>)> =
        tensors.iter().map(|(name, tensor)| (name, tensor.shape().to_vec())).collect();
    write_tensors(&file, &shapes);
    folder.display().to_string()
}

/// The fixture model as a draft model of `laser train draft`.
fn copy_as_draft(dir: &Path) -> String {
    let folder = copy_model(dir, "itself");
    let kept = serde_json::json!({
        "epoch": 1, "loss": 0.0, "held_out_loss": 0.0, "shares": [], "score": 1.0, "seconds": 0.0
    });
    let tokenizer = laser_model::Tokenizer::open(&folder.join("tokenizer.json")).unwrap();
    let tokenizer = laser_schema::Digest::from_bytes(tokenizer.fingerprint());
    let belongs = serde_json::json!({
        "target": "the small model", "tokenizer": tokenizer, "training": "none", "kept": kept
    });
    describe_draft(&folder, belongs);
    folder.display().to_string()
}

/// Says whom a draft belongs to.
fn describe_draft(folder: &Path, belongs: serde_json::Value) {
    let file = folder.join("config.json");
    let known = std::fs::read(&file).unwrap_or_else(|_| b"{}".to_vec());
    let mut config: serde_json::Value = serde_json::from_slice(&known).unwrap();
    config["laser_draft"] = belongs;
    std::fs::write(file, config.to_string()).unwrap();
}

/// Compares these drafts with what else there is.
async fn compare(setup: &SetupArgs, drafts: &[String], options: &str) -> Report {
    let drafts = drafts.iter().map(|draft| format!(" --draft {draft}")).collect::<String>();
    let line = format!("compare --users-table u --model m{drafts} {options}");
    let Ok(Command::Compare(args)) = parse(&line) else { unreachable!("the command is compare: {line}") };
    paper::sources(&sources::CompareArgs { setup: setup.clone(), ..args }).await.unwrap()
}

#[tokio::test]
async fn sources_of_drafts_are_compared_and_padded_ones_draft_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let small = SetupArgs { items_table: None, ..setup(dir.path()) };
    let [eagle, medusa] = drafts_of_features(dir.path());
    let own = fixture("profile-lm");
    let pad = |line: &str| {
        let Ok(Command::Pad(options)) = parse(line) else { unreachable!("the command is pad") };
        pad::pad(&options)
    };
    let drafts = [format!("itself={own}"), format!("eagle={eagle}"), format!("medusa={medusa}")];
    let options = "--batches 1,3 --forwards 1,2 --trees 3 --stops 0.5 --merge itself,eagle";
    let report = compare(&small, &drafts, options).await;
    let text = report.render(Style::Text).unwrap();
    let rows = &report.kinds[0].rows;
    let of = |name: &str| rows.iter().find(|row| row.variant == name).unwrap_or_else(|| panic!("{name}: {text}"));
    assert_eq!(rows.len(), 10 + 4 * 7 + 1 + 2, "{text}");
    assert_eq!(of("medusa, measured tree").texts, of("medusa, 1 forward").texts, "{text}");
    assert!(of("PLD, aligned").relaxed_share == 0.0 && of("AASD").texts == 5, "{text}");
    assert!(report.kinds.iter().all(|kind| kind.mismatches.is_empty()), "{text}");
    assert!(of("itself, 2 forwards").aal > 1.5 && of("itself, 1 forward").accepted_by_depth[0] > 0.9, "{text}");
    assert!(of("merged, 2 forwards").accepted_by_depth[0] > 0.9, "{text}");
    assert!(of("itself, 3 nodes").calls_per_token < 0.5, "{text}");
    // What the model itself is sure of is never rejected; of the others about as much as the threshold says.
    let [stopped, whole] = ["itself, stop at 0.5", "itself, 2 forwards"].map(of);
    assert!(stopped.discarded_per_token < whole.discarded_per_token, "{text}");
    assert!(stopped.aal > 1.0 && stopped.aal <= whole.aal, "{text}");
    assert!(text.contains("speedup (tokens/s), batch 3") && report.charts().len() == 1, "{text}");

    // Padding changes neither the texts nor what is drafted, and neither does a wider vocabulary.
    let itself = copy_as_draft(dir.path());
    for (name, more) in [("deep", ""), ("wide", "--vocabulary 6000")] {
        let model = dir.path().join(name).display().to_string();
        pad(&format!(
            "pad --model {own} --output {model} --hidden 320 --layers 5 --heads 10 --intermediate 700 {more}"
        ))
        .unwrap();
        let drafts = [("itself", &itself), ("eagle", &eagle), ("medusa", &medusa)].map(|(name, draft)| {
            pad(&format!("pad --model {draft} --output {model}-{name} --target {model}")).unwrap();
            format!("{name}={model}-{name}")
        });
        for (draft, file) in [(&eagle, "eagle/model.safetensors"), (&medusa, "medusa/medusa_lm_head.safetensors")] {
            let padded = format!("{model}-{file}");
            assert_eq!(
                draft_tokens(Path::new(&padded)),
                draft_tokens(&Path::new(draft).with_file_name(file)),
                "{file}"
            );
        }
        let padded = SetupArgs { model: model.clone(), old_model: Some(own.clone()), ..small.clone() };
        let padded = compare(&padded, &drafts, options).await;
        for (small, padded) in rows.iter().zip(&padded.kinds[0].rows).filter(|(row, _)| !row.adaptive) {
            let drafted = |row: &crate::report::VariantRow| (row.tokens, row.accepted_by_depth.clone());
            assert_eq!(drafted(small), drafted(padded), "{name}: {}", small.variant);
        }
        let error = pad(&format!("pad --model {own} --output {model}-2 --target {model}")).unwrap_err().to_string();
        assert!(error.contains("no draft model of `laser train draft`"), "{error}");
    }
}

#[tokio::test]
async fn only_the_variants_that_are_named_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let small = SetupArgs { items_table: None, ..setup(dir.path()) };
    let Ok(Command::Compare(args)) = parse("compare --users-table u --model m --batches 1") else { unreachable!() };
    let only = |name: &str| {
        let args = sources::CompareArgs { setup: small.clone(), only: vec![name.to_owned()], ..args.clone() };
        async move { paper::sources(&args).await }
    };
    for (name, charts) in [("pool", 1), ("pool, adaptive", 0)] {
        let report = only(name).await.unwrap();
        let names: Vec<&str> = report.kinds[0].rows.iter().map(|row| row.variant.as_str()).collect();
        assert_eq!((names.as_slice(), report.charts().len()), (["vanilla", name].as_slice(), charts));
    }
    let error = only("pools").await.unwrap_err().to_string();
    assert!(error.contains("--only pools: expected one of: vanilla; PLD") && error.contains("; pool; "), "{error}");
}

#[tokio::test]
async fn drawn_texts_are_those_of_plain_sampling_whatever_drafts_them_and_at_every_batch_size() {
    let dir = tempfile::tempdir().unwrap();
    // As many texts as fill the largest batch.
    let small = SetupArgs { items_table: None, new_texts: 8, max_new_tokens: 12, ..setup(dir.path()) };
    let [eagle, medusa] = drafts_of_features(dir.path());
    let drafts = [
        format!("itself={}", fixture("profile-lm")),
        format!("stranger={}", stranger(dir.path())),
        format!("eagle={eagle}"),
        format!("medusa={medusa}"),
    ];
    let options = "--temperature 1 --batches 1,3,8 --forwards 2 --merge itself,eagle --runners-up 2";
    let report = compare(&small, &drafts, options).await;
    let text = report.render(Style::Text).unwrap();
    assert_eq!(report.kinds.iter().map(|kind| kind.batch).collect::<Vec<_>>(), [1, 3, 8]);
    let plain = &report.kinds[0].rows[0];
    for kind in &report.kinds {
        assert_eq!(kind.mismatches, [], "{text}");
        // Nine without draft models, two of the soft pool, four of each draft model and of those that are merged, one
        // more of the heads, and the rule that is not strict.
        assert_eq!(kind.rows.len(), 9 + 2 + 5 * 4 + 1 + 1, "{text}");
        let own = &kind.rows[0];
        assert_eq!((own.texts, own.tokens), (8, plain.tokens), "batch {}: {text}", kind.batch);
        let difference = (own.mean_log_probability - plain.mean_log_probability).abs();
        assert!(difference < 1e-9, "batch {}: {difference}", kind.batch);
        for row in kind.rows.iter().filter(|row| !row.variant.starts_with("typical")) {
            assert_eq!(row.identical, 8, "batch {}, {}: {text}", kind.batch, row.variant);
        }
        let itself = kind.rows.iter().find(|row| row.variant == "itself, 2 forwards").unwrap();
        assert!(itself.aal > 1.5, "batch {}: {text}", kind.batch);
        let stranger = kind.rows.iter().find(|row| row.variant == "stranger, 2 forwards").unwrap();
        assert!(stranger.aal < 0.1, "batch {}: {text}", kind.batch);
    }
    assert!(text.contains("typical 0.09, 0.3") && !text.contains("relaxed 2"), "{text}");
}

#[tokio::test]
async fn lossless_rules_accept_as_often_as_the_distributions_overlap() {
    let dir = tempfile::tempdir().unwrap();
    let small = SetupArgs { items_table: None, ..setup(dir.path()) };
    let lossless = async |draft: String, options: &str| {
        let line = format!("lossless --users-table u --model m --draft {draft} --children 1,3 {options}");
        let Ok(Command::Lossless(args)) = parse(&line) else { unreachable!("the command is lossless") };
        lossless::run(&lossless::LosslessArgs { setup: small.clone(), ..args }).await.unwrap()
    };
    // Another model, at temperatures at which its distribution and the target's overlap in part.
    for row in lossless(stranger(dir.path()), "--temperatures 2,4").await.rows {
        let [(rule, rejection), ..] = &row.accepted[..] else { panic!("{row:?}") };
        let error = (row.overlap * (1.0 - row.overlap) / row.places as f64).sqrt();
        assert_eq!(*rule, lossless::Rule::Rejection);
        assert!((0.1..0.9).contains(&row.overlap) && row.places > 100, "{row:?}");
        assert!((rejection[0] - row.overlap).abs() < 4.0 * error, "{row:?}");
    }
    // Itself: it expects what the target does.
    let report = lossless(fixture("profile-lm"), "--temperatures 0.8,1.2").await;
    assert_eq!(report.rows.len(), 2);
    for row in &report.rows {
        assert!((row.overlap - 1.0).abs() < 1e-3 && row.places > 100, "{row:?}");
        let of =
            |rule| row.accepted.iter().find(|(found, _)| *found == rule).map(|(_, shares)| shares.clone()).unwrap();
        let [rejection, shared] = [lossless::Rule::Rejection, lossless::Rule::SharedNoise].map(of);
        assert!(rejection[0] > 0.99 && shared[0] > 0.99, "{row:?}");
        let [given, keyed, drawn] =
            [lossless::Rule::MostProbableRejection, lossless::Rule::MostProbableKeyed, lossless::Rule::Independent]
                .map(of);
        // By the same probability, whoever draws: within four standard errors.
        let error = 4.0 / (row.places as f64).sqrt();
        assert!((0..2).all(|at| (given[at] - keyed[at]).abs() < error), "{row:?}");
        assert!(drawn[0] < shared[0] && drawn[0] < drawn[1] && keyed[0] < keyed[1], "{row:?}");
    }
    assert!(report.render(Style::Text).contains("3 children"));
}

#[test]
fn an_acceptance_head_goes_with_its_padded_draft_model() {
    let dir = tempfile::tempdir().unwrap();
    let (head, output) = (dir.path().join("head"), dir.path().join("padded"));
    let draft = std::path::PathBuf::from(copy_as_draft(dir.path()));
    std::fs::create_dir_all(&head).unwrap();
    describe_draft(&draft, serde_json::json!({ "target": "the padded model" }));
    describe_draft(&head, serde_json::json!({ "target": "the small model", "draft": "the small draft model" }));
    let shapes = [("0.0.linear.weight", vec![8, 8]), ("0.0.linear.bias", vec![8]), ("0.1.weight", vec![2, 8])];
    write_tensors(&head.join("acceptance_head.safetensors"), &shapes);
    let line = format!("pad --model {} --output {} --target {}", head.display(), output.display(), draft.display());
    let Ok(Command::Pad(options)) = parse(&line) else { unreachable!("the command is pad") };
    assert_eq!(pad::pad(&options).unwrap(), 256 * 256 + 256 + 2 * 256);
    assert!(output.join("acceptance_head.safetensors").exists());
    let config = std::fs::read_to_string(output.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let digest = laser_model::ModelFiles::open(&draft).unwrap().digest().unwrap();
    assert_eq!(config["laser_draft"], serde_json::json!({ "target": "the padded model", "draft": digest }));
}

#[test]
fn a_model_is_not_padded_to_less_than_it_has() {
    let sizes = ["--hidden 128", "--layers 4", "--heads 6", "--heads 9", "--intermediate 671", "--vocabulary 4000"];
    for size in sizes {
        let option = size.split(' ').next().unwrap();
        let rest = ["--hidden 256", "--layers 5", "--heads 8", "--intermediate 672"];
        let rest = rest.into_iter().filter(|default| !default.starts_with(option)).collect::<Vec<_>>().join(" ");
        let line = format!("pad --model {} --output /nowhere {rest} {size}", fixture("profile-lm"));
        let Ok(Command::Pad(options)) = parse(&line) else { unreachable!("the command is pad") };
        let error = pad::pad(&options).unwrap_err().to_string();
        assert!(error.starts_with(size), "{error}");
    }
}

#[tokio::test]
async fn precisions_are_compared_with_f32() {
    let dir = tempfile::tempdir().unwrap();
    let args = |precisions: &[&str], setup| PrecisionArgs {
        setup,
        precisions: precisions.iter().map(ToString::to_string).collect(),
    };
    let report = precision::run(&args(&["f32", "q8_0"], setup(dir.path()))).await.unwrap();
    let rows = report.rows();
    let names: Vec<&str> = rows.iter().map(|row| row.precision.as_str()).collect();
    let alone = "q8_0, weights alone";
    assert_eq!(names, ["f32", "f32", "f32", "f32", "q8_0", "q8_0", alone, alone]);
    for (f32, again, q8, alone) in
        [(0, 2, 4, 6), (1, 3, 5, 7)].map(|(a, b, c, d)| (&rows[a], &rows[b], &rows[c], &rows[d]))
    {
        assert_eq!((f32.equal, f32.common), (5, 1.0));
        assert_eq!((again.equal, again.common, again.perplexity), (5, 1.0, f32.perplexity));
        assert!(f32.perplexity > 1.0 && q8.perplexity != f32.perplexity, "{}", report.render(Style::Text));
        for rounded in [q8, alone] {
            assert!((rounded.perplexity / f32.perplexity - 1.0).abs() < 0.02, "{}", report.render(Style::Text));
        }
        // Activations are rounded beside the weights, and not alone: three texts of one model.
        assert!(alone.perplexity != f32.perplexity && alone.perplexity != q8.perplexity);
    }
    let error = |setup, precisions| async move {
        format!("{:#}", precision::run(&args(precisions, setup)).await.err().unwrap())
    };
    let unknown = error(setup(dir.path()), &["q9"]).await;
    assert!(unknown.contains("option isq = \"q9\""), "{unknown}");
    let mut twice = setup(dir.path());
    twice.load.dtype = laser_engine::DTypeOption::Bf16;
    let twice = error(twice, &["q8_0"]).await;
    assert!(twice.starts_with("--dtype, --isq: name what is to be compared"), "{twice}");
}

#[tokio::test]
async fn batch_sizes_are_compared_and_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let setup = SetupArgs { items_table: None, ..setup(dir.path()) };
    let report = paper::batch(&setup, &[1, 3], &[4, 8]).await.unwrap();
    let batches: Vec<u16> = report.kinds.iter().map(|kind| kind.batch).collect();
    assert_eq!(batches, [1, 3]);
    let plain = |batch: usize| &report.kinds[batch].rows[0];
    assert_eq!(plain(0).tokens, plain(1).tokens);
    let predicted = report.kinds[0].rows[2].aal;
    let shuffled = report.kinds[0].rows[5].aal;
    assert!(predicted > 2.0 * shuffled, "{predicted} {shuffled}");
    let text = report.render(Style::Text).unwrap();
    assert!(text.contains("Speedup for users\n\nbatch  plain tokens/s"), "{text}");
    finish(&report, &setup.output, Style::Text).unwrap();
    assert_eq!(report.file_name(), "batch-user.json");
    let svg = std::fs::read_to_string(setup.output.join("batch-user.svg")).unwrap();
    assert!(svg.contains("Speedup against plain decoding, users"));
}

#[tokio::test]
async fn a_synthetic_night_is_planned_in_every_stage() {
    let dir = tempfile::tempdir().unwrap();
    let (output, model) = (dir.path().display(), fixture("profile-lm"));
    let line = format!("plan --entities 3000 --memory-mb 1 --output {output} --model {model}");
    let Ok(Command::Plan(options)) = parse(&line) else { unreachable!("the command is plan") };
    // It fails unless the unchanged users, and they alone, are carried forward.
    let table = plan::run(&options).await.unwrap().render(Style::Text);
    for stage in ["making the night", "building pools", "planning"] {
        assert!(table.contains(stage), "{table}");
    }
}

#[tokio::test]
async fn the_coordinators_look_is_measured_at_any_size() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("look --shards 200 --between 10 --output {}", dir.path().display());
    let Ok(Command::Look(looks)) = parse(&line) else { unreachable!("the command is look") };
    let looks = look::run(&looks).await.unwrap().render(Style::Text);
    assert!(looks.contains("110"), "{looks}");
}

#[tokio::test]
async fn replay_measures_each_file_and_all_together() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, of: &str| {
        let line = |i: i64| format!("{{\"id\": {i}, \"text\": \"the viewer likes {of} and film {}\"}}\n", i % 7);
        let path = dir.path().join(name);
        std::fs::write(&path, (0..60).map(line).collect::<String>()).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (a, b, output) = (file("a.jsonl", "drama"), file("b.jsonl", "comedy"), dir.path().join("out"));
    let line = format!(
        "replay {a} {b} --train-tokenizer 300 --held-out 0.2 --nodes 8 --pool-tokens 500 --output {}",
        output.display()
    );
    let Ok(Command::Replay(options)) = parse(&line) else { unreachable!("the command is replay") };
    let report = replay::replay(&options).await.unwrap();
    let of: Vec<(&str, &str)> = report.rows.iter().map(|row| (row.texts_of.as_str(), row.drafter)).collect();
    let expected = ["a.jsonl", "b.jsonl", "all"]
        .map(|texts| ["blended", "raw-frequency", "prompt-lookup"].map(|drafter| (texts, drafter)));
    assert_eq!(of, expected.concat());
    let text = report.render(Style::Text);
    assert!(report.rows[0].accepted_per_step > 2.0, "{text}");
    assert!(text.contains("threads on one pool"), "{text}");
    let tokenizer = laser_model::Tokenizer::open(&output.join("tokenizer.json")).unwrap();
    assert!((257..=300).contains(&tokenizer.vocab_size()), "{}", tokenizer.vocab_size());
    let tokens = tokenizer.encode("the viewer likes drama", false).unwrap();
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "the viewer likes drama");
}

#[test]
fn impossible_options_are_refused() {
    let cases = [
        ("paper --model m", "--users-table"),
        ("paper --model m --users-table u --batch 0", "0 is not in 1.."),
        ("compare --model m --users-table u --rounds 0", "0 is not in 1.."),
        ("paper --model m --users-table u --dtype f8", "expected f32, f16 or bf16"),
        ("paper --model m --users-table u --chat no", "expected true, false or auto"),
        ("replay t.jsonl", "--tokenizer"),
        ("compare --model m --users-table u --draft =d", "expected a path, NAME=PATH or NAME=PATH,HEAD"),
        ("compare --model m --users-table u --draft n=d,", "expected a path, NAME=PATH or NAME=PATH,HEAD"),
        ("compare --model m --users-table u --forwards 0", "expected a number from 1 to 20"),
        ("lossless --model m --users-table u --draft d --children 0", "expected a number from 1 to 64"),
        ("pad --model m --output o", "--hidden"),
        ("pad --model m --output o --target t --hidden 9", "cannot be used with"),
    ];
    for (line, message) in cases {
        let error = parse(line).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}
