//! One plan by several coordinators, each with a runtime and connections of its own, on a real NATS server.

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier};
use std::thread::{Scope, ScopedJoinHandle, scope};

use bytes::Bytes;
use laser_coordinator::nats::{NatsClient, NatsConfig, Planner, connect};
use laser_schema::job::{Action, Plan, ShardRow};
use laser_schema::{Digest, Kind};
use laser_store::Location;
use laser_store::run_store::RunStore;
use serde_json::json;
use tokio::runtime::Runtime;

use crate::nats_server::{Server, Version};
use crate::plan::files;
use crate::support::*;

/// Five of users and one of items.
const RANGES: usize = 6;

/// Rows of a range.
const ROWS: usize = 1024;

fn night() -> Night {
    let mut night = Night { shard_rows: 300, audit_share: 0.1, ..Night::new() };
    night.write_table("users.jsonl", Kind::User, (0..5000).map(user));
    night
}

fn block<T>(future: impl Future<Output = T>) -> T {
    Runtime::new().unwrap().block_on(future)
}

/// The plan that a coordinator makes alone, and all that it writes.
fn alone(night: &Night) -> (Plan, BTreeMap<String, Bytes>) {
    let output = night.output("alone");
    block(async { (night.plan(&output).await, files(&output).await) })
}

async fn client(config: &NatsConfig) -> NatsClient {
    let client = connect(config, "coordinator").await.unwrap();
    client.ensure_streams().await.unwrap();
    client
}

/// A coordinator that plans into `out`.
fn coordinator<'s>(
    scope: &'s Scope<'s, '_>,
    (night, config): (&'s Night, NatsConfig),
    mut progress: impl FnMut(u64) + Send + 's,
) -> ScopedJoinHandle<'s, Plan> {
    scope.spawn(move || {
        block(async {
            let (client, output) = (client(&config).await, night.output("out"));
            night.plan_with(1 << 30, Some(&output), Some(&client), &mut progress).await.unwrap()
        })
    })
}

/// Progress that meets a test after the first range, and again before it goes on.
fn held() -> (impl FnMut(u64) + Send, Arc<Barrier>) {
    let meeting = Arc::new(Barrier::new(2));
    let (there, mut is_first) = (meeting.clone(), true);
    let progress = move |_| {
        if std::mem::take(&mut is_first) {
            there.wait();
            there.wait();
        }
    };
    (progress, meeting)
}

fn store(night: &Night) -> RunStore {
    RunStore::new(&night.output("out"), &night.run)
}

/// The rows to generate, in order.
fn generated(output: &Location, plan: &Plan) -> Vec<ShardRow> {
    block(all_rows(output, plan, Action::Generate))
}

/// The planner has rendered one range when its helper comes, and waits until that has rendered all others.
#[test]
fn a_second_coordinator_renders_prompts_and_no_byte_changes() {
    let (night, server) = (night(), Server::start(Version::New));
    let (plan, written) = alone(&night);
    scope(|scope| {
        let (progress, meeting) = held();
        let planner = coordinator(scope, (&night, server.config()), progress);
        meeting.wait();
        let helper = coordinator(scope, (&night, server.config()), |_| {});
        block(async { while store(&night).known_prompts().await.unwrap().len() < RANGES - 1 {} });
        meeting.wait();
        assert_eq!(planner.join().unwrap(), plan);
        assert_eq!(helper.join().unwrap(), plan);
    });
    assert_eq!(block(files(&night.output("out"))), written);
}

/// Three that begin at once share as it happens.
#[test]
fn coordinators_that_begin_together_make_one_plan() {
    let (night, server) = (night(), Server::start(Version::Old));
    let (plan, written) = alone(&night);
    scope(|scope| {
        let coordinators = [(); 3].map(|()| coordinator(scope, (&night, server.config()), |_| {}));
        for coordinator in coordinators {
            assert_eq!(coordinator.join().unwrap(), plan);
        }
    });
    assert_eq!(block(files(&night.output("out"))), written);
}

/// Something happens while a planner waits after its first range; then it makes the plan of one alone.
fn plans_on_after(happens: impl FnOnce(&Night, &mut Server)) {
    let (night, mut server) = (night(), Server::start(Version::New));
    let (plan, written) = alone(&night);
    let config = server.config();
    scope(|scope| {
        let (progress, meeting) = held();
        let planner = coordinator(scope, (&night, config), progress);
        meeting.wait();
        happens(&night, &mut server);
        meeting.wait();
        assert_eq!(planner.join().unwrap(), plan);
    });
    assert_eq!(block(files(&night.output("out"))), written);
}

#[test]
fn a_range_that_a_helper_owes_is_rendered_by_the_planner() {
    plans_on_after(|night, server| {
        let taken = block(async {
            let client = client(&server.config()).await;
            let planner = client.planner(&night.run).await.unwrap().unwrap();
            client.take_range(&night.run, &planner, 0).await.unwrap()
        });
        assert_eq!(taken, Some(1));
    });
}

/// As long as a lost server is waited for, then alone.
#[test]
fn planning_goes_on_without_the_server() {
    plans_on_after(|_, server| server.kill());
}

/// That prompts are found shows in one that was changed under way.
#[test]
fn a_helper_becomes_the_planner_and_finds_the_prompts() {
    let (night, server) = (night(), Server::start(Version::New));
    let (plan, _) = alone(&night);
    let expected = generated(&night.output("alone"), &plan);
    let runtime = Runtime::new().unwrap();
    let client = runtime.block_on(client(&server.config()));
    let input = runtime.block_on(async {
        night.plan_with(1 << 30, Some(&night.output("before")), Some(&client), &mut |_| {}).await.unwrap();
        client.planner(&night.run).await.unwrap().unwrap().input
    });
    let dying = Planner { id: "dying".into(), input };
    runtime.block_on(async { while !client.hold_planning(&night.run, &dying).await.unwrap() {} });
    let store = store(&night);
    scope(|scope| {
        let helper = coordinator(scope, (&night, server.config()), |_| {});
        runtime.block_on(async {
            while store.known_prompts().await.unwrap().len() < RANGES {
                assert!(client.hold_planning(&night.run, &dying).await.unwrap());
            }
            let names = store.known_prompts().await.unwrap();
            let first = names.iter().find_map(|name| name.strip_prefix("00000000-")?.strip_suffix(".prompts")).unwrap();
            let digest = Digest::from(first.to_owned());
            let mut prompts = store.prompts(0, &digest, ROWS).await.unwrap().unwrap();
            prompts[0].as_mut().unwrap().push(7);
            store.write_prompts(0, &digest, &prompts).await.unwrap();
        });
        let plan = helper.join().unwrap();
        let found = generated(&night.output("out"), &plan);
        let differ: Vec<(ShardRow, ShardRow)> = found.into_iter().zip(expected).filter(|(a, b)| a != b).collect();
        let [(found, expected)] = &differ[..] else {
            panic!("{} rows differ", differ.len());
        };
        assert_eq!(found.prompt, [&*expected.prompt, &[7]].concat());
    });
    assert!(runtime.block_on(store.known_prompts()).unwrap().is_empty());
}

/// The planner's own entities are the same, but a helper may have rendered others.
#[test]
fn a_table_that_changes_under_way_is_refused() {
    let (night, server) = (night(), Server::start(Version::New));
    let (mut progress, meeting) = held();
    scope(|scope| {
        let planner = scope.spawn(|| {
            block(async {
                let (client, output) = (client(&server.config()).await, night.output("out"));
                night.plan_with(1 << 30, Some(&output), Some(&client), &mut progress).await.unwrap_err().to_string()
            })
        });
        meeting.wait();
        night.write("items.jsonl", (0..5).map(|id| json!({"id": format!("i{id}"), "genre": "Drama"})));
        meeting.wait();
        let error = planner.join().unwrap();
        assert!(error.contains("items.jsonl: was changed while it was read; run again"), "{error}");
    });
    assert!(block(store(&night).plan()).unwrap().is_none());
}

#[test]
fn a_coordinator_with_other_settings_plans_alone() {
    let (night, server) = (night(), Server::start(Version::New));
    let (plan, written) = alone(&night);
    block(async {
        let (client, output) = (client(&server.config()).await, night.output("out"));
        let other = client.new_planner(Digest::of(b"other settings"));
        assert!(client.hold_planning(&night.run, &other).await.unwrap());
        let planned = night.plan_with(1 << 30, Some(&output), Some(&client), &mut |_| {}).await.unwrap();
        assert_eq!(planned, plan);
        assert_eq!(files(&output).await, written);
    });
}
