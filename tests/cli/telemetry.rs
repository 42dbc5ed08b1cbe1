//! What processes tell whoever watches them: metrics for Prometheus, logs for machines.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::distributed::{Cluster, Process};
use crate::faults::signal;

/// An address that nobody else uses: the loopback network has sixteen million.
fn address(host: u8) -> String {
    let [.., high, low] = std::process::id().to_be_bytes();
    format!("127.{high}.{low}.{host}:9464")
}

/// The names of a role's metrics, by what deploy/README.md says; tests/deploy keeps alerts and dashboard to these.
fn documented(role: &str) -> BTreeSet<String> {
    let readme = std::path::absolute("deploy/README.md").unwrap();
    let readme = fs::read_to_string(readme).unwrap();
    let rows = readme.lines().filter(|line| line.starts_with("| `laser_"));
    let cells = rows.map(|row| row.split('|').map(str::trim).collect::<Vec<_>>());
    let of_role = cells.filter(|cells| cells[2] == role || cells[2] == "both");
    of_role.map(|cells| cells[1].trim_matches('`').to_owned()).collect()
}

fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

/// The names of the samples of a text that Prometheus reads: every sample has a name, labels in quotes, a number,
/// and a type before it.
fn samples(text: &str) -> BTreeSet<String> {
    let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let mut types = BTreeMap::new();
    let mut names = BTreeSet::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(declared) = line.strip_prefix("# TYPE ") {
            let (name, kind) = declared.split_once(' ').unwrap();
            assert!(["counter", "gauge", "summary"].contains(&kind), "{line}");
            assert!(types.insert(name, kind).is_none(), "{name} is declared twice");
        } else if !line.starts_with("# HELP ") {
            let (sample, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let (name, labels) = sample.split_once('{').unwrap_or((sample, "}"));
            let labels = labels.strip_suffix('}').unwrap_or_else(|| panic!("{line}"));
            for label in labels.split(',').filter(|l| !l.is_empty()) {
                let (key, value) = label.split_once('=').unwrap();
                assert!(is_name(key) && value.len() >= 2, "{line}");
                assert!(value.starts_with('"') && value.ends_with('"'), "{line}");
            }
            assert!(is_name(name) && types.contains_key(name), "{line}");
            names.insert(name.to_owned());
        }
    }
    names
}

/// Scrapes until all of a role's metrics are there.
#[track_caller]
fn assert_complete(role: &str, address: &str) {
    let (wanted, started) = (documented(role), Instant::now());
    assert!(wanted.len() > 5, "{wanted:?}");
    loop {
        let missing: Vec<String> = wanted.difference(&samples(&scrape(address))).cloned().collect();
        if missing.is_empty() {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{role} lacks {missing:?}");
    }
}

#[test]
fn coordinator_and_worker_serve_every_metric_that_alerts_and_dashboard_use() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let addresses = [address(1), address(2)];
    let listen = addresses.each_ref().map(|a| format!("metrics.listen={a}"));
    // Tomorrow, so that there is one.
    let hour_ago = jiff::Zoned::now() - jiff::Span::new().hours(1);
    let deadline = format!("run.deadline='{}'", hour_ago.strftime("%H:%M"));
    let coordinator = cluster.coordinator(&[&listen[0], &deadline, "price.gpu_hour=2.5"]);
    let worker = cluster.start("worker", &[&listen[1], "price.gpu_hour=2.5"]);
    worker.wait_for("acknowledged", 2);
    // So that the run does not end while its coordinator is looked at.
    signal(&worker.child, "-STOP");
    assert_complete("coordinator", &addresses[0]);
    signal(&worker.child, "-CONT");
    assert_complete("worker", &addresses[1]);
    cluster.finish(coordinator, worker);
}

fn json_log(cluster: &Cluster, subcommand: &str, settings: &[&str]) -> Process {
    let mut command = cluster.tonight.command(subcommand, settings);
    command.env("LASER_LOG", "json");
    Process::start(command)
}

fn objects(log: &[String]) -> Vec<Value> {
    let parse = |line: &String| -> Value {
        let value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
        assert!(matches!(value, Value::Object(_)), "{line}");
        value
    };
    log.iter().map(parse).collect()
}

#[test]
fn json_logs_are_an_object_a_line_and_name_run_shard_and_pool() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = json_log(&cluster, "coordinator", &[]);
    coordinator.wait_for("queued shards", 1);
    let worker = json_log(&cluster, "worker", &[]);
    objects(&coordinator.assert_ends(0));
    let log = objects(&worker.terminate());
    let of_shards: Vec<&Value> = log.iter().filter(|line| line["span"]["shard"].is_u64()).collect();
    assert!(of_shards.len() > 10, "{log:?}");
    for line in of_shards {
        assert_eq!(line["span"]["run"], cluster.run_id(), "{line}");
        assert!(line["span"]["pool"].is_string(), "{line}");
    }
    cluster.assert_whole();
    let failed = json_log(&cluster, "worker", &["queue.url=nats://127.0.0.1:1"]);
    let log = objects(&failed.assert_ends(75));
    let last = log.last().unwrap();
    assert_eq!(last["level"], "error");
    assert!(last["message"].as_str().unwrap().contains("cannot connect to nats"), "{last}");
}
