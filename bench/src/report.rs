//! What a comparison found: figures as JSON, and as tables.

use std::fmt::Write as _;

use anyhow::Result;
use laser_engine::EngineInfo;
use laser_model::ModelFiles;
use laser_report::LineChart;
use laser_schema::knowledge::ratio;
use laser_schema::{Digest, Kind};
use laser_terminal::{Style, Table};
use laser_worker::cost::{StepCost, StepLoad};
use laser_worker::generate::Generated;
use serde::Serialize;

use super::pools::{PoolScheme, PoolSummary};
use super::rounds::mean_and_error;
use super::run::{Measured, Subject};
use super::variants::{ADAPTIVE, ADVERSARIAL, Variant};
use super::{SetupArgs, machine};

/// Accepted drafts that are told apart by their number, at most.
const DEPTHS: u32 = 8;

/// Those of them that a table has room for.
const SHOWN_DEPTHS: [usize; 4] = [1, 2, 4, 8];

/// A comparison of variants.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    command: &'static str,
    /// The processor and how many of its threads there are.
    machine: String,
    model: ModelSummary,
    options: SetupArgs,
    pub(super) pools: Vec<PoolSummary>,
    pub(super) kinds: Vec<KindReport>,
}

#[derive(Debug, Serialize)]
struct ModelSummary {
    digest: Digest,
    architecture: String,
    parameters: u64,
    dtype: String,
    device: String,
}

/// The figures of one kind at one batch size.
#[derive(Debug, Serialize)]
pub(super) struct KindReport {
    pub(super) kind: Kind,
    pub(super) batch: u16,
    pub(super) rows: Vec<VariantRow>,
    /// Texts of strict variants that are not those of plain decoding. Strict decoding takes the same argmax, but over
    /// sums in another order: where two tokens are as probable but for rounding, either may come out.
    pub(super) mismatches: Vec<Mismatch>,
}

/// One text that should have been another.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Mismatch {
    variant: String,
    entity: String,
    /// The first token that differs, counted from 0.
    token: usize,
}

/// The figures of one variant, over all rounds.
#[derive(Debug, Serialize)]
pub(super) struct VariantRow {
    pub(super) variant: String,
    /// `strict`, or k and p.
    verification: String,
    nodes: usize,
    pub(super) adaptive: bool,
    /// Texts of a customised pool at most; none for other variants.
    pool_texts: Option<usize>,
    pub(super) texts: usize,
    pub(super) tokens: u64,
    /// Forwards that gave tokens, counted for each text.
    forwards: u64,
    /// Wall time of all forwards, drafting included.
    seconds: f64,
    pub(super) tokens_per_second: f64,
    /// Tokens a second against plain decoding: the mean of the rounds' own ratios.
    pub(super) speedup: f64,
    /// Its standard error over several rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup_error: Option<f64>,
    /// The ratio of each of several rounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    round_speedups: Vec<f64>,
    /// Accepted draft tokens a forward.
    pub(super) aal: f64,
    /// Share of the forwards that accept at least 1, 2, … and [`DEPTHS`] drafted tokens.
    pub(super) accepted_by_depth: Vec<f64>,
    tokens_per_step: f64,
    /// Forwards of the target and drafted tokens that are not accepted, by tokens: the measures of SpecDec++ that do
    /// not depend on the machine.
    pub(super) calls_per_token: f64,
    pub(super) discarded_per_token: f64,
    /// Mean wall time of a forward without prompts in it.
    step_ms: f64,
    /// Mean wall time of a forward in which a prompt is read.
    prefill_ms: f64,
    /// Seconds of drafting a text (the paper's ART), forwards of draft models included.
    art_seconds: f64,
    /// Milliseconds of drafting per forward, the median of the texts.
    pub(super) drafting_ms: f64,
    /// Share of the drafted tokens that were accepted.
    draft_yield: f64,
    /// Seconds that the same tokens would take if none but those that were accepted had been drafted, at the measured
    /// cost of forwards and with the same prefill, against the seconds they took. None where costs were not measured.
    of_ceiling: Option<f64>,
    /// Share of the texts' tokens that were accepted though not the most probable.
    pub(super) relaxed_share: f64,
    /// Tokens against those of plain decoding.
    pub(super) length_ratio: f64,
    /// Texts that are those of plain decoding, token for token.
    pub(super) identical: usize,
    /// Mean natural-log probability of a token under the target.
    pub(super) mean_log_probability: f64,
}

impl VariantRow {
    fn new(variant: &Variant, measured: &Measured, plain: &Measured, ceiling: Option<Ceiling<'_>>) -> Self {
        let texts = &measured.texts;
        let sum = |of: fn(&Generated) -> f64| texts.iter().map(of).sum::<f64>();
        let tokens = measured.tokens();
        let forwards = sum(|text| text.step_accepted.len() as f64);
        let accepted = sum(|text| text.step_accepted.iter().map(|&n| f64::from(n)).sum());
        let rates = measured.rates.iter().zip(&plain.rates);
        let speedups: Vec<f64> = rates.map(|(own, plain)| ratio(*own, *plain)).collect();
        let has_rounds = speedups.len() > 1;
        let (speedup, error) = mean_and_error(&speedups);
        let identical = |(a, b): &(&_, &_)| same_tokens(a, b);
        Self {
            variant: variant.name.clone(),
            verification: verification(variant),
            nodes: variant.nodes,
            adaptive: variant.adaptive,
            pool_texts: match variant.pools {
                Some(PoolScheme::Custom { max_texts }) => Some(max_texts),
                _ => None,
            },
            texts: texts.len(),
            tokens,
            forwards: texts.iter().map(|text| text.step_accepted.len() as u64).sum(),
            seconds: measured.seconds,
            tokens_per_second: measured.tokens_per_second(),
            speedup,
            speedup_error: has_rounds.then_some(error),
            round_speedups: if has_rounds { speedups } else { Vec::new() },
            aal: ratio(accepted, forwards),
            accepted_by_depth: (1..=DEPTHS).map(|depth| accepted_to(texts, depth, forwards)).collect(),
            tokens_per_step: ratio(tokens as f64, forwards),
            calls_per_token: ratio(forwards, tokens as f64),
            discarded_per_token: ratio(sum(|text| text.drafted as f64) - accepted, tokens as f64),
            step_ms: 1e3 * ratio(measured.decode_seconds, measured.decode_steps as f64),
            prefill_ms: 1e3 * ratio(measured.prefill_seconds, measured.prefill_steps as f64),
            art_seconds: ratio(sum(|text| text.draft_seconds), texts.len() as f64),
            drafting_ms: 1e3 * median(texts.iter().map(|t| ratio(t.draft_seconds, t.step_accepted.len() as f64))),
            draft_yield: ratio(accepted, sum(|text| text.drafted as f64)),
            of_ceiling: ceiling.map(|ceiling| ceiling.share(measured)),
            relaxed_share: ratio(sum(|text| text.relaxed as f64), tokens as f64),
            length_ratio: ratio(tokens as f64, plain.tokens() as f64),
            identical: texts.iter().zip(&plain.texts).filter(identical).count(),
            mean_log_probability: ratio(sum(|text| text.log_probability), tokens as f64),
        }
    }

    /// `1.03`, or of several rounds `1.03 ± .01`.
    fn speedup_cell(&self) -> String {
        let mean = format!("{:.2}", self.speedup);
        match self.speedup_error.map(|error| format!("{error:.2}")) {
            Some(error) => format!("{mean} ± {}", error.trim_start_matches('0')),
            None => mean,
        }
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.variant.clone(),
            format!("{}", self.tokens),
            format!("{:.0}", self.tokens_per_second),
            self.speedup_cell(),
            format!("{:.2}", self.aal),
            format!("{:.2}", self.tokens_per_step),
            format!("{:.2}", self.step_ms),
            format!("{:.1}", self.prefill_ms),
            format!("{:.2}", 1e3 * self.art_seconds),
            format!("{:.1} %", 100.0 * self.draft_yield),
            self.of_ceiling.map_or_else(|| "–".to_owned(), |share| format!("{share:.2}")),
            format!("{:.1} %", 100.0 * self.relaxed_share),
            format!("{:.2}", self.length_ratio),
            format!("{}/{}", self.identical, self.texts),
            format!("{:.2}", self.mean_log_probability),
        ]
    }
}

const COLUMNS: [&str; 15] = [
    "variant", "tokens", "tokens/s", "speedup", "AAL", "tokens/step", "step ms", "prefill ms", "ART ms", "yield",
    "of ceiling", "relaxed", "length", "identical", "log p",
];

/// What the ceiling of a variant is computed from.
#[derive(Clone, Copy)]
struct Ceiling<'a> {
    cost: &'a StepCost,
    plain: &'a Measured,
    /// Tokens of a prompt on average.
    prompt: f64,
}

impl Ceiling<'_> {
    /// See [`VariantRow::of_ceiling`]. The cost model is scaled to what plain decoding took.
    fn share(&self, measured: &Measured) -> f64 {
        let scale = ratio(self.plain.decode_seconds, self.decode(self.plain));
        ratio(measured.prefill_seconds + scale * self.decode(measured), measured.seconds)
    }

    /// Modelled seconds of as many forwards as were measured, each of as many tokens as it emitted.
    #[expect(clippy::cast_possible_truncation, reason = "tokens and pairs of a forward")]
    fn decode(&self, of: &Measured) -> f64 {
        let steps = (of.prefill_steps + of.decode_steps) as f64;
        let tokens = ratio(of.tokens() as f64, steps);
        let cached = self.prompt + ratio(of.tokens() as f64, 2.0 * of.texts.len() as f64);
        let load = StepLoad { tokens: tokens.round() as usize, pairs: (tokens * cached).round() as usize };
        of.decode_steps as f64 * self.cost.seconds(load)
    }
}

/// The middle one; 0 of none.
fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or_default()
}

fn same_tokens(a: &Generated, b: &Generated) -> bool {
    a.tokens == b.tokens
}

/// The share of `forwards` that accept at least so many drafted tokens.
fn accepted_to(texts: &[Generated], depth: u32, forwards: f64) -> f64 {
    let steps = texts.iter().flat_map(|text| &text.step_accepted);
    ratio(steps.filter(|&&accepted| accepted >= depth).count() as f64, forwards)
}

fn verification(variant: &Variant) -> String {
    match variant.verification {
        laser_decode::Verification::Relaxed { k, p } => format!("k = {k}, p = {p}"),
        laser_decode::Verification::Conditional { alpha, beta, .. } => format!("α = {alpha}, β = {beta}"),
        laser_decode::Verification::Typical { epsilon, delta } => format!("ε = {epsilon}, δ = {delta}"),
        laser_decode::Verification::Strict => "strict".to_owned(),
    }
}

impl KindReport {
    /// The figures of `measured`, in the order of `variants`, of which the first is plain decoding.
    pub(super) fn new(
        (kind, batch): (Kind, u16),
        variants: &[Variant],
        subjects: &[Subject],
        measured: &[Measured],
        cost: Option<&StepCost>,
    ) -> Self {
        let plain = &measured[0];
        let prompts: usize = subjects.iter().map(|subject| subject.prompt.len()).sum();
        let prompt = ratio(prompts as f64, subjects.len() as f64);
        let ceiling = cost.map(|cost| Ceiling { cost, plain, prompt });
        let rows = variants.iter().zip(measured).map(|(v, m)| VariantRow::new(v, m, plain, ceiling)).collect();
        let mut mismatches = Vec::new();
        for (variant, measured) in variants.iter().zip(measured).filter(|(v, _)| v.is_strict()) {
            let texts = plain.texts.iter().zip(&measured.texts).zip(subjects.iter().cycle());
            for ((expected, found), subject) in texts.filter(|((a, b), _)| !same_tokens(a, b)) {
                let pairs = expected.tokens.iter().zip(&found.tokens);
                mismatches.push(Mismatch {
                    variant: variant.name.clone(),
                    entity: subject.id.to_string(),
                    token: pairs.take_while(|(a, b)| a == b).count(),
                });
            }
        }
        Self { kind, batch, rows, mismatches }
    }

    fn row(&self, variant: &str) -> Option<&VariantRow> {
        self.rows.iter().find(|row| row.variant == variant)
    }

    /// The row of the table by batch size.
    fn batch_cells(&self) -> Vec<String> {
        let cell = |value: f64| format!("{value:.2}");
        let speedups = self.rows.iter().skip(1).map(VariantRow::speedup_cell);
        let others = self.rows.iter().filter(|row| ![ADAPTIVE, ADVERSARIAL].contains(&row.variant.as_str()));
        let best = others.map(|row| row.speedup).fold(0.0, f64::max);
        let of_best = cell(self.row(ADAPTIVE).map_or(f64::NAN, |row| row.speedup / best));
        let of_plain = self.row(ADVERSARIAL).map_or_else(|| cell(f64::NAN), VariantRow::speedup_cell);
        let plain = format!("{:.0}", self.rows[0].tokens_per_second);
        [self.batch.to_string(), plain].into_iter().chain(speedups).chain([of_best, of_plain]).collect()
    }

    fn render(&self, style: Style) -> Result<String> {
        let mut table = Table::new(&COLUMNS);
        self.rows.iter().for_each(|row| table.push(row.cells()));
        Ok(table.render(style) + &self.render_mismatches()?)
    }

    /// How many strictly verified texts are not those of plain decoding, and which.
    pub(super) fn render_mismatches(&self) -> Result<String> {
        let mut out = String::new();
        let strict = self.rows.iter().filter(|row| row.verification == "strict").skip(1);
        let texts: usize = strict.map(|row| row.texts).sum();
        if texts == 0 {
            return Ok(out);
        }
        writeln!(
            out,
            "{} of {texts} strictly verified texts differ from plain decoding{}",
            self.mismatches.len(),
            if self.mismatches.is_empty() { "." } else { " (near-ties):" }
        )?;
        for Mismatch { variant, entity, token } in &self.mismatches {
            let line = format!("- {variant}, {} {entity}, from token {token} on\n", self.kind);
            // Once, in however many rounds it differs so.
            if !out.contains(&line) {
                out += &line;
            }
        }
        Ok(out)
    }
}

impl Report {
    /// A report without figures yet.
    pub(super) fn new(
        command: &'static str,
        options: &SetupArgs,
        engine: &EngineInfo,
        model: &ModelFiles,
    ) -> Result<Self> {
        Ok(Self {
            command,
            machine: machine(),
            model: ModelSummary {
                digest: model.digest()?,
                architecture: engine.architecture.clone(),
                parameters: engine.parameters,
                dtype: engine.dtype.clone(),
                device: engine.device.clone(),
            },
            options: options.clone(),
            pools: Vec::new(),
            kinds: Vec::new(),
        })
    }

    /// `paper-user-item.json`: users and items may be measured apart.
    pub(super) fn file_name(&self) -> String {
        let mut kinds: Vec<&str> = self.kinds.iter().map(|kind| kind.kind.as_str()).collect();
        kinds.dedup();
        format!("{}-{}.json", self.command, kinds.join("-"))
    }

    /// The reports of each kind, by batch size.
    fn by_kind(&self) -> impl Iterator<Item = &[KindReport]> {
        self.kinds.chunk_by(|a, b| a.kind == b.kind)
    }

    /// Charts with their file names: of `batch` speedup by batch size, of `compare` acceptance by depth, of
    /// `sweep` by pool size.
    pub(super) fn charts(&self) -> Vec<(String, LineChart)> {
        let chart = |reports: &[KindReport]| match self.command {
            "batch" => Some(speedup_chart(reports)),
            "compare" => depth_chart(&reports[0]),
            "sweep" => acceptance_chart(&reports[0]),
            _ => None,
        };
        let named = |reports: &[KindReport]| {
            let name = format!("{}-{}.svg", self.command, reports[0].kind);
            Some((name, chart(reports)?))
        };
        self.by_kind().filter_map(named).collect()
    }

    /// Speedup against plain decoding by batch size, the figures that `batch` is run for.
    fn render_batches(&self, style: Style) -> String {
        let mut out = String::new();
        for reports in self.by_kind() {
            let variants = reports[0].rows.iter().map(|row| row.variant.as_str());
            let header = ["batch", "plain tokens/s"].into_iter().chain(variants.skip(1));
            let columns = ["adaptive of the best", "without prediction of plain"];
            let mut table = Table::new(&header.chain(columns).collect::<Vec<_>>());
            reports.iter().for_each(|report| table.push(report.batch_cells()));
            out += &format!("Speedup for {}s\n\n{}", reports[0].kind, table.render(style));
        }
        out
    }

    /// All tables.
    pub(super) fn render(&self, style: Style) -> Result<String> {
        let Self { machine, model, options, .. } = self;
        let rounds = if options.rounds > 1 { format!(", {} rounds", options.rounds) } else { String::new() };
        let mut out = String::new();
        writeln!(
            out,
            "{}, {:.1}M parameters, {} on {} ({machine}); {} nodes, seed {}{rounds}\n",
            model.architecture,
            model.parameters as f64 / 1e6,
            model.dtype,
            model.device,
            options.nodes,
            options.seed
        )?;
        let mut pools = Table::new(&["pool", "scheme", "texts", "tokens"]);
        for pool in &self.pools {
            let (texts, tokens) = (pool.texts.to_string(), pool.tokens.to_string());
            pools.push(vec![pool.name.clone(), pool.scheme.clone(), texts, tokens]);
        }
        out += &pools.render(style);
        let heading = if style == Style::Markdown { "### New knowledge of " } else { "New knowledge of " };
        if self.command == "batch" {
            out += &self.render_batches(style);
        }
        if self.command == "compare" {
            for reports in self.by_kind() {
                writeln!(out, "{heading}{}s\n\n{}", reports[0].kind, sources_table(reports).render(style))?;
                for report in reports {
                    write!(out, "Batch {}: {}", report.batch, report.render_mismatches()?)?;
                }
                out.push('\n');
            }
            return Ok(out);
        }
        for kind in &self.kinds {
            writeln!(out, "{heading}{}s, batch {}\n", kind.kind, kind.batch)?;
            out += &kind.render(style)?;
            out.push('\n');
        }
        Ok(out)
    }
}

/// One row per variant: acceptance, calls and cost at the first batch size, speedup at all of them.
fn sources_table(reports: &[KindReport]) -> Table {
    let first = &reports[0];
    let acceptance = SHOWN_DEPTHS.iter().map(|depth| format!("≥ {depth}"));
    let measures = ["AAL", "calls/token", "discarded/token", "drafting ms"].map(str::to_owned);
    let speedups = reports.iter().map(|report| format!("speedup (tokens/s), batch {}", report.batch));
    let texts = ["relaxed", "length", "log p", "identical"].map(str::to_owned);
    let columns: Vec<String> =
        ["variant".to_owned()].into_iter().chain(acceptance).chain(measures).chain(speedups).chain(texts).collect();
    let mut table = Table::new(&columns.iter().map(String::as_str).collect::<Vec<_>>());
    for (at, row) in first.rows.iter().enumerate() {
        let acceptance = SHOWN_DEPTHS.iter().map(|depth| format!("{:.2}", row.accepted_by_depth[depth - 1]));
        let measures = [row.aal, row.calls_per_token, row.discarded_per_token].map(|number| format!("{number:.2}"));
        let speedup = |row: &VariantRow| format!("{} ({:.0})", row.speedup_cell(), row.tokens_per_second);
        let speedups = reports.iter().map(|report| speedup(&report.rows[at]));
        let numbers = measures.into_iter().chain([format!("{:.3}", row.drafting_ms)]).chain(speedups);
        let texts = [
            format!("{:.1} %", 100.0 * row.relaxed_share),
            format!("{:.2}", row.length_ratio),
            format!("{:.2}", row.mean_log_probability),
            format!("{}/{}", row.identical, row.texts),
        ];
        table.push([row.variant.clone()].into_iter().chain(acceptance).chain(numbers).chain(texts).collect());
    }
    table
}

fn speedup_chart(reports: &[KindReport]) -> LineChart {
    let line = |index: usize| {
        let rows = reports.iter().map(|report| &report.rows[index]);
        (reports[0].rows[index].variant.clone(), rows.map(|row| row.speedup).collect())
    };
    LineChart {
        title: format!("Speedup against plain decoding, {}s", reports[0].kind),
        x: "batch",
        y: "speedup",
        places: reports.iter().map(|report| report.batch.to_string()).collect(),
        lines: (0..reports[0].rows.len()).map(line).collect(),
    }
}

/// Of the sources alone with trees of a fixed size: budgets draft no more than pays at a batch size.
/// None if no trees of a fixed size were tried.
fn depth_chart(report: &KindReport) -> Option<LineChart> {
    let rows = report.rows.iter().filter(|row| row.nodes > 0 && !row.adaptive && !row.variant.starts_with("pool + "));
    let lines: Vec<_> = rows.map(|row| (row.variant.clone(), row.accepted_by_depth.clone())).collect();
    (!lines.is_empty()).then(|| LineChart {
        title: format!("Acceptance by depth, {}s, batch {}", report.kind, report.batch),
        x: "drafted tokens",
        y: "share of forwards that accept as many",
        places: (1..=DEPTHS).map(|depth| depth.to_string()).collect(),
        lines,
    })
}

/// None if fewer than two sizes of pools were tried.
fn acceptance_chart(report: &KindReport) -> Option<LineChart> {
    let sizes = report.rows.iter().filter(|row| row.variant.starts_with("pool "));
    let (places, values): (Vec<String>, Vec<f64>) =
        sizes.filter_map(|row| Some((row.pool_texts?.to_string(), row.aal))).unzip();
    (places.len() > 1).then(|| LineChart {
        title: format!("Acceptance by pool size, {}s", report.kind),
        x: "texts of a pool at most",
        y: "accepted draft tokens a forward",
        places,
        lines: vec![("LASER".to_owned(), values)],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_counts_accepted_tokens_alone_and_the_prefill() {
        let measured = |decode_steps, seconds| Measured {
            texts: vec![Generated { tokens: vec![0; 12], ..Generated::default() }],
            rates: Vec::new(),
            seconds,
            prefill_steps: 1,
            prefill_seconds: 1.0,
            decode_steps,
            decode_seconds: seconds - 1.0,
        };
        let cost = StepCost::new(vec![(1.0, 0.5), (4.0, 1.0)], 0.0);
        let plain = measured(11, 12.0);
        let ceiling = Ceiling { cost: &cost, plain: &plain, prompt: 5.0 };
        assert_eq!(ceiling.share(&plain), 1.0);
        // Plain forwards took twice the modelled time; two forwards of four tokens would take 2 s each.
        assert_eq!(ceiling.share(&measured(2, 11.0)), 5.0 / 11.0);
    }

    #[test]
    fn the_speedup_of_several_rounds_is_the_mean_of_their_own_ratios() {
        let row = |rates: &[f64], plain: &[f64]| {
            let [own, plain] = [rates, plain].map(|rates| Measured { rates: rates.to_vec(), ..Measured::default() });
            VariantRow::new(&Variant::plain(), &own, &plain, None)
        };
        // A machine that was twice as fast in each round as in the one before it.
        let row_of_three = row(&[11.0, 24.0, 36.0], &[10.0, 20.0, 40.0]);
        let error = (0.28_f64 / 36.0).sqrt();
        assert!((row_of_three.speedup - 3.2 / 3.0).abs() < 1e-12, "{row_of_three:?}");
        assert!(row_of_three.speedup_error.is_some_and(|found| (found - error).abs() < 1e-12), "{row_of_three:?}");
        assert_eq!(row_of_three.speedup_cell(), "1.07 ± .09");
        let json = serde_json::to_value(&row_of_three).unwrap();
        assert_eq!(json["round_speedups"], serde_json::json!([1.1, 1.2, 0.9]));

        let single = row(&[11.0], &[10.0]);
        assert_eq!((single.speedup, single.speedup_cell()), (1.1, "1.10".to_owned()));
        let json = serde_json::to_value(&single).unwrap();
        assert!(json.get("speedup_error").is_none() && json.get("round_speedups").is_none(), "{json}");
    }
}
