//! The same night over NATS and several processes: whatever dies, the rows are those of one undisturbed process.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

use crate::faults::{signal, texts, without_run};
use crate::proxy::Proxy;
use crate::s3::S3;
use crate::{Workspace, assert_exit, stderr, stdout};

/// A NATS server of its own, killed when dropped.
pub(crate) struct Nats {
    dir: TempDir,
    binary: PathBuf,
    pub(crate) port: u16,
    child: Child,
}

impl Nats {
    pub(crate) fn start(variable: &str) -> Self {
        Self::start_with(variable, "")
    }

    /// With more configuration.
    pub(crate) fn start_with(variable: &str, configuration: &str) -> Self {
        let binary = std::env::var_os(variable).unwrap_or_else(|| {
            panic!("{variable} is not set: pass the tests with tests/run.sh, or `source tests/nats.sh` first")
        });
        let (dir, binary) = (tempfile::tempdir().unwrap(), PathBuf::from(binary));
        fs::write(dir.path().join("nats.conf"), configuration).unwrap();
        let (child, port) = spawn(&binary, dir.path(), "-1");
        Self { dir, binary, port, child }
    }

    /// As `kill -9` does, and a start on the same store and port.
    pub(crate) fn kill_and_restart(&mut self) {
        self.restart_after(|_| ());
    }

    /// The same, on an empty disk.
    pub(crate) fn lose_everything(&mut self) {
        self.restart_after(|dir| fs::remove_dir_all(dir.join("jetstream")).unwrap());
    }

    fn restart_after(&mut self, change: impl FnOnce(&Path)) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        change(self.dir.path());
        let port = self.port.to_string();
        (self.child, _) = spawn(&self.binary, self.dir.path(), &port);
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a server and returns once it says that it is ready, with its port.
fn spawn(binary: &Path, dir: &Path, port: &str) -> (Child, u16) {
    let mut child = Command::new(binary)
        .current_dir(dir)
        .args(["-c", "nats.conf", "-js", "-sd", ".", "-a", "127.0.0.1", "-p", port])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut port = None;
    for line in lines.by_ref() {
        if let Some((_, address)) = line.split_once("Listening for client connections on ") {
            port = address.rsplit(':').next().and_then(|p| p.trim().parse().ok());
        }
        if line.contains("Server is ready") {
            break;
        }
    }
    let port = port.unwrap_or_else(|| panic!("{} did not start", binary.display()));
    // Read on, since a full pipe stops the server.
    std::thread::spawn(move || lines.for_each(drop));
    (child, port)
}

/// Tonight's half of the demo, with a queue; and what one process makes of the same.
pub(crate) struct Cluster {
    pub(crate) nats: Nats,
    /// Where the output is, if not on the disk.
    pub(crate) store: Option<S3>,
    pub(crate) tonight: Workspace,
    /// The run of one process, whose data is read.
    _inputs: Workspace,
    pub(crate) expected: BTreeMap<(String, String), String>,
}

impl Cluster {
    pub(crate) fn new(server: &str) -> Self {
        let embedded = Workspace::new();
        assert_exit(&embedded.run(&[]), 0);
        let expected = without_run(texts(&embedded));
        let (nats, tonight) = (Nats::start(server), Workspace::new());
        let config = fs::read_to_string(tonight.path("laser.toml")).unwrap();
        let demo = config.find("[demo]").unwrap()..config.find("[[input]]").unwrap();
        let own = config.find("[[previous]]").unwrap()..config.find("[output]").unwrap();
        let previous = format!("[[previous]]\npath = \"{}/out\"\n", embedded.path("").display());
        let queue = format!(
            "[queue]\nurl = \"nats://127.0.0.1:{}\"\nlease_seconds = 3\nretry_seconds = 0\nattempts = 9\n",
            nats.port
        );
        let config = config.replace(&config[own], &previous).replace(&config[demo], "") + &queue;
        fs::write(tonight.path("laser.toml"), config).unwrap();
        Self {
            nats,
            store: None,
            tonight,
            _inputs: embedded,
            expected: expected.into_iter().filter(|((folder, _), _)| folder.contains("dt=2026-01-02")).collect(),
        }
    }

    /// The same with the output on an S3 server.
    pub(crate) fn on_s3(server: &str) -> Self {
        let (mut cluster, s3) = (Self::new(server), S3::start());
        cluster.move_output("s3://laser/out", s3.environment());
        cluster.store = Some(s3);
        cluster
    }

    /// Has the output on a remote store, which the environment says how to reach.
    pub(crate) fn move_output(&mut self, url: &str, environment: Vec<(&'static str, String)>) {
        self.tonight.environment = environment;
        let file = self.tonight.path("laser.toml");
        let config = fs::read_to_string(&file).unwrap();
        let out = format!("path = \"{}\"", self.tonight.path("out").display());
        assert!(config.contains(&out), "{config}");
        let cache = self.tonight.path("cache");
        let config = config.replace(&out, &format!("path = {url:?}")) + &format!("[worker]\ncache = {cache:?}\n");
        fs::write(file, config).unwrap();
    }

    pub(crate) fn start(&self, subcommand: &str) -> Process {
        self.start_with(subcommand, &[])
    }

    pub(crate) fn start_with(&self, subcommand: &str, settings: &[&str]) -> Process {
        Process::start(self.tonight.command(subcommand, settings))
    }

    /// Starts a process that reaches the store through a proxy.
    pub(crate) fn start_at_store(&self, subcommand: &str, proxy: &Proxy) -> Process {
        let mut command = self.tonight.command(subcommand, &["queue.attempts=2"]);
        command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{}", proxy.port));
        Process::start(command)
    }

    /// Starts a process that reaches NATS through a proxy.
    pub(crate) fn start_at_nats(&self, subcommand: &str, proxy: &Proxy) -> Process {
        let url = format!("queue.url=nats://127.0.0.1:{}", proxy.port);
        self.start_with(subcommand, &[&url])
    }

    /// What was published is, row for row, what one process publishes.
    #[track_caller]
    pub(crate) fn assert_whole(&self) {
        match &self.store {
            None => assert_exit(&self.tonight.verify(), 0),
            Some(s3) => {
                assert_exit(&s3.verify("out"), 0);
                s3.copy_parts("out", &self.tonight);
            }
        }
        assert_eq!(without_run(texts(&self.tonight)), self.expected);
    }

    pub(crate) fn run_id(&self) -> String {
        let runs = fs::read_dir(self.tonight.path("out/runs")).unwrap();
        let mut names = runs.map(|run| run.unwrap().file_name().into_string().unwrap());
        names.next().unwrap()
    }

    pub(crate) fn laser(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_laser"));
        command.envs(self.tonight.environment.clone());
        command.args(args).output().unwrap()
    }
}

/// A process whose log is read line by line.
pub(crate) struct Process {
    pub(crate) child: Child,
    log: std::sync::mpsc::Receiver<String>,
    /// What was waited through.
    seen: RefCell<Vec<String>>,
}

impl Process {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command
            .env("RUST_LOG", "laser=info,laser_worker=debug,laser_coordinator=info")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // More lines than a test logs: nobody may wait for the reader.
        let (send, log) = std::sync::mpsc::sync_channel(100_000);
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        Self { child, log, seen: RefCell::default() }
    }

    /// Waits until the process has logged `word` a number of times.
    #[track_caller]
    pub(crate) fn wait_for(&self, word: &str, times: usize) {
        let mut seen = self.seen.borrow_mut();
        for _ in 0..times {
            loop {
                let Ok(line) = self.log.recv() else {
                    panic!("{word:?} was not logged {times} times:\n{}", seen.join("\n"));
                };
                seen.push(line);
                if seen.last().is_some_and(|line| line.contains(word)) {
                    break;
                }
            }
        }
    }

    /// Returns all that it has logged.
    pub(crate) fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.whole_log()
    }

    fn whole_log(self) -> Vec<String> {
        let mut log = self.seen.into_inner();
        log.extend(self.log.iter());
        log
    }

    #[track_caller]
    pub(crate) fn terminate(self) {
        signal(&self.child, "-TERM");
        self.assert_ends(143);
    }

    #[track_caller]
    pub(crate) fn assert_ends(self, code: i32) {
        self.log_until_end(code);
    }

    /// All that it has logged until its end.
    #[track_caller]
    pub(crate) fn log_until_end(mut self, code: i32) -> Vec<String> {
        let status = self.child.wait().unwrap();
        let log = self.whole_log();
        assert_eq!(status.code(), Some(code), "{}", log.join("\n"));
        log
    }
}

#[test]
fn two_workers_make_the_night_of_one_process_on_an_old_and_a_new_server() {
    for server in ["LASER_NATS_OLD", "LASER_NATS_NEW"] {
        let cluster = Cluster::new(server);
        let coordinator = cluster.start("coordinator");
        coordinator.wait_for("queued shards", 1);
        let idle = || Process::start(cluster.tonight.command("worker", &["worker.idle_seconds=3"]));
        let workers = [idle(), idle()];
        coordinator.assert_ends(0);
        workers.into_iter().for_each(|worker| worker.assert_ends(0));
        cluster.assert_whole();
        // Again: it is published, and nobody has to work.
        assert_exit(&cluster.tonight.command("coordinator", &[]).output().unwrap(), 0);
        let status = cluster.tonight.command("status", &[]).output().unwrap();
        assert_exit(&status, 0);
        assert!(stdout(&status).contains("users published"), "{}", stdout(&status));
        cluster.assert_whole();
    }
}

/// After the lease, before, during and after the write, and after the acknowledgement.
#[test]
fn workers_killed_anywhere_lose_and_double_nothing() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.start("coordinator");
    coordinator.wait_for("queued shards", 1);
    for word in ["leased", "writing", "committed", "acknowledged", "leased"] {
        let worker = cluster.start("worker");
        worker.wait_for(word, 2);
        worker.kill();
    }
    let worker = cluster.start("worker");
    coordinator.assert_ends(0);
    worker.terminate();
    cluster.assert_whole();
}

#[test]
fn a_server_and_a_coordinator_killed_three_times_lose_and_double_nothing() {
    let mut cluster = Cluster::new("LASER_NATS_OLD");
    let worker = {
        let coordinator = cluster.start("coordinator");
        coordinator.wait_for("queued shards", 1);
        let worker = cluster.start("worker");
        worker.wait_for("acknowledged", 1);
        coordinator.kill();
        worker
    };
    for _ in 0..3 {
        cluster.nats.kill_and_restart();
        let coordinator = cluster.start("coordinator");
        worker.wait_for("acknowledged", 1);
        coordinator.kill();
    }
    let coordinators = [cluster.start("coordinator"), cluster.start("coordinator")];
    coordinators.into_iter().for_each(|coordinator| coordinator.assert_ends(0));
    worker.terminate();
    cluster.assert_whole();
}

#[test]
fn a_worker_that_was_stopped_past_its_lease_changes_nothing() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.start("coordinator");
    coordinator.wait_for("queued shards", 1);
    let zombie = cluster.start("worker");
    zombie.wait_for("leased", 2);
    signal(&zombie.child, "-STOP");
    let worker = cluster.start("worker");
    coordinator.assert_ends(0);
    let published = cluster.tonight.parts();
    signal(&zombie.child, "-CONT");
    zombie.wait_for("created=Exists", 1);
    zombie.terminate();
    worker.terminate();
    assert_eq!(cluster.tonight.parts(), published);
    cluster.assert_whole();
}

#[test]
fn a_terminated_worker_gives_its_shards_back() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.start("coordinator");
    coordinator.wait_for("queued shards", 1);
    let terminated = cluster.start("worker");
    terminated.wait_for("leased", 2);
    terminated.terminate();
    let worker = cluster.start("worker");
    coordinator.assert_ends(0);
    worker.terminate();
    cluster.assert_whole();
}

#[test]
fn a_shard_that_always_fails_is_a_dead_letter_and_can_be_replayed() {
    let cluster = Cluster::new("LASER_NATS_OLD");
    let coordinator = cluster.start("coordinator");
    coordinator.wait_for("queued shards", 1);
    let run = cluster.run_id();
    let shards = cluster.tonight.path(&format!("out/runs/{run}/shards"));
    let input = fs::read_dir(shards).unwrap().map(|f| f.unwrap().path());
    let input = input.filter(|p| !p.file_name().unwrap().to_string_lossy().starts_with("audit")).min().unwrap();
    let whole = fs::read(&input).unwrap();
    fs::write(&input, &whole[1..]).unwrap();
    let worker = Process::start(cluster.tonight.command("worker", &["queue.attempts=2"]));
    coordinator.assert_ends(75);
    worker.terminate();
    let config = cluster.tonight.path("laser.toml").display().to_string();
    let listed = cluster.laser(&["dlq", "list", &config, &run]);
    assert_exit(&listed, 0);
    assert!(
        stdout(&listed).contains("after 2 attempts") && stdout(&listed).contains("1 dead letters"),
        "{}",
        stdout(&listed)
    );
    assert!(stdout(&listed).contains("do not match the plan's digest"), "{}", stdout(&listed));
    fs::write(&input, &whole).unwrap();
    let replayed = cluster.laser(&["dlq", "replay", &config, &run]);
    assert_exit(&replayed, 0);
    assert!(stdout(&replayed).contains("1 shards queued again"), "{}", stdout(&replayed));
    let (coordinator, worker) = (cluster.start("coordinator"), cluster.start("worker"));
    coordinator.assert_ends(0);
    worker.terminate();
    cluster.assert_whole();
}

#[test]
fn at_the_deadline_what_is_there_is_published_and_late_workers_change_nothing() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.start("coordinator");
    coordinator.wait_for("queued shards", 1);
    let late = cluster.start("worker");
    late.wait_for("leased", 1);
    signal(&late.child, "-STOP");
    coordinator.kill();
    // The first such time after the plan, so it does not matter how long a start takes.
    let soon = jiff::Zoned::now() + jiff::Span::new().seconds(1);
    let mut command = cluster.tonight.command("coordinator", &[]);
    command.args(["--deadline", &soon.strftime("%H:%M:%S").to_string()]);
    command.args(["--min-coverage", "0"]);
    Process::start(command).assert_ends(0);
    let published = cluster.tonight.parts();
    signal(&late.child, "-CONT");
    late.wait_for("created=Exists", 1);
    late.terminate();
    assert_eq!(cluster.tonight.parts(), published);
    assert_exit(&cluster.tonight.verify(), 0);
    let errors = fs::read_dir(cluster.tonight.path("out/profiles/kind=user/dt=2026-01-02")).unwrap();
    let folder = errors.map(|run| run.unwrap().path()).next().unwrap();
    let errors = fs::read_to_string(folder.join("_errors.jsonl")).unwrap();
    assert!(errors.contains("not generated before the deadline"), "{errors}");
}

#[test]
fn a_cancelled_run_stops_and_resumes() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let config = cluster.tonight.path("laser.toml").display().to_string();
    let mut coordinator = cluster.tonight.command("coordinator", &[]);
    coordinator.args(["--previous", "latest"]);
    let coordinator = Process::start(coordinator);
    coordinator.wait_for("queued shards", 1);
    let run = cluster.run_id();
    assert_exit(&cluster.laser(&["cancel", &config, &run]), 0);
    coordinator.assert_ends(75);
    let refused = cluster.laser(&["coordinator", &config, "--previous", "latest"]);
    assert_exit(&refused, 75);
    assert!(stderr(&refused).contains("was cancelled"), "{}", stderr(&refused));
    let other = cluster.laser(&["resume", &config, &run]);
    assert_exit(&other, 65);
    assert!(stderr(&other).contains("another --previous"), "{}", stderr(&other));
    let worker = cluster.start("worker");
    let resumed = cluster.laser(&["resume", &config, &run, "--previous", "latest"]);
    assert_exit(&resumed, 0);
    worker.terminate();
    cluster.assert_whole();
    let unknown = cluster.laser(&["cancel", &config, "2026-01-01-00000000"]);
    assert_exit(&unknown, 65);
    assert!(stderr(&unknown).contains("no run"), "{}", stderr(&unknown));
}

#[test]
fn a_worker_of_another_configuration_is_refused() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.start("coordinator");
    coordinator.wait_for("queued shards", 1);
    let mut other = cluster.tonight.command("worker", &["generate.max_new_tokens=25"]);
    let output = other.output().unwrap();
    assert_exit(&output, 65);
    assert!(stderr(&output).contains("max_new_tokens = 24") && stderr(&output).contains("25"), "{}", stderr(&output));
    let worker = cluster.start("worker");
    coordinator.assert_ends(0);
    worker.terminate();
    cluster.assert_whole();
}
