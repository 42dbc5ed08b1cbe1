//! The gate of the guards: what it holds back, and that a pool is judged once.

use laser_coordinator::finalise::{Published, Terms, publish};
use laser_coordinator::gate::Gate;
use laser_schema::Kind;
use laser_schema::audit::{Audit, AuditReport};
use laser_schema::guard::{GuardAction, Guards, Verdict};
use laser_schema::job::{Action, Plan, ShardJob};
use laser_schema::knowledge::Figures;
use laser_schema::manifest::SUCCESS;
use laser_store::Location;

use crate::support::*;

/// Texts may be a tenth longer than the plain ones.
fn guards(action: GuardAction) -> Guards {
    Guards { action, max_length_ratio: Some(1.1), ..Guards::default() }
}

/// A night whose texts are audited.
async fn audited(guards: Option<Guards>) -> (Night, Location, Plan) {
    let mut night = Night::new();
    (night.audit_share, night.guards) = (0.9, guards);
    let output = night.output("out");
    let plan = night.plan(&output).await;
    (night, output, plan)
}

/// Audits of a pool that found texts of so many tokens where plain ones have ten.
async fn commit_audits(output: &Location, plan: &Plan, pool: &str, tokens: u64) {
    let texts = 9;
    let audit = Audit {
        report: AuditReport { texts, plain_tokens: 10 * texts, tokens: tokens * texts, ..AuditReport::default() },
        figures: Figures { texts, ..Figures::default() },
        pairs: Vec::new(),
    };
    let json = serde_json::to_vec(&audit).unwrap();
    for job in audits(plan, pool) {
        output.join(&job.output).write(json.clone().into()).await.unwrap();
    }
}

fn audits<'a>(plan: &'a Plan, pool: &str) -> Vec<&'a ShardJob> {
    let of_pool = |job: &&ShardJob| job.action == Action::Audit && job.pool == pool;
    plan.shards.iter().filter(of_pool).collect()
}

fn admitted(gate: &Gate, plan: &Plan) -> Vec<String> {
    let texts = plan.shards.iter();
    let texts = texts.filter(|job| job.action == Action::Generate && gate.admits(job));
    let mut pools: Vec<String> = texts.map(|job| job.pool.clone()).collect();
    pools.dedup();
    pools
}

async fn verdict(output: &Location, plan: &Plan, pool: &str) -> Option<Verdict> {
    let read = planned(output, plan).store.verdict(Kind::User, pool).await;
    read.unwrap()
}

#[tokio::test]
async fn a_pool_is_generated_once_all_its_audits_are_settled_and_judged_by_them() {
    let (_night, output, plan) = audited(Some(guards(GuardAction::Strict))).await;
    let run = planned(&output, &plan);
    let first_text = plan.shards.iter().position(|job| job.action == Action::Generate);
    let last_audit = plan.shards.iter().rposition(|job| job.action == Action::Audit);
    assert!(last_audit < first_text, "audits come first");
    let mut gate = Gate::new(&plan);
    gate.poll(&run, |_| false).await.unwrap();
    assert!(admitted(&gate, &plan).is_empty());
    assert!(plan.shards.iter().filter(|job| job.action == Action::Audit).all(|job| gate.admits(job)));

    let odd = audits(&plan, "user-odd");
    assert!(odd.len() > 2);
    commit_audits(&output, &plan, "user-odd", 12).await;
    let all_but_one = |shard: u32| odd[1..].iter().any(|job| job.shard == shard);
    gate.poll(&run, all_but_one).await.unwrap();
    assert!(admitted(&gate, &plan).is_empty());
    gate.poll(&run, |shard| odd.iter().any(|job| job.shard == shard)).await.unwrap();
    assert_eq!(admitted(&gate, &plan), ["user-odd"]);
    let barred = verdict(&output, &plan, "user-odd").await.unwrap();
    assert!(barred.strict);
    assert_eq!(barred.texts, 9 * odd.len() as u64);
    assert_eq!(barred.breaches[0].to_string(), "length ratio 1.200 is above max_length_ratio = 1.1");

    commit_audits(&output, &plan, "user-even", 11).await;
    // The items' audits were given up: nothing is there.
    gate.poll(&run, |_| true).await.unwrap();
    assert_eq!(admitted(&gate, &plan), ["item-all", "user-even", "user-odd"]);
    let free = verdict(&output, &plan, "user-even").await.unwrap();
    assert!(!free.strict && free.breaches.is_empty() && free.texts > 9);
    let unknown = run.store.verdict(Kind::Item, "item-all").await.unwrap();
    assert_eq!(unknown, Some(Verdict::default()));
}

#[tokio::test]
async fn the_first_verdict_stands_whatever_a_later_process_would_find() {
    let (_night, output, plan) = audited(Some(guards(GuardAction::Strict))).await;
    let run = planned(&output, &plan);
    commit_audits(&output, &plan, "user-odd", 12).await;
    Gate::new(&plan).poll(&run, |_| true).await.unwrap();
    let first = verdict(&output, &plan, "user-odd").await;
    commit_audits(&output, &plan, "user-odd", 10).await;
    Gate::new(&plan).poll(&run, |_| true).await.unwrap();
    assert!(first.as_ref().is_some_and(|verdict| verdict.strict));
    assert_eq!(verdict(&output, &plan, "user-odd").await, first);

    work(&output, &plan).await;
    let terms = Terms { min_coverage: 1.0, guards: plan.guards, delta: false };
    let manifest = complete(publish(&run, Kind::User, &terms).await.unwrap());
    let report = manifest.details.guards.clone().unwrap();
    assert_eq!(report.pools.get("user-odd"), first.as_ref());
    assert!(!report.pools["user-even"].strict);
}

#[tokio::test]
async fn without_strict_guards_nothing_is_held_back() {
    let (_night, output, plan) = audited(None).await;
    let run = planned(&output, &plan);
    let mut gate = Gate::new(&plan);
    assert!(plan.shards.iter().all(|job| gate.admits(job)));
    gate.poll(&run, |_| true).await.unwrap();
    assert_eq!(verdict(&output, &plan, "user-odd").await, None);
}

#[tokio::test]
async fn a_breach_withholds_success_until_it_is_only_warned_of() {
    let (_night, output, plan) = audited(None).await;
    let run = planned(&output, &plan);
    commit_audits(&output, &plan, "user-odd", 12).await;
    work(&output, &plan).await;
    let success = output.join(&plan.partition(Kind::User)).join(SUCCESS);
    let publish = async |action| {
        let terms = Terms { min_coverage: 1.0, guards: Some(guards(action)), delta: false };
        publish(&run, Kind::User, &terms).await.unwrap()
    };
    for _ in 0..2 {
        let Published::Breached(manifest) = publish(GuardAction::Fail).await else {
            panic!("published");
        };
        let report = manifest.details.guards.clone().unwrap();
        let breaches: Vec<_> = report.breaches().collect();
        assert_eq!(breaches.len(), 1, "{breaches:?}");
        assert_eq!(breaches[0].0, "user-odd");
        assert!(!success.exists().await.unwrap());
    }
    let manifest = complete(publish(GuardAction::Warn).await);
    assert_eq!(manifest.details.guards.clone().unwrap().breaches().count(), 1);
    assert!(success.exists().await.unwrap());
}
