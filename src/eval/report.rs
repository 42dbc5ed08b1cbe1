//! What `laser eval ctr` found, as tables and JSON.

use anyhow::Result;
use laser_night::config::EvalConfig;
use laser_recommender::ctr::{Data, Feature, ModelKind, Part, Run, Variant};
use laser_recommender::statistics::{Comparison, Mean};
use laser_terminal::Table;
use serde::Serialize;

use super::Format;
use super::ctr::Origin;
use super::knowledge::Form;
use super::leak::instant;

#[derive(Serialize)]
pub(super) struct Report<'a> {
    config: &'a EvalConfig,
    /// Where training and validation end; of the first user if each has ends of their own.
    ends: [f64; 2],
    parts: Vec<PartSummary>,
    knowledge: Vec<Coverage>,
    results: Vec<Row>,
    pairs: Vec<Pair>,
    runs: &'a [Run],
}

#[derive(Serialize)]
struct PartSummary {
    part: Part,
    impressions: usize,
    positive: f64,
    users_trained: f64,
    items_trained: f64,
}

/// How much a variant knows.
#[derive(Serialize)]
struct Coverage {
    variant: String,
    users: Option<f64>,
    items: Option<f64>,
}

/// A model with a variant.
#[derive(Serialize)]
struct Row {
    model: ModelKind,
    variant: String,
    auc: Mean,
    log_loss: Mean,
    /// Of AUC, paired by seed, against no knowledge.
    gain: Option<Comparison>,
}

/// Two origins in the same form and model: AUC of the first less that of the second, paired by seed.
#[derive(Serialize)]
struct Pair {
    model: ModelKind,
    form: Form,
    first: String,
    second: String,
    auc: Comparison,
    log_loss: Comparison,
}

impl<'a> Report<'a> {
    pub(super) fn new(
        config: &'a EvalConfig,
        data: &Data,
        cuts: &[[f64; 2]],
        (origins, variants): (&[Origin], &[Variant]),
        runs: &'a [Run],
    ) -> Self {
        let mut report = Self {
            config,
            ends: cuts.first().copied().unwrap_or_default(),
            parts: Part::ALL.map(|part| PartSummary::new(part, data)).into(),
            knowledge: variants[1..].iter().map(|v| Coverage::new(v, data)).collect(),
            results: Vec::new(),
            pairs: Vec::new(),
            runs,
        };
        for &model in &config.models {
            for (index, variant) in variants.iter().enumerate() {
                report.results.push(report.row(model, index, variant));
            }
            for (first, origin) in origins.iter().enumerate() {
                for (second, other) in origins.iter().enumerate().skip(first + 1) {
                    if let (Some((a, form)), Some((b, same))) = (origin, other)
                        && form == same
                    {
                        let pair = report.pair(model, *form, (first, a), (second, b));
                        report.pairs.push(pair);
                    }
                }
            }
        }
        report
    }

    /// A figure of a model and a variant by seed.
    fn figures(&self, model: ModelKind, variant: usize, figure: fn(&Run) -> f64) -> Vec<f64> {
        let runs = self.runs.iter();
        let of = runs.filter(|run| run.model == model && run.variant == variant);
        of.map(figure).collect()
    }

    fn differences(&self, model: ModelKind, (first, second): (usize, usize), figure: fn(&Run) -> f64) -> Comparison {
        let of = |variant| self.figures(model, variant, figure);
        let differences: Vec<f64> = of(first).iter().zip(of(second)).map(|(a, b)| a - b).collect();
        Comparison::of(&differences, self.config.margin)
    }

    fn row(&self, model: ModelKind, index: usize, variant: &Variant) -> Row {
        Row {
            model,
            variant: variant.name.clone(),
            auc: Mean::of(&self.figures(model, index, |run| run.auc)),
            log_loss: Mean::of(&self.figures(model, index, |run| run.log_loss)),
            gain: (index > 0).then(|| self.differences(model, (index, 0), |run| run.auc)),
        }
    }

    fn pair(&self, model: ModelKind, form: Form, (first, a): (usize, &str), (second, b): (usize, &str)) -> Pair {
        Pair {
            model,
            form,
            first: a.to_owned(),
            second: b.to_owned(),
            auc: self.differences(model, (first, second), |run| run.auc),
            log_loss: self.differences(model, (first, second), |run| run.log_loss),
        }
    }

    pub(super) fn render(&self, format: Format) -> Result<String> {
        let style = match format {
            Format::Json => return Ok(serde_json::to_string_pretty(self)? + "\n"),
            Format::Tables(style) => style,
        };
        let mut out = self.heading();
        out += &self.parts().render(style);
        if !self.knowledge.is_empty() {
            out += &self.coverage().render(style);
        }
        out += &self.results().render(style);
        if !self.pairs.is_empty() {
            out += &self.comparisons().render(style);
        }
        Ok(out)
    }

    fn heading(&self) -> String {
        let config = self.config;
        let split = match config.split_by {
            laser_schema::interactions::SplitBy::Time => {
                let [train, validation] = self.ends.map(instant);
                format!("training ends at {train}, validation at {validation}")
            }
            laser_schema::interactions::SplitBy::User => format!(
                "training ends after {} and validation after {} of each user's interactions",
                config.train_until, config.validation_until
            ),
        };
        format!(
            "positive from a rating of {}; {split}; {} seeds, margin {} AUC\n\n",
            config.positive_rating, config.seeds, config.margin
        )
    }

    fn parts(&self) -> Table {
        let header = ["part", "impressions", "positive", "of trained users", "of trained items"];
        let mut table = Table::new(&header);
        for part in &self.parts {
            table.push(vec![
                part.part.as_str().to_owned(),
                part.impressions.to_string(),
                percent(part.positive),
                percent(part.users_trained),
                percent(part.items_trained),
            ]);
        }
        table
    }

    fn coverage(&self) -> Table {
        let mut table = Table::new(&["knowledge", "users", "items"]);
        let cell = |share: Option<f64>| share.map_or_else(|| "none".to_owned(), percent);
        for knowledge in &self.knowledge {
            table.push(vec![knowledge.variant.clone(), cell(knowledge.users), cell(knowledge.items)]);
        }
        table
    }

    fn results(&self) -> Table {
        let mut table = Table::new(&["model", "knowledge", "AUC", "log loss", "AUC gain", "p", "verdict"]);
        for row in &self.results {
            let gain = row.gain.as_ref();
            table.push(vec![
                row.model.as_str().to_owned(),
                row.variant.clone(),
                mean(&row.auc, false),
                mean(&row.log_loss, false),
                gain.map_or_else(String::new, |gain| mean(&gain.difference, true)),
                gain.map_or_else(String::new, |gain| p_value(gain.p_different)),
                gain.map_or_else(String::new, |gain| gain.verdict.as_str().to_owned()),
            ]);
        }
        table
    }

    fn comparisons(&self) -> Table {
        let header = [
            "model",
            "form",
            "compared",
            "AUC difference",
            "p different",
            "p as far as the margin",
            "AUC",
            "log loss difference",
        ];
        let mut table = Table::new(&header);
        for pair in &self.pairs {
            table.push(vec![
                pair.model.as_str().to_owned(),
                pair.form.as_str().to_owned(),
                format!("{} less {}", pair.first, pair.second),
                mean(&pair.auc.difference, true),
                p_value(pair.auc.p_different),
                p_value(pair.auc.p_equivalent),
                pair.auc.verdict.as_str().to_owned(),
                mean(&pair.log_loss.difference, true),
            ]);
        }
        table
    }
}

impl PartSummary {
    fn new(part: Part, data: &Data) -> Self {
        let labels = data.labels(part);
        let [users_trained, items_trained] = data.known(part);
        let positive = labels.iter().filter(|label| **label).count();
        Self {
            part,
            impressions: labels.len(),
            positive: positive as f64 / labels.len() as f64,
            users_trained,
            items_trained,
        }
    }
}

impl Coverage {
    fn new(variant: &Variant, data: &Data) -> Self {
        let share =
            |feature: &Option<Feature>, of: usize| feature.as_ref().map(|feature| feature.known() as f64 / of as f64);
        Self {
            variant: variant.name.clone(),
            users: share(&variant.user, data.users()),
            items: share(&variant.item, data.items()),
        }
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn mean(mean: &Mean, signed: bool) -> String {
    let value = if signed { format!("{:+.4}", mean.mean) } else { format!("{:.4}", mean.mean) };
    match mean.half_width {
        Some(half) => format!("{value} ± {half:.4}"),
        None => value,
    }
}

fn p_value(p: Option<f64>) -> String {
    match p {
        None => String::new(),
        Some(p) if p < 0.001 => "< 0.001".to_owned(),
        Some(p) => format!("{p:.3}"),
    }
}
