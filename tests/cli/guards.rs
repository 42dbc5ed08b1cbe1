//! Guards on relaxed texts: a breach is told, or makes the pool's texts strict, or withholds the night; and it stays
//! so, whatever dies.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use laser_schema::Kind;
use laser_schema::audit::Audit;
use laser_schema::guard::{GuardReport, Verdict};
use laser_schema::job::{Action, Plan};
use laser_schema::knowledge::KnowledgeRecord;
use laser_schema::manifest::Manifest;
use laser_store::part::decode_part;

use crate::distributed::Cluster;
use crate::faults::start_and_kill;
use crate::report::page;
use crate::server::installed;
use crate::{Workspace, assert_contains, assert_exit, assert_prints, assert_refused, entries, files, read_json};

/// No text keeps this bound, and with an audit of everything every pool is judged.
const RELAXED: [&str; 4] =
    ["verification.policy=relaxed", "run.audit_share=1.0", "guards.min_texts=1", "guards.min_log_probability=-0.0001"];

pub(crate) fn with(action: &'static str) -> Vec<&'static str> {
    [RELAXED.as_slice(), &[action]].concat()
}

/// The folder of tonight's run.
fn run_folder(workspace: &Workspace) -> PathBuf {
    entries(&workspace.path("out/runs")).pop().unwrap()
}

pub(crate) fn plan(workspace: &Workspace) -> Plan {
    read_json(&run_folder(workspace).join("plan.json"))
}

/// Tonight's manifests, of users first.
fn manifests(workspace: &Workspace) -> Vec<Manifest> {
    let folders = workspace.published("2026-01-02");
    assert!(!folders.is_empty());
    folders.iter().map(|folder| read_json(&folder.join("_manifest.json"))).collect()
}

/// Tonight's generated records, with their kind.
pub(crate) fn records(workspace: &Workspace) -> Vec<(Kind, KnowledgeRecord)> {
    let mut records = Vec::new();
    for bytes in workspace.parts_of("2026-01-02").into_values() {
        let (rows, info) = decode_part("part", bytes.into()).unwrap();
        let tonight = rows.into_iter().filter(|row| row.generated_by == info.run);
        records.extend(tonight.map(|row| (info.kind, row)));
    }
    assert!(!records.is_empty());
    records
}

/// Every pool that tonight generates was barred, and its texts are those of plain decoding, by the audit of all of
/// them.
#[track_caller]
fn assert_all_strict(workspace: &Workspace) {
    let verdicts = files(&run_folder(workspace).join("guards"));
    assert!(verdicts.len() > 1);
    for (path, json) in verdicts {
        let verdict: Verdict = serde_json::from_slice(&json).unwrap();
        assert!(verdict.strict, "{}: {verdict:?}", path.display());
    }
    let mut plain = BTreeMap::new();
    let mut relaxed = 0;
    for job in plan(workspace).shards.iter().filter(|job| job.action == Action::Audit) {
        let audit: Audit = read_json(&workspace.path("out").join(&job.output));
        relaxed += audit.figures.relaxed;
        for pair in audit.pairs {
            plain.insert((job.kind, pair.entity_id.to_string()), pair.plain);
        }
    }
    assert!(relaxed > 0, "the night would have been relaxed");
    for (kind, record) in records(workspace) {
        assert_eq!(record.policy, "strict");
        assert_eq!(record.text, plain[&(kind, record.entity_id.to_string())]);
    }
    for manifest in manifests(workspace) {
        let report = manifest.details.guards.clone().unwrap();
        assert!(report.pools.values().all(|verdict| verdict.strict), "{report:?}");
    }
}

#[test]
fn a_conditional_night_names_its_policy_and_can_be_barred() {
    let conditional = ["verification.policy=conditional", "verification.beta=0.05", "verification.sources=all"];
    let free = Workspace::new();
    assert_exit(&free.run(&conditional), 0);
    let found = records(&free);
    assert!(found.iter().any(|(_, record)| record.relaxed_tokens > 0));
    assert!(found.iter().all(|(_, record)| record.policy == "conditional(alpha=0.1,beta=0.05,sources=all)"));
    let guarded = Workspace::new();
    assert_exit(&guarded.run(&[with("guards.action=strict").as_slice(), &conditional].concat()), 0);
    assert_all_strict(&guarded);
}

#[test]
fn a_typical_night_that_is_barred_has_the_texts_of_a_strict_one() {
    let drawn = ["generate.temperature=1.0", "draft.adaptive=false"];
    let typical = ["verification.policy=typical", "verification.epsilon=0.05"];
    let (guarded, strict) = (Workspace::new(), Workspace::new());
    let settings = [with("guards.action=strict").as_slice(), &typical, &drawn].concat();
    assert_prints(&guarded.run(&settings), &["verified strictly"]);
    assert_all_strict(&guarded);
    assert_exit(&strict.run(&drawn), 0);
    let texts = |workspace: &Workspace| -> BTreeMap<(Kind, String), String> {
        records(workspace)
            .into_iter()
            .map(|(kind, record)| ((kind, record.entity_id.to_string()), record.text))
            .collect()
    };
    assert_eq!(texts(&guarded), texts(&strict));
}

#[test]
fn a_warning_is_told_and_changes_nothing() {
    let (guarded, free) = (Workspace::new(), Workspace::new());
    let fixed = "draft.adaptive=false";
    let output = guarded.run(&[with("guards.action=warn"), vec![fixed]].concat());
    assert_prints(&output, &["log probability -", "is below min_log_probability = -0.0001"]);
    assert_exit(&free.run(&["verification.policy=relaxed", "run.audit_share=1.0", fixed]), 0);
    let texts = |workspace: &Workspace| -> BTreeMap<_, _> {
        let records = records(workspace).into_iter();
        records.map(|(kind, r)| ((kind, r.entity_id.to_string()), (r.text, r.policy))).collect()
    };
    assert_eq!(texts(&guarded), texts(&free));
    for manifest in manifests(&guarded) {
        let report = manifest.details.guards.clone().unwrap();
        assert_eq!(report.breaches().count(), manifest.figures.len());
        assert!(report.pools.values().all(|verdict| !verdict.strict));
    }
    assert!(manifests(&free).iter().all(|m| m.guards.is_none()));
}

#[test]
fn a_pool_that_breaches_is_verified_strictly_and_stays_so_when_the_night_is_killed() {
    let workspace = Workspace::new();
    let settings = with("guards.action=strict");
    let mut verdicts = BTreeMap::new();
    for shards in [2, 4, 3] {
        start_and_kill(workspace.command("run", &settings), shards);
        for run in entries(&workspace.path("out/runs")) {
            let files = files(&run.join("guards"));
            assert!(verdicts.iter().all(|(path, json)| files.get(path).is_none_or(|now| now == json)));
            verdicts.extend(files);
        }
    }
    assert_prints(&workspace.run(&settings), &["verified strictly"]);
    for (path, json) in &verdicts {
        assert_eq!(&fs::read(path).unwrap(), json);
    }
    assert_all_strict(&workspace);
    assert_exit(&workspace.verify(), 0);
    let page = page(&workspace, &workspace.path("out"));
    assert!(page.contains("is below min_log_probability = -0.0001: verified strictly"));
}

#[test]
fn a_breach_withholds_the_night_until_it_is_let_through() {
    let workspace = Workspace::new();
    for _ in 0..2 {
        let output = workspace.run(&with("guards.action=fail"));
        let told = ["user pool ", "is below min_log_probability = -0.0001", "--set guards.action=warn"];
        assert_refused(&output, &told);
        assert_exit(&workspace.verify(), 65);
    }
    let parts = workspace.parts();
    assert!(!parts.is_empty());
    // Of the first night, which the second is made from.
    assert_exit(&workspace.run(&with("guards.action=warn")), 0);
    let now = workspace.parts();
    assert!(parts.iter().all(|(path, bytes)| now.get(path) == Some(bytes)));
    assert_exit(&workspace.verify(), 0);
}

#[test]
fn coordinator_and_workers_judge_each_pool_once() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let settings = with("guards.action=strict");
    let coordinator = cluster.coordinator(&settings);
    let worker = cluster.start("worker", &settings);
    // The audits are done, some pool is judged and its shards are queued.
    coordinator.wait_for("queued shards", 1);
    coordinator.kill();
    let guards = cluster.run_folder().join("guards");
    let verdicts = files(&guards);
    assert!(!verdicts.is_empty());
    // One process that verifies strictly gives the same.
    cluster.finish(cluster.start("coordinator", &settings), worker);
    let after = files(&guards);
    assert!(verdicts.iter().all(|(path, json)| after.get(path) == Some(json)));
    assert_all_strict(&cluster.tonight);
}

#[test]
fn a_damaged_audit_ends_the_coordinator_and_not_the_night() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let settings = with("guards.action=strict");
    let coordinator = cluster.coordinator(&settings);
    let plan = plan(&cluster.tonight);
    let audits = plan.shards.iter().filter(|job| job.action == Action::Audit);
    let audits: Vec<PathBuf> = audits.map(|job| cluster.tonight.path("out").join(&job.output)).collect();
    fs::create_dir_all(audits[0].parent().unwrap()).unwrap();
    for audit in &audits {
        fs::write(audit, "{").unwrap();
    }
    assert_contains(&coordinator.assert_ends(65).join("\n"), &["remove that part and run again"]);
    audits.iter().for_each(|audit| fs::remove_file(audit).unwrap());
    let worker = cluster.start("worker", &settings);
    cluster.finish(cluster.start("coordinator", &settings), worker);
}

#[test]
fn audited_texts_are_compared_by_the_encoder() {
    let workspace = Workspace::new();
    let encoder = format!("encoder.path={}", installed("LASER_MINILM", "encoder.sh"));
    let settings = [
        "verification.policy=relaxed",
        // What is drafted, and so what is accepted, may not depend on measured times.
        "draft.adaptive=false",
        "run.audit_share=1.0",
        "guards.min_texts=1",
        "guards.min_similarity=1.0",
        &encoder,
    ];
    assert_exit(&workspace.run(&settings), 0);
    let (mut alike, mut below) = (0, 0);
    for json in files(&run_folder(&workspace).join("audits")).values() {
        let audit: Audit = serde_json::from_slice(json).unwrap();
        assert_eq!(audit.report.encoded, audit.report.texts);
        for pair in &audit.pairs {
            let similarity = pair.similarity.unwrap();
            assert!((-1.0..=1.000_01).contains(&similarity), "{similarity}");
            // Rounding of another batch is all that equal texts may differ by.
            assert!(similarity > 0.999_99 || pair.plain != pair.text(), "{pair:?}");
            alike += u32::from(pair.identical);
            below += u32::from(similarity < 0.99);
        }
    }
    assert!(alike > 0 && below > 0, "{alike} alike, {below} below");
    let mut breaches = 0;
    for manifest in manifests(&workspace) {
        for (pool, breach) in manifest.guards.iter().flat_map(GuardReport::breaches) {
            assert_eq!(breach.guard, "min_similarity");
            // Sums of the same numbers, in another order.
            let mean = manifest.audit[pool].mean_similarity().unwrap();
            assert!((mean - breach.found).abs() < 1e-9, "{mean}: {breach:?}");
            breaches += 1;
        }
    }
    assert!(breaches > 0);
    let page = page(&workspace, &workspace.path("out"));
    assert!(page.contains("similarity of the audited texts to the plain ones"));
}
