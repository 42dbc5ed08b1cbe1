//! Networks and stores that fail while processes live: whatever is lost on the way, the rows are those of one
//! undisturbed process.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use crate::assert_contains;
use crate::distributed::Cluster;
use crate::faults::signal;
use crate::proxy::{Fault, Proxy};

/// The shards that a log says a word of.
fn shards(log: &[String], word: &str) -> Vec<u32> {
    let word = format!(": {word} ");
    let lines = log.iter().filter(|line| line.contains(&word));
    let shard = |line: &String| line.split("shard=").nth(1)?.split(' ').next()?.parse().ok();
    lines.filter_map(shard).collect()
}

/// A cluster on S3 and a proxy before the store.
fn on_s3() -> (Cluster, Proxy) {
    let cluster = Cluster::on_s3("LASER_NATS_NEW");
    let proxy = Proxy::http(cluster.store.as_ref().unwrap().port());
    (cluster, proxy)
}

/// The first commit of a table, which creates it, and that of its first night.
const TABLE_COMMITS: [&str; 2] = ["/00000000000000000000.json", "/00000000000000000001.json"];

/// The same with a Delta table of users and one of items.
fn with_tables() -> (Cluster, Proxy) {
    let (mut cluster, proxy) = on_s3();
    cluster.tonight.environment.push(("LASER_OUTPUT__TABLE", "delta".into()));
    (cluster, proxy)
}

/// That each table was created once, and has the night once.
#[track_caller]
fn assert_one_commit(cluster: &Cluster) {
    let published = cluster.store.as_ref().unwrap().published("out");
    let commits = published.keys().filter(|key| key.contains("/_delta_log/"));
    assert_eq!(commits.count(), 2 * TABLE_COMMITS.len(), "{:?}", published.keys());
}

/// Longer than the ten tries that object_store makes by itself, which take three seconds. A cut may cost a shard one
/// of its two attempts, since nobody knows whether the server heard the last request.
#[test]
fn a_store_that_is_away_for_a_while_is_waited_for() {
    let (cluster, proxy) = on_s3();
    let coordinator = cluster.start_at_store("coordinator", &proxy);
    coordinator.wait_for("queued shards", 1);
    let worker = cluster.start_at_store("worker", &proxy);
    worker.wait_for("committed", 2);
    proxy.suffer(Fault::Answer(503), Duration::from_secs(5));
    worker.wait_for("committed", 2);
    proxy.suffer(Fault::Cut, Duration::from_secs(5));
    cluster.finish(coordinator, worker);
}

#[test]
fn a_write_whose_answer_is_lost_is_found_and_not_repeated() {
    let (cluster, proxy) = on_s3();
    let coordinator = cluster.coordinator(&[]);
    proxy.set(Fault::LoseAnswers);
    let worker = cluster.start_at_store("worker", &proxy);
    coordinator.assert_ends(0);
    let log = worker.terminate();
    let written = shards(&log, "writing");
    let distinct: BTreeSet<u32> = written.iter().copied().collect();
    assert!(written.len() > 3 && distinct.len() == written.len(), "{written:?}");
    assert!(shards(&log, "attempt failed").is_empty());
    cluster.assert_whole();
}

#[test]
fn wrong_credentials_end_a_process_with_a_word_and_cost_no_shard() {
    let (cluster, proxy) = on_s3();
    let refused = |subcommand: &str| {
        let log = cluster.start_at_store(subcommand, &proxy).assert_ends(65);
        let error = log.iter().find(|l| l.starts_with("error: ")).unwrap();
        assert!(error.contains("s3://laser/out") && error.contains("403"), "{error}");
    };
    proxy.set(Fault::Answer(403));
    refused("coordinator");
    let coordinator = cluster.coordinator(&[]);
    refused("worker");
    proxy.set(Fault::None);
    // In the middle of the work.
    let expired = cluster.start_at_store("worker", &proxy);
    expired.wait_for("committed", 2);
    proxy.set(Fault::Answer(403));
    assert_contains(&expired.assert_ends(65).join("\n"), &["check the credentials"]);
    cluster.finish(coordinator, cluster.worker());
}

/// `kill -9` before the store hears a write and before the coordinator hears of it; and with half of the shards
/// queued.
#[test]
fn a_coordinator_killed_at_any_of_its_writes_publishes_one_data_set() {
    let (cluster, store) = with_tables();
    let kill_at = |word: &'static str| {
        for heard in [false, true] {
            store.set(Fault::Hold { word, heard });
            let coordinator = cluster.start_at_store("coordinator", &store);
            store.wait_held();
            coordinator.kill();
            store.set(Fault::None);
        }
    };
    kill_at("/pools.json");
    kill_at("/plan.json");
    let nats = Proxy::tcp(cluster.nats.port());
    nats.set(Fault::Hold { word: "PUB laser.jobs.2026", heard: false });
    let coordinator = cluster.start_at_nats("coordinator", &nats);
    nats.wait_held();
    coordinator.kill();
    let worker = cluster.worker();
    for word in ["/_errors.jsonl", "/_manifest.json", TABLE_COMMITS[0], TABLE_COMMITS[1], "/_SUCCESS"] {
        kill_at(word);
    }
    cluster.finish(cluster.start("coordinator", &[]), worker);
    assert_one_commit(&cluster);
}

/// They plan at once. Then the slow one is held until the fast one has published: before it writes the manifest, before
/// it commits the night to a table, and when it has committed and not heard of it.
#[test]
fn two_coordinators_publish_one_manifest() {
    publish_twice("/_manifest.json", false);
    publish_twice(TABLE_COMMITS[1], false);
    publish_twice(TABLE_COMMITS[1], true);
}

fn publish_twice(word: &'static str, heard: bool) {
    let (cluster, proxy) = with_tables();
    proxy.set(Fault::Hold { word, heard });
    let slow = cluster.start_at_store("coordinator", &proxy);
    let fast = cluster.start("coordinator", &[]);
    for coordinator in [&slow, &fast] {
        coordinator.wait_for("\"generating\"", 1);
    }
    signal(&fast.child, "-STOP");
    let worker = cluster.worker();
    proxy.wait_held();
    signal(&fast.child, "-CONT");
    fast.assert_ends(0);
    let published = cluster.store.as_ref().unwrap().published("out");
    let manifests = published.keys().filter(|k| k.ends_with("_manifest.json"));
    assert_eq!(manifests.count(), 2);
    proxy.set(Fault::None);
    slow.assert_ends(0);
    worker.terminate();
    assert_eq!(cluster.store.as_ref().unwrap().published("out"), published);
    cluster.assert_whole();
    assert_one_commit(&cluster);
}

/// Longer than a lease, so that what was in hand is leased again.
#[test]
fn connections_to_nats_that_stall_break_and_lag_lose_nothing() {
    let cluster = Cluster::new("LASER_NATS_OLD");
    let proxy = Proxy::tcp(cluster.nats.port());
    let coordinator = cluster.start_at_nats("coordinator", &proxy);
    coordinator.wait_for("queued shards", 1);
    let worker = cluster.start_at_nats("worker", &proxy);
    for fault in [Fault::Stall, Fault::Cut] {
        worker.wait_for("leased", 2);
        proxy.suffer(fault, Duration::from_secs(4));
    }
    worker.wait_for("leased", 1);
    proxy.set(Fault::Delay(Duration::from_millis(100)));
    cluster.finish(coordinator, worker);
}

/// What remains in the queue of a shard that is committed costs a look.
#[test]
fn a_run_that_lost_every_process_and_the_queue_generates_no_committed_shard() {
    let mut cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[]);
    // Committed, and not acknowledged.
    for _ in 0..2 {
        cluster.kill_worker_at("committed", 2);
    }
    coordinator.kill();
    let committed = cluster.tonight.parts();
    assert!(committed.len() >= 3, "{}", committed.len());
    let number = |name: &str| name.strip_prefix("part-")?.strip_suffix(".parquet")?.parse().ok();
    let done: BTreeSet<u32> = committed.keys().filter_map(|path| number(path.file_name()?.to_str()?)).collect();
    assert_eq!(done.len(), committed.len());
    cluster.nats.lose_everything();
    let (coordinator, worker) = (cluster.coordinator(&[]), cluster.worker());
    coordinator.assert_ends(0);
    let written = shards(&worker.terminate(), "writing");
    assert!(!written.is_empty() && !written.iter().any(|shard| done.contains(shard)));
    for (path, bytes) in committed {
        assert_eq!(fs::read(&path).unwrap(), bytes, "{path:?} changed");
    }
    cluster.assert_whole();
}

/// What the queue was told counts for nothing: the store is asked.
#[test]
fn an_output_that_is_lost_after_its_acknowledgement_is_made_again() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[]);
    cluster.kill_worker_at("acknowledged", 2);
    let (lost, _) = cluster.tonight.parts().pop_first().unwrap();
    fs::remove_file(&lost).unwrap();
    cluster.finish(coordinator, cluster.worker());
    assert!(lost.exists());
}
