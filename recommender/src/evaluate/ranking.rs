//! `laser eval embed`: LightGCN against popularity and matrix factorisation, on the same held-out interactions.

use std::time::Instant;

use anyhow::{Result, ensure};
use laser_schema::Progress;
use laser_schema::interactions::InteractionTable;
use serde::Serialize;

use crate::embed::{hold_out, read, split_name, train_model};
use crate::lightgcn::{CUTOFF, EmbedConfig};
use crate::ranking::{Holdout, RankingQuality, evaluate_embeddings, evaluate_popularity};

/// The findings of `laser eval embed`.
#[derive(Debug, Serialize)]
pub struct RankingReport<'a> {
    /// Users of the interactions.
    pub users: usize,
    /// Items of the interactions.
    pub items: usize,
    /// Interactions that are learnt from.
    pub train: usize,
    /// Interactions that end training.
    pub validation: usize,
    /// Interactions that are tested on.
    pub test: usize,
    /// Whether each user's latest interactions are held out; else a random choice.
    pub by_time: bool,
    /// The same in words.
    #[serde(skip)]
    pub split: &'static str,
    /// The `[embed]` section.
    pub config: &'a EmbedConfig,
    /// The methods.
    pub methods: Vec<Method>,
}

/// One way to rank items.
#[derive(Debug, Serialize)]
pub struct Method {
    /// Its name.
    pub name: &'static str,
    /// On the test interactions.
    pub quality: RankingQuality,
    /// The best epoch; popularity has none.
    pub epoch: Option<usize>,
    /// Training and evaluation together.
    pub seconds: f64,
}

/// Trains LightGCN with and without layers, and ranks the test interactions by each method.
///
/// # Errors
/// Interactions that cannot be read or are too few, and a training that fails.
pub async fn ranking<'a>(
    table: &InteractionTable,
    config: &'a EmbedConfig,
    progress: &mut dyn Progress,
) -> Result<RankingReport<'a>> {
    ensure!(
        config.layers > 0,
        "[embed] layers = 0 is matrix factorisation, which LightGCN is compared with here: set at least 1"
    );
    let interactions = read(table, config).await?;
    let data = hold_out(&interactions, config, config.test);
    ensure!(
        !data.test.is_empty(),
        "{}: no user has enough interactions to hold one out for the test; give more interactions, or a larger \
         [embed] test",
        table.path
    );
    Ok(RankingReport {
        users: data.users,
        items: data.items,
        train: data.train.len(),
        validation: data.validation.len(),
        test: data.test.len(),
        by_time: data.by_time,
        split: split_name(&data),
        config,
        methods: compare(&data, config, progress)?,
    })
}

fn compare(data: &Holdout, config: &EmbedConfig, progress: &mut dyn Progress) -> Result<Vec<Method>> {
    let seen = [data.train.as_slice(), &data.validation];
    let started = Instant::now();
    let mut methods = vec![Method {
        name: "popularity",
        quality: evaluate_popularity(data, &seen, &data.test, CUTOFF),
        epoch: None,
        seconds: started.elapsed().as_secs_f64(),
    }];
    let factorisation = EmbedConfig { layers: 0, ..config.clone() };
    for (name, config) in [("matrix factorisation (BPR)", &factorisation), ("LightGCN", config)] {
        let started = Instant::now();
        let trained = train_model(name, data, config, progress)?;
        let embeddings = trained.embeddings(data, &data.train);
        methods.push(Method {
            name,
            quality: evaluate_embeddings(data, &seen, &data.test, CUTOFF, &embeddings),
            epoch: Some(trained.epoch),
            seconds: started.elapsed().as_secs_f64(),
        });
    }
    Ok(methods)
}
