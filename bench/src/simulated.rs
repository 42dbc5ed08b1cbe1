//! A night that exists on paper only: the plan that the coordinator's measurements share.

use jiff::civil::{Date, date};
use laser_schema::entity::IdType;
use laser_schema::job::{Action, KindCounts, PLAN_VERSION, Plan, Policy, ShardJob, Spec};
use laser_schema::lists::ListRows;
use laser_schema::{Digest, Kind};

/// The night's date.
pub(super) const NIGHT: Date = date(2026, 1, 2);

/// The plan of a night of `rows` users in `shards` shards that differ by one row at most.
pub(super) fn plan(rows: u64, shards: u32) -> Plan {
    let mut plan = Plan {
        version: PLAN_VERSION,
        run: "bench".into(),
        date: NIGHT,
        spec: spec(),
        pools: "pools".into(),
        pool_digest: Digest::of(b"pools"),
        price: None,
        guards: None,
        embedding: None,
        list_rows: ListRows::default(),
        runners_up: 0,
        priority: None,
        canary: None,
        ids: [(Kind::User, IdType::Int64)].into(),
        counts: [(Kind::User, KindCounts { entities: rows, ..KindCounts::default() })].into(),
        shards: Vec::new(),
    };
    let partition = plan.partition(Kind::User);
    let count = u64::from(shards);
    let job = |shard: u32| ShardJob {
        shard,
        action: Action::Generate,
        kind: Kind::User,
        pool: "user-all".into(),
        rows: rows / count + u64::from(u64::from(shard) < rows % count),
        prompt_tokens: 0,
        value: None,
        input: String::new(),
        input_digest: Digest::of(b""),
        output: format!("{partition}/part-{shard:07}.parquet"),
    };
    plan.shards = (0..shards).map(job).collect();
    plan
}

/// A specification of models and prompts that do not exist.
pub(super) fn spec() -> Spec {
    Spec {
        engine: "simulated".into(),
        model: Digest::of(b"model"),
        tokenizer: Digest::of(b"tokenizer"),
        end_of_text: Vec::new(),
        precision: "f32".into(),
        prompts: Kind::ALL.map(|kind| (kind, Digest::of(b"prompt"))).into(),
        verification: Policy::Strict,
        sampling: None,
        max_new_tokens: 128,
        stop: Vec::new(),
        constraint: None,
        lists: None,
    }
}
