//! What a recommender minimises, and what is measured of it.

use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::atspeed::{relaxed, reverse_divergence, strict, strict_with_entropy};
use crate::recommender::options::RecommenderLoss;
use crate::softmax::{log_probabilities, log_softmax};

/// Loss and measures over the codes of whole items: `[N, V]` logits, of each item one row a level.
#[derive(Debug, Clone)]
pub(crate) struct Objective {
    pub(crate) loss: RecommenderLoss,
    /// See [`RecommenderOptions`](crate::RecommenderOptions).
    pub(crate) constrained: bool,
    /// The tokens of each level.
    pub(crate) levels: Vec<Range<usize>>,
}

/// How right a recommender is, as sums over items.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Hits {
    pub(crate) items: f64,
    /// Items whose first code is the most probable of its level.
    pub(crate) first: f64,
    /// Items of which every code is.
    pub(crate) all: f64,
    /// Σ min(p, q) with a target, summed over codes.
    pub(crate) overlap: f64,
}

/// What is known of N places in listed items, beside the logits there.
#[derive(Debug)]
pub(crate) struct ListPlaces {
    /// `[N, V]`: 0 for the codes that are compared, [`FORBIDDEN`](crate::atspeed::FORBIDDEN) for all others.
    pub(crate) mask: Tensor,
    /// `[N, 1]`: the log probability that the target gives the code of its list's last item at the same level.
    pub(crate) log_p_k: Option<Tensor>,
    /// The most probable codes that count.
    pub(crate) k: usize,
}

impl Objective {
    /// The mean loss over places in listed items, whose codes are `text`, `[N, 1]`: the cross-entropy, or with a
    /// target's logits there AtSpeed's loss between distributions of the codes that the prefixes allow.
    pub(crate) fn of_lists(
        &self,
        logits: &Tensor,
        text: &Tensor,
        target: Option<(&ListPlaces, &Tensor)>,
    ) -> Result<Tensor> {
        let Some((places, target)) = target else {
            return self.of(logits, text, None);
        };
        let [draft, target] = [(logits + &places.mask)?, (target + &places.mask)?];
        match (self.loss, &places.log_p_k) {
            (RecommenderLoss::AtSpeedS, Some(log_p_k)) => strict(&draft, &target, log_p_k, places.k),
            (RecommenderLoss::AtSpeedSEntropy, _) => strict_with_entropy(&draft, &target, places.k),
            (RecommenderLoss::ReverseKl, _) => reverse_divergence(&draft, &target, places.k),
            (RecommenderLoss::AtSpeedR, _) => relaxed(&draft, &target, places.k),
            (loss, _) => candle_core::bail!("loss = \"{loss}\" does not compare lists"),
        }
    }

    /// The mean loss over the places, whose codes are `text`, `[N, 1]`; `target` are a target's logits there.
    pub(crate) fn of(&self, logits: &Tensor, text: &Tensor, target: Option<&Tensor>) -> Result<Tensor> {
        let parts = self.parts(logits)?;
        let targets = target.map(|target| self.parts(target)).transpose()?;
        let mut sum: Option<Tensor> = None;
        for (at, part) in parts.iter().enumerate() {
            let target = targets.as_ref().and_then(|targets| targets.get(at));
            let of_part = self.of_part(part, &self.codes(text, at)?, target)?;
            sum = Some(match sum {
                Some(sum) => (sum + of_part)?,
                None => of_part,
            });
        }
        match sum {
            Some(sum) => sum / parts.len() as f64,
            None => candle_core::bail!("identifiers of no levels"),
        }
    }

    fn of_part(&self, logits: &Tensor, codes: &Tensor, target: Option<&Tensor>) -> Result<Tensor> {
        match (self.loss, target) {
            (loss, _) if !loss.compares_data() => log_probabilities(logits, codes)?.mean_all()?.neg(),
            (_, None) => candle_core::bail!("a loss of two distributions needs a target"),
            (RecommenderLoss::WordKd, Some(target)) => {
                let (log_p, log_q) = (log_softmax(target)?.detach(), log_softmax(logits)?);
                (log_p.exp()? * (log_p - log_q)?)?.sum(1)?.mean_all()
            }
            (RecommenderLoss::TvdKd, Some(target)) => {
                let (p, q) = (log_softmax(target)?.exp()?.detach(), log_softmax(logits)?.exp()?);
                (p - q)?.abs()?.sum(1)?.mean_all()? * 0.5
            }
            (loss, Some(_)) => candle_core::bail!("loss = \"{loss}\" does not compare histories"),
        }
    }

    /// How right the most probable codes are.
    pub(crate) fn hits(&self, logits: &Tensor, text: &Tensor, target: Option<&Tensor>) -> Result<Hits> {
        let by_level = Self { constrained: true, ..self.clone() };
        let mut right: Vec<Tensor> = Vec::new();
        for (level, logits) in by_level.parts(logits)?.iter().enumerate() {
            right.push(logits.argmax_keepdim(1)?.eq(&by_level.codes(text, level)?)?);
        }
        let Some(first) = right.first() else {
            return Ok(Hits::default());
        };
        let all = Tensor::cat(&right, 1)?.min(1)?;
        let mut hits = Hits { items: first.dim(0)? as f64, first: count(first)?, all: count(&all)?, overlap: 0.0 };
        if let Some(target) = target {
            for (own, target) in self.parts(logits)?.iter().zip(self.parts(target)?) {
                let both = log_softmax(own)?.exp()?.minimum(&log_softmax(&target)?.exp()?)?;
                hits.overlap += f64::from(both.sum_all()?.to_scalar::<f32>()?);
            }
        }
        Ok(hits)
    }

    /// What is normalised apart: all logits, or of each level `[items, codes]`.
    fn parts(&self, logits: &Tensor) -> Result<Vec<Tensor>> {
        if !self.constrained {
            return Ok(vec![logits.clone()]);
        }
        let (places, vocabulary) = logits.dims2()?;
        let depth = self.levels.len();
        let by_item = logits.reshape((places / depth, depth, vocabulary))?;
        let part = |(level, tokens): (usize, &Range<usize>)| {
            by_item.narrow(2, tokens.start, tokens.len())?.narrow(1, level, 1)?.squeeze(1)?.contiguous()
        };
        self.levels.iter().enumerate().map(part).collect()
    }

    /// The codes of a part, `[items, 1]`, counted from its first.
    fn codes(&self, text: &Tensor, part: usize) -> Result<Tensor> {
        if !self.constrained {
            return Ok(text.clone());
        }
        let depth = self.levels.len();
        let codes = text.reshape((text.dim(0)? / depth, depth))?.narrow(1, part, 1)?.contiguous()?;
        let begin = u32::try_from(self.levels[part].start).map_err(candle_core::Error::wrap)?;
        codes.broadcast_sub(&Tensor::new(begin, text.device())?)
    }
}

/// How many are not 0.
fn count(flags: &Tensor) -> Result<f64> {
    flags.to_dtype(candle_core::DType::F32)?.sum_all()?.to_scalar::<f32>().map(f64::from)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// Two items of two levels, which have two and three codes after one special token.
    const V: usize = 6;
    const TEXT: [usize; 4] = [1, 5, 2, 3];

    fn objective(loss: RecommenderLoss, constrained: bool) -> Objective {
        Objective { loss, constrained, levels: vec![1..3, 3..6] }
    }

    fn values(step: usize) -> Vec<f32> {
        (0..TEXT.len() * V).map(|at| ((at * step + 3) % 11) as f32 / 4.0 - 1.0).collect()
    }

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::from_slice(values, (TEXT.len(), V), &Device::Cpu).unwrap()
    }

    fn text() -> Tensor {
        Tensor::from_vec(TEXT.map(|token| u32::try_from(token).unwrap()).to_vec(), (TEXT.len(), 1), &Device::Cpu)
            .unwrap()
    }

    /// The distribution at a place, of all tokens or of its level's.
    fn distribution(logits: &[f32], place: usize, objective: &Objective) -> Vec<f64> {
        let level = &objective.levels[place % 2];
        let allowed = |token| !objective.constrained || level.contains(&token);
        let row = logits[place * V..][..V].iter().enumerate();
        let weights = row.map(|(token, &x)| if allowed(token) { f64::from(x).exp() } else { 0.0 });
        let weights: Vec<f64> = weights.collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    }

    fn naive(objective: &Objective, logits: &[f32], target: &[f32]) -> f64 {
        let of_place = |place: usize| {
            let [q, p] = [logits, target].map(|logits| distribution(logits, place, objective));
            let pairs = p.iter().zip(&q).filter(|(p, _)| **p > 0.0);
            match objective.loss {
                RecommenderLoss::Sft => -q[TEXT[place]].ln(),
                RecommenderLoss::WordKd => pairs.map(|(p, q)| p * (p / q).ln()).sum(),
                RecommenderLoss::TvdKd => pairs.map(|(p, q)| 0.5 * (p - q).abs()).sum(),
                loss => panic!("{loss}"),
            }
        };
        (0..TEXT.len()).map(of_place).sum::<f64>() / TEXT.len() as f64
    }

    #[test]
    fn losses_and_their_gradients_are_those_of_the_definitions() {
        let (values, target) = (values(7), values(5));
        for loss in [RecommenderLoss::Sft, RecommenderLoss::WordKd, RecommenderLoss::TvdKd] {
            for constrained in [false, true] {
                let objective = objective(loss, constrained);
                let of = |draft: &Tensor| objective.of(draft, &text(), Some(&tensor(&target))).unwrap();
                check(of, |draft| naive(&objective, draft, &target), &values, &format!("{objective:?}"));
            }
        }
    }

    /// What the prefixes allow, and what the target gives the code of its last item.
    const ALLOWED: [&[usize]; 4] = [&[1, 2], &[3, 4, 5], &[1, 2], &[4]];
    const LOG_P_K: [f32; 4] = [-1.5, -0.3, -2.0, 0.0];
    const K: usize = 2;

    fn places() -> ListPlaces {
        let mut mask = vec![crate::atspeed::FORBIDDEN; TEXT.len() * V];
        ALLOWED
            .iter()
            .enumerate()
            .for_each(|(place, codes)| codes.iter().for_each(|code| mask[place * V + code] = 0.0));
        let log_p_k = Tensor::from_slice(&LOG_P_K, (TEXT.len(), 1), &Device::Cpu).unwrap();
        ListPlaces { mask: tensor(&mask), log_p_k: Some(log_p_k), k: K }
    }

    /// The distribution of these codes alone.
    fn among(logits: &[f32], codes: &[usize]) -> Vec<f64> {
        let weights: Vec<f64> = codes.iter().map(|&code| f64::from(logits[code]).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    }

    /// AtSpeed's losses by their definitions, among the allowed codes.
    fn naive_on_lists(loss: RecommenderLoss, logits: &[f32], target: &[f32]) -> f64 {
        let of_place = |place: usize| -> f64 {
            let [draft, target] = [logits, target].map(|all| &all[place * V..][..V]);
            let (allowed, mut best) = (ALLOWED[place], ALLOWED[place].to_vec());
            let by = if loss == RecommenderLoss::AtSpeedR { target } else { draft };
            best.sort_by(|&a, &b| by[b].total_cmp(&by[a]));
            best.truncate(K);
            if loss == RecommenderLoss::AtSpeedS {
                let at = |all: &[f64], code: usize| all[allowed.iter().position(|&other| other == code).unwrap()];
                let [q, p] = [draft, target].map(|logits| among(logits, allowed));
                return best.iter().map(|&x| at(&q, x) * (f64::from(LOG_P_K[place]) - at(&p, x).ln())).sum();
            }
            let [q, p] = [draft, target].map(|logits| among(logits, &best));
            let pairs = || q.iter().zip(&p);
            if loss == RecommenderLoss::AtSpeedR {
                return pairs().map(|(q, p)| 0.5 * (p - q).abs()).sum();
            }
            let has_density = loss == RecommenderLoss::AtSpeedSEntropy && best.len() >= K;
            let last = if has_density { p[K - 1] } else { 0.0 };
            pairs().map(|(q, p)| q * (q / p).ln() - last * q * q.ln()).sum()
        };
        (0..TEXT.len()).map(of_place).sum::<f64>() / TEXT.len() as f64
    }

    /// Compares a loss and its slopes with the same of a definition.
    fn check(loss: impl Fn(&Tensor) -> Tensor, definition: impl Fn(&[f32]) -> f64, values: &[f32], what: &str) {
        let var = Var::from_tensor(&tensor(values)).unwrap();
        let (found, expected) = (loss(&var), definition(values));
        let difference = f64::from(found.to_scalar::<f32>().unwrap()) - expected;
        assert!(difference.abs() < 1e-5, "{what}: {expected}, {difference}");
        let gradients = found.backward().unwrap();
        let gradient = gradients.get(&var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for at in 0..values.len() {
            let moved = |by: f32| {
                let mut values = values.to_vec();
                values[at] += by;
                definition(&values)
            };
            let slope = (moved(1e-3) - moved(-1e-3)) / 2e-3;
            assert!((f64::from(gradient[at]) - slope).abs() < 1e-4, "{what} at {at}: {slope}");
        }
    }

    #[test]
    fn losses_on_lists_are_those_of_the_codes_that_prefixes_allow() {
        let (values, target, places) = (values(7), values(5), places());
        let entropic = [RecommenderLoss::AtSpeedSEntropy, RecommenderLoss::ReverseKl];
        for loss in entropic.into_iter().chain([RecommenderLoss::AtSpeedS, RecommenderLoss::AtSpeedR]) {
            let objective = objective(loss, false);
            let of = |draft: &Tensor| objective.of_lists(draft, &text(), Some((&places, &tensor(&target)))).unwrap();
            check(of, |draft| naive_on_lists(loss, draft, &target), &values, &loss.to_string());
        }
        for constrained in [false, true] {
            let (own, sft) =
                (objective(RecommenderLoss::SeqKd, constrained), objective(RecommenderLoss::Sft, constrained));
            let of = |draft: &Tensor| own.of_lists(draft, &text(), None).unwrap();
            check(of, |draft| naive(&sft, draft, &target), &values, "seq-kd");
        }
    }

    #[test]
    fn hits_count_codes_that_are_first_in_their_level() {
        // Tokens of other levels are more probable, and do not count.
        let rows = [
            [9.0, 1.0, 0.0, 7.0, 0.0, 0.0],
            [9.0, 9.0, 0.0, 0.0, 0.5, 1.0],
            [0.0, 1.0, 2.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
        ];
        let objective = objective(RecommenderLoss::Sft, false);
        let logits = tensor(&rows.concat());
        let hits = objective.hits(&logits, &text(), None).unwrap();
        assert_eq!(hits, Hits { items: 2.0, first: 2.0, all: 1.0, overlap: 0.0 });
        let same = objective.hits(&logits, &text(), Some(&logits)).unwrap().overlap;
        assert!((same - 4.0).abs() < 1e-5, "{same}");
    }
}
