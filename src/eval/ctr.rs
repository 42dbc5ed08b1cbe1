//! `laser eval ctr`: DIN and DCNv2 without and with knowledge.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};
use laser_night::config::EvalConfig;
use laser_night::{Config, Progress};
use laser_recommender::ctr::{Data, Impression, Run, Variant, evaluate};
use laser_schema::interactions::InteractionTable;
use laser_store::interactions::{Interactions, Needs};
use laser_terminal::{Display, print};

use super::Format;
use super::knowledge::{Entities, Form, Places, variants};
use super::leak::{Ends, check};
use super::report::Report;

/// What the first variant is called: no knowledge.
pub(super) const BASELINE: &str = "no knowledge";

pub(crate) async fn ctr(config: &Config, format: Format) -> Result<()> {
    let (table, config) = (config.interactions()?, &config.eval);
    let mut display = Display::new();
    display.stage("reading");
    let needs = Needs { rating: true, timestamp: true };
    let interactions = Interactions::read(table, needs).await?;
    let cuts = cuts(&interactions, config, table)?;
    let entities = Entities { users: Places::new(&interactions.users), items: Places::new(&interactions.items) };
    let of_users: Vec<f64> = cuts.iter().map(|cut| cut[0]).collect();
    let ends = Ends { by: config.split_by, of_users: &of_users, users: &entities.users };
    let (mut origins, mut all) = (vec![None], vec![baseline()]);
    for knowledge in &config.knowledge {
        check(&knowledge.name, &knowledge.entities, &ends).await?;
        for (form, variant) in variants(knowledge, &entities).await? {
            origins.push(Some((knowledge.name.clone(), form)));
            all.push(variant);
        }
    }
    let data = impressions(&interactions, config, &cuts, table)?;
    let runs = train_all(&data, &all, config, display)?;
    let report = Report::new(config, &data, &cuts, (&origins, &all), &runs);
    print(&report.render(format)?)
}

/// An origin and a form, by variant; none of the baseline.
pub(super) type Origin = Option<(String, Form)>;

fn baseline() -> Variant {
    Variant { name: BASELINE.to_owned(), ..Variant::default() }
}

/// By user, where training and validation end.
fn cuts(interactions: &Interactions, config: &EvalConfig, table: &InteractionTable) -> Result<Vec<[f64; 2]>> {
    let ends = |until: laser_schema::interactions::Until| {
        let rows = interactions.rows.iter();
        // Every row has one: the reader was told that it is needed.
        let times = rows.map(|row| (row.user, row.timestamp.unwrap_or_default()));
        until.instants(config.split_by, interactions.users.len(), times)
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

fn impressions(
    interactions: &Interactions,
    config: &EvalConfig,
    cuts: &[[f64; 2]],
    table: &InteractionTable,
) -> Result<Data> {
    let rows = interactions.rows.iter().map(|row| Impression {
        user: row.user,
        item: row.item,
        label: row.rating.is_some_and(|rating| rating >= config.positive_rating),
        time: row.timestamp.unwrap_or_default(),
    });
    let data = Data::new(interactions.items.len(), rows.collect(), cuts);
    data.map_err(|error| anyhow::anyhow!("{}: {error}", table.path))
}

fn train_all(data: &Data, variants: &[Variant], config: &EvalConfig, mut display: Display) -> Result<Vec<Run>> {
    let seeds: Vec<u64> = (1..=config.seeds).collect();
    let total = config.models.len() * variants.len() * seeds.len();
    display.stage("training");
    display.update(0, Some(total as u64), "");
    let display = Mutex::new((display, 0));
    let done = |run: &Run| {
        let mut guard = display.lock().unwrap_or_else(PoisonError::into_inner);
        let (display, count) = &mut *guard;
        *count += 1;
        let message = format!(
            "{}, {}, seed {}: AUC {:.4} in epoch {}",
            run.model.as_str(),
            variants[run.variant].name,
            run.seed,
            run.auc,
            run.epoch
        );
        display.update(*count, Some(total as u64), &message);
    };
    let threads = std::thread::available_parallelism()?.get();
    let (models, training) = (&config.models, &config.training);
    // Minutes on all cores: other tasks of this thread move to another one.
    let runs = tokio::task::block_in_place(|| evaluate(data, models, variants, &seeds, training, threads, &done))?;
    let (mut display, count) = display.into_inner().unwrap_or_else(PoisonError::into_inner);
    display.finish_with(&format!("{count} models"));
    Ok(runs)
}
