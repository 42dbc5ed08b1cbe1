//! Real NATS servers: an old one and a new one, each in a folder and on a port of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use laser_coordinator::nats::{NatsClient, NatsConfig, NatsWorker, RunRef, connect};
use laser_schema::job::{Action, ShardJob};
use laser_schema::{Digest, Kind};
use nkeys::KeyPair;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa};
use tempfile::TempDir;

use crate::server::{self, installed};

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Version {
    Old,
    New,
}

/// A NATS server.
pub(crate) struct Server {
    dir: TempDir,
    binary: String,
    secure: bool,
    environment: BTreeMap<&'static str, String>,
    process: server::Server,
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
        let variable = if version == Version::Old { "LASER_NATS_OLD" } else { "LASER_NATS_NEW" };
        let binary = installed(variable, "nats.sh");
        let process = serve(&binary, dir.path(), &environment, "-1");
        Self { dir, binary, secure, environment, process }
    }

    /// As `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    pub(crate) fn restart(&mut self) {
        let port = self.process.port.to_string();
        self.process = serve(&self.binary, self.dir.path(), &self.environment, &port);
    }

    pub(crate) fn config(&self) -> NatsConfig {
        let scheme = if self.secure { "tls" } else { "nats" };
        NatsConfig {
            url: format!("{scheme}://127.0.0.1:{}", self.process.port),
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

fn serve(binary: &str, dir: &Path, environment: &BTreeMap<&str, String>, port: &str) -> server::Server {
    let mut command = Command::new(binary);
    command.args(["-c", "nats.conf", "-a", "127.0.0.1", "-p", port]).current_dir(dir).envs(environment);
    server::Server::start(command, "Listening for client connections on ", "Server is ready")
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
        value: None,
        input: format!("shards/{shard}.parquet"),
        input_digest: Digest::of(b"input"),
        output: format!("profiles/{shard}.parquet"),
    };
    (0..shards).map(job).collect()
}
