//! Every source of drafts and every rule of verification, as a configuration names them: in a night of one process, and
//! in the same night of a coordinator and a worker over NATS.

use std::collections::{BTreeMap, BTreeSet};

use laser_schema::Kind;
use laser_schema::audit::{Audit, Proposer};
use laser_schema::job::Action;

use crate::distributed::{Nats, Process};
use crate::guards::{plan, records};
use crate::sampling::{DRAWN, contested};
use crate::train::train;
use crate::{TONIGHT, Workspace, assert_exit, fixture, read_json};

/// Of all nights here: few entities, each of them generated and half of them audited, and drafts that depend on the
/// entity alone. Many nights are under way at the same time.
const FEW: [&str; 7] = [
    "run.limit=8",
    "run.carry_forward=false",
    "run.audit_share=0.5",
    "prompt.max_tokens=100",
    "draft.adaptive=false",
    "draft.nodes=8",
    "model.threads=1",
];

/// Users and items of such a night.
const ROWS: usize = 16;

/// Who proposes tokens where there is a pool, where tokens are copied or made beside the text alone, where a model
/// drafts alone, and where it drafts beside a pool.
const POOLED: &[Proposer] = &[Proposer::Pool, Proposer::Previous, Proposer::Context];
const COPIED: &[Proposer] = &[Proposer::Context];
const DRAFTED: &[Proposer] = &[Proposer::DraftModel];
const JOINED: &[Proposer] = &[Proposer::Pool, Proposer::Previous, Proposer::Context, Proposer::DraftModel];

/// A name, and the keys that are set.
type Setting<'a> = (&'a str, &'a [&'a str]);

/// These keys, and those that all nights here have in common.
fn with<'a>(keys: &[&'a str]) -> Vec<&'a str> {
    [FEW.as_slice(), keys].concat()
}

/// The section of a queue of its own: nights of equal inputs and specifications have runs of the same name.
fn queue(nats: &Nats, name: &str) -> String {
    format!(
        "[queue]\nurl = \"nats://127.0.0.1:{}\"\nsubjects = \"{name}\"\nstream = \"{name}\"\nconsumer = \"{name}\"\n\
         dead_letters = \"{name}-dead\"\nplanning = \"{name}-planning\"\nretry_seconds = 0\n",
        nats.port()
    )
}

/// Both nights of the demo without drafts, and a server for others of the second one.
struct Plain {
    nights: Workspace,
    nats: Nats,
}

impl Plain {
    fn new() -> Self {
        let nights = Workspace::new();
        assert_exit(&nights.run(&with(&["draft.method=none", "run.audit_share=0"])), 0);
        Self { nights, nats: Nats::start("LASER_NATS_NEW", "") }
    }

    /// Tonight, to be drafted from the texts of the night before, with a queue of this name.
    fn tonight(&self, name: &str) -> Workspace {
        let previous = format!("[[previous]]\npath = \"{}\"\n", self.nights.path("out").display());
        Workspace::with(&[&previous, TONIGHT, &queue(&self.nats, name)])
    }

    /// Tonight with each of these settings, of one process and of a coordinator and a worker.
    fn make(&self, settings: &[Setting<'_>]) -> Vec<[Workspace; 2]> {
        let begin = |(name, keys): &Setting<'_>| {
            let night = self.tonight(name);
            let coordinator = Process::start(night.command("coordinator", &with(keys)));
            (night, coordinator)
        };
        let begun: Vec<(Workspace, Process)> = settings.iter().map(begin).collect();
        let mut distributed = Vec::new();
        for ((night, coordinator), (_, keys)) in begun.into_iter().zip(settings) {
            coordinator.wait_for("queued shards", 1);
            let worker = Process::start(night.command("worker", &with(keys)));
            distributed.push((night, coordinator, worker));
        }
        let mut made = Vec::new();
        for ((night, coordinator, worker), (name, keys)) in distributed.into_iter().zip(settings) {
            let embedded = self.tonight(name);
            assert_exit(&embedded.run(&with(keys)), 0);
            coordinator.assert_ends(0);
            worker.terminate();
            assert_exit(&embedded.verify(), 0);
            assert_exit(&night.verify(), 0);
            made.push([embedded, night]);
        }
        made
    }
}

/// Of each of tonight's rows its text, the rule that it was verified by, and its tokens that this rule alone accepted.
fn rows(night: &Workspace) -> BTreeMap<(Kind, String), (String, String, i64)> {
    let records = records(night).into_iter();
    let rows: BTreeMap<_, _> = records
        .map(|(kind, row)| ((kind, row.entity_id.to_string()), (row.text, row.policy, row.relaxed_tokens)))
        .collect();
    assert_eq!(rows.len(), ROWS);
    rows
}

/// Tonight's audits.
fn audits(night: &Workspace) -> Vec<Audit> {
    let plan = plan(night);
    let jobs = plan.shards.iter().filter(|job| job.action == Action::Audit);
    jobs.map(|job| read_json(&night.path("out").join(&job.output))).collect()
}

/// Tokens of the audited texts that these proposed. The night has drafted, and nobody else has proposed any.
#[track_caller]
fn accepted(night: &Workspace, sources: &[Proposer], name: &str) -> u64 {
    let drafted: i64 = records(night).iter().map(|(_, row)| row.drafted_tokens).sum();
    assert!(drafted > 0, "{name}: nothing was drafted");
    let mut proposed: BTreeMap<Proposer, u64> = BTreeMap::new();
    for pair in audits(night).into_iter().flat_map(|audit| audit.pairs) {
        for (proposer, tokens) in pair.proposed {
            *proposed.entry(proposer).or_default() += tokens;
        }
    }
    assert!(proposed.remove(&Proposer::Target).is_some(), "{name}: nothing was audited");
    assert!(proposed.keys().all(|proposer| sources.contains(proposer)), "{name}: {proposed:?}");
    proposed.values().sum()
}

/// Who proposed what was accepted in audited texts although the model's own choice was another.
fn relaxed_sources(night: &Workspace) -> BTreeSet<Proposer> {
    let pieces = audits(night).into_iter().flat_map(|audit| audit.pairs).flat_map(|pair| pair.pieces);
    pieces.filter(|piece| piece.origin.relaxed).map(|piece| piece.origin.source).collect()
}

#[test]
fn strict_texts_are_those_of_plain_decoding_whatever_drafts_without_a_model() {
    let plain = Plain::new();
    let expected = rows(&plain.nights);
    let cases: [(Setting<'_>, &[Proposer]); 5] = [
        (("blended", &["draft.method=blended"]), POOLED),
        (("raw-frequency", &["draft.method=raw-frequency"]), POOLED),
        (("alignment", &["draft.alignment=2"]), POOLED),
        (("prompt-lookup", &["draft.method=prompt-lookup"]), COPIED),
        (("lookahead", &["draft.method=lookahead", "draft.order=3", "draft.window=2"]), COPIED),
    ];
    let made = plain.make(&cases.map(|(setting, _)| setting));
    for (((name, _), sources), nights) in cases.into_iter().zip(made) {
        for night in &nights {
            assert_eq!(rows(night), expected, "{name}");
            // Pools are of texts by the same model; texts that hardly copy from their prompts may accept no copy.
            assert!(accepted(night, sources, name) > 0 || sources == COPIED, "{name}: nothing was accepted");
        }
    }
}

#[test]
fn strict_texts_are_those_of_plain_decoding_whatever_model_drafts() {
    let plain = Plain::new();
    let expected = rows(&plain.nights);
    let folder = |name: &str| plain.nights.path(name).display().to_string();
    let learn = |name: &str, keys: &[&str]| {
        let output = format!("train.output={}", folder(name));
        assert_exit(&train(&plain.nights, &[&[output.as_str()], keys].concat()), 0);
    };
    learn("draft", &[]);
    learn("head", &["train.kind=acceptance", &format!("train.draft={}", folder("draft"))]);
    learn("eagle", &["train.kind=eagle", "train.passes=2"]);
    learn("one-pass", &["train.kind=eagle", "train.passes=1"]);
    learn("medusa", &["train.kind=medusa", "train.medusa_heads=2"]);
    let itself = format!("draft.model.path={}", fixture().display());
    let [draft, eagle, one_pass, medusa] =
        ["draft", "eagle", "one-pass", "medusa"].map(|name| format!("draft.model.path={}", folder(name)));
    let head = format!("draft.model.acceptance_head={}", folder("head"));
    let two =
        format!("draft.model=[{{path='{}',forwards=1}},{{path='{}',forwards=2}}]", folder("draft"), folder("eagle"));
    let (alone, pooled, forwards) = ("draft.method=none", "draft.method=blended", "draft.model.forwards=2");
    let cases: [(Setting<'_>, &[Proposer]); 9] = [
        (("itself", &[alone, &itself, forwards]), DRAFTED),
        (("acceptance-head", &[alone, &draft, &head, forwards]), DRAFTED),
        (("stop", &[alone, &itself, forwards, "draft.adaptive=false", "draft.model.stop_threshold=0.7"]), DRAFTED),
        (("eagle", &[alone, &eagle, forwards]), DRAFTED),
        (("medusa", &[alone, &medusa]), DRAFTED),
        (("medusa-measured", &[alone, &medusa, "draft.model.medusa_tree=measured"]), DRAFTED),
        (("merged", &[alone, &two]), DRAFTED),
        (("pool-draft", &[pooled, &draft, forwards]), JOINED),
        (("pool-eagle", &[pooled, &one_pass, "draft.model.forwards=1"]), JOINED),
    ];
    let made = plain.make(&cases.map(|(setting, _)| setting));
    for (((name, _), sources), nights) in cases.into_iter().zip(made) {
        for night in &nights {
            assert_eq!(rows(night), expected, "{name}");
            // What was trained has seen few texts, and may be wrong about every token; pools are of texts by the model.
            let is_right = ["itself", "stop"].contains(&name) || sources == JOINED;
            assert!(accepted(night, sources, name) > 0 || !is_right, "{name}: nothing was accepted");
        }
    }
}

#[test]
fn each_rule_accepts_the_same_in_one_process_and_over_nats() {
    let plain = Plain::new();
    let relaxed = ["verification.policy=relaxed", "verification.k=4", "verification.p=0.03"];
    let conditional = ["verification.policy=conditional", "verification.beta=0.03"];
    let typical = ["verification.policy=typical", "verification.epsilon=0.03", "generate.temperature=1.0"];
    let itself = format!("draft.model.path={}", fixture().display());
    let drafted = [typical.as_slice(), &["draft.method=none", &itself, "draft.model.forwards=2"]].concat();
    let of = |sources: &'static str| [conditional.as_slice(), &[sources]].concat();
    let (of_prompt, of_all) = (of("verification.sources=prompt"), of("verification.sources=all"));
    // Of each its name in the rows, and the sources whose tokens it relaxes.
    let cases: [(Setting<'_>, &str, &[Proposer]); 5] = [
        (("relaxed", &relaxed), "relaxed(k=4,p=0.03)", POOLED),
        (("conditional-prompt", &of_prompt), "conditional(alpha=0.1,beta=0.03,sources=prompt)", COPIED),
        (("conditional-all", &of_all), "conditional(alpha=0.1,beta=0.03,sources=all)", POOLED),
        (("typical", &typical), "typical(epsilon=0.03,delta=0.3)", POOLED),
        (("typical-draft", &drafted), "typical(epsilon=0.03,delta=0.3)", DRAFTED),
    ];
    let made = plain.make(&cases.map(|(setting, ..)| setting));
    for (((name, _), policy, sources), nights) in cases.into_iter().zip(made) {
        let [embedded, distributed] = nights.each_ref().map(rows);
        // How sharp a draft model's probabilities are is learnt from the texts before, in whatever order they come.
        assert!(embedded == distributed || sources == DRAFTED, "{name}: {embedded:?} {distributed:?}");
        assert!(embedded.values().all(|(_, rule, _)| rule == policy), "{name}: {embedded:?}");
        let relaxed: i64 = embedded.values().map(|(_, _, relaxed)| relaxed).sum();
        // Few tokens are of the prompt alone.
        assert!(relaxed > 0 || sources == COPIED, "{name}: only the model's own choices were accepted");
        let proposers = if sources == DRAFTED { DRAFTED } else { POOLED };
        for night in &nights {
            assert!(accepted(night, proposers, name) > 0, "{name}: nothing was accepted");
            let found = relaxed_sources(night);
            assert!(found.iter().all(|source| sources.contains(source)), "{name}: {found:?}");
        }
    }
}

#[test]
fn drawn_texts_are_those_of_plain_decoding_when_soft_pools_draft() {
    let nats = Nats::start("LASER_NATS_NEW", "");
    let drawn = [with(&DRAWN), vec!["output.runners_up=2"]].concat();
    // With another seed the night before has other texts than tonight.
    let before = ["generate.seed=8", "run.date=2026-01-01", "run.audit_share=0"];
    let nights = [(); 2].map(|()| {
        let night = Workspace::with(&[TONIGHT, &queue(&nats, "soft-pools")]);
        assert_exit(&night.run(&[drawn.as_slice(), &before].concat()), 0);
        night
    });
    let latest = |night: &Workspace, subcommand: &str| {
        let mut command = night.command(subcommand, &drawn);
        command.args(["--previous", "latest"]);
        command
    };
    let [embedded, distributed] = &nights;
    let coordinator = Process::start(latest(distributed, "coordinator"));
    coordinator.wait_for("queued shards", 1);
    let worker = Process::start(distributed.command("worker", &drawn));
    assert_exit(&latest(embedded, "run").output().unwrap(), 0);
    coordinator.assert_ends(0);
    worker.terminate();

    let plain = Workspace::with(&[TONIGHT]);
    assert_exit(&plain.run(&[drawn.as_slice(), &["draft.method=none"]].concat()), 0);
    let expected = rows(&plain);
    for night in &nights {
        assert_exit(&night.verify(), 0);
        assert!(contested(night, "2026-01-02") > 0, "the pools have no runners-up");
        assert!(accepted(night, POOLED, "soft pools") > 0, "nothing was accepted");
        assert_eq!(rows(night), expected);
    }
}
