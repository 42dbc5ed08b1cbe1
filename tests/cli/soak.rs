//! Nights in which everything dies at random, and what holds after each of them.
//!
//! The suite passes one short night; `tests/soak.sh MINUTES` goes on for so long, begins with an outage of the store
//! of a whole minute, and prints figures. Which faults there are and where they strike is drawn from a seed; when
//! they strike hangs on the machine.

use std::collections::BTreeMap;
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::assert_exit;
use crate::distributed::{Cluster, Process};
use crate::faults::{signal, texts, without_run};
use crate::proxy::{Fault, Proxy};

const WORKERS: usize = 3;

/// What happened in all nights.
#[derive(Debug, Default)]
struct Figures {
    nights: u32,
    rows: usize,
    shards: usize,
    /// Times that a shard was written after the first: it was in the hands of a process that died or was paused.
    written_again: usize,
    faults: BTreeMap<&'static str, u32>,
}

struct Soak {
    cluster: Cluster,
    store: Proxy,
    queue: Proxy,
    random: Xoshiro256PlusPlus,
    figures: Figures,
}

/// The processes of a night and the lines of theirs that name a shard.
struct Night {
    settings: Vec<String>,
    coordinator: Process,
    workers: Vec<Process>,
    log: Vec<Vec<String>>,
}

impl Soak {
    fn new(seed: u64) -> Self {
        let cluster = Cluster::on_s3("LASER_NATS_NEW");
        Self {
            store: Proxy::http(cluster.store.as_ref().unwrap().port()),
            queue: Proxy::tcp(cluster.nats.port()),
            cluster,
            random: Xoshiro256PlusPlus::seed_from_u64(seed),
            figures: Figures::default(),
        }
    }

    fn start(&self, subcommand: &str, settings: &[String]) -> Process {
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let mut command = self.cluster.tonight.command(subcommand, &settings);
        command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{}", self.store.port));
        Process::start(command)
    }

    /// A night of its own run and folder, disturbed a number of times.
    fn night(&mut self, faults: usize, outage: Option<Duration>) {
        let root = format!("night-{}", self.figures.nights);
        let settings = vec![
            format!("output.path=s3://laser/{root}"),
            format!("queue.url=nats://127.0.0.1:{}", self.queue.port),
            format!("run.seed={}", self.figures.nights),
            "run.shard_rows=2".to_owned(),
            "queue.attempts=1000".to_owned(),
            "worker.grace_seconds=1".to_owned(),
        ];
        let coordinator = self.start("coordinator", &settings);
        coordinator.wait_for("queued shards", 1);
        let workers = (0..WORKERS).map(|_| self.start("worker", &settings));
        let workers = workers.collect();
        let mut night = Night { settings, coordinator, workers, log: Vec::new() };
        if let Some(length) = outage {
            night.workers[0].wait_for("committed", 1);
            self.store.suffer(Fault::Cut, length);
        }
        for _ in 0..faults {
            if self.is_over(&mut night) {
                break;
            }
            self.strike(&mut night);
        }
        while !self.is_over(&mut night) {
            sleep(Duration::from_millis(50));
        }
        self.conclude(night, &root);
    }

    /// Starts again what has ended by itself, as a scheduler would. `true` once the coordinator has published.
    fn is_over(&self, night: &mut Night) -> bool {
        for index in 0..WORKERS {
            if let Some(status) = night.workers[index].child.try_wait().unwrap() {
                assert_eq!(status.code(), Some(75), "a worker ended");
                self.replace_worker(night, index);
            }
        }
        match night.coordinator.child.try_wait().unwrap() {
            None => false,
            Some(status) if status.code() == Some(75) => {
                night.coordinator = self.start("coordinator", &night.settings);
                false
            }
            Some(status) => {
                assert_eq!(status.code(), Some(0), "the coordinator ended");
                true
            }
        }
    }

    fn replace_worker(&self, night: &mut Night, index: usize) {
        let new = self.start("worker", &night.settings);
        let old = std::mem::replace(&mut night.workers[index], new);
        night.log.push(old.kill());
    }

    /// One fault, and the time until the next.
    fn strike(&mut self, night: &mut Night) {
        let worker = self.random.gen_range(0..WORKERS);
        let length = Duration::from_millis(self.random.gen_range(500..5000));
        let fault = match self.random.gen_range(0..11) {
            0 | 1 => {
                self.replace_worker(night, worker);
                "kill -9 of a worker"
            }
            2 => {
                signal(&night.workers[worker].child, "-TERM");
                let _ = night.workers[worker].child.wait();
                self.replace_worker(night, worker);
                "SIGTERM of a worker"
            }
            3 => {
                signal(&night.workers[worker].child, "-STOP");
                sleep(length);
                signal(&night.workers[worker].child, "-CONT");
                "SIGSTOP of a worker"
            }
            4 | 5 => {
                let new = self.start("coordinator", &night.settings);
                std::mem::replace(&mut night.coordinator, new).kill();
                "kill -9 of the coordinator"
            }
            6 => {
                self.cluster.nats.kill_and_restart();
                "kill -9 of NATS"
            }
            proxied => {
                let (proxy, fault, name) = match proxied {
                    7 => (&self.queue, Fault::Stall, "half-open connections to NATS"),
                    8 => (&self.store, Fault::Answer(503), "503 from the store"),
                    9 => (&self.store, Fault::Cut, "store unreachable"),
                    _ => (&self.store, Fault::LoseAnswers, "answers of the store lost"),
                };
                proxy.suffer(fault, length);
                name
            }
        };
        *self.figures.faults.entry(fault).or_default() += 1;
        sleep(Duration::from_millis(self.random.gen_range(0..1000)));
    }

    /// Every row is there once and is that of one undisturbed process; no committed shard was generated.
    fn conclude(&mut self, mut night: Night, root: &str) {
        night.log.extend(night.workers.into_iter().map(Process::kill));
        let store = self.cluster.store.as_ref().unwrap();
        assert_exit(&store.verify(root), 0);
        let _ = fs::remove_dir_all(self.cluster.tonight.path("out"));
        store.copy_parts(root, &self.cluster.tonight);
        let rows = without_run(texts(&self.cluster.tonight));
        assert_eq!(rows, self.cluster.expected, "night {root}");
        let writes = Writes::of(&night.log);
        assert_eq!(writes.of_committed, 0, "committed shards were generated in {root}");
        self.figures.nights += 1;
        self.figures.rows += rows.len();
        self.figures.shards += writes.shards;
        self.figures.written_again += writes.again;
    }
}

/// What the logs of a night say about who wrote what when.
struct Writes {
    shards: usize,
    again: usize,
    /// Written by an attempt that was leased after the shard was known to be committed.
    of_committed: usize,
}

impl Writes {
    fn of(logs: &[Vec<String>]) -> Self {
        let shard = |line: &str| -> Option<u32> { line.split(" shard=").nth(1)?.split(' ').next()?.parse().ok() };
        // Lines begin with their time.
        let time = |line: &str| line.split(' ').next().unwrap().to_owned();
        let mut won: BTreeMap<u32, String> = BTreeMap::new();
        for line in logs.iter().flatten().filter(|l| l.contains("created=Won")) {
            won.insert(shard(line).unwrap(), time(line));
        }
        let mut writes: BTreeMap<u32, usize> = BTreeMap::new();
        let mut of_committed = 0;
        for log in logs {
            let mut leased = BTreeMap::new();
            for line in log {
                let Some(shard) = shard(line) else { continue };
                if line.contains(": leased ") {
                    leased.insert(shard, time(line));
                } else if line.contains(": writing ") {
                    *writes.entry(shard).or_default() += 1;
                    let after = won.get(&shard).is_some_and(|won| *won < leased[&shard]);
                    of_committed += usize::from(after);
                }
            }
        }
        Self { shards: writes.len(), again: writes.values().map(|n| n - 1).sum(), of_committed }
    }
}

#[test]
fn nights_in_which_everything_dies_at_random_are_whole() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let minutes: u64 = number("LASER_SOAK_MINUTES").unwrap_or(0);
    let mut soak = Soak::new(number("LASER_SOAK_SEED").unwrap_or(1));
    let started = Instant::now();
    match minutes {
        0 => soak.night(4, None),
        _ => soak.night(20, Some(Duration::from_secs(60))),
    }
    while started.elapsed() < Duration::from_secs(60 * minutes) {
        soak.night(20, None);
    }
    let minutes = started.elapsed().as_secs_f64() / 60.0;
    println!("{minutes:.1} minutes, none lost, none doubled: {:#?}", soak.figures);
}
