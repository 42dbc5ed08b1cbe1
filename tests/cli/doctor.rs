//! `laser doctor` finds what is wrong before a night does, and says what to mend.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Command, Output};

use crate::distributed::{Cluster, Nats};
use crate::proxy::{Fault, Proxy};
use crate::s3::S3;
use crate::{Workspace, assert_exit, fixture, stdout};

fn doctor(workspace: &Workspace, settings: &[&str]) -> Command {
    workspace.command("doctor", settings)
}

/// One thing is wrong, and its line says these words.
#[track_caller]
fn assert_wrong(output: &Output, words: &[&str]) {
    assert_exit(output, 65);
    let text = stdout(output);
    let wrong: Vec<&str> = text.lines().filter(|l| l.starts_with("WRONG ")).collect();
    assert_eq!(wrong.len(), 1, "{text}");
    for word in words {
        assert!(wrong[0].contains(word), "no {word:?} in {:?}", wrong[0]);
    }
}

fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn all_is_well_before_a_night_and_after() {
    let cluster = Cluster::on_s3("LASER_NATS_OLD");
    let before = doctor(&cluster.tonight, &[]).output().unwrap();
    assert_exit(&before, 0);
    let text = stdout(&before);
    for line in ["ok    model", "ok    input", "ok    previous", "ok    queue", "ok    run: none yet"] {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
    assert!(text.contains("conditional puts have one winner, clocks "), "{text}");
    let (coordinator, worker) = (cluster.start("coordinator"), cluster.start("worker"));
    coordinator.assert_ends(0);
    worker.terminate();
    assert_exit(&doctor(&cluster.tonight, &[]).output().unwrap(), 0);
    cluster.assert_whole();
}

#[test]
fn a_queue_that_will_not_do_is_told() {
    let workspace = Workspace::new();
    let at = |port: u16| format!("queue.url=nats://127.0.0.1:{port}");
    let absent = doctor(&workspace, &[&at(closed_port())]).output().unwrap();
    assert_wrong(&absent, &["cannot connect to nats at 127.0.0.1", "check that the server runs"]);
    let old = doctor(&workspace, &[&at(greet("2.8.4"))]).output().unwrap();
    assert_wrong(&old, &["nats server granny has version 2.8.4, expected 2.9.0 or later", "upgrade it"]);
    let user = "authorization { users: [{ user: a, password: b, permissions: { publish: nothing } }] }";
    let server = Nats::start_with("LASER_NATS_NEW", user);
    let url = format!("queue.url=nats://a:b@127.0.0.1:{}", server.port);
    let forbidden = doctor(&workspace, &[&url]).output().unwrap();
    assert_wrong(&forbidden, &["neither coordinator", "nor worker", "deploy/nats/laser.conf"]);
}

/// Greets as a server would that cannot be installed any more. Returns its port.
fn greet(version: &str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let info = serde_json::json!({
        "server_id": "X", "server_name": "granny", "version": version, "jetstream": true,
        "headers": true, "max_payload": 1_048_576, "proto": 1,
    });
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        write!(socket, "INFO {info}\r\n").unwrap();
        let lines = BufReader::new(socket.try_clone().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            if line.starts_with("PING") {
                socket.write_all(b"PONG\r\n").unwrap();
            }
        }
    });
    port
}

#[test]
fn a_store_that_will_not_do_is_told() {
    let (s3, mut workspace) = (S3::start(), Workspace::new());
    workspace.environment = s3.environment();
    let proxy = Proxy::http(s3.port);
    let at = |port: u16| {
        let mut command = doctor(&workspace, &["output.path=s3://laser/out", "previous=[]"]);
        command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{port}"));
        command.output().unwrap()
    };
    assert_wrong(&at(closed_port()), &["output s3://laser/out", "did not answer", "endpoint"]);
    proxy.set(Fault::Answer(403));
    assert_wrong(&at(proxy.port), &["output s3://laser/out", "403"]);
    proxy.set(Fault::Unconditional);
    assert_wrong(&at(proxy.port), &["it knows no conditional put", "use a store that does"]);
    proxy.set(Fault::Modified("Mon, 05 Jan 2026 10:00:00 GMT"));
    assert_wrong(&at(proxy.port), &["its clock and this machine's are", "synchronise them (NTP)"]);
    proxy.set(Fault::None);
    assert_exit(&at(proxy.port), 0);
}

#[test]
fn a_worker_with_another_model_or_a_damaged_pool_is_told() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.start("coordinator");
    coordinator.wait_for("queued shards", 1);
    coordinator.kill();
    let run = cluster.run_id();
    let well = doctor(&cluster.tonight, &[]).output().unwrap();
    assert_exit(&well, 0);
    assert!(stdout(&well).contains(&format!("{run} can be worked on")), "{}", stdout(&well));
    let model = cluster.tonight.path("model");
    fs::create_dir(&model).unwrap();
    for file in fs::read_dir(fixture()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    let weights = model.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(weights, bytes).unwrap();
    let other = format!("model.path={}", model.display());
    let other = doctor(&cluster.tonight, &[&other]).output().unwrap();
    assert_wrong(&other, &[&run, "it wants model = ", "work with the coordinator's [model]"]);
    let pools = cluster.tonight.path(&format!("out/pools/{run}"));
    let files = fs::read_dir(pools).unwrap().map(|f| f.unwrap().path());
    let pool = files.filter(|p| p.extension().is_some_and(|e| e == "pool")).min().unwrap();
    let mut bytes = fs::read(&pool).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&pool, bytes).unwrap();
    let damaged = doctor(&cluster.tonight, &[]).output().unwrap();
    assert_wrong(&damaged, &[&run, pool.file_name().unwrap().to_str().unwrap()]);
}
