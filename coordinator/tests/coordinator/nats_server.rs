//! Real NATS servers: an old one and a new one, each in a folder and on a port of its own.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use laser_coordinator::nats::{NatsClient, NatsConfig, NatsWorker, RunRef, connect};
use laser_schema::job::{Action, ShardJob};
use laser_schema::{Digest, Kind};
use nkeys::KeyPair;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa};
use tempfile::TempDir;

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Version {
    Old,
    New,
}

impl Version {
    fn binary(self) -> PathBuf {
        let name = match self {
            Self::Old => "LASER_NATS_OLD",
            Self::New => "LASER_NATS_NEW",
        };
        match std::env::var_os(name) {
            Some(path) => path.into(),
            None => panic!("{name} is not set: pass the tests with tests/run.sh, or `source tests/nats.sh` first"),
        }
    }
}

/// A running server; it is killed when dropped.
pub(crate) struct Server {
    dir: TempDir,
    binary: PathBuf,
    port: u16,
    secure: bool,
    environment: BTreeMap<&'static str, String>,
    child: Child,
}

impl Server {
    /// A server without users and TLS.
    pub(crate) fn start(version: Version) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = format!("jetstream {{ store_dir: {:?} }}", dir.path().join("store"));
        fs::write(dir.path().join("nats.conf"), store).unwrap();
        Self::launch(version, dir, BTreeMap::new(), false)
    }

    /// A server with the configuration that is shipped, changed as a test likes.
    pub(crate) fn start_shipped(version: Version, change: impl Fn(String) -> String) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let shipped = std::path::absolute("../deploy/nats/laser.conf").unwrap();
        let text = change(fs::read_to_string(shipped).unwrap());
        fs::write(dir.path().join("nats.conf"), text).unwrap();
        let mut environment = certificates(dir.path());
        environment.insert("LASER_NATS_STORE", path(dir.path(), "store"));
        for (variable, user) in [
            ("LASER_NKEY_COORDINATOR", "coordinator"),
            ("LASER_NKEY_WORKER", "worker"),
            ("LASER_NKEY_OPERATOR", "operator"),
        ] {
            environment.insert(variable, nkey(dir.path(), user));
        }
        Self::launch(version, dir, environment, true)
    }

    fn launch(version: Version, dir: TempDir, environment: BTreeMap<&'static str, String>, secure: bool) -> Self {
        let binary = version.binary();
        let (child, port) = spawn(&binary, dir.path(), &environment, None);
        Self { dir, binary, port, secure, environment, child }
    }

    /// As `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        let port = Some(self.port);
        (self.child, _) = spawn(&self.binary, self.dir.path(), &self.environment, port);
    }

    /// All that the server has stored; call it while the server is down.
    pub(crate) fn lose_store(&self) {
        fs::remove_dir_all(self.dir.path().join("store")).unwrap();
    }

    pub(crate) fn config(&self) -> NatsConfig {
        let scheme = if self.secure { "tls" } else { "nats" };
        NatsConfig {
            url: format!("{scheme}://127.0.0.1:{}", self.port),
            lease_seconds: 2,
            retry_seconds: 0,
            tls_ca: self.secure.then(|| self.dir.path().join("ca.pem")),
            ..Default::default()
        }
    }

    /// The configuration of a user of the shipped server.
    pub(crate) fn user(&self, name: &str) -> NatsConfig {
        NatsConfig {
            nkey_seed: Some(self.dir.path().join(format!("{name}.seed"))),
            inbox_prefix: Some(format!("_INBOX_{name}")),
            ..self.config()
        }
    }

    /// A file in the server's folder.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A coordinator, with the streams made.
    pub(crate) async fn coordinator(&self) -> NatsClient {
        let client = connect(&self.config(), "coordinator").await.unwrap();
        client.ensure_streams().await.unwrap();
        client
    }

    pub(crate) async fn worker(&self, name: &str, attempts: u32) -> NatsWorker {
        let config = NatsConfig { attempts, ..self.config() };
        let client = connect(&config, name).await.unwrap();
        NatsWorker::bind(client, None).await.unwrap()
    }

    pub(crate) async fn idle_worker(&self, idle: Duration) -> NatsWorker {
        let client = connect(&self.config(), "idle").await.unwrap();
        NatsWorker::bind(client, Some(idle)).await.unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a server and returns once it says that it is ready, with its port.
fn spawn(binary: &Path, dir: &Path, environment: &BTreeMap<&str, String>, port: Option<u16>) -> (Child, u16) {
    let port = port.map_or("-1".to_owned(), |port| port.to_string());
    let mut child = Command::new(binary)
        .args(["-c", "nats.conf", "-a", "127.0.0.1", "-p", &port])
        .current_dir(dir)
        .envs(environment)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let log = child.stderr.take().unwrap();
    let port = ready(log);
    (child, port)
}

fn ready(log: ChildStderr) -> u16 {
    let mut lines = BufReader::new(log).lines().map_while(Result::ok);
    let (mut seen, mut port) = (String::new(), None);
    for line in lines.by_ref() {
        if let Some((_, address)) = line.split_once("Listening for client connections on ") {
            port = address.rsplit(':').next().and_then(|p| p.trim().parse().ok());
        }
        if line.contains("Server is ready") {
            // The log is read to its end, since a full pipe stops the server.
            std::thread::spawn(move || lines.for_each(drop));
            return port.expect("a server that is ready has said its port");
        }
        seen += &(line + "\n");
    }
    panic!("the server did not start:\n{seen}");
}

/// A certificate authority, and a certificate of it for servers and clients on this machine.
fn certificates(dir: &Path) -> BTreeMap<&'static str, String> {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, rcgen::KeyPair::generate().unwrap()).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let certificate = CertificateParams::new(names).unwrap();
    let certificate = certificate.signed_by(&key, &authority).unwrap();
    let mut environment = BTreeMap::new();
    for (variable, file, text) in [
        ("LASER_NATS_CA", "ca.pem", authority.as_ref().pem()),
        ("LASER_NATS_CERT", "cert.pem", certificate.pem()),
        ("LASER_NATS_KEY", "key.pem", key.serialize_pem()),
    ] {
        fs::write(dir.join(file), text).unwrap();
        environment.insert(variable, path(dir, file));
    }
    environment
}

fn path(dir: &Path, file: &str) -> String {
    dir.join(file).to_str().unwrap().to_owned()
}

/// Writes a new user's seed and returns the public key.
pub(crate) fn nkey(dir: &Path, user: &str) -> String {
    let pair = KeyPair::new_user();
    fs::write(dir.join(format!("{user}.seed")), pair.seed().unwrap() + "\n").unwrap();
    pair.public_key()
}

pub(crate) fn run_ref(run: &str) -> RunRef {
    RunRef { run: run.to_owned(), output: "file:///output".to_owned(), plan_digest: Digest::of(run.as_bytes()) }
}

pub(crate) fn jobs(shards: u32) -> Vec<ShardJob> {
    let job = |shard| ShardJob {
        shard,
        action: Action::Generate,
        kind: Kind::User,
        pool: "pool".into(),
        rows: 1,
        prompt_tokens: 9,
        input: format!("shards/{shard}.parquet"),
        input_digest: Digest::of(b"input"),
        output: format!("profiles/{shard}.parquet"),
    };
    (0..shards).map(job).collect()
}
