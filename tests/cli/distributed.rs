//! The same night over NATS and several processes: whatever dies, the rows are those of one undisturbed process.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

use crate::cycle::yesterday;
use crate::faults::{FAULTY, faulty_device, signal, texts, without_run};
use crate::proxy::{Fault, Proxy};
use crate::s3::S3;
use crate::server::{Server, installed};
use crate::{
    TONIGHT, Workspace, assert_contains, assert_exit, assert_prints, assert_refused, entries, flip_bit, laser, only,
    stderr,
};

/// A NATS server of its own.
pub(crate) struct Nats {
    dir: TempDir,
    binary: String,
    server: Server,
}

impl Nats {
    /// The server that the variable names, with more configuration than its folder and port.
    pub(crate) fn start(variable: &str, configuration: &str) -> Self {
        let (dir, binary) = (tempfile::tempdir().unwrap(), installed(variable, "nats.sh"));
        fs::write(dir.path().join("nats.conf"), configuration).unwrap();
        let server = Self::serve(&binary, dir.path(), "-1");
        Self { dir, binary, server }
    }

    fn serve(binary: &str, dir: &Path, port: &str) -> Server {
        let mut command = Command::new(binary);
        command.current_dir(dir).args(["-c", "nats.conf", "-js", "-sd", ".", "-a", "127.0.0.1", "-p", port]);
        Server::start(command, "Listening for client connections on ", "Server is ready")
    }

    pub(crate) fn port(&self) -> u16 {
        self.server.port
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
        self.server.kill();
        change(self.dir.path());
        self.server = Self::serve(&self.binary, self.dir.path(), &self.port().to_string());
    }
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
        let nats = Nats::start(server, "");
        let previous = format!("[[previous]]\npath = \"{}\"\n", embedded.path("out").display());
        let queue = format!(
            "[queue]\nurl = \"nats://127.0.0.1:{}\"\nlease_seconds = 3\nretry_seconds = 0\nattempts = 9\n",
            nats.port()
        );
        Self {
            nats,
            store: None,
            tonight: Workspace::with(&[&previous, TONIGHT, &queue]),
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
        let cache = self.tonight.path("cache").display().to_string();
        self.tonight.environment.extend([("LASER_OUTPUT__PATH", url.to_owned()), ("LASER_WORKER__CACHE", cache)]);
    }

    pub(crate) fn start(&self, subcommand: &str, settings: &[&str]) -> Process {
        Process::start(self.tonight.command(subcommand, settings))
    }

    pub(crate) fn worker(&self) -> Process {
        self.start("worker", &[])
    }

    /// Starts a coordinator, and returns once it has queued shards.
    pub(crate) fn coordinator(&self, settings: &[&str]) -> Process {
        let coordinator = self.start("coordinator", settings);
        coordinator.wait_for("queued shards", 1);
        coordinator
    }

    /// Kills a worker once it has logged a word a number of times.
    pub(crate) fn kill_worker_at(&self, word: &str, times: usize) {
        let worker = self.worker();
        worker.wait_for(word, times);
        worker.kill();
    }

    /// The coordinator publishes the night, and the night is whole.
    #[track_caller]
    pub(crate) fn finish(&self, coordinator: Process, worker: Process) {
        coordinator.assert_ends(0);
        worker.terminate();
        self.assert_whole();
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
        self.start(subcommand, &[&url])
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

    pub(crate) fn run_folder(&self) -> PathBuf {
        only(&self.tonight.path("out/runs"))
    }

    pub(crate) fn run_id(&self) -> String {
        self.run_folder().file_name().unwrap().to_str().unwrap().to_owned()
    }

    /// A subcommand of this configuration with further arguments.
    fn laser(&self, subcommand: &[&str], args: &[&str]) -> Output {
        let mut command = laser();
        command.args(subcommand).arg(self.tonight.path("laser.toml")).args(args).output().unwrap()
    }

    /// A coordinator that publishes what is there a second after it is started, whatever that is.
    pub(crate) fn seal(&self, settings: &[&str]) {
        // The first such time after the plan, so it does not matter how long a start takes.
        let soon = jiff::Zoned::now() + jiff::Span::new().seconds(1);
        let mut command = self.tonight.command("coordinator", settings);
        command.args(["--deadline", &soon.strftime("%H:%M:%S").to_string(), "--min-coverage", "0"]);
        Process::start(command).assert_ends(0);
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

    /// Returns all that it has logged.
    #[track_caller]
    pub(crate) fn terminate(self) -> Vec<String> {
        signal(&self.child, "-TERM");
        self.assert_ends(143)
    }

    /// Returns all that it has logged.
    #[track_caller]
    pub(crate) fn assert_ends(mut self, code: i32) -> Vec<String> {
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
        let coordinator = cluster.coordinator(&[]);
        let workers = [1, 2].map(|_| cluster.start("worker", &["worker.idle_seconds=3"]));
        for process in [coordinator].into_iter().chain(workers) {
            process.assert_ends(0);
        }
        cluster.assert_whole();
        // Again: it is published, and nobody has to work.
        assert_exit(&cluster.tonight.output("coordinator", &[]), 0);
        assert_prints(&cluster.tonight.output("status", &[]), &["users published"]);
        cluster.assert_whole();
    }
}

/// After the lease, before, during and after the write, and after the acknowledgement.
#[test]
fn workers_killed_anywhere_lose_and_double_nothing() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[]);
    for word in ["leased", "writing", "committed", "acknowledged", "leased"] {
        cluster.kill_worker_at(word, 2);
    }
    cluster.finish(coordinator, cluster.worker());
}

#[test]
fn a_server_and_a_coordinator_killed_three_times_lose_and_double_nothing() {
    let mut cluster = Cluster::new("LASER_NATS_OLD");
    let coordinator = cluster.coordinator(&[]);
    let worker = cluster.worker();
    worker.wait_for("acknowledged", 1);
    coordinator.kill();
    for _ in 0..3 {
        cluster.nats.kill_and_restart();
        let coordinator = cluster.start("coordinator", &[]);
        worker.wait_for("acknowledged", 1);
        coordinator.kill();
    }
    let [one, two] = [1, 2].map(|_| cluster.start("coordinator", &[]));
    one.assert_ends(0);
    cluster.finish(two, worker);
}

/// A worker that was stopped when it had leased some shards goes on after the night was published.
#[track_caller]
fn assert_changes_nothing(cluster: &Cluster, late: Process) {
    let published = cluster.tonight.parts();
    signal(&late.child, "-CONT");
    late.wait_for("created=Exists", 1);
    late.terminate();
    assert_eq!(cluster.tonight.parts(), published);
}

#[test]
fn a_worker_that_was_stopped_past_its_lease_changes_nothing() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[]);
    let zombie = cluster.worker();
    zombie.wait_for("leased", 2);
    signal(&zombie.child, "-STOP");
    cluster.finish(coordinator, cluster.worker());
    assert_changes_nothing(&cluster, zombie);
    cluster.assert_whole();
}

#[test]
fn a_terminated_worker_gives_its_shards_back() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[]);
    let terminated = cluster.worker();
    terminated.wait_for("leased", 2);
    terminated.terminate();
    cluster.finish(coordinator, cluster.worker());
}

#[test]
fn a_shard_that_always_fails_is_a_dead_letter_and_can_be_replayed() {
    let cluster = Cluster::new("LASER_NATS_OLD");
    let coordinator = cluster.coordinator(&[]);
    let run = cluster.run_id();
    let inputs = entries(&cluster.run_folder().join("shards"));
    let is_audit = |input: &PathBuf| input.file_name().unwrap().to_str().unwrap().starts_with("audit");
    let input = inputs.iter().find(|input| !is_audit(input)).unwrap();
    let whole = fs::read(input).unwrap();
    fs::write(input, &whole[1..]).unwrap();
    let worker = cluster.start("worker", &["queue.attempts=2"]);
    coordinator.assert_ends(75);
    worker.terminate();
    let listed = cluster.laser(&["dlq", "list"], &[&run]);
    assert_prints(&listed, &["after 2 attempts", "1 dead letters", "do not match the plan's digest"]);
    fs::write(input, &whole).unwrap();
    assert_prints(&cluster.laser(&["dlq", "replay"], &[&run]), &["1 shards queued again"]);
    cluster.finish(cluster.start("coordinator", &[]), cluster.worker());
}

/// The price is part of the plan and not of the run's name.
#[test]
fn a_run_that_is_begun_anew_is_kept_from_neither_jobs_nor_dead_letters_of_its_earlier_plan() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&["price.gpu_hour=1"]);
    entries(&cluster.run_folder().join("shards")).iter().for_each(|input| flip_bit(input));
    let worker = cluster.start("worker", &["queue.attempts=1"]);
    worker.wait_for("attempt failed", 1);
    coordinator.kill();
    worker.terminate();
    fs::remove_dir_all(cluster.run_folder()).unwrap();
    cluster.finish(cluster.coordinator(&[]), cluster.worker());
}

#[test]
fn at_the_deadline_what_is_there_is_published_and_late_workers_change_nothing() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[]);
    let late = cluster.worker();
    late.wait_for("leased", 1);
    signal(&late.child, "-STOP");
    coordinator.kill();
    cluster.seal(&[]);
    assert_changes_nothing(&cluster, late);
    assert_exit(&cluster.tonight.verify(), 0);
    let users = only(&cluster.tonight.path("out/profiles/kind=user/dt=2026-01-02"));
    let errors = fs::read_to_string(users.join("_errors.jsonl")).unwrap();
    assert_contains(&errors, &["not generated before the deadline"]);
}

/// None of the run's shards is left for a worker.
#[track_caller]
fn assert_none_queued(cluster: &Cluster, run: &str) {
    assert_prints(&cluster.laser(&["cancel"], &[run]), &["cancelled, 0 shards left the queue"]);
}

/// The coordinator has found the run not cancelled and publishes its shards.
#[test]
fn a_run_that_is_cancelled_while_it_is_queued_leaves_nothing_in_the_queue() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let proxy = Proxy::tcp(cluster.nats.port());
    proxy.set(Fault::Hold { word: "PUB laser.jobs.2026", heard: false });
    let coordinator = cluster.start_at_nats("coordinator", &proxy);
    proxy.wait_held();
    let run = cluster.run_id();
    assert_exit(&cluster.laser(&["cancel"], &[&run]), 0);
    proxy.set(Fault::None);
    coordinator.assert_ends(75);
    assert_none_queued(&cluster, &run);
}

#[test]
fn a_cancelled_run_stops_and_resumes() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let mut coordinator = cluster.tonight.command("coordinator", &[]);
    coordinator.args(["--previous", "latest"]);
    let coordinator = Process::start(coordinator);
    coordinator.wait_for("queued shards", 1);
    let run = cluster.run_id();
    // So that it next looks at a run that is cancelled, and at a queue that is empty.
    signal(&coordinator.child, "-STOP");
    assert_exit(&cluster.laser(&["cancel"], &[&run]), 0);
    signal(&coordinator.child, "-CONT");
    let log = coordinator.assert_ends(75);
    assert_eq!(log.iter().filter(|line| line.contains("queued shards")).count(), 1, "{}", log.join("\n"));
    assert_none_queued(&cluster, &run);
    let refused = cluster.laser(&["coordinator"], &["--previous", "latest"]);
    assert_exit(&refused, 75);
    assert_contains(&stderr(&refused), &["was cancelled"]);
    assert_refused(&cluster.laser(&["resume"], &[&run]), &["another --previous"]);
    let worker = cluster.worker();
    assert_exit(&cluster.laser(&["resume"], &[&run, "--previous", "latest"]), 0);
    worker.terminate();
    cluster.assert_whole();
    assert_refused(&cluster.laser(&["cancel"], &["2026-01-01-00000000"]), &["no run"]);
}

/// A day later there is another night; the run's name tells its own.
#[test]
fn a_cancelled_run_of_yesterday_resumes_by_its_name() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    cluster.coordinator(&[&format!("run.date={}", yesterday())]).kill();
    let run = cluster.run_id();
    assert_exit(&cluster.laser(&["cancel"], &[&run]), 0);
    let config = cluster.tonight.path("laser.toml");
    let dated = fs::read_to_string(&config).unwrap();
    fs::write(&config, dated.replace("date = \"2026-01-02\"\n", "")).unwrap();
    let worker = cluster.worker();
    assert_exit(&cluster.laser(&["resume"], &[&run]), 0);
    worker.terminate();
    assert_eq!(cluster.run_id(), run);
    assert_exit(&cluster.tonight.verify(), 0);
}

#[test]
fn a_worker_of_another_configuration_is_refused() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[]);
    let other = cluster.tonight.output("worker", &["generate.max_new_tokens=25"]);
    assert_refused(&other, &["max_new_tokens = 24", "25"]);
    cluster.finish(coordinator, cluster.worker());
}

#[test]
fn a_worker_whose_device_fails_the_self_test_leases_nothing() {
    let cluster = Cluster::new("LASER_NATS_NEW");
    let coordinator = cluster.coordinator(&[]);
    let log = cluster.start("worker", &[&faulty_device(&cluster.tonight)]).assert_ends(65);
    assert_contains(&log.join("\n"), &FAULTY);
    assert!(!log.iter().any(|line| line.contains("leased")), "{log:?}");
    assert!(cluster.tonight.parts().is_empty());
    cluster.finish(coordinator, cluster.worker());
}
