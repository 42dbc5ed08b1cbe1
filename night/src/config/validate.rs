//! What the types of the configuration leave open, checked before anything is done.

use anyhow::{Result, ensure};
use laser_decode::RUNNERS_UP_MAX;
use laser_schema::embedding::EmbeddingLayout;
use laser_schema::guard::{GuardAction, Guards};
use laser_store::spill::PARTITIONS;

use super::{Config, DraftMethod, EngineKind, PolicyKind};

/// Most forwards of a draft model per step: SpecDec++ drafts 20 tokens at most, one a forward.
const DRAFT_FORWARDS_MAX: usize = 20;

/// Most tokens beside one that is copied from the prompt: AASD takes 2, and all are nodes of the tree.
const ALIGNMENT_MAX: usize = 8;

impl Config {
    /// Checks what recommender models are trained by.
    pub(super) fn validate_learning(&self) -> Result<()> {
        self.embed.validate()?;
        self.eval.validate()
    }

    /// Checks what the types leave open, before anything is done.
    pub(super) fn validate(&self) -> Result<()> {
        ensure!(!self.model.path.is_empty(), "[model] path: not set; give a model directory, a .gguf file or a hub id");
        ensure!(!self.output.path.is_empty(), "[output] path: not set; give a directory or an object-store URL");
        ensure!(!self.input.is_empty(), "[[input]]: no table; give the path of at least one");
        if let Some(demo) = &self.demo {
            ensure!(!demo.last_night.is_empty(), "[demo] last_night: no table; give the paths, or remove [demo]");
            ensure!(self.canary.is_none(), "[demo]: runs nights, and [canary] is beside one; remove either section");
        }
        if let Some(canary) = &self.canary {
            canary.validate()?;
        }
        let share = |key: &str, value: f64| {
            ensure!((0.0..=1.0).contains(&value), "{key} = {value}: expected a share from 0 to 1");
            Ok(())
        };
        share("[output] min_coverage", self.output.min_coverage)?;
        share("[run] audit_share", self.run.audit_share)?;
        let positive = |key: &str, value: usize| {
            ensure!(value > 0, "{key} = 0: expected at least 1");
            Ok(())
        };
        positive("[generate] max_new_tokens", self.generate.max_new_tokens)?;
        positive("[generate] batch", self.generate.batch)?;
        positive("[generate] step_tokens", self.generate.step_tokens.unwrap_or(1))?;
        positive("[run] shard_rows", self.run.shard_rows)?;
        positive("[run] attempts", self.run.attempts as usize)?;
        self.validate_priority()?;
        if let Some(nights) = self.output.keep_nights {
            ensure!(
                nights >= 2,
                "[output] keep_nights = {nights}: expected at least 2, tonight and the night it is made from"
            );
        }
        if let Some(price) = &self.price {
            ensure!(
                price.gpu_hour > 0.0 && price.gpu_hour.is_finite(),
                "[price] gpu_hour = {}: expected a price above 0",
                price.gpu_hour
            );
        }
        ensure!(
            !self.generate.stop.iter().any(String::is_empty),
            "[generate] stop: an empty string would end every text at once"
        );
        self.train.validate()?;
        self.verification.verification()?;
        self.validate_sampling()?;
        self.validate_constraint()?;
        self.validate_guards()?;
        if let Some(lists) = &self.lists {
            lists.validate()?;
        }
        self.draft.drafter()?;
        self.validate_alignment()?;
        self.validate_runners_up()?;
        self.validate_draft_model()?;
        self.pools.validate()?;
        self.ids.validate()?;
        if let Some(queue) = &self.queue {
            queue.validate()?;
        }
        self.validate_learning()?;
        self.validate_encoder()
    }

    fn validate_priority(&self) -> Result<()> {
        self.run.valuation()?;
        let Some(bands) = self.run.priority_bands else {
            return Ok(());
        };
        ensure!(
            (1..=PARTITIONS).contains(&bands),
            "[run] priority_bands = {bands}: expected 1 (by kind and pool alone) to {PARTITIONS} (by value alone)"
        );
        ensure!(
            self.run.priority.is_some(),
            "[run] priority_bands: there is no value to divide; set [run] priority, or remove priority_bands"
        );
        Ok(())
    }

    pub(super) fn validate_encoder(&self) -> Result<()> {
        ensure!(
            self.encoder.as_ref().is_none_or(|e| !e.path.is_empty()),
            "[encoder] path: not set; give a BERT model's directory, a hub id or a URL, or remove [encoder]"
        );
        ensure!(
            !self.output.is_delta() || self.encoder.as_ref().is_none_or(|e| e.layout == EmbeddingLayout::List),
            "[encoder] layout: with [output] table = \"delta\" it must be \"list\", because readers of Delta tables \
             refuse lists of fixed size"
        );
        Ok(())
    }

    fn validate_alignment(&self) -> Result<()> {
        let (alignment, method) = (self.draft.alignment, self.draft.method);
        ensure!(
            alignment <= ALIGNMENT_MAX,
            "[draft] alignment = {alignment}: expected 0 to {ALIGNMENT_MAX}; AASD takes 2"
        );
        ensure!(
            alignment == 0 || !matches!(method, DraftMethod::None | DraftMethod::Lookahead),
            "[draft] alignment: method = \"{method}\" copies nothing from the prompt; choose \"blended\", \
             \"raw-frequency\" or \"prompt-lookup\", or remove alignment"
        );
        ensure!(
            alignment == 0 || self.model.engine == EngineKind::Tree,
            "[draft] alignment: engine = \"mistralrs\" does not draft; choose [model] engine = \"tree\", or remove \
             alignment"
        );
        Ok(())
    }

    fn validate_runners_up(&self) -> Result<()> {
        let runners_up = self.output.runners_up;
        ensure!(runners_up <= RUNNERS_UP_MAX, "[output] runners_up = {runners_up}: expected 0 to {RUNNERS_UP_MAX}");
        ensure!(
            runners_up == 0 || self.model.engine == EngineKind::Tree,
            "[output] runners_up: engine = \"mistralrs\" does not tell them; choose [model] engine = \"tree\", or \
             remove runners_up"
        );
        Ok(())
    }

    fn validate_draft_model(&self) -> Result<()> {
        for draft in &self.draft.model {
            ensure!(
                !draft.path.is_empty(),
                "[draft.model] path: not set; give a smaller model of the same tokenizer, or remove [draft.model]"
            );
            ensure!(
                (1..=DRAFT_FORWARDS_MAX).contains(&draft.forwards),
                "[draft.model] forwards = {}: expected 1 to {DRAFT_FORWARDS_MAX}",
                draft.forwards
            );
            let threshold = draft.stop_threshold.unwrap_or(1.0);
            ensure!(
                threshold > 0.0 && threshold <= 1.0,
                "[draft.model] stop_threshold = {threshold}: expected a probability above 0 and up to 1, such as 0.7"
            );
        }
        ensure!(
            self.draft.model.is_empty() || self.model.engine == EngineKind::Tree,
            "[draft.model]: engine = \"mistralrs\" does not draft; choose [model] engine = \"tree\", or remove \
             [draft.model]"
        );
        // It would judge the window by its chance to be accepted, and leave it out.
        ensure!(
            self.draft.model.is_empty() || self.draft.method != DraftMethod::Lookahead,
            "[draft.model]: [draft] method = \"lookahead\" drafts without a model; choose another method, or remove \
             [draft.model]"
        );
        Ok(())
    }

    /// Policies that say nothing of drawn texts, or of others, and engines that draw otherwise. No policy says anything
    /// of lists.
    fn validate_sampling(&self) -> Result<()> {
        let is_drawn = self.generate.drawn()?.is_some();
        let policy = self.verification.policy;
        ensure!(
            !is_drawn || self.lists.is_some() || !matches!(policy, PolicyKind::Relaxed | PolicyKind::Conditional),
            "[generate] temperature: [verification] policy = \"{policy}\" is for greedy texts; choose \"strict\" or \
             \"typical\", or remove temperature"
        );
        ensure!(
            is_drawn || policy != PolicyKind::Typical,
            "[verification] policy = \"typical\" is for texts that are drawn: set [generate] temperature, or choose \
             another policy"
        );
        ensure!(
            !is_drawn || self.model.engine == EngineKind::Tree,
            "[generate] temperature: engine = \"mistralrs\" writes greedy texts only; choose [model] engine = \
             \"tree\", or remove temperature"
        );
        Ok(())
    }

    /// What texts cannot follow, and what would break it.
    fn validate_constraint(&self) -> Result<()> {
        let keys = self.generate.constraint_keys();
        let Some(key) = keys.first() else {
            return Ok(());
        };
        ensure!(
            keys.len() == 1,
            "[generate] {}: a text follows one of them; keep one and remove the others",
            keys.join(", ")
        );
        ensure!(
            self.lists.is_none(),
            "[generate] {key}: lists follow the catalogue; remove {key}, or [lists] to make texts"
        );
        ensure!(
            self.model.engine == EngineKind::Tree,
            "[generate] {key}: engine = \"mistralrs\" cannot hold texts to it; choose [model] engine = \"tree\", or \
             remove {key}"
        );
        ensure!(
            self.generate.stop.is_empty(),
            "[generate] stop: would cut texts off within what {key} prescribes, which says itself where they end; \
             remove stop"
        );
        Ok(())
    }

    /// Bounds that could never be kept, or that nothing would be measured for.
    pub(super) fn validate_guards(&self) -> Result<()> {
        let Some(guards) = &self.guards else {
            return Ok(());
        };
        ensure!(
            guards.bounds().next().is_some(),
            "[guards]: no bound is set; give at least one, such as min_distinct_2, or remove the section"
        );
        for (key, limit) in guards.bounds() {
            let (from, to) = Guards::range(key);
            ensure!((from..=to).contains(&limit), "[guards] {key} = {limit}: expected {from} to {to}");
            ensure!(
                self.run.audit_share > 0.0 || !Guards::needs_audit(key),
                "[guards] {key} compares with plain texts, which the audit gives: set [run] audit_share above 0"
            );
        }
        ensure!(
            guards.min_similarity.is_none() || self.encoder.is_some(),
            "[guards] min_similarity compares embeddings: set [encoder], or remove it"
        );
        if guards.action == GuardAction::Strict {
            ensure!(
                self.verification.policy != PolicyKind::Strict,
                "[guards] action = \"strict\": [verification] policy is strict already; use \"warn\" or \"fail\""
            );
            ensure!(
                self.run.audit_share > 0.0,
                "[guards] action = \"strict\" judges a pool by its audit: set [run] audit_share above 0"
            );
        }
        Ok(())
    }
}
