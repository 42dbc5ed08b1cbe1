//! A night on Azure's blob storage: a real server of its protocol, real processes.

use std::fs;
use std::process::Command;

use crate::distributed::Cluster;
use crate::faults::{texts, without_run};
use crate::s3::request;
use crate::server::{Server, installed};
use crate::{Workspace, assert_exit, laser};

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

/// A blob server.
struct Azurite(Server);

impl Azurite {
    fn start() -> Self {
        let mut command = Command::new(installed("LASER_AZURITE", "azurite.sh"));
        command.args(["--blobHost", "127.0.0.1", "--blobPort", "0", "--silent"]);
        command.args(["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]);
        let words = "listens on http://127.0.0.1:";
        let server = Server::start(command, words, words);
        let made = Command::new("node").args(["-e", MAKE_CONTAINER, &server.port.to_string(), KEY]).status().unwrap();
        assert!(made.success());
        Self(server)
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        let url = format!("http://127.0.0.1:{}", self.0.port);
        vec![("AZURE_STORAGE_USE_EMULATOR", "true".into()), ("AZURITE_BLOB_STORAGE_URL", url)]
    }

    fn copy_parts(&self, workspace: &Workspace) {
        let container = "/devstoreaccount1/laser";
        let list = format!("{container}?restype=container&comp=list&prefix=out/profiles/");
        let listed = String::from_utf8(request(self.0.port, "GET", &list, "")).unwrap();
        for key in listed.split("<Name>").skip(1) {
            let key = key.split("</Name>").next().unwrap();
            let path = workspace.path(key);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let bytes = request(self.0.port, "GET", &format!("{container}/{key}"), "");
            fs::write(path, bytes).unwrap();
        }
    }
}

#[test]
fn workers_share_a_night_on_azure() {
    let azure = Azurite::start();
    let mut cluster = Cluster::new("LASER_NATS_NEW");
    cluster.move_output("az://laser/out", azure.environment());
    let coordinator = cluster.coordinator(&[]);
    cluster.kill_worker_at("writing", 2);
    let worker = cluster.worker();
    coordinator.assert_ends(0);
    worker.terminate();
    let verified = laser().args(["verify", "az://laser/out"]).envs(azure.environment()).output();
    assert_exit(&verified.unwrap(), 0);
    azure.copy_parts(&cluster.tonight);
    assert_eq!(without_run(texts(&cluster.tonight)), cluster.expected);
}
