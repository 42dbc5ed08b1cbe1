//! What is particular to NATS, each fact on an old server and on a new one.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::jetstream::stream::{Config, RetentionPolicy};
use laser_coordinator::nats::{
    MESSAGE_VERSION, NatsClient, NatsConfig, NatsError, NatsQueue, NatsWorker, RunRef, connect,
};
use laser_schema::Digest;
use laser_schema::job::Queue;

use crate::nats_server::{Server, Version, jobs, nkey, run_ref};
use crate::queue_conformance::take;
use crate::server::{closed_port, greet};

/// A server on which a coordinator has queued a run of so many shards.
async fn queued(version: Version, shards: u32) -> (Server, NatsClient, RunRef) {
    let (server, run) = (Server::start(version), run_ref("run"));
    let coordinator = server.coordinator().await;
    coordinator.publish(&run, &jobs(shards)).await.unwrap();
    (server, coordinator, run)
}

async fn raw(server: &Server) -> async_nats::Client {
    async_nats::connect(server.config().url).await.unwrap()
}

/// A server with the shipped configuration, and its coordinator.
async fn shipped(version: Version) -> (Server, NatsClient) {
    let server = Server::start_shipped(version, |shipped| shipped);
    let coordinator = connect(&server.user("coordinator"), "coordinator").await.unwrap();
    coordinator.ensure_streams().await.unwrap();
    (server, coordinator)
}

async fn commit_one(queue: &NatsQueue) {
    let lease = take(queue).await;
    queue.committed(&lease).await.unwrap();
}

/// Works until nothing of the run is queued; returns how many leases that took.
async fn work_off(queue: &NatsQueue, coordinator: &NatsClient, run: &str) -> usize {
    let mut leases = 0;
    while coordinator.queued(run).await.unwrap() > 0 {
        commit_one(queue).await;
        leases += 1;
    }
    leases
}

/// Asks the server until nothing of the run is queued.
async fn emptied(coordinator: &NatsClient, run: &str) {
    while coordinator.queued(run).await.unwrap() > 0 {}
}

/// The oldest version that is supported and the newest that was tried.
#[tokio::test]
async fn the_servers_are_of_the_versions_that_are_meant() {
    let version = async |version| Server::start(version).coordinator().await.server_version();
    let (old, new) = (version(Version::Old).await, version(Version::New).await);
    assert!(old.starts_with("2.9."), "LASER_NATS_OLD has version {old}, expected 2.9");
    assert_eq!(new, "2.14.5", "the version of LASER_NATS_NEW");
}

async fn publishing_twice_queues_once(version: Version) {
    let (server, coordinator, run) = queued(version, 0).await;
    // More than the window of publishes that are under way.
    let jobs = jobs(700);
    // In a task: the future does not hold the closure, which could not be sent.
    let (publisher, first, to) = (coordinator.clone(), jobs.clone(), run.clone());
    let first = tokio::spawn(async move { publisher.publish(&to, first.iter().filter(|job| job.shard < 500)).await });
    assert_eq!(first.await.unwrap().unwrap(), 500);
    let queue = server.worker("worker", 3).await.queue(&run);
    let held = take(&queue).await;
    assert_eq!(coordinator.publish(&run, &jobs).await.unwrap(), 200);
    assert_eq!(coordinator.queued("run").await.unwrap(), 700);
    queue.committed(&held).await.unwrap();
    assert_eq!(coordinator.queued("run").await.unwrap(), 699);
    assert_eq!(coordinator.publish(&run, &jobs).await.unwrap(), 1);
}

async fn cancelling_a_run_leaves_the_others(version: Version) {
    let server = Server::start(version);
    let coordinator = server.coordinator().await;
    coordinator.publish(&run_ref("one"), &jobs(5)).await.unwrap();
    coordinator.publish(&run_ref("two"), &jobs(3)).await.unwrap();
    let queue = server.worker("worker", 3).await.queue(&run_ref("one"));
    let held = take(&queue).await;
    assert_eq!(coordinator.purge("one").await.unwrap(), 5);
    assert_eq!(coordinator.queued("one").await.unwrap(), 0);
    assert_eq!(coordinator.queued("two").await.unwrap(), 3);
    queue.committed(&held).await.unwrap();
    let error = coordinator.purge("*").await.unwrap_err();
    assert!(matches!(error, NatsError::RunName(_)), "{error}");
}

async fn a_killed_server_that_comes_back_is_waited_for(version: Version) {
    let (mut server, coordinator, run) = queued(version, 10).await;
    let worker = server.worker("worker", 100).await;
    let queue = worker.queue(&run);
    let before = [take(&queue).await, take(&queue).await];
    queue.committed(&before[0]).await.unwrap();
    server.kill();
    // In the outage: no answer is no error, and no end of the work.
    queue.committed(&before[1]).await.unwrap();
    let (lease, ()) = tokio::join!(take(&queue), async { server.restart() });
    queue.committed(&lease).await.unwrap();
    work_off(&queue, &coordinator, "run").await;
    assert_eq!(coordinator.dead_letters("run").await.unwrap(), []);
}

async fn publishing_goes_on_after_the_server_was_killed(version: Version) {
    let (mut server, coordinator, run) = queued(version, 20).await;
    let jobs = jobs(50);
    server.kill();
    let (published, ()) = tokio::join!(coordinator.publish(&run, &jobs), async { server.restart() });
    published.unwrap();
    assert_eq!(coordinator.queued("run").await.unwrap(), 50);
}

async fn a_lost_stream_is_built_again_under_a_worker_that_stays(version: Version) {
    let (mut server, coordinator, run) = queued(version, 5).await;
    let queue = server.worker("worker", 3).await.queue(&run);
    commit_one(&queue).await;
    server.kill();
    std::fs::remove_dir_all(server.file("store")).unwrap();
    server.restart();
    coordinator.ensure_streams().await.unwrap();
    // The store lists what is done; the rest is published again.
    let missing = &jobs(5)[1..];
    assert_eq!(coordinator.publish(&run, missing).await.unwrap(), 4);
    assert_eq!(work_off(&queue, &coordinator, "run").await, 4);
}

async fn a_worker_goes_from_run_to_run_and_loses_no_message(version: Version) {
    let server = Server::start(version);
    let coordinator = server.coordinator().await;
    let (one, two) = (run_ref("one"), run_ref("two"));
    coordinator.publish(&one, &jobs(2)).await.unwrap();
    coordinator.publish(&two, &jobs(2)).await.unwrap();
    let worker = server.worker("worker", 1).await;
    for run in [&one, &two] {
        assert_eq!(worker.next_run().await.as_ref(), Some(run));
        assert_eq!(worker.next_run().await.as_ref(), Some(run), "until it is leased");
        let queue = worker.queue(run);
        for shard in 0..2 {
            let lease = take(&queue).await;
            assert_eq!((lease.job.shard, lease.attempt), (shard, 1));
            queue.committed(&lease).await.unwrap();
        }
        if run == &one {
            assert_eq!(queue.lease().await.unwrap(), None);
            assert_eq!(queue.lease().await.unwrap(), None, "ended for good");
        }
    }
    assert_eq!(coordinator.queued("one").await.unwrap(), 0);
    assert_eq!(coordinator.queued("two").await.unwrap(), 0);
}

async fn a_held_message_is_given_back_by_a_worker_that_ends(version: Version) {
    let (server, _, run) = queued(version, 1).await;
    let one = server.worker("one", 3).await;
    assert_eq!(one.next_run().await, Some(run.clone()));
    one.release().await;
    let lease = take(&server.worker("two", 3).await.queue(&run)).await;
    assert_eq!(lease.attempt, 2, "the broker counts deliveries");
}

async fn a_held_message_is_kept_while_its_run_is_loaded(version: Version) {
    let (server, _, run) = queued(version, 1).await;
    let one = server.worker("one", 3).await;
    assert_eq!(one.next_run().await, Some(run.clone()));
    let two = server.worker("two", 3).await.queue(&run);
    let second = tokio::time::timeout(two.lease_duration() * 2, two.lease()).await;
    assert!(second.is_err(), "{second:?} while another worker holds it");
    assert_eq!(take(&one.queue(&run)).await.attempt, 1);
}

async fn an_idle_worker_ends(version: Version) {
    let server = Server::start(version);
    server.coordinator().await;
    let worker = server.idle_worker(Duration::from_secs(1)).await;
    assert_eq!(worker.next_run().await, None);
}

async fn the_settings_of_an_operator_stay(version: Version) {
    let server = Server::start(version);
    let coordinator = server.coordinator().await;
    let stream = async_nats::jetstream::new(raw(&server).await);
    let info = stream.get_stream("LASER_JOBS").await.unwrap();
    let changed = Config {
        description: Some("ours".into()),
        discard_new_per_subject: false,
        ..info.cached_info().config.clone()
    };
    stream.update_stream(&changed).await.unwrap();
    coordinator.ensure_streams().await.unwrap();
    let info = stream.get_stream("LASER_JOBS").await.unwrap();
    let config = &info.cached_info().config;
    assert!(config.discard_new_per_subject);
    assert_eq!(config.description.as_deref(), Some("ours"));
}

async fn what_is_no_job_becomes_a_dead_letter(version: Version) {
    let server = Server::start(version);
    let coordinator = server.coordinator().await;
    let stream = async_nats::jetstream::new(raw(&server).await);
    let bad = [
        ("laser.jobs.run.7", "junk"),
        ("laser.jobs.run.8", r#"{"version":9}"#),
        ("laser.jobs.run.9", r#"{"version":1}"#),
        ("laser.jobs.run.x", "no shard"),
    ];
    for (subject, payload) in bad {
        stream.publish(subject, payload.into()).await.unwrap().await.unwrap();
    }
    let run = run_ref("run");
    coordinator.publish(&run, &jobs(1)).await.unwrap();
    let queue = server.worker("worker", 3).await.queue(&run);
    commit_one(&queue).await;
    assert_eq!(coordinator.queued("run").await.unwrap(), 0);
    let letters = coordinator.dead_letters("run").await.unwrap();
    let expected = [
        (7, "message of version none, expected 1"),
        (8, "message of version 9, expected 1"),
        (9, "message is not a job: missing field"),
    ];
    assert_eq!(letters.len(), expected.len());
    for (letter, (shard, reason)) in letters.iter().zip(expected) {
        assert_eq!((letter.shard, letter.worker.as_str()), (shard, "worker"));
        assert!(letter.reason.starts_with(reason), "{}", letter.reason);
    }
    assert_eq!(letters[0].message, "junk");
    let error = coordinator.replay("run", &[7]).await.unwrap_err();
    assert!(matches!(error, NatsError::BadDeadLetter { shard: 7, .. }), "{error}");
    assert_eq!(coordinator.dead_letters("run").await.unwrap().len(), 3);
}

async fn a_shard_whose_workers_die_becomes_a_dead_letter(version: Version) {
    let (server, coordinator, run) = queued(version, 1).await;
    let dies = server.worker("dies", 1).await.queue(&run);
    take(&dies).await;
    let other = server.worker("other", 1).await.queue(&run);
    tokio::select! {
        lease = other.lease() => panic!("{lease:?} after its only attempt"),
        () = emptied(&coordinator, "run") => {}
    }
    // At once: a shard leaves the queue after the stream has confirmed its letter.
    let letter = coordinator.dead_letter("run", 0).await.unwrap();
    assert!(letter.reason.starts_with("delivered 1 times without an outcome"));
    assert_eq!((letter.worker.as_str(), letter.attempt), ("other", 2));
}

async fn a_dead_letter_can_be_replayed(version: Version) {
    let (server, coordinator, run) = queued(version, 3).await;
    let queue = server.worker("worker", 1).await.queue(&run);
    for _ in 0..3 {
        let lease = take(&queue).await;
        queue.failed(&lease, "engine").await.unwrap();
    }
    let letter = coordinator.dead_letter("run", 2).await.unwrap();
    assert_eq!((letter.version, letter.attempt), (MESSAGE_VERSION, 1));
    assert_eq!((letter.reason.as_str(), letter.shard), ("engine", 2));
    assert_eq!(coordinator.replay("run", &[2, 0]).await.unwrap(), 2);
    let left = coordinator.dead_letters("run").await.unwrap();
    assert_eq!(left.iter().map(|l| l.shard).collect::<Vec<_>>(), [1]);
    let error = coordinator.replay("run", &[2]).await.unwrap_err();
    assert!(matches!(error, NatsError::NoDeadLetter { shard: 2, .. }), "{error}");
    for shard in [2, 0] {
        let lease = take(&queue).await;
        assert_eq!((lease.job.shard, lease.attempt), (shard, 1));
        assert_eq!(lease.job, jobs(3)[shard as usize]);
        queue.committed(&lease).await.unwrap();
    }
    assert_eq!(coordinator.queued("run").await.unwrap(), 0);
}

async fn a_changed_lease_changes_the_consumer(version: Version) {
    let server = Server::start(version);
    server.coordinator().await.ensure_streams().await.unwrap();
    let config = NatsConfig { lease_seconds: 7, ..server.config() };
    let client = connect(&config, "coordinator").await.unwrap();
    client.ensure_streams().await.unwrap();
    let queue = server.worker("worker", 3).await.queue(&run_ref("run"));
    assert_eq!(queue.lease_duration(), config.lease());
}

async fn a_stream_of_another_kind_is_refused_by_its_difference(version: Version) {
    let server = Server::start(version);
    let other = Config {
        name: "LASER_JOBS".into(),
        subjects: vec!["laser.jobs.*.*".into()],
        retention: RetentionPolicy::Limits,
        ..Default::default()
    };
    let stream = async_nats::jetstream::new(raw(&server).await);
    stream.create_stream(other).await.unwrap();
    let client = connect(&server.config(), "coordinator").await.unwrap();
    let error = client.ensure_streams().await.unwrap_err().to_string();
    assert!(error.contains("stream LASER_JOBS"), "{error}");
    let difference = "retention: expected WorkQueue, found Limits";
    assert!(error.contains(difference), "{error}");
}

#[tokio::test]
async fn a_server_that_will_not_do_is_refused_by_name() {
    let servers = [
        (
            "2.8.4",
            true,
            "nats server granny has version 2.8.4, expected 2.9.0 or later: it would not keep one message for each \
             shard; upgrade it",
        ),
        ("2.14.5", false, "nats server granny runs without jetstream; add a `jetstream` block to its configuration"),
    ];
    for (version, jetstream, expected) in servers {
        let url = format!("nats://127.0.0.1:{}", greet(version, jetstream));
        let config = NatsConfig { url, ..Default::default() };
        let error = connect(&config, "worker").await.unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_an_error() {
    let address = format!("127.0.0.1:{}", closed_port());
    let config = NatsConfig { url: format!("nats://user:secret@{address}"), ..Default::default() };
    let error = connect(&config, "worker").await.unwrap_err().to_string();
    assert!(error.contains(&format!("nats at {address}")), "{error}");
    assert!(!error.contains("secret"), "{error}");
}

#[tokio::test]
async fn a_bad_file_is_named_with_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "nothing of use").unwrap();
    let missing = dir.path().join("missing");
    type Set = fn(&mut NatsConfig, PathBuf);
    let keys: [(&str, Set); 4] = [
        ("tls_ca", |c, f| c.tls_ca = Some(f)),
        ("nkey_seed", |c, f| c.nkey_seed = Some(f)),
        ("credentials", |c, f| c.credentials = Some(f)),
        ("tls_cert", |c, f| {
            c.tls_cert = Some(f.clone());
            c.tls_key = Some(f);
        }),
    ];
    for (key, set) in keys {
        for file in [&file, &missing] {
            let mut config = NatsConfig::default();
            set(&mut config, file.clone());
            let error = connect(&config, "worker").await.unwrap_err().to_string();
            assert!(error.starts_with(&format!("[queue] {key}: ")), "{error}");
            assert!(error.contains(file.to_str().unwrap()), "{error}");
        }
    }
}

#[tokio::test]
async fn a_bad_value_is_named_with_its_key() {
    type Change = fn(&mut NatsConfig);
    let bad: [(&str, Change); 7] = [
        ("nkey_seed", |c| {
            c.nkey_seed = Some("seed".into());
            c.credentials = Some("creds".into());
        }),
        ("attempts", |c| c.attempts = 0),
        ("lease_seconds", |c| c.lease_seconds = 0),
        ("replicas", |c| c.replicas = 6),
        ("stream", |c| c.stream = "A.B".into()),
        ("tls_cert", |c| c.tls_key = Some("key.pem".into())),
        ("url", |c| c.url = "nats://a:b:c".into()),
    ];
    for (key, change) in bad {
        let mut config = NatsConfig::default();
        change(&mut config);
        let error = connect(&config, "worker").await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("[queue] {key}: ")), "{error}");
    }
}

async fn the_shipped_server_configuration_lets_each_user_do_its_work(version: Version) {
    let (server, coordinator) = shipped(version).await;
    let run = run_ref("run");
    coordinator.publish(&run, &jobs(3)).await.unwrap();
    let planner = coordinator.new_planner(Digest::of(b"input"));
    assert!(coordinator.hold_planning("run", &planner).await.unwrap());
    assert_eq!(coordinator.take_range("run", &planner, 0).await.unwrap(), Some(0));
    let config = NatsConfig { attempts: 1, ..server.user("worker") };
    let client = connect(&config, "worker").await.unwrap();
    let worker = NatsWorker::bind(client, None).await.unwrap();
    assert_eq!(worker.next_run().await, Some(run.clone()));
    let queue = worker.queue(&run);
    let (first, second) = (take(&queue).await, take(&queue).await);
    assert!(queue.heartbeat(&first).await.unwrap());
    queue.committed(&first).await.unwrap();
    queue.failed(&second, "engine").await.unwrap();
    let operator = connect(&server.user("operator"), "operator").await.unwrap();
    assert_eq!(operator.dead_letters("run").await.unwrap().len(), 1);
    assert_eq!(operator.replay("run", &[second.job.shard]).await.unwrap(), 1);
    assert_eq!(operator.queued("run").await.unwrap(), 2);
    assert_eq!(coordinator.dead_letters("run").await.unwrap(), []);
    assert_eq!(operator.purge("run").await.unwrap(), 2);
}

/// By any number of helpers, and of another planner from the beginning.
async fn a_range_is_taken_once(version: Version) {
    let server = Server::start(version);
    let (one, two) = (server.coordinator().await, server.coordinator().await);
    let (first, second) = (one.new_planner(Digest::of(b"input")), two.new_planner(Digest::of(b"input")));
    assert_eq!(one.planner("run").await.unwrap(), None);
    assert_eq!(one.take_range("run", &first, 0).await.unwrap(), None);
    assert!(one.hold_planning("run", &first).await.unwrap());
    let take = async |client: &NatsClient| {
        let mut taken = Vec::new();
        for _ in 0..20 {
            assert!(one.hold_planning("run", &first).await.unwrap());
            taken.push(client.take_range("run", &first, 0).await.unwrap().unwrap());
        }
        taken
    };
    let (a, b, c) = tokio::join!(take(&one), take(&two), take(&two));
    for taken in [&a, &b, &c] {
        assert!(taken.is_sorted());
    }
    let mut all = [a, b, c].concat();
    all.sort_unstable();
    assert_eq!(all, Vec::from_iter(0..60));
    assert_eq!(two.take_range("run", &first, 100).await.unwrap(), Some(100));
    assert_eq!(one.take_range("run", &first, 0).await.unwrap(), Some(101));
    assert!(!two.hold_planning("run", &second).await.unwrap());
    assert_eq!(two.take_range("run", &second, 0).await.unwrap(), None);
    assert_eq!(two.planner("run").await.unwrap(), Some(first.clone()));
    // Nobody renews the first one's lease.
    while !two.hold_planning("run", &second).await.unwrap() {}
    assert_eq!(one.take_range("run", &first, 0).await.unwrap(), None);
    assert_eq!(two.take_range("run", &second, 0).await.unwrap(), Some(0));
    assert!(matches!(one.planner("a.b").await, Err(NatsError::RunName(_))));
}

async fn a_worker_may_do_nothing_else(version: Version) {
    let (server, coordinator) = shipped(version).await;
    let client = connect(&server.user("worker"), "worker").await.unwrap();
    let seed = std::fs::read_to_string(server.file("worker.seed")).unwrap();
    let raw = async_nats::ConnectOptions::with_nkey(seed.trim().to_owned())
        .add_root_certificates(server.file("ca.pem"))
        .custom_inbox_prefix("_INBOX_worker")
        .connect(server.config().url)
        .await
        .unwrap();
    let raw = async_nats::jetstream::new(raw);
    // A refusal reaches the sender as a timeout, so they are waited for together.
    let (job, stream, run, letter, made) = tokio::join!(
        async { raw.publish("laser.jobs.run.1", "{}".into()).await?.await },
        raw.delete_stream("LASER_JOBS"),
        client.purge("run"),
        client.dead_letter("run", 1),
        client.ensure_streams(),
    );
    assert!(job.is_err() && stream.is_err() && run.is_err());
    assert!(letter.is_err() && made.is_err());
    let refused = client.events().permission_violations.load(Ordering::Relaxed);
    assert_eq!(refused, 3);
    // Nothing of it has happened.
    assert_eq!(coordinator.queued("run").await.unwrap(), 0);
}

async fn a_stranger_is_not_let_in(version: Version) {
    let server = Server::start_shipped(version, |shipped| shipped);
    nkey(server.file("").as_path(), "stranger");
    let anonymous = server.config();
    let mut impostor = server.user("worker");
    impostor.tls_ca = None;
    for (config, reason) in [
        (server.user("stranger"), "authorization violation"),
        (anonymous, "authorization violation"),
        (impostor, "certificate"),
    ] {
        let error = connect(&config, "worker").await.unwrap_err();
        assert!(matches!(error, NatsError::Connect { .. }), "{error}");
        assert!(error.to_string().to_lowercase().contains(reason), "{error}");
    }
}

async fn a_server_may_ask_for_our_certificate_too(version: Version) {
    let verify = |text: String| text.replace("# verify: true", "verify: true");
    let server = Server::start_shipped(version, verify);
    let mut config = server.user("coordinator");
    connect(&config, "coordinator").await.unwrap_err();
    config.tls_cert = Some(server.file("cert.pem"));
    config.tls_key = Some(server.file("key.pem"));
    let client = connect(&config, "coordinator").await.unwrap();
    client.ensure_streams().await.unwrap();
}

macro_rules! on_both {
    ($($test:ident),* $(,)?) => {
        on_both!(old Old $($test)*);
        on_both!(new New $($test)*);
    };
    ($name:ident $version:ident $($test:ident)*) => {
        mod $name {
            $(
                #[tokio::test]
                async fn $test() {
                    super::$test(crate::nats_server::Version::$version).await;
                }
            )*
        }
    };
}

on_both![
    a_range_is_taken_once,
    publishing_twice_queues_once,
    cancelling_a_run_leaves_the_others,
    a_killed_server_that_comes_back_is_waited_for,
    publishing_goes_on_after_the_server_was_killed,
    a_lost_stream_is_built_again_under_a_worker_that_stays,
    a_worker_goes_from_run_to_run_and_loses_no_message,
    a_held_message_is_given_back_by_a_worker_that_ends,
    a_held_message_is_kept_while_its_run_is_loaded,
    an_idle_worker_ends,
    the_settings_of_an_operator_stay,
    what_is_no_job_becomes_a_dead_letter,
    a_shard_whose_workers_die_becomes_a_dead_letter,
    a_dead_letter_can_be_replayed,
    a_changed_lease_changes_the_consumer,
    a_stream_of_another_kind_is_refused_by_its_difference,
    the_shipped_server_configuration_lets_each_user_do_its_work,
    a_worker_may_do_nothing_else,
    a_stranger_is_not_let_in,
    a_server_may_ask_for_our_certificate_too,
];
