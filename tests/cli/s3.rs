//! A night on an object store: a real S3 server, real processes.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::distributed::Cluster;
use crate::faults::{texts, without_run};
use crate::feast::{python_report, rows};
use crate::proxy::head_length;
use crate::server::{Server, installed};
use crate::{Workspace, assert_exit, entries, laser, stdout};

/// An S3 server with one bucket, `laser`.
pub(crate) struct S3(Server);

impl S3 {
    pub(crate) fn start() -> Self {
        let mut command = Command::new(installed("LASER_MOTO", "moto.sh"));
        command.args(["-H", "127.0.0.1", "-p", "0"]).env("PYTHONUNBUFFERED", "1");
        let server = Self(Server::start(command, "http://127.0.0.1:", "http://127.0.0.1:"));
        server.request("PUT", "/laser");
        server
    }

    pub(crate) fn port(&self) -> u16 {
        self.0.port
    }

    /// moto asks who signs, and does not check the signature.
    fn request(&self, method: &str, path: &str) -> Vec<u8> {
        let signed = "Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request\r\n";
        request(self.port(), method, path, signed)
    }

    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ENDPOINT", format!("http://127.0.0.1:{}", self.port())),
            ("AWS_ALLOW_HTTP", "true".into()),
            ("AWS_REGION", "us-east-1".into()),
            ("AWS_ACCESS_KEY_ID", "test".into()),
            ("AWS_SECRET_ACCESS_KEY", "test".into()),
        ]
    }

    /// Copies the published parts below a folder to `out` of a workspace, where texts are read from.
    pub(crate) fn copy_parts(&self, root: &str, workspace: &Workspace) {
        Self::copy(self.published(root), root, workspace);
    }

    /// Copies all objects below a folder to `out` of a workspace.
    pub(crate) fn copy_all(&self, root: &str, workspace: &Workspace) {
        Self::copy(self.objects(&format!("{root}/")), root, workspace);
    }

    fn copy(objects: BTreeMap<String, Vec<u8>>, root: &str, workspace: &Workspace) {
        for (key, bytes) in objects {
            let path: PathBuf = workspace.path(&key.replacen(root, "out", 1));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }

    /// All published objects below a folder, by key.
    pub(crate) fn published(&self, root: &str) -> BTreeMap<String, Vec<u8>> {
        self.objects(&format!("{root}/profiles/"))
    }

    /// All objects whose keys begin with a prefix.
    fn objects(&self, prefix: &str) -> BTreeMap<String, Vec<u8>> {
        let query = format!("/laser?list-type=2&prefix={prefix}&max-keys=1000");
        let listed = self.request("GET", &query);
        let listed = String::from_utf8(listed).unwrap();
        let keys = listed.split("<Key>").skip(1);
        keys.map(|key| {
            let key = key.split("</Key>").next().unwrap();
            (key.to_owned(), self.request("GET", &format!("/laser/{key}")))
        })
        .collect()
    }

    pub(crate) fn verify(&self, root: &str) -> Output {
        laser().args(["verify", &format!("s3://laser/{root}")]).envs(self.environment()).output().unwrap()
    }
}

/// The answer to a request without a body, which must succeed.
pub(crate) fn request(port: u16, method: &str, path: &str, headers: &str) -> Vec<u8> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\nConnection: close\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    answer.split_off(head_length(&answer).unwrap())
}

/// A server, and a workspace whose processes reach it.
fn start() -> (S3, Workspace) {
    let (s3, mut workspace) = (S3::start(), Workspace::new());
    workspace.environment = s3.environment();
    (s3, workspace)
}

#[test]
fn two_nights_on_s3_are_those_on_a_disk() {
    let ((s3, remote), local) = (start(), Workspace::new());
    let settings = ["output.path=s3://laser/out"];
    assert_exit(&remote.run(&settings), 0);
    let verified = s3.verify("out");
    assert_exit(&verified, 0);
    assert_eq!(stdout(&verified).matches("whole:").count(), 4);
    s3.copy_parts("out", &remote);
    assert_exit(&local.run(&[]), 0);
    assert_eq!(without_run(texts(&remote)), without_run(texts(&local)));
    // Again: the night is published, which only the store knows.
    assert_exit(&remote.run(&settings), 0);
}

#[test]
fn delta_tables_on_s3_are_read_whole() {
    let (s3, remote) = start();
    let settings = ["output.path=s3://laser/out", "output.table=delta"];
    assert_exit(&remote.run(&settings), 0);
    assert_exit(&remote.run(&settings), 0);
    let verified = s3.verify("out");
    assert_exit(&verified, 0);
    assert_eq!(stdout(&verified).matches("agrees: the table").count(), 2, "users and items");
    s3.copy_parts("out", &remote);
    let users = remote.path("out/profiles/kind=user");
    let night = |date: &str| rows(&users.join(format!("dt={date}"))).into_values();
    let of_both: Vec<Value> = night("2026-01-01").chain(night("2026-01-02")).collect();
    let tokens = |rows: &[Value]| rows.iter().map(|row| row["text_tokens"].as_i64().unwrap()).sum::<i64>();
    let second: Vec<Value> = night("2026-01-02").collect();
    let (script, examples) = ("tests/feast/delta_s3.py", "docs/examples/feast");
    let report = python_report(&[script, "s3://laser/out", examples, "2026-01-02"].map(Path::new), &s3.environment());
    let all = json!([of_both.len(), tokens(&of_both)]);
    let feast = json!([second.len(), tokens(&second)]);
    assert_eq!(report, json!({"deltalake": all, "polars": all, "duckdb": all, "feast": feast, "version": 2}));
}

#[test]
fn nights_on_s3_follow_each_other_and_leave() {
    let (s3, remote) = start();
    let dates = || {
        let listed = s3.request("GET", "/laser?list-type=2&prefix=out/&max-keys=1000");
        let listed = String::from_utf8(listed).unwrap();
        let has = |day: &&str| listed.contains(&format!("2026-01-{day}"));
        ["01", "02", "03"].into_iter().filter(has).collect::<Vec<_>>()
    };
    let settings = ["output.path=s3://laser/out", "output.keep_nights=2"];
    assert_exit(&remote.run(&settings), 0);
    assert_eq!(dates(), ["01", "02"]);
    let later = [&settings[..], &["run.date=2026-01-03"]].concat();
    assert_exit(&remote.run(&later), 0);
    assert_eq!(dates(), ["02", "03"], "runs, pools and profiles of the first night are gone");
    assert_exit(&s3.verify("out"), 0);
}

#[test]
fn workers_share_a_night_on_s3_and_keep_pools_in_a_cache() {
    let cluster = Cluster::on_s3("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[]);
    cluster.kill_worker_at("committed", 2);
    let other = cluster.worker();
    cluster.finish(coordinator, cluster.worker());
    other.terminate();
    assert!(entries(&cluster.tonight.path("cache")).len() > 1);
}
