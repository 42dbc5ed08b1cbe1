//! The findings of `laser eval ctr`.

use laser_schema::Kind;
use serde::Serialize;

use super::EvalConfig;
use super::knowledge::{Compared, Form, Origin};
use crate::ctr::{Data, ITEM_GROUPS, ModelKind, Part, Run, Variant};
use crate::statistics::{Comparison, Mean};

/// The findings of `laser eval ctr`.
#[derive(Debug, Serialize)]
pub struct CtrReport<'a> {
    /// The `[eval]` section.
    pub config: &'a EvalConfig,
    /// The ends of training and validation, if time divides; the first user's if each has ends of their own.
    pub ends: Option<[f64; 2]>,
    /// The parts; by item the first seed's.
    pub parts: Vec<PartSummary>,
    /// The variants but for the first, and how many entities they know something about.
    pub knowledge: Vec<Coverage>,
    /// By model and variant.
    pub results: Vec<Row>,
    /// Origins of texts against each other.
    pub pairs: Vec<Pair>,
    /// All trainings.
    pub runs: Vec<Run>,
}

/// A part of the impressions.
#[derive(Debug, Serialize)]
pub struct PartSummary {
    /// The part.
    pub part: Part,
    /// Its impressions.
    pub impressions: usize,
    /// The positive share of them.
    pub positive: f64,
    /// The share of users who are trained on.
    pub users_trained: f64,
    /// The share of items that are trained on.
    pub items_trained: f64,
}

/// How many entities a variant knows something about.
#[derive(Debug, Serialize)]
pub struct Coverage {
    /// The variant.
    pub variant: String,
    /// The share of users, if it has features of them.
    pub users: Option<f64>,
    /// The share of items, if it has features of them.
    pub items: Option<f64>,
}

/// A model with a variant.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The model.
    pub model: ModelKind,
    /// The variant.
    pub variant: String,
    /// Over seeds.
    pub auc: Mean,
    /// Over seeds.
    pub log_loss: Mean,
    /// AUC against no knowledge, paired by seed.
    pub gain: Option<Comparison>,
    /// By the items' training interactions.
    pub groups: Vec<GroupRow>,
}

/// A model with a variant on the test impressions of some items.
#[derive(Debug, Serialize)]
pub struct GroupRow {
    /// The group's name.
    pub group: &'static str,
    /// Its test impressions, mean over seeds.
    pub impressions: f64,
    /// Over seeds, if each of them has both labels.
    pub auc: Option<Mean>,
    /// Over seeds.
    pub log_loss: Option<Mean>,
    /// AUC against no knowledge, paired by seed.
    pub gain: Option<Comparison>,
    /// AUC against attributes alone, paired by seed; of variants with texts.
    pub gain_over_attributes: Option<Comparison>,
}

/// Two origins in the same form and model: the first less the second, paired by seed.
#[derive(Debug, Serialize)]
pub struct Pair {
    /// The model.
    pub model: ModelKind,
    /// The form of both.
    pub form: Form,
    /// An origin.
    pub first: String,
    /// Another one.
    pub second: String,
    /// Differences of AUC.
    pub auc: Comparison,
    /// Differences of log loss.
    pub log_loss: Comparison,
}

/// A figure of a training, if it has one.
type Figure<'f> = dyn Fn(&Run) -> Option<f64> + 'f;

impl<'a> CtrReport<'a> {
    pub(super) fn new(
        config: &'a EvalConfig,
        data: &Data,
        ends: Option<[f64; 2]>,
        compared: &Compared,
        runs: Vec<Run>,
    ) -> Self {
        let mut report = Self {
            config,
            ends,
            parts: Part::ALL.map(|part| PartSummary::new(part, data)).into(),
            knowledge: compared.variants[1..].iter().map(|variant| Coverage::new(variant, data)).collect(),
            results: Vec::new(),
            pairs: Vec::new(),
            runs,
        };
        for &model in &config.models {
            for (index, variant) in compared.variants.iter().enumerate() {
                let row = report.row(model, index, variant, compared.attributes);
                report.results.extend(row);
            }
            for (first, origin) in compared.origins.iter().enumerate() {
                for (second, other) in compared.origins.iter().enumerate().skip(first + 1) {
                    if let (Some(a), Some(b)) = (origin, other)
                        && a.form == b.form
                    {
                        let pair = report.pair(model, (first, a), (second, b));
                        report.pairs.extend(pair);
                    }
                }
            }
        }
        report
    }

    /// A figure of a model and a variant by seed; none if a seed has none.
    fn figures(&self, model: ModelKind, variant: usize, figure: &Figure<'_>) -> Option<Vec<f64>> {
        let of = self.runs.iter().filter(|run| run.model == model && run.variant == variant);
        of.map(figure).collect()
    }

    fn mean(&self, model: ModelKind, variant: usize, figure: &Figure<'_>) -> Option<Mean> {
        Some(Mean::of(&self.figures(model, variant, figure)?))
    }

    fn compare(&self, model: ModelKind, (first, second): (usize, usize), figure: &Figure<'_>) -> Option<Comparison> {
        let (first, second) = (self.figures(model, first, figure)?, self.figures(model, second, figure)?);
        let differences: Vec<f64> = first.iter().zip(second).map(|(a, b)| a - b).collect();
        Some(Comparison::of(&differences, self.config.margin))
    }

    fn row(&self, model: ModelKind, index: usize, variant: &Variant, attributes: Option<usize>) -> Option<Row> {
        // Texts come after the attributes.
        let attributes = attributes.filter(|attributes| index > *attributes);
        let group = |place: usize| GroupRow {
            group: ITEM_GROUPS[place].name,
            impressions: self.mean_of_group(model, index, place),
            auc: self.mean(model, index, &|run| run.groups[place].auc),
            log_loss: self.mean(model, index, &|run| run.groups[place].log_loss),
            gain: (index > 0).then(|| self.compare(model, (index, 0), &|run| run.groups[place].auc)).flatten(),
            gain_over_attributes: attributes
                .and_then(|attributes| self.compare(model, (index, attributes), &|run| run.groups[place].auc)),
        };
        Some(Row {
            model,
            variant: variant.name.clone(),
            auc: self.mean(model, index, &|run| Some(run.auc))?,
            log_loss: self.mean(model, index, &|run| Some(run.log_loss))?,
            gain: (index > 0).then(|| self.compare(model, (index, 0), &|run| Some(run.auc))).flatten(),
            groups: (0..ITEM_GROUPS.len()).map(group).collect(),
        })
    }

    fn mean_of_group(&self, model: ModelKind, variant: usize, place: usize) -> f64 {
        let impressions = self.mean(model, variant, &|run| Some(run.groups[place].impressions as f64));
        impressions.map_or(0.0, |mean| mean.mean)
    }

    fn pair(&self, model: ModelKind, (first, a): (usize, &Origin), (second, b): (usize, &Origin)) -> Option<Pair> {
        Some(Pair {
            model,
            form: a.form,
            first: a.name.clone(),
            second: b.name.clone(),
            auc: self.compare(model, (first, second), &|run| Some(run.auc))?,
            log_loss: self.compare(model, (first, second), &|run| Some(run.log_loss))?,
        })
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
    /// Texts come after attributes, and are what is counted.
    fn new(variant: &Variant, data: &Data) -> Self {
        let share = |kind: Kind, entities: usize| {
            let counted = variant.features[kind as usize].last();
            counted.map(|feature| feature.known() as f64 / entities as f64)
        };
        let (users, items) = (share(Kind::User, data.users()), share(Kind::Item, data.items()));
        Self { variant: variant.name.clone(), users, items }
    }
}
