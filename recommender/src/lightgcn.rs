//! LightGCN (He et al. 2020): embeddings of users and items from interactions alone.
//!
//! The only parameters are one vector per user and item. They are propagated over the graph of the training
//! interactions, and the dot products of the propagated vectors are trained with the BPR loss: an item that the user
//! interacted with should score higher than a random one. Without layers this is matrix factorisation.
//!
//! Gradients are exact and written by hand, because propagation is its own transpose (see `graph`). A step costs two
//! propagations whatever its batch, so batches are large; Adam compensates for that.

use anyhow::{Context, Result, ensure};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::graph::Graph;
use crate::ranking::{Holdout, RankingQuality, evaluate_embeddings};
use crate::{Edge, Embeddings};

/// The cut-off of the validation's recall, as in the paper.
pub const CUTOFF: usize = 20;

/// Rows of parameters that one task of the optimiser updates.
const ADAM_CHUNK: usize = 4096;

/// The `[embed]` section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EmbedConfig {
    /// Values of an embedding.
    pub dimension: usize,
    /// Propagation layers; 0 is matrix factorisation.
    pub layers: usize,
    /// Adam's step size.
    pub learning_rate: f32,
    /// Weight of the squared norm of the vectors of a batch.
    pub l2: f32,
    /// Interactions per step.
    pub batch: usize,
    /// Most passes over the interactions.
    pub epochs: usize,
    /// Epochs between two validations.
    pub validate_every: usize,
    /// Validations without a better recall that end training.
    pub patience: usize,
    /// Share of each user's interactions for validation.
    pub validation: f64,
    /// Share of each user's interactions that `laser eval embed` uses as the test.
    pub test: f64,
    /// Interactions rated lower are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_rating: Option<f32>,
    /// Seed for initial vectors, order, negative items, and the split if there are no timestamps.
    pub seed: u64,
}

impl Default for EmbedConfig {
    fn default() -> Self {
        Self {
            dimension: 64,
            layers: 2,
            learning_rate: 0.005,
            l2: 1e-4,
            batch: 8192,
            epochs: 200,
            validate_every: 2,
            patience: 5,
            validation: 0.1,
            test: 0.1,
            min_rating: None,
            seed: 1,
        }
    }
}

impl EmbedConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// The first key whose value makes no sense, with what was expected.
    pub fn validate(&self) -> Result<()> {
        let counts = [
            ("dimension", self.dimension),
            ("batch", self.batch),
            ("epochs", self.epochs),
            ("validate_every", self.validate_every),
            ("patience", self.patience),
        ];
        for (key, count) in counts {
            ensure!(count > 0, "[embed] {key} = 0: expected at least 1");
        }
        let Self { learning_rate, l2, .. } = self;
        ensure!(
            *learning_rate > 0.0 && learning_rate.is_finite(),
            "[embed] learning_rate = {learning_rate}: expected a number above 0"
        );
        ensure!(*l2 >= 0.0 && l2.is_finite(), "[embed] l2 = {l2}: expected 0 or more");
        for (key, share) in [("validation", self.validation), ("test", self.test)] {
            ensure!(share > 0.0 && share < 0.5, "[embed] {key} = {share}: expected a share above 0 and below 0.5");
        }
        Ok(())
    }
}

/// What training says after each epoch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epoch {
    /// Counted from 1.
    pub epoch: usize,
    /// Mean BPR loss of its interactions.
    pub loss: f64,
    /// The newest validation, if there was one.
    pub validation: Option<RankingQuality>,
}

/// The outcome of training.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// Parameters of the epoch with the best validation: one row per user, then one per item.
    parameters: Vec<f32>,
    /// Values of a row.
    dimension: usize,
    layers: usize,
    /// The epoch with the best validation.
    pub epoch: usize,
    /// Number of epochs trained.
    pub epochs: usize,
    /// Recall and NDCG at [`CUTOFF`] on the validation's interactions.
    pub validation: RankingQuality,
}

impl Trained {
    /// Returns the parameters propagated over the graph of `edges`. With `data.train` these are the validated vectors;
    /// with all known edges they are the best available, including items that were held out entirely.
    pub fn embeddings(&self, data: &Holdout, edges: &[Edge]) -> Embeddings {
        let graph = Graph::new(data.users, data.items, edges);
        embeddings(&graph, &self.parameters, self.dimension, self.layers)
    }
}

fn embeddings(graph: &Graph, parameters: &[f32], dimension: usize, layers: usize) -> Embeddings {
    let mut users = graph.propagate(parameters, dimension, layers);
    let items = users.split_off(graph.users() * dimension);
    Embeddings { dimension, users, items }
}

/// Trains on `data.train` until the recall on `data.validation` no longer improves.
///
/// # Errors
/// Nothing to validate on or to compare with, and a training that diverges.
pub fn train(data: &Holdout, config: &EmbedConfig, progress: &mut dyn FnMut(Epoch)) -> Result<Trained> {
    ensure!(
        !data.validation.is_empty(),
        "no user has enough interactions to hold one out for validation ({} users, {} interactions): give more \
         interactions, or a larger [embed] validation",
        data.users,
        data.train.len()
    );
    let mut trainer = Trainer::new(data, config)?;
    let mut best: Option<Trained> = None;
    let mut newest = None;
    for epoch in 1..=config.epochs {
        let loss = trainer.epoch();
        ensure!(
            loss.is_finite(),
            "the loss is not finite in epoch {epoch}: lower [embed] learning_rate (it is {})",
            config.learning_rate
        );
        if epoch % config.validate_every == 0 || epoch == config.epochs {
            let (graph, parameters) = (&trainer.graph, &trainer.parameters);
            let vectors = embeddings(graph, parameters, config.dimension, config.layers);
            let (seen, wanted) = (&[data.train.as_slice()], &data.validation);
            let validation = evaluate_embeddings(data, seen, wanted, CUTOFF, &vectors);
            newest = Some(validation);
            if best.as_ref().is_none_or(|best| validation.recall > best.validation.recall) {
                best = Some(Trained {
                    parameters: parameters.clone(),
                    dimension: config.dimension,
                    layers: config.layers,
                    epoch,
                    epochs: epoch,
                    validation,
                });
            }
        }
        progress(Epoch { epoch, loss, validation: newest });
        if let Some(best) = &mut best {
            best.epochs = epoch;
            if epoch - best.epoch >= config.patience * config.validate_every {
                break;
            }
        }
    }
    // The last epoch validates, and no recall is below every other.
    best.context("[embed] epochs: none")
}

/// Parameters with Adam's moments, and the training interactions.
struct Trainer<'a> {
    data: &'a Holdout,
    config: &'a EmbedConfig,
    graph: Graph,
    rng: Xoshiro256PlusPlus,
    /// Training interactions of users who have not seen everything.
    edges: Vec<Edge>,
    /// One row per user, then one per item.
    parameters: Vec<f32>,
    moments: Vec<[f32; 2]>,
    steps: i32,
}

/// A user, an item of theirs, and one that is not.
type Triple = [usize; 3];

impl<'a> Trainer<'a> {
    fn new(data: &'a Holdout, config: &'a EmbedConfig) -> Result<Self> {
        let graph = Graph::new(data.users, data.items, &data.train);
        let has_negatives = |edge: &&Edge| graph.items_of(edge.0).len() < data.items;
        let edges: Vec<Edge> = data.train.iter().filter(has_negatives).copied().collect();
        ensure!(
            !edges.is_empty(),
            "every user has interacted with all {} items: there is nothing to tell liked items from; give the \
             interactions of more items, or set [embed] min_rating",
            data.items
        );
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(config.seed);
        // Xavier: propagated vectors start with dot products near 0.
        let bound = (6.0 / (graph.nodes() + config.dimension) as f32).sqrt();
        let count = graph.nodes() * config.dimension;
        let parameters = (0..count).map(|_| rng.gen_range(-bound..bound)).collect();
        Ok(Self { data, config, graph, rng, edges, parameters, moments: vec![[0.0; 2]; count], steps: 0 })
    }

    /// Makes one pass over the interactions and returns the mean loss.
    fn epoch(&mut self) -> f64 {
        let mut edges = std::mem::take(&mut self.edges);
        edges.shuffle(&mut self.rng);
        let mut loss = 0.0;
        for batch in edges.chunks(self.config.batch) {
            let triples: Vec<Triple> = batch.iter().map(|&edge| self.triple(edge)).collect();
            let (batch_loss, gradient) = self.gradient(&triples);
            loss += batch_loss;
            self.update(&gradient);
        }
        self.edges = edges;
        loss / self.edges.len() as f64
    }

    /// Adds an item drawn uniformly from those that the user has not interacted with.
    fn triple(&mut self, (user, item): Edge) -> Triple {
        let items = u32::try_from(self.data.items).unwrap_or(u32::MAX);
        let seen = self.graph.items_of(user);
        let other = loop {
            let other = self.rng.gen_range(0..items);
            if seen.binary_search(&other).is_err() {
                break other;
            }
        };
        let node = |item: u32| self.data.users + item as usize;
        [user as usize, node(item), node(other)]
    }

    /// Returns the sum of the triples' BPR losses, and the gradient of mean loss and regularisation at the parameters.
    fn gradient(&self, triples: &[Triple]) -> (f64, Vec<f32>) {
        let (dimension, layers) = (self.config.dimension, self.config.layers);
        let vectors = self.graph.propagate(&self.parameters, dimension, layers);
        let row = |node: usize| node * dimension..(node + 1) * dimension;
        let mut loss = 0.0;
        let mut gradient = vec![0.0; vectors.len()];
        let share = 1.0 / triples.len() as f32;
        for &[user, item, other] in triples {
            let (user_row, item_row, other_row) = (row(user), row(item), row(other));
            let margin: f32 = (user_row.clone().zip(item_row.clone()).zip(other_row.clone()))
                .map(|((u, i), o)| vectors[u] * (vectors[i] - vectors[o]))
                .sum();
            // -ln σ(margin), whose derivative is -σ(-margin).
            loss += f64::from((-margin.abs()).exp().ln_1p() + (-margin).max(0.0));
            let slope = -share / (1.0 + margin.exp());
            for ((u, i), o) in user_row.zip(item_row).zip(other_row) {
                gradient[u] += slope * (vectors[i] - vectors[o]);
                gradient[i] += slope * vectors[u];
                gradient[o] -= slope * vectors[u];
            }
        }
        let mut gradient = self.graph.propagate(&gradient, dimension, layers);
        let decay = share * self.config.l2;
        for node in triples.iter().flatten() {
            for position in row(*node) {
                gradient[position] += decay * self.parameters[position];
            }
        }
        (loss, gradient)
    }

    /// Updates the parameters by Adam (Kingma and Ba 2015) with its usual constants.
    fn update(&mut self, gradient: &[f32]) {
        const DECAYS: [f32; 2] = [0.9, 0.999];
        self.steps += 1;
        let [first, second] = DECAYS.map(|decay| 1.0 - decay.powi(self.steps));
        let step = self.config.learning_rate / first;
        let parameters = self.parameters.par_chunks_mut(ADAM_CHUNK);
        let moments = self.moments.par_chunks_mut(ADAM_CHUNK);
        let chunks = parameters.zip(moments).zip(gradient.par_chunks(ADAM_CHUNK));
        chunks.for_each(|((parameters, moments), gradient)| {
            for ((parameter, [mean, square]), &slope) in parameters.iter_mut().zip(moments).zip(gradient) {
                *mean += (1.0 - DECAYS[0]) * (slope - *mean);
                *square += (1.0 - DECAYS[1]) * (slope * slope - *square);
                *parameter -= step * *mean / ((*square / second).sqrt() + 1e-8);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, Var};

    use super::*;
    use crate::ranking::{Event, evaluate_popularity};

    /// Users and items of `groups` communities; a user interacts with `own` items of theirs and one of all.
    fn communities(users: u32, items: u32, groups: u32, own: usize) -> Holdout {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        let mut events = Vec::new();
        for user in 0..users {
            for draw in 0..=own {
                let any = rng.gen_range(0..items);
                let item = if draw < own { any - any % groups + user % groups } else { any };
                events.push(Event { user, item: item.min(items - 1), time: None });
            }
        }
        Holdout::new(users as usize, items as usize, &events, (0.15, 0.15), 5)
    }

    fn config(layers: usize) -> EmbedConfig {
        EmbedConfig { dimension: 4, layers, batch: 64, epochs: 40, learning_rate: 0.02, ..EmbedConfig::default() }
    }

    fn small() -> Holdout {
        communities(12, 40, 2, 12)
    }

    #[test]
    fn the_gradient_is_that_of_candles_autograd() {
        let (data, config) = (small(), EmbedConfig { l2: 0.1, ..config(2) });
        let mut trainer = Trainer::new(&data, &config).unwrap();
        let edges = trainer.edges.clone();
        let triples: Vec<Triple> = edges.iter().map(|&edge| trainer.triple(edge)).collect();
        let (loss, gradient) = trainer.gradient(&triples);

        let (nodes, cpu) = (trainer.graph.nodes(), Device::Cpu);
        // P itself, column by column.
        let mut identity = vec![0.0; nodes * nodes];
        (0..nodes).for_each(|node| identity[node * nodes + node] = 1.0);
        let propagation = trainer.graph.propagate(&identity, nodes, 2);
        let propagation = Tensor::from_vec(propagation, (nodes, nodes), &cpu).unwrap();
        let parameters = Var::from_slice(&trainer.parameters, (nodes, 4), &cpu).unwrap();
        let vectors = propagation.matmul(&parameters).unwrap();
        let pick = |of: &Tensor, place: usize| {
            let rows: Vec<u32> = triples.iter().map(|t| u32::try_from(t[place]).unwrap()).collect();
            of.index_select(&Tensor::new(rows, &cpu).unwrap(), 0).unwrap()
        };
        let [user, item, other] = [0, 1, 2].map(|place| pick(&vectors, place));
        let margin = (user * (item - other).unwrap()).unwrap().sum(1).unwrap();
        let losses = (margin.neg().unwrap().exp().unwrap() + 1.0).unwrap().log().unwrap();
        let mean = losses.mean_all().unwrap();
        assert!((f64::from(mean.to_scalar::<f32>().unwrap()) - loss / triples.len() as f64).abs() < 1e-6);
        let norms = [0, 1, 2].map(|place| pick(&parameters, place).sqr().unwrap().sum_all().unwrap());
        let norms = norms.into_iter().reduce(|a, b| (a + b).unwrap()).unwrap();
        let penalty = (norms * (0.5 * f64::from(config.l2) / triples.len() as f64)).unwrap();
        let gradients = (mean + penalty).unwrap().backward().unwrap();
        let expected = gradients.get(&parameters).unwrap().flatten_all().unwrap();
        for (found, expected) in gradient.iter().zip(expected.to_vec1::<f32>().unwrap()) {
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn communities_are_found_and_popularity_does_not_find_them() {
        let data = communities(120, 60, 3, 12);
        let config = EmbedConfig { dimension: 8, ..config(2) };
        let trained = train(&data, &config, &mut |_| {}).unwrap();
        let seen = [data.train.as_slice(), &data.validation];
        let found = evaluate_embeddings(&data, &seen, &data.test, 10, &trained.embeddings(&data, &data.train));
        let popular = evaluate_popularity(&data, &seen, &data.test, 10);
        assert!(found.recall > popular.recall + 0.3, "{found:?} against {popular:?}");
    }

    #[test]
    fn a_seed_decides_everything() {
        let data = small();
        let vectors = |seed| {
            let config = EmbedConfig { seed, epochs: 4, ..config(2) };
            train(&data, &config, &mut |_| {}).unwrap().embeddings(&data, &data.train)
        };
        assert_eq!(vectors(1), vectors(1));
        assert_ne!(vectors(1), vectors(2));
    }

    #[test]
    fn too_little_data_and_runaway_training_are_refused() {
        let refusal = |data: &Holdout, config: &EmbedConfig| train(data, config, &mut |_| {}).unwrap_err().to_string();
        let one = Holdout { validation: Vec::new(), ..small() };
        assert!(refusal(&one, &config(1)).contains("no user has enough interactions"));
        let all = Holdout {
            users: 1,
            items: 2,
            train: vec![(0, 0), (0, 1)],
            validation: vec![(0, 1)],
            test: Vec::new(),
            by_time: false,
        };
        assert!(refusal(&all, &config(1)).contains("all 2 items"));
        let wild = EmbedConfig { learning_rate: f32::MAX, ..config(2) };
        assert!(refusal(&small(), &wild).contains("lower [embed] learning_rate"));
    }
}
