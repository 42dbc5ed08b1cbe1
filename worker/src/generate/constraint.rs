//! The constraint of one text: which drafts are worth a forward, and what the target says of allowed tokens alone.
//!
//! A mask of the whole vocabulary is seldom needed. A choice of the target that is allowed is also its choice among the
//! allowed tokens, greedy or drawn: the first of a race is the first of all who take part, whoever else does. So where
//! the text may go on with a token that the step has told of, single tokens are looked up. Only where it may not is a
//! mask computed, and the engine asked again about the logits that it has; likewise where `top_k` or `top_p` decide who
//! takes part, since that depends on who else may. Nothing is asked of nodes that the text does not come to.
//!
//! Probabilities are those of the whole vocabulary, not of the allowed tokens. A forced token is certain.

use laser_decode::{Candidate, DraftTree, Prediction, TargetScores, Verification};
use laser_engine::Allowed;
use laser_grammar::{GrammarError, Next, Parser};

/// Candidates of a node that the engine tells of at least: of texts whose model knows what it is to write, most places
/// are settled by the first ones.
pub(super) const CANDIDATES: usize = 8;

/// What the target says of the allowed tokens after a node.
#[derive(Debug, Clone)]
pub(super) struct Told {
    /// Those that may be accepted, most probable first.
    pub(super) top: Vec<Candidate>,
    pub(super) prediction: Prediction,
}

/// By what rule a text is verified.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    pub(super) policy: Verification,
    /// Whether tokens are drawn, and whether only some of them are drawn from.
    pub(super) is_drawn: bool,
    pub(super) truncates: bool,
}

/// Where a text stands in its grammar, and what is known of the allowed tokens in this step.
#[derive(Debug)]
pub(super) struct Constrained {
    parser: Parser,
    /// The token that ends a text where the grammar allows nothing else.
    end: u32,
    /// The nodes below the root behind which the parser stands.
    path: Vec<usize>,
    /// By node of this step's tree; none where the text does not come to.
    pub(super) told: Vec<Option<Told>>,
}

impl Constrained {
    pub(super) fn new(parser: Parser, end: u32) -> Self {
        Self { parser, end, path: Vec::new(), told: Vec::new() }
    }

    pub(super) fn into_parser(self) -> Parser {
        self.parser
    }

    /// What a text is forced to begin with, at most `most` tokens. A text takes a forward, so the last token of one
    /// that is forced to its end is left to that.
    pub(super) fn begin(&mut self, most: usize) -> Result<Vec<u32>, GrammarError> {
        let mut tokens = Vec::new();
        while tokens.len() < most
            && let Next::Forced(token) = self.parser.next_token()?
        {
            self.parser.push(token)?;
            tokens.push(token);
        }
        if self.parser.next_token()? == Next::End && tokens.pop().is_some() {
            self.parser.pop(1)?;
        }
        Ok(tokens)
    }

    /// Cuts what may not follow out of a draft.
    pub(super) fn cut(&mut self, tree: &mut DraftTree) -> Result<(), GrammarError> {
        if tree.drafted() == 0 {
            return Ok(());
        }
        let mut keep = vec![false; tree.len()];
        keep[0] = true;
        self.visit(tree, 0, &mut keep)?;
        tree.retain(&keep);
        Ok(())
    }

    /// Depth first, so that the parser goes back as rarely as can be.
    fn visit(&mut self, tree: &DraftTree, node: usize, keep: &mut [bool]) -> Result<(), GrammarError> {
        for child in tree.children(node) {
            let token = tree.tokens()[child];
            keep[child] = self.parser.allows(token)?;
            if keep[child] && !self.parser.ends(token) && tree.children(child).next().is_some() {
                self.parser.push(token)?;
                self.visit(tree, child, keep)?;
                self.parser.pop(1)?;
            }
        }
        Ok(())
    }

    /// Begins the walk over a step's tree.
    pub(super) fn begin_step(&mut self) {
        self.told.clear();
    }

    /// Goes on with the walk as far as is known without a mask. Returns the node whose mask is needed, if any.
    pub(super) fn advance(
        &mut self,
        tree: &DraftTree,
        scores: &impl TargetScores,
        rule: Rule,
    ) -> Result<Option<(usize, Vec<u32>)>, GrammarError> {
        while self.told.len() < tree.len().max(1) {
            let node = self.told.len();
            if !self.comes_to(tree, node, rule.policy) {
                self.told.push(None);
                continue;
            }
            self.stand_at(tree, node)?;
            match self.tell((scores.top(node), scores.prediction(node)), rule)? {
                Some(told) => self.told.push(Some(told)),
                None => return Ok(Some((node, self.parser.mask()?))),
            }
        }
        Ok(None)
    }

    /// Takes over what the target says of a node under the mask that was needed.
    pub(super) fn answer(&mut self, Allowed { candidates, choice }: Allowed, prediction: Prediction) {
        self.told.push(Some(Told { top: candidates, prediction: Prediction { choice, ..prediction } }));
    }

    /// Whether the text may come to a node, and go on from it: it is accepted, and what is above it.
    fn comes_to(&self, tree: &DraftTree, node: usize, policy: Verification) -> bool {
        let Some(&parent) = tree.parents().get(node).filter(|_| node > 0) else {
            return true;
        };
        let (token, source) = (tree.tokens()[node], tree.sources()[node]);
        let accepts = |told: &Told| policy.accepts((&told.top, told.prediction), (token, source)).is_some();
        !self.parser.ends(token) && self.told[parent as usize].as_ref().is_some_and(accepts)
    }

    /// Moves the parser behind a node.
    fn stand_at(&mut self, tree: &DraftTree, node: usize) -> Result<(), GrammarError> {
        let mut path = Vec::new();
        let mut at = node;
        while at != 0 {
            path.push(at);
            at = tree.parents()[at] as usize;
        }
        path.reverse();
        let common = self.path.iter().zip(&path).take_while(|(a, b)| a == b).count();
        self.parser.pop(self.path.len() - common)?;
        path[common..].iter().try_for_each(|&node| self.parser.push(tree.tokens()[node]))?;
        self.path = path;
        Ok(())
    }

    /// What the target says of the allowed tokens where the parser stands; nothing if that takes a mask.
    fn tell(
        &mut self,
        (candidates, prediction): (&[Candidate], Prediction),
        Rule { policy, is_drawn, truncates }: Rule,
    ) -> Result<Option<Told>, GrammarError> {
        let certain = |token| {
            let choice = Candidate { token, log_probability: 0.0 };
            Some(Told { top: vec![choice], prediction: Prediction { choice, ..prediction } })
        };
        match self.parser.next_token()? {
            Next::Forced(token) => return Ok(certain(token)),
            Next::End => return Ok(certain(self.end)),
            // What is no number says so in the text.
            Next::Free if prediction.choice.log_probability.is_nan() => {
                return Ok(Some(Told { top: Vec::new(), prediction }));
            }
            Next::Free => {}
        }
        let choice = match is_drawn {
            true if truncates => None,
            true => self.first_allowed(&[prediction.choice])?,
            false => self.first_allowed(candidates)?,
        };
        let Some(choice) = choice else { return Ok(None) };
        let top = self.acceptable(candidates, prediction, policy)?;
        Ok(top.map(|top| Told { top, prediction: Prediction { choice, ..prediction } }))
    }

    fn first_allowed(&mut self, candidates: &[Candidate]) -> Result<Option<Candidate>, GrammarError> {
        for candidate in candidates {
            if self.parser.allows(candidate.token)? {
                return Ok(Some(*candidate));
            }
        }
        Ok(None)
    }

    /// The allowed candidates that the policy may accept; nothing if there may be more than were told.
    fn acceptable(
        &mut self,
        candidates: &[Candidate],
        prediction: Prediction,
        policy: Verification,
    ) -> Result<Option<Vec<Candidate>>, GrammarError> {
        let mut top: Vec<Candidate> = Vec::new();
        for candidate in candidates {
            let most = top.first().unwrap_or(candidate).log_probability.exp();
            // Candidates fall in probability, and so do their chances by every policy.
            if top.len() == policy.top_k() || !policy.passes(*candidate, prediction, most) {
                return Ok(Some(top));
            }
            if self.parser.allows(candidate.token)? {
                top.push(*candidate);
            }
        }
        Ok(Some(top).filter(|top| top.len() == policy.top_k()))
    }

    /// Moves the parser behind what a step has emitted: nodes of its tree, and the token after them.
    pub(super) fn settle(&mut self, tree: &DraftTree, path: &[usize], bonus: Option<u32>) -> Result<(), GrammarError> {
        let last = path.iter().rev().find(|&&node| !self.parser.ends(tree.tokens()[node]));
        self.stand_at(tree, last.copied().unwrap_or(0))?;
        self.path.clear();
        bonus.filter(|&token| !self.parser.ends(token)).map_or(Ok(()), |token| self.parser.push(token))
    }

    /// The next token, if the grammar allows only one; the parser is behind it then.
    pub(super) fn forced(&mut self) -> Result<Option<u32>, GrammarError> {
        match self.parser.next_token()? {
            Next::Forced(token) => self.parser.push(token).map(|()| Some(token)),
            Next::End => Ok(Some(self.end)),
            Next::Free => Ok(None),
        }
    }

    /// Whether the text may end here.
    pub(super) fn may_end(&mut self) -> Result<bool, GrammarError> {
        self.parser.may_end()
    }
}

/// Scores of a segment as seen from its tree: the root is the last token of the chunk. Under a constraint those of
/// allowed tokens.
pub(super) struct TreeScores<'a, S> {
    pub(super) scores: &'a S,
    pub(super) root: usize,
    pub(super) told: Option<&'a [Option<Told>]>,
}

impl<S: TargetScores> TargetScores for TreeScores<'_, S> {
    fn top(&self, node: usize) -> &[Candidate] {
        match self.told {
            None => self.scores.top(self.root + node),
            Some(told) => told[node].as_ref().map_or(&[], |told| &told.top),
        }
    }

    fn prediction(&self, node: usize) -> Prediction {
        match self.told {
            None => self.scores.prediction(self.root + node),
            Some(told) => told[node].as_ref().map_or_else(Prediction::default, |told| told.prediction),
        }
    }
}
