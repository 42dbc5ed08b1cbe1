//! A night on Azure's blob storage: a real server of its protocol, real processes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::distributed::Cluster;
use crate::faults::{texts, without_run};
use crate::s3::request;
use crate::{Workspace, assert_exit};

/// Makes the container `laser`, which everybody may read, in the emulator's well-known account.
const MAKE_CONTAINER: &str = r"
const [port, key] = process.argv.slice(1);
const headers = {
    'x-ms-blob-public-access': 'container',
    'x-ms-date': new Date().toUTCString(),
    'x-ms-version': '2021-08-06',
};
const lines = Object.entries(headers).map(([name, value]) => `${name}:${value}\n`).join('');
const text = 'PUT' + '\n'.repeat(12) + lines + '/devstoreaccount1/devstoreaccount1/laser\nrestype:container';
const sign = require('crypto').createHmac('sha256', Buffer.from(key, 'base64'));
headers.Authorization = 'SharedKey devstoreaccount1:' + sign.update(text).digest('base64');
const path = '/devstoreaccount1/laser?restype=container';
const answer = (got) => process.exit(got.statusCode === 201 ? 0 : 1);
require('http').request({ port, method: 'PUT', path, headers }, answer).end();
";
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// A blob server; killed when dropped.
struct Azurite {
    child: Child,
    port: u16,
}

impl Azurite {
    fn start() -> Self {
        let binary = std::env::var_os("LASER_AZURITE").unwrap_or_else(|| {
            panic!("LASER_AZURITE is not set: pass the tests with tests/run.sh, or `source tests/azurite.sh` first")
        });
        let mut child = Command::new(binary)
            .args(["--blobHost", "127.0.0.1", "--blobPort", "0", "--silent"])
            .args(["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let port = lines
            .find_map(|line| line.split_once("listens on http://127.0.0.1:")?.1.trim().parse().ok())
            .expect("azurite did not start");
        std::thread::spawn(move || lines.for_each(drop));
        let server = Self { child, port };
        let made = Command::new("node").args(["-e", MAKE_CONTAINER, &port.to_string(), KEY]).status().unwrap();
        assert!(made.success());
        server
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        let url = format!("http://127.0.0.1:{}", self.port);
        vec![("AZURE_STORAGE_USE_EMULATOR", "true".into()), ("AZURITE_BLOB_STORAGE_URL", url)]
    }

    fn copy_parts(&self, workspace: &Workspace) {
        let container = "/devstoreaccount1/laser";
        let list = format!("{container}?restype=container&comp=list&prefix=out/profiles/");
        let listed = String::from_utf8(request(self.port, "GET", &list, "")).unwrap();
        for key in listed.split("<Name>").skip(1) {
            let key = key.split("</Name>").next().unwrap();
            let path = workspace.path(key);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let bytes = request(self.port, "GET", &format!("{container}/{key}"), "");
            fs::write(path, bytes).unwrap();
        }
    }
}

impl Drop for Azurite {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn workers_share_a_night_on_azure() {
    let azure = Azurite::start();
    let mut cluster = Cluster::new("LASER_NATS_NEW");
    cluster.move_output("az://laser/out", azure.environment());
    let coordinator = cluster.start("coordinator");
    coordinator.wait_for("queued shards", 1);
    let killed = cluster.start("worker");
    killed.wait_for("writing", 2);
    killed.kill();
    let worker = cluster.start("worker");
    coordinator.assert_ends(0);
    worker.terminate();
    assert_exit(&cluster.laser(&["verify", "az://laser/out"]), 0);
    azure.copy_parts(&cluster.tonight);
    assert_eq!(without_run(texts(&cluster.tonight)), cluster.expected);
}
