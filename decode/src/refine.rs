//! Refining a draft tree by a draft model: a second, smaller model of the same tokenizer.
//!
//! One forward of the draft model reads a whole tree. It tells of every node what it expects next, so it judges what
//! the other sources drafted and proposes tokens that they lack. The tree is then grown again, best-first, from both
//! opinions; what is new in it can be read in a further forward. On a tree that is only a root this is the dynamic tree
//! of EAGLE-2 (arXiv:2406.16858, section 4), a level a forward; on the tree of a pool one forward judges all levels.
//!
//! Let a(x) be the estimate of the other sources that x follows a node, A the sum of a over the node's drafted
//! children, p the draft model's distribution and w the trust in it. The probability of x is
//! (1 - w) · (a(x) + (1 - A) · p(x)) + w · p(x): a mixture of the draft model and of the other sources, which leave
//! to it what they do not know.
//!
//! A greedy target takes its most probable token however close the race was, so what a draft model puts first is right
//! more often than its probability says. Therefore p is the model's distribution to the power of a sharpness,
//! normalised; the slope of its log likelihood ([`Refined::slope`]) tells how to learn that from the texts.
//!
//! An acceptance head (after SpecDec++, arXiv:2405.19715, section 3.2) corrects what the draft model thinks of a node,
//! once that was read, from the draft model's state there ([`Verdict`]). That takes the place of p(x).

use std::collections::BinaryHeap;
use std::sync::Arc;

use crate::Token;
use crate::race::Race;
use crate::sampling::Noise;
use crate::tree::{DraftTree, Source};
use crate::verify::Candidate;

/// A draft tree with what a draft model says of it. Buffers are kept from step to step.
#[derive(Debug, Clone, Default)]
pub struct Refined {
    tree: DraftTree,
    notes: Vec<Note>,
    grown: DraftTree,
    grown_notes: Vec<Note>,
    open: BinaryHeap<Open>,
    /// Nodes offered to `open` so far.
    seen: usize,
    /// The noise of the token after the root, of a text that is drawn.
    noise: Option<Noise>,
}

/// What is known of a node.
#[derive(Debug, Clone, Default)]
struct Note {
    /// The estimates that it follows its parent: of the other sources, and of the draft model once that has read the
    /// parent.
    estimate: f32,
    model: f32,
    /// What the acceptance head says of it, once it was read.
    verdict: Option<Verdict>,
    /// What the other sources leave of the probability of its children.
    left: f32,
    /// What the draft model says after it; none before it was read.
    read: Option<Read>,
}

/// What a draft model says after a node.
#[derive(Debug, Clone, Default)]
struct Read {
    candidates: Vec<Candidate>,
    /// The log probability of the last candidate, and the logarithm of how many tokens of that would make up all that
    /// are no candidates.
    last: f32,
    log_others: f32,
    calibration: Calibration,
    /// Logarithm of the sum of the sharpened probabilities.
    log_sum: f32,
    /// Of a text that is drawn.
    race: Option<Race>,
    /// The feature of the node, where the draft model works on features. Shared by the copies that growing makes.
    feature: Arc<[f32]>,
}

/// How the probabilities of a draft model are taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibration {
    /// Weight of the draft model against the other sources, in 0..=1.
    pub trust: f32,
    /// Exponent of its probabilities.
    pub sharpness: f32,
}

impl Default for Calibration {
    /// Both opinions count alike, and as they are.
    fn default() -> Self {
        Self { trust: 0.5, sharpness: 1.0 }
    }
}

/// What an acceptance head makes of the draft model's own sharpened probability q of a token: 1 / (1 + exp(-x)) with
/// x = `scale` · ln(q / (1 - q)) + `shift`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Factor of the draft model's log odds.
    pub scale: f32,
    /// What is added to them.
    pub shift: f32,
}

impl Verdict {
    /// The probability that the target accepts a token to which the draft model gives this sharpened one.
    fn probability(self, own: f32) -> f32 {
        1.0 / (1.0 + (-(self.scale * log_odds(own) + self.shift)).exp())
    }
}

/// ln(p / (1 - p)) of a probability, at most 14 either way: it may have been rounded to 0 or 1.
#[must_use]
pub fn log_odds(probability: f32) -> f32 {
    let least = OTHERS_MIN;
    probability.max(least).ln() - (1.0 - probability).max(least).ln()
}

/// The probabilities of a draft model's most probable tokens at a sharpness, as refined trees take them.
#[must_use]
pub fn sharpened(candidates: &[Candidate], sharpness: f32) -> Vec<f32> {
    let read = Read::new(candidates, Calibration { trust: 1.0, sharpness }, None, &[]);
    candidates.iter().map(|candidate| read.sharpen(candidate.log_probability)).collect()
}

/// The least probability that tokens are given which are no candidates.
const OTHERS_MIN: f32 = 1e-6;

impl Read {
    fn new(candidates: &[Candidate], calibration: Calibration, noise: Option<Noise>, feature: &[f32]) -> Self {
        let known: f32 = candidates.iter().map(|candidate| candidate.log_probability.exp()).sum();
        let last = candidates.last().map_or(0.0, |candidate| candidate.log_probability);
        let log_others = (1.0 - known).max(OTHERS_MIN).ln() - last;
        let (candidates, feature) = (candidates.to_vec(), feature.into());
        let mut read = Self { candidates, last, log_others, calibration, log_sum: 0.0, race: None, feature };
        let sharpness = calibration.sharpness;
        // The largest power is taken out, so that none underflows that matters.
        let most = read.all().fold(f32::MIN, |most, (log, _)| most.max(log));
        let sum: f32 = read.all().map(|(log, log_count)| (sharpness * (log - most) + log_count).exp()).sum();
        read.log_sum = sharpness * most + sum.ln();
        read.race = noise.map(|noise| {
            let known = read.candidates.iter().map(|known| (known.token, read.sharpen(known.log_probability)));
            Race::new(noise, known.filter(|(_, probability)| *probability > 0.0))
        });
        read
    }

    /// Log probabilities, and the logarithm of how many tokens have each: one has a candidate's. All others count as if
    /// they had the last candidate's, so sharpening takes no more from them than it would.
    fn all(&self) -> impl Iterator<Item = (f32, f32)> {
        let candidates = self.candidates.iter().map(|candidate| (candidate.log_probability, 0.0));
        candidates.chain([(self.last, self.log_others)])
    }

    /// The probability of this log probability, sharpened.
    fn sharpen(&self, log_probability: f32) -> f32 {
        (self.calibration.sharpness * log_probability - self.log_sum).exp()
    }

    fn log_probability(&self, token: Token) -> Option<f32> {
        let found = self.candidates.iter().find(|candidate| candidate.token == token);
        found.map(|candidate| candidate.log_probability)
    }

    /// The probability that a token follows; 0 if it is no candidate.
    fn probability(&self, token: Token) -> f32 {
        self.log_probability(token).map_or(0.0, |log_probability| self.of(Candidate { token, log_probability }))
    }

    /// The probability that a candidate follows: sharpened, and under the noise if that is known.
    fn of(&self, candidate: Candidate) -> f32 {
        self.under_noise(candidate.token, self.sharpen(candidate.log_probability))
    }

    fn under_noise(&self, token: Token, probability: f32) -> f32 {
        match &self.race {
            Some(race) if probability > 0.0 => race.probability(token, probability),
            _ => probability,
        }
    }

    /// The same of a node with this note, which the acceptance head may have judged.
    fn of_node(&self, token: Token, note: &Note) -> f32 {
        let Some(verdict) = note.verdict else {
            return self.probability(token);
        };
        // A token that is no candidate is at most as probable as the last of these.
        let own = self.sharpen(self.log_probability(token).unwrap_or(self.last));
        self.under_noise(token, verdict.probability(own))
    }
}

impl Note {
    /// The probability that a node with this note follows: what the other sources say if the draft model has not read.
    fn conditional(&self, child: &Self) -> f32 {
        self.read.as_ref().map_or(child.estimate, |read| child.blend(self.left, read.calibration.trust))
    }

    /// The probability after a parent that was read, with this trust in the draft model.
    fn blend(&self, left: f32, trust: f32) -> f32 {
        ((1.0 - trust) * (self.estimate + left * self.model) + trust * self.model).min(1.0)
    }
}

/// A node that may be drafted.
#[derive(Debug, Clone)]
struct Open {
    /// Of its path.
    probability: f32,
    /// In the order found: earlier ones come first among equals.
    order: usize,
    /// Its parent in the tree that is grown.
    parent: usize,
    token: Token,
    source: Source,
    note: Note,
    /// Its node in the tree before.
    before: Option<usize>,
}

impl Ord for Open {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.probability.total_cmp(&other.probability).then(other.order.cmp(&self.order))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Open {}

/// How a tree is grown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// Drafted nodes, at most.
    pub max_nodes: usize,
    /// The path probability that a node must exceed.
    pub min_probability: f32,
    /// Nothing follows this token.
    pub end_of_text: Token,
    /// Only tokens below this are drafted: a draft model may have more than the target.
    pub vocab_size: usize,
    /// What verifying a node costs, in tokens.
    pub price: f32,
}

impl Terms {
    /// What a node of this path probability gains.
    fn gain(&self, probability: f32) -> f32 {
        (probability - self.price).max(0.0)
    }
}

impl Refined {
    /// Begins with the tree of the other sources, which has a root; nothing of it has been read. `noise` is that of the
    /// token after the root, if the text is drawn.
    pub fn begin(&mut self, tree: &DraftTree, noise: Option<Noise>) {
        self.noise = noise;
        self.tree.clone_from(tree);
        self.notes.clear();
        self.notes.resize(tree.len(), Note { left: 1.0, ..Note::default() });
        for node in 1..tree.len() {
            let parent = tree.parents()[node] as usize;
            let estimate = tree.probabilities()[node] / tree.probabilities()[parent];
            self.notes[node].estimate = estimate;
            self.notes[parent].left -= estimate;
        }
        self.notes.iter_mut().for_each(|note| note.left = note.left.clamp(0.0, 1.0));
    }

    /// The tree as it is now.
    #[must_use]
    pub fn tree(&self) -> &DraftTree {
        &self.tree
    }

    /// What the tree gains, in tokens, by its estimates: the sum of its path probabilities above the price of a node.
    #[must_use]
    pub fn gain(&self, terms: Terms) -> f32 {
        self.tree.probabilities().iter().skip(1).map(|&probability| terms.gain(probability)).sum()
    }

    /// Whether the text is drawn.
    #[must_use]
    pub fn is_drawn(&self) -> bool {
        self.noise.is_some()
    }

    /// Whether the draft model is still to read a node.
    #[must_use]
    pub fn is_unread(&self, node: usize) -> bool {
        self.notes[node].read.is_none()
    }

    /// The drafted nodes that the draft model has to be given so that it reads those of at least this path probability
    /// that it has not read, ends of texts excepted: these and their ancestors below the root, ascending.
    #[must_use]
    pub fn to_read(&self, end_of_text: Token, min_probability: f32) -> Vec<usize> {
        let is_wanted = |node| self.is_unread(node) && self.tree.probabilities()[node] >= min_probability;
        let mut needed: Vec<bool> = (0..self.tree.len()).map(is_wanted).collect();
        for node in (1..self.tree.len()).rev() {
            let is_end = self.tree.tokens()[node] == end_of_text;
            needed[node] &= !is_end;
            if needed[node] {
                needed[self.tree.parents()[node] as usize] = true;
            }
        }
        (1..needed.len()).filter(|&node| needed[node]).collect()
    }

    /// Of [`to_read`](Self::to_read) the nodes whose parent was read, and their ancestors: what a draft model can read
    /// that needs the [feature](Self::feature_before) which it gave the parent.
    #[must_use]
    pub fn to_read_next(&self, end_of_text: Token, min_probability: f32) -> Vec<usize> {
        let mut nodes = self.to_read(end_of_text, min_probability);
        nodes.retain(|&node| self.feature_before(node).is_some());
        nodes
    }

    /// The unread nodes at a depth, ends of texts excepted.
    #[must_use]
    pub fn unread_at(&self, depth: usize, end_of_text: Token) -> Vec<usize> {
        let is_at = |&node: &usize| self.tree.depths()[node] as usize == depth;
        let goes_on = |&node: &usize| node == 0 || self.tree.tokens()[node] != end_of_text;
        (0..self.tree.len()).filter(|node| self.is_unread(*node)).filter(is_at).filter(goes_on).collect()
    }

    /// Takes over the draft model's most probable tokens after a node, how they are to be taken, and the feature that
    /// it gave the node, empty if it gives none.
    pub fn read(&mut self, node: usize, candidates: &[Candidate], calibration: Calibration, feature: &[f32]) {
        let noise = self.noise.map(|noise| noise.after(self.tree.depths()[node] as usize));
        self.notes[node].read = Some(Read::new(candidates, calibration, noise, feature));
    }

    /// Takes over what an acceptance head says of a drafted node.
    pub fn judge(&mut self, node: usize, verdict: Verdict) {
        self.notes[node].verdict = Some(verdict);
    }

    /// The feature of a drafted node's parent, if the draft model has read that.
    #[must_use]
    pub fn feature_before(&self, node: usize) -> Option<&[f32]> {
        let parent = self.tree.parents()[node] as usize;
        self.notes.get(parent)?.read.as_ref().map(|read| &*read.feature)
    }

    /// The derivative, by the sharpness, of the log probability that the draft model gave to a token after a node: the
    /// token's log probability less the expected one. `None` if the model has not read the node.
    #[must_use]
    pub fn slope(&self, node: usize, token: Token) -> Option<f32> {
        let read = self.notes.get(node)?.read.as_ref()?;
        let expected: f32 = read.all().map(|(log, log_count)| read.sharpen(log) * log_count.exp() * log).sum();
        Some(read.log_probability(token).unwrap_or(read.last) - expected)
    }

    /// The rank of a token among the draft model's most probable ones after a node, from 0, or how many these are if it
    /// is none of them. `None` if the model has not read the node.
    #[must_use]
    pub fn rank(&self, node: usize, token: Token) -> Option<usize> {
        let candidates = &self.notes.get(node)?.read.as_ref()?.candidates;
        Some(candidates.iter().position(|candidate| candidate.token == token).unwrap_or(candidates.len()))
    }

    /// Grows the tree anew from all that was read: the nodes of the greatest path probabilities, in falling order.
    /// Returns what that gains, in tokens: the sum of the new tree's path probabilities above the price of a node, less
    /// that of the one before, both as they are estimated now.
    pub fn grow(&mut self, terms: Terms) -> f32 {
        let before = self.estimated_gain(terms);
        let Some(&root) = self.tree.tokens().first() else {
            return 0.0;
        };
        self.grown.reset(root);
        self.grown_notes.clear();
        self.grown_notes.push(self.notes[0].clone());
        self.open.clear();
        self.seen = 0;
        self.expand(0, 0, terms);
        let mut sum = 0.0;
        while self.grown.drafted() < terms.max_nodes
            && let Some(open) = self.open.pop()
        {
            let node = self.grown.push(open.parent, open.token, open.probability, open.source);
            sum += terms.gain(open.probability);
            self.grown_notes.push(open.note);
            if let Some(before) = open.before.filter(|_| open.token != terms.end_of_text) {
                self.expand(before, node, terms);
            }
        }
        std::mem::swap(&mut self.tree, &mut self.grown);
        std::mem::swap(&mut self.notes, &mut self.grown_notes);
        sum - before
    }

    /// The estimates of a node that it follows its parent: of the other sources, completed by the draft model, and of
    /// the draft model; `None` if that has not read the parent.
    #[must_use]
    pub fn opinions(&self, node: usize) -> Option<(f32, f32)> {
        let parent = self.tree.parents()[node] as usize;
        self.notes.get(parent)?.read.as_ref()?;
        let note = &self.notes[node];
        Some((note.blend(self.notes[parent].left, 0.0), note.model))
    }

    /// Offers the children of a node: those that it had, and those that the draft model proposes.
    fn expand(&mut self, node: usize, grown: usize, terms: Terms) {
        let (above, parent) = (self.grown.probabilities()[grown], &self.notes[node]);
        let read = parent.read.as_ref();
        let trust = read.map_or(0.0, |read| read.calibration.trust);
        let children: Vec<usize> = self.tree.children(node).collect();
        let known = children.iter().map(|&child| {
            let (token, source) = (self.tree.tokens()[child], self.tree.sources()[child]);
            let model = read.map_or(0.0, |read| read.of_node(token, &self.notes[child]));
            let is_proposed = model > 0.0 || read.is_some_and(|read| read.log_probability(token).is_some());
            let note = Note { model, ..self.notes[child].clone() };
            let probability = above * parent.conditional(&note);
            let source = joint_source(source, &note, (trust, is_proposed));
            Open { probability, order: 0, parent: grown, token, source, note, before: Some(child) }
        });
        let is_new = |candidate: &Candidate| {
            let is_known = children.iter().any(|&child| self.tree.tokens()[child] == candidate.token);
            !is_known && (candidate.token as usize) < terms.vocab_size
        };
        let proposed = read.into_iter().flat_map(|read| read.candidates.iter().map(move |candidate| (read, candidate)));
        let new = proposed.filter(|(_, candidate)| is_new(candidate)).map(|(read, candidate)| {
            let note = Note { model: read.of(*candidate), left: 1.0, ..Note::default() };
            let (probability, token) = (above * note.blend(parent.left, trust), candidate.token);
            Open { probability, order: 0, parent: grown, token, source: Source::Model, note, before: None }
        });
        for open in known.chain(new).filter(|open| open.probability > terms.min_probability) {
            self.open.push(Open { order: self.seen, ..open });
            self.seen += 1;
        }
    }

    /// What the nodes of the tree gain as they are estimated now.
    fn estimated_gain(&self, terms: Terms) -> f32 {
        let mut probabilities = vec![1.0; self.tree.len()];
        for node in 1..self.tree.len() {
            let parent = self.tree.parents()[node] as usize;
            let above = &self.notes[parent];
            let (token, note) = (self.tree.tokens()[node], &self.notes[node]);
            let model = above.read.as_ref().map_or(0.0, |read| read.of_node(token, note));
            let note = Note { model, estimate: note.estimate, ..Note::default() };
            probabilities[node] = probabilities[parent] * above.conditional(&note);
        }
        probabilities.iter().skip(1).map(|&probability| terms.gain(probability)).sum()
    }
}

/// The source that contributes most. A token that the draft model proposes as well is no longer the prompt's alone,
/// even if its probability rounds to 0.
fn joint_source(source: Source, note: &Note, (trust, is_proposed): (f32, bool)) -> Source {
    match source {
        _ if trust * note.model > (1.0 - trust) * note.estimate => Source::Model,
        Source::Prompt if is_proposed => Source::Context,
        source => source,
    }
}

#[cfg(test)]
mod tests;
