//! `laser eval ctr`: DIN and DCNv2 without and with attributes and knowledge.

use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use laser_schema::interactions::{InteractionTable, SplitBy, Until};
use laser_schema::{Kind, Progress};
use laser_store::interactions::{Interactions, Needs};

use super::EvalConfig;
use super::attributes::attributes;
use super::knowledge::{Compared, Entities, Origin, Places, variants};
use super::leak::{Ends, check};
use super::report::CtrReport;
use crate::ctr::{Data, Impression, ItemSplit, Run, Variant, evaluate};

/// The name of the first variant.
const BASELINE: &str = "no knowledge";

/// Trains every model with every variant and seed, and reports what each was worth.
///
/// # Errors
/// Tables that cannot be read or do not fit together, knowledge that knows what is tested on, and trainings that fail.
pub async fn ctr<'a>(
    table: &InteractionTable,
    config: &'a EvalConfig,
    progress: &mut dyn Progress,
) -> Result<CtrReport<'a>> {
    progress.stage("reading");
    let needs = Needs { rating: true, timestamp: config.split_by.by_time().is_some() };
    let interactions = Interactions::read(table, needs).await?;
    let cuts = match config.split_by.by_time() {
        Some(by) => Some(cuts(&interactions, config, by, table)?),
        None => None,
    };
    let entities = [&interactions.users, &interactions.items].map(|ids| Places::new(ids));
    let ends = config.split_by.by_time().zip(cuts.as_ref()).map(|(by, cuts)| Ends {
        by,
        of_users: cuts.iter().map(|cut| cut[0]).collect(),
        users: &entities[Kind::User as usize],
    });
    let compared = compared(config, &entities, ends.as_ref()).await?;
    let splits = Splits { table, config, interactions: &interactions, cuts: cuts.as_deref() };
    // Minutes on all cores: other tasks of this thread move to another one.
    let (data, runs) = tokio::task::block_in_place(|| splits.train(&compared.variants, progress))?;
    let ends = cuts.and_then(|cuts| cuts.first().copied());
    Ok(CtrReport::new(config, &data, ends, &compared, runs))
}

/// No knowledge; attributes; each origin of texts in each of its forms; attributes with each origin in its first form.
async fn compared(config: &EvalConfig, entities: &Entities, ends: Option<&Ends<'_>>) -> Result<Compared> {
    let mut all = vec![Variant { name: BASELINE.to_owned(), ..Variant::default() }];
    let mut origins = vec![None];
    let attributes = match &config.attributes {
        Some(attributes_config) => Some(attributes(attributes_config, entities).await?),
        None => None,
    };
    if let Some(attributes) = &attributes {
        all.push(attributes.clone());
        origins.push(None);
    }
    let mut combined = Vec::new();
    for knowledge in &config.knowledge {
        check(&knowledge.name, &knowledge.entities, ends).await?;
        for (place, (form, variant)) in variants(knowledge, entities).await?.into_iter().enumerate() {
            if let Some(attributes) = attributes.as_ref().filter(|_| place == 0) {
                combined.push(Variant {
                    name: format!("{} and {}", attributes.name, variant.name),
                    features: Kind::ALL
                        .map(|kind| [attributes, &variant].map(|v| &*v.features[kind as usize]).concat()),
                });
            }
            origins.push(Some(Origin { name: knowledge.name.clone(), form }));
            all.push(variant);
        }
    }
    origins.resize_with(origins.len() + combined.len(), || None);
    all.extend(combined);
    Ok(Compared { variants: all, origins, attributes: attributes.map(|_| 1) })
}

/// By user, where training and validation end.
fn cuts(
    interactions: &Interactions,
    config: &EvalConfig,
    by: SplitBy,
    table: &InteractionTable,
) -> Result<Vec<[f64; 2]>> {
    let ends = |until: Until| {
        let rows = interactions.rows.iter();
        // Every row has one: the reader was told that it is needed.
        let times = rows.map(|row| (row.user, row.timestamp.unwrap_or_default()));
        until.instants(by, interactions.users.len(), times)
    };
    let pairs = ends(config.train_until).into_iter().zip(ends(config.validation_until));
    let cuts: Vec<[f64; 2]> = pairs.map(|(train, validation)| [train, validation]).collect();
    ensure!(
        cuts.iter().all(|[train, validation]| train <= validation),
        "{}: [eval] validation_until is before train_until; give a later one",
        table.path
    );
    Ok(cuts)
}

/// Interactions and the ways to divide them.
struct Splits<'a> {
    table: &'a InteractionTable,
    config: &'a EvalConfig,
    interactions: &'a Interactions,
    /// By user, if time divides.
    cuts: Option<&'a [[f64; 2]]>,
}

impl Splits<'_> {
    /// Every training, ordered by model, variant and seed; and the first seed's data. Time divides the same for all
    /// seeds; by item each seed holds out items of its own, so that differences tell about other items, too.
    fn train(&self, variants: &[Variant], progress: &mut dyn Progress) -> Result<(Data, Vec<Run>)> {
        let seeds: Vec<u64> = (1..=self.config.seeds).collect();
        let seeds_of_split = if self.cuts.is_some() { seeds.len() } else { 1 };
        let total = (self.config.models.len() * variants.len() * seeds.len()) as u64;
        progress.stage("training");
        progress.update(0, Some(total), "");
        let progress = Mutex::new((progress, 0));
        let done = |run: &Run| {
            let mut guard = progress.lock().unwrap_or_else(PoisonError::into_inner);
            let (progress, done) = &mut *guard;
            *done += 1;
            let (model, variant, seed) = (run.model.as_str(), &variants[run.variant].name, run.seed);
            let message = format!("{model}, {variant}, seed {seed}: AUC {:.4} in epoch {}", run.auc, run.epoch);
            progress.update(*done, Some(total), &message);
        };
        let threads = std::thread::available_parallelism()?.get();
        let (mut first, mut runs) = (None, Vec::new());
        for seeds in seeds.chunks(seeds_of_split) {
            let data = self.divide(seeds[0])?;
            runs.extend(evaluate(&data, &self.config.models, variants, seeds, &self.config.training, threads, &done)?);
            first.get_or_insert(data);
        }
        runs.sort_by_key(|run| {
            (self.config.models.iter().position(|model| *model == run.model), run.variant, run.seed)
        });
        let (progress, count) = progress.into_inner().unwrap_or_else(PoisonError::into_inner);
        progress.finish_with(&format!("{count} models"));
        Ok((first.context("[eval] seeds: none")?, runs))
    }

    fn divide(&self, seed: u64) -> Result<Data> {
        let Interactions { users, items, rows } = self.interactions;
        let impressions = rows.iter().map(|row| Impression {
            user: row.user,
            item: row.item,
            label: row.rating.is_some_and(|rating| rating >= self.config.positive_rating),
            time: row.timestamp.unwrap_or_default(),
        });
        let impressions = impressions.collect();
        let data = match self.cuts {
            Some(cuts) => Data::new(items.len(), impressions, cuts),
            None => {
                let split = ItemSplit {
                    share: self.config.item_share,
                    train: self.config.train_until.into(),
                    validation: self.config.validation_until.into(),
                    seed,
                };
                Data::by_item((users.len(), items.len()), impressions, &split)
            }
        };
        data.with_context(|| self.table.path.clone())
    }
}
