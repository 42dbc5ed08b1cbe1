//! `laser-bench precision`: what a precision of the weights costs in accuracy, against f32.
//!
//! The texts that the model writes in f32 are written again in every other precision, and f32's own texts are scored
//! by it, token by token: their perplexity is `exp(-mean log p)`. Kernels of quantised weights round activations as
//! well; a second row of such a precision has the weights rounded alone.

use anyhow::{Context, Result, bail, ensure};
use laser_decode::{TargetScores as _, chain_parents};
use laser_engine::{DTypeOption, Engine, Segment};
use laser_model::ModelFiles;
use laser_night::{Progress as _, open_local_model};
use laser_schema::Kind;
use laser_schema::knowledge::ratio;
use laser_terminal::{Display, Style, Table};
use laser_worker::generate::{Generator, Request};
use serde::Serialize;

use super::paper::{load_engine, options, prompts};
use super::run::generate;
use super::{LoadArgs, PrecisionArgs, SetupArgs, machine, parse_dtype, rounded};

/// Tokens among which a scored one is looked for. One beyond them counts as probable as the last of them, so that a
/// perplexity is a lower bound where a precision fails altogether.
const CANDIDATES: usize = 256;

/// The precisions, compared.
#[derive(Debug, Serialize)]
pub(super) struct PrecisionReport {
    machine: String,
    options: PrecisionArgs,
    rows: Vec<PrecisionRow>,
}

/// One precision and one kind of entity.
#[derive(Debug, Serialize)]
pub(super) struct PrecisionRow {
    pub(super) precision: String,
    pub(super) kind: Kind,
    texts: usize,
    /// Texts that are f32's, token for token.
    pub(super) equal: usize,
    /// Share of the tokens of f32's texts in front of the first that differs.
    pub(super) common: f64,
    /// Of f32's texts, without their prompts.
    pub(super) perplexity: f64,
    /// Of plain decoding.
    tokens_per_second: f64,
}

/// Texts of one kind: prompts, and what f32 makes of them.
struct Reference {
    kind: Kind,
    prompts: Vec<Vec<u32>>,
    texts: Vec<Vec<u32>>,
}

/// Writes and scores the texts in f32, then in every precision.
///
/// # Errors
/// The engine's, and names of precisions that it does not know.
pub(super) async fn run(args: &PrecisionArgs) -> Result<PrecisionReport> {
    let mut display = Display::new();
    let model = open_local_model(&args.setup.model).await?;
    let mut references: Vec<Reference> = Vec::new();
    for (kind, prompts) in prompts(&args.setup, &model).await? {
        references.push(Reference { kind, prompts, texts: Vec::new() });
    }
    let rounded = args.setup.output.join("rounded");
    let mut rows = Vec::new();
    for precision in std::iter::once("f32").chain(args.precisions.iter().map(String::as_str)) {
        let mut setup = args.setup.clone();
        setup.load = load(precision, &setup.load)?;
        measure((precision, &setup), &model, &mut references, &mut rows, &mut display)?;
        if let Some(blocks) = setup.load.isq.as_deref().and_then(rounded::blocks) {
            rounded::write(model.path(), blocks, &rounded)?;
            let path = rounded.display().to_string();
            let setup = SetupArgs { model: path.clone(), load: args.setup.load.clone(), ..setup };
            let (model, name) = (open_local_model(&path).await?, format!("{precision}, weights alone"));
            measure((&name, &setup), &model, &mut references, &mut rows, &mut display)?;
            std::fs::remove_dir_all(&rounded)?;
        }
    }
    Ok(PrecisionReport { machine: machine(), options: args.clone(), rows })
}

/// The rows of one precision; the first one's texts are what all are compared with.
fn measure(
    (precision, setup): (&str, &SetupArgs),
    model: &ModelFiles,
    references: &mut [Reference],
    rows: &mut Vec<PrecisionRow>,
    display: &mut Display,
) -> Result<()> {
    display.stage(precision);
    let mut engine = load_engine(setup, model)?;
    let mut count = 0;
    for reference in references {
        let mut generator = Generator::new(engine, model.tokenizer.clone(), options(setup, model));
        let measured = generate(&mut generator, requests(&reference.prompts))?;
        engine = generator.into_engine();
        let texts: Vec<Vec<u32>> = measured.texts.iter().map(|text| text.tokens.clone()).collect();
        if reference.texts.is_empty() {
            reference.texts.clone_from(&texts);
        }
        count += texts.len();
        let written: usize = texts.iter().map(Vec::len).sum();
        let per_second = ratio(written as f64, measured.seconds);
        rows.push(compare(precision, reference, (&texts, per_second), engine.as_mut())?);
    }
    display.finish_with(&format!("{count} texts"));
    Ok(())
}

/// `f32`, `f16`, `bf16`, or the name of a quantisation, with f32 for what is not quantised.
fn load(precision: &str, base: &LoadArgs) -> Result<LoadArgs> {
    let unset = base.isq.is_none() && base.dtype == DTypeOption::F32;
    ensure!(unset, "--dtype, --isq: name what is to be compared with f32 in --precisions");
    let (dtype, isq) = match parse_dtype(precision) {
        Ok(dtype) => (dtype, None),
        Err(_) => (DTypeOption::F32, Some(precision.to_owned())),
    };
    Ok(LoadArgs { dtype, isq, ..base.clone() })
}

fn requests(prompts: &[Vec<u32>]) -> Vec<Request> {
    let request =
        |prompt: &Vec<u32>| Request { prompt: prompt.clone(), plain: true, strict: true, ..Request::default() };
    prompts.iter().map(request).collect()
}

fn compare(
    precision: &str,
    reference: &Reference,
    (texts, tokens_per_second): (&[Vec<u32>], f64),
    engine: &mut dyn Engine,
) -> Result<PrecisionRow> {
    let (mut equal, mut common, mut total, mut log_probability) = (0, 0, 0, 0.0);
    for ((prompt, expected), text) in reference.prompts.iter().zip(&reference.texts).zip(texts) {
        equal += usize::from(text == expected);
        common += expected.iter().zip(text).take_while(|(a, b)| a == b).count();
        total += expected.len();
        log_probability += score(engine, prompt, expected)?;
    }
    Ok(PrecisionRow {
        precision: precision.to_owned(),
        kind: reference.kind,
        texts: texts.len(),
        equal,
        common: ratio(common as f64, total as f64),
        perplexity: (-ratio(log_probability, total as f64)).exp(),
        tokens_per_second,
    })
}

/// The sum of the log-probabilities of a text's tokens behind its prompt.
fn score(engine: &mut dyn Engine, prompt: &[u32], text: &[u32]) -> Result<f64> {
    let (Some((_, seen)), Some(last)) = (text.split_last(), prompt.len().checked_sub(1)) else {
        return Ok(0.0);
    };
    let tokens = [prompt, seen].concat();
    let parents: Vec<u32> = chain_parents(tokens.len()).collect();
    let slot = engine.open(tokens.len())?;
    let scores = engine.step(
        &[Segment { slot, tokens: &tokens, parents: &parents, scored_from: last, ..Segment::default() }],
        CANDIDATES,
    );
    engine.close(slot);
    let Some(scores) = scores?.pop() else {
        bail!("the engine gave no scores");
    };
    let of = |(token, node): (&u32, usize)| {
        let candidates = scores.top(node);
        let found = candidates.iter().find(|candidate| candidate.token == *token).or(candidates.last());
        let found = found.context("the engine gave no candidates")?;
        Ok(f64::from(found.log_probability))
    };
    text.iter().zip(last..).map(of).sum()
}

impl PrecisionReport {
    /// As a table.
    pub(super) fn render(&self, style: Style) -> String {
        let mut table = Table::new(&["precision", "kind", "equal texts", "common", "perplexity", "tokens/s"]);
        for row in &self.rows {
            table.push(vec![
                row.precision.clone(),
                row.kind.to_string(),
                format!("{}/{}", row.equal, row.texts),
                format!("{:.1} %", 100.0 * row.common),
                format!("{:.4}", row.perplexity),
                format!("{:.0}", row.tokens_per_second),
            ]);
        }
        format!("{}; batch {}\n\n{}", self.machine, self.options.setup.batch, table.render(style))
    }

    /// The rows, in the order of precisions, then of kinds.
    #[cfg(test)]
    pub(super) fn rows(&self) -> &[PrecisionRow] {
        &self.rows
    }
}
