//! Guards on relaxed texts: a breach is told, or makes the pool's texts strict, or withholds the night; and it stays
//! so, whatever dies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use laser_schema::Kind;
use laser_schema::audit::Audit;
use laser_schema::guard::{GuardReport, Verdict};
use laser_schema::job::{Action, Plan};
use laser_schema::knowledge::KnowledgeRecord;
use laser_schema::manifest::Manifest;
use laser_store::part::decode_part;

use crate::distributed::Cluster;
use crate::faults::start;
use crate::{Workspace, assert_exit, stderr, stdout};

/// No text keeps this bound, and with an audit of everything every pool is judged.
const RELAXED: [&str; 4] =
    ["verification.policy=relaxed", "run.audit_share=1.0", "guards.min_texts=1", "guards.min_log_probability=-0.0001"];

fn with(action: &'static str) -> Vec<&'static str> {
    [RELAXED.as_slice(), &[action]].concat()
}

fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    let files = entries.map(|entry| entry.unwrap().path());
    files.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// The folder of a night's run.
fn run_folder(workspace: &Workspace, night: &str) -> PathBuf {
    let runs = fs::read_dir(workspace.path("out/runs")).unwrap();
    let mut runs = runs.map(|run| run.unwrap().path());
    let is_of_night = |run: &PathBuf| run.file_name().unwrap().to_str().unwrap().starts_with(night);
    runs.find(is_of_night).unwrap()
}

fn manifests(workspace: &Workspace, night: &str) -> Vec<Manifest> {
    let mut manifests = Vec::new();
    for kind in ["user", "item"] {
        let night = workspace.path(&format!("out/profiles/kind={kind}/dt={night}"));
        for run in fs::read_dir(night).unwrap() {
            let manifest = fs::read(run.unwrap().path().join("_manifest.json")).unwrap();
            manifests.push(serde_json::from_slice(&manifest).unwrap());
        }
    }
    manifests
}

/// Tonight's generated records, with their kind.
fn records(workspace: &Workspace) -> Vec<(Kind, KnowledgeRecord)> {
    let mut records = Vec::new();
    for (path, bytes) in workspace.parts() {
        if path.to_str().unwrap().contains("dt=2026-01-02") {
            let (rows, info) = decode_part("part", bytes.into()).unwrap();
            let tonight = rows.into_iter().filter(|row| row.generated_by == info.run);
            records.extend(tonight.map(|row| (info.kind, row)));
        }
    }
    assert!(!records.is_empty());
    records
}

/// Every pool that tonight generates was barred, and its texts are those of plain decoding, by the audit of all of
/// them.
#[track_caller]
fn assert_all_strict(workspace: &Workspace) {
    let run = run_folder(workspace, "2026-01-02");
    let verdicts = files(&run.join("guards"));
    assert!(verdicts.len() > 1);
    for (path, json) in verdicts {
        let verdict: Verdict = serde_json::from_slice(&json).unwrap();
        assert!(verdict.strict, "{}: {verdict:?}", path.display());
    }
    let plan: Plan = serde_json::from_slice(&fs::read(run.join("plan.json")).unwrap()).unwrap();
    let mut plain = BTreeMap::new();
    let mut relaxed = 0;
    for job in plan.shards.iter().filter(|job| job.action == Action::Audit) {
        let json = fs::read(workspace.path("out").join(&job.output)).unwrap();
        let audit: Audit = serde_json::from_slice(&json).unwrap();
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
    for manifest in manifests(workspace, "2026-01-02") {
        let report = manifest.details.guards.clone().unwrap();
        assert!(report.pools.values().all(|verdict| verdict.strict), "{report:?}");
    }
}

#[test]
fn a_warning_is_told_and_changes_nothing() {
    let (guarded, free) = (Workspace::new(), Workspace::new());
    let fixed = "draft.adaptive=false";
    let output = guarded.run(&[with("guards.action=warn"), vec![fixed]].concat());
    assert_exit(&output, 0);
    assert!(
        stdout(&output).contains("log probability -")
            && stdout(&output).contains("is below min_log_probability = -0.0001"),
        "{}",
        stdout(&output)
    );
    assert_exit(&free.run(&["verification.policy=relaxed", "run.audit_share=1.0", fixed]), 0);
    let texts = |workspace: &Workspace| {
        let records = records(workspace).into_iter();
        let texts: BTreeMap<_, _> =
            records.map(|(kind, r)| ((kind, r.entity_id.to_string()), (r.text, r.policy))).collect();
        texts
    };
    assert_eq!(texts(&guarded), texts(&free));
    for manifest in manifests(&guarded, "2026-01-02") {
        let report = manifest.details.guards.clone().unwrap();
        assert_eq!(report.breaches().count(), manifest.figures.len());
        assert!(report.pools.values().all(|verdict| !verdict.strict));
    }
    assert!(manifests(&free, "2026-01-02").iter().all(|m| m.guards.is_none()));
}

#[test]
fn a_pool_that_breaches_is_verified_strictly_and_stays_so_when_the_night_is_killed() {
    let workspace = Workspace::new();
    let settings = with("guards.action=strict");
    let mut verdicts = BTreeMap::new();
    for shards in [2, 4, 3] {
        let mut child = start(workspace.command("run", &settings), shards);
        child.kill().unwrap();
        child.wait().unwrap();
        let now = fs::read_dir(workspace.path("out/runs")).unwrap();
        for run in now {
            let files = files(&run.unwrap().path().join("guards"));
            assert!(verdicts.iter().all(|(path, json)| files.get(path).is_none_or(|now| now == json)));
            verdicts.extend(files);
        }
    }
    let output = workspace.run(&settings);
    assert_exit(&output, 0);
    assert!(stdout(&output).contains("verified strictly"), "{}", stdout(&output));
    for (path, json) in &verdicts {
        assert_eq!(&fs::read(path).unwrap(), json);
    }
    assert_all_strict(&workspace);
    assert_exit(&workspace.verify(), 0);
    let page = workspace.path("page.html");
    let report = Command::new(env!("CARGO_BIN_EXE_laser"))
        .arg("report")
        .arg(workspace.path("out"))
        .arg("-o")
        .arg(&page)
        .output()
        .unwrap();
    assert_exit(&report, 0);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("is below min_log_probability = -0.0001: verified strictly"));
}

#[test]
fn a_breach_withholds_the_night_until_it_is_let_through() {
    let workspace = Workspace::new();
    for _ in 0..2 {
        let output = workspace.run(&with("guards.action=fail"));
        assert_exit(&output, 65);
        let told = stderr(&output);
        assert!(told.contains("user pool ") && told.contains("is below min_log_probability = -0.0001"), "{told}");
        assert!(told.contains("--set guards.action=warn"), "{told}");
        assert_exit(&workspace.verify(), 65);
    }
    let parts = workspace.parts();
    assert!(!parts.is_empty());
    // Of the first night, which the second is made from.
    assert_exit(&workspace.run(&with("guards.action=warn")), 0);
    let now: BTreeMap<_, _> = workspace.parts().into_iter().collect();
    assert!(parts.iter().all(|(path, bytes)| now.get(path) == Some(bytes)));
    assert_exit(&workspace.verify(), 0);
}

#[test]
fn coordinator_and_workers_judge_each_pool_once() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let settings = with("guards.action=strict");
    let coordinator = cluster.start_with("coordinator", &settings);
    coordinator.wait_for("queued shards", 1);
    let worker = cluster.start_with("worker", &settings);
    // The audits are done, some pool is judged and its shards are queued.
    coordinator.wait_for("queued shards", 1);
    coordinator.kill();
    let guards = run_folder(&cluster.tonight, "2026-01-02").join("guards");
    let verdicts = files(&guards);
    assert!(!verdicts.is_empty());
    let again = cluster.start_with("coordinator", &settings);
    again.assert_ends(0);
    worker.terminate();
    let after = files(&guards);
    assert!(verdicts.iter().all(|(path, json)| after.get(path) == Some(json)));
    assert_all_strict(&cluster.tonight);
    // One process that verifies strictly gives the same.
    cluster.assert_whole();
}

#[test]
fn a_damaged_audit_ends_the_coordinator_and_not_the_night() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let settings = with("guards.action=strict");
    let coordinator = cluster.start_with("coordinator", &settings);
    coordinator.wait_for("queued shards", 1);
    let run = run_folder(&cluster.tonight, "2026-01-02");
    let plan: Plan = serde_json::from_slice(&fs::read(run.join("plan.json")).unwrap()).unwrap();
    let audits = plan.shards.iter().filter(|job| job.action == Action::Audit);
    let audits: Vec<PathBuf> = audits.map(|job| cluster.tonight.path("out").join(&job.output)).collect();
    fs::create_dir_all(audits[0].parent().unwrap()).unwrap();
    for audit in &audits {
        fs::write(audit, "{").unwrap();
    }
    let log = coordinator.log_until_end(65).join("\n");
    assert!(log.contains("remove that part and run again"), "{log}");
    audits.iter().for_each(|audit| fs::remove_file(audit).unwrap());
    let worker = cluster.start_with("worker", &settings);
    cluster.start_with("coordinator", &settings).assert_ends(0);
    worker.terminate();
    cluster.assert_whole();
}

#[test]
fn audited_texts_are_compared_by_the_encoder() {
    let minilm = std::env::var("LASER_MINILM").unwrap_or_else(|_| {
        panic!("LASER_MINILM is not set: pass the tests with tests/run.sh, or `source tests/encoder.sh` first")
    });
    let workspace = Workspace::new();
    let encoder = format!("encoder.path={minilm}");
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
    for json in files(&run_folder(&workspace, "2026-01-02").join("audits")).values() {
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
    for manifest in manifests(&workspace, "2026-01-02") {
        for (pool, breach) in manifest.guards.iter().flat_map(GuardReport::breaches) {
            assert_eq!(breach.guard, "min_similarity");
            // Sums of the same numbers, in another order.
            let mean = manifest.audit[pool].mean_similarity().unwrap();
            assert!((mean - breach.found).abs() < 1e-9, "{mean}: {breach:?}");
            breaches += 1;
        }
    }
    assert!(breaches > 0);
    let page = workspace.path("page.html");
    let mut report = Command::new(env!("CARGO_BIN_EXE_laser"));
    report.arg("report").arg(workspace.path("out")).arg("-o").arg(&page);
    assert_exit(&report.output().unwrap(), 0);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("similarity of the audited texts to the plain ones"));
}
