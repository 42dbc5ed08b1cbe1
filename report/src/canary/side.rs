//! The figures of a canary, or of the night, over the entities that both have.

use laser_schema::knowledge::{KnowledgeRecord, ratio};
use laser_schema::manifest::{Cost, Manifest};

use super::Figure;

/// Sums over rows.
#[derive(Debug, Default)]
pub(super) struct Side {
    rows: u64,
    tokens: f64,
    log_probability: f64,
    relaxed: f64,
    items: f64,
    best_scores: f64,
    forwards: f64,
    engine_seconds: f64,
}

impl Side {
    pub(super) fn add(&mut self, row: &KnowledgeRecord) {
        self.rows += 1;
        self.tokens += row.text_tokens as f64;
        self.log_probability += row.mean_log_probability * row.text_tokens as f64;
        self.relaxed += row.relaxed_tokens as f64;
        self.items += row.items.len() as f64;
        self.best_scores += row.scores.first().copied().unwrap_or_default();
        self.forwards += row.forwards as f64;
        self.engine_seconds += row.engine_seconds;
    }

    fn per_row(&self, sum: f64) -> Option<f64> {
        Some(ratio(sum, self.rows as f64))
    }

    fn per_token(&self, sum: f64) -> Option<f64> {
        (self.tokens > 0.0).then(|| sum / self.tokens)
    }

    /// The price of 1,000 rows, if the run had one.
    fn price(&self, cost: Option<&Cost>) -> Option<f64> {
        cost.map(|cost| cost.price.of_seconds(ratio(self.engine_seconds, self.rows as f64) * 1e3))
    }
}

/// The figures of both sides that their rows have.
pub(super) fn figures(sides: &[Side; 2], manifests: [&Manifest; 2]) -> Vec<Figure> {
    let mut figures = Vec::new();
    let mut push = |name: &str, digits, of: &dyn Fn(usize) -> Option<f64>| {
        let [canary, night] = [of(0), of(1)];
        if canary.is_some() || night.is_some() {
            figures.push(Figure { name: name.to_owned(), canary, night, digits });
        }
    };
    let side = |at: usize| &sides[at];
    let is_lists = manifests[0].spec.lists.is_some();
    if is_lists {
        push("items per list", 1, &|at| side(at).per_row(side(at).items));
        push("log probability of the best item", 3, &|at| side(at).per_row(side(at).best_scores));
    } else {
        push("tokens per text", 1, &|at| side(at).per_row(side(at).tokens));
        // An engine that does not tell probabilities says 0.
        let told = |sum: f64| (sum != 0.0).then_some(sum);
        push("log probability per token", 3, &|at| told(side(at).log_probability).and_then(|s| side(at).per_token(s)));
        push("share of relaxed tokens", 3, &|at| side(at).per_token(side(at).relaxed));
    }
    let row = if is_lists { "list" } else { "text" };
    push(&format!("forwards per {row}"), 2, &|at| side(at).per_row(side(at).forwards));
    push(&format!("engine seconds per {row}"), 4, &|at| side(at).per_row(side(at).engine_seconds));
    let currency = manifests.iter().find_map(|m| Some(m.cost.as_ref()?.price.currency.as_str())).unwrap_or_default();
    push(&format!("{currency} per 1,000 {row}s"), 4, &|at| side(at).price(manifests[at].cost.as_ref()));
    figures
}
