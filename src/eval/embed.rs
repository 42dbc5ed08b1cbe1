//! `laser eval embed`: LightGCN against popularity and matrix factorisation, on the same held-out interactions.

use std::time::Instant;

use anyhow::{Result, ensure};
use laser_night::Config;
use laser_recommender::lightgcn::{CUTOFF, EmbedConfig};
use laser_recommender::ranking::{Holdout, RankingQuality, evaluate_embeddings, evaluate_popularity};
use laser_terminal::{Display, Table, print};
use serde::Serialize;

use super::Format;
use crate::embed::{hold_out, read, split_name, train_model};

#[derive(Serialize)]
struct Report<'a> {
    users: usize,
    items: usize,
    train: usize,
    validation: usize,
    test: usize,
    by_time: bool,
    config: &'a EmbedConfig,
    methods: Vec<Method>,
}

#[derive(Serialize)]
struct Method {
    name: &'static str,
    quality: RankingQuality,
    /// The best epoch; none of popularity.
    epoch: Option<usize>,
    seconds: f64,
}

pub(crate) async fn embed(config: &Config, format: Format) -> Result<()> {
    let (table, config) = (config.interactions()?, &config.embed);
    ensure!(
        config.layers > 0,
        "[embed] layers = 0 is matrix factorisation, which LightGCN is compared with here: set at least 1"
    );
    let interactions = read(table, config).await?;
    let data = hold_out(&interactions, config, config.test);
    ensure!(
        !data.test.is_empty(),
        "{}: no user has enough interactions to hold one out for the test; give more interactions, or a larger [embed] test",
        table.path
    );
    let mut display = Display::new();
    let methods = compare(&data, config, &mut display)?;
    drop(display);
    let report = Report {
        users: data.users,
        items: data.items,
        train: data.train.len(),
        validation: data.validation.len(),
        test: data.test.len(),
        by_time: data.by_time,
        config,
        methods,
    };
    print(&report.render(&data, format)?)
}

fn compare(data: &Holdout, config: &EmbedConfig, display: &mut Display) -> Result<Vec<Method>> {
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
        let trained = train_model(name, data, config, display)?;
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

impl Report<'_> {
    fn render(&self, data: &Holdout, format: Format) -> Result<String> {
        let style = match format {
            Format::Json => return Ok(serde_json::to_string_pretty(self)? + "\n"),
            Format::Tables(style) => style,
        };
        let mut table = Table::new(&["method", "recall@20", "NDCG@20", "epoch", "seconds"]);
        for method in &self.methods {
            table.push(vec![
                method.name.to_owned(),
                format!("{:.4}", method.quality.recall),
                format!("{:.4}", method.quality.ndcg),
                method.epoch.map_or_else(String::new, |e| e.to_string()),
                format!("{:.0}", method.seconds),
            ]);
        }
        Ok(format!(
            "{} users, {} items; {} interactions to train, {} to validate, {} to test ({})\n\n{}",
            self.users,
            self.items,
            self.train,
            self.validation,
            self.test,
            split_name(data),
            table.render(style)
        ))
    }
}
