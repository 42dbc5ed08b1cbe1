//! The ledger: the state of every shard of a run, as a pure state machine.
//!
//! It takes events and the time and returns what follows. It does no I/O and knows no clock, runtime or network. Memory
//! is a few dozen bytes per shard. A shard is *ready*, *leased*, *committed* or *dead*. Only a commit that was seen in
//! the store makes it committed, so the ledger can always be rebuilt by listing the output.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A point in time, counted from any fixed start.
pub type Instant = Duration;

/// The limits of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerLimits {
    /// The duration of a lease without a heartbeat.
    pub lease: Duration,
    /// Attempts before a shard is given up; at least 1.
    pub attempts: u32,
    /// The wait before the second attempt; it doubles with each further one.
    pub retry: Duration,
}

impl Default for LedgerLimits {
    /// A lease of one minute (a heartbeat every 20 s) and 3 attempts with 1 s and 2 s between them.
    fn default() -> Self {
        Self { lease: Duration::from_secs(60), attempts: 3, retry: Duration::from_secs(1) }
    }
}

/// The state of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ShardState {
    /// Waiting for a worker, not before the given time.
    Ready {
        /// The earliest time at which it may be leased.
        not_before: Instant,
    },
    /// A worker has it.
    Leased {
        /// Identifies the lease.
        token: u64,
        /// The time at which it ends without a heartbeat.
        until: Instant,
    },
    /// Its output exists.
    Committed,
    /// Given up.
    Dead {
        /// The reason why the last attempt failed.
        reason: String,
    },
}

#[derive(Debug, Clone)]
struct Shard {
    state: ShardState,
    attempts: u32,
}

/// The result of [`Ledger::lease`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leasing {
    /// Work: shard, attempt (from 1), token.
    Shard {
        /// The shard.
        shard: u32,
        /// The attempt, from 1.
        attempt: u32,
        /// Identifies the lease.
        token: u64,
    },
    /// Nothing to lease now: ask again at this time, or when something changes.
    Wait {
        /// The next time at which a shard becomes ready or a lease ends.
        until: Instant,
    },
    /// Every shard is committed or dead.
    Finished,
}

/// The number of shards in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LedgerCounts {
    /// Shards that wait.
    pub ready: usize,
    /// Shards that are leased.
    pub leased: usize,
    /// Shards that are committed.
    pub committed: usize,
    /// Shards that were given up.
    pub dead: usize,
}

/// The state of all shards of a run. Every operation is O(log shards).
#[derive(Debug, Clone)]
pub struct Ledger {
    limits: LedgerLimits,
    shards: Vec<Shard>,
    /// Ready shards by the time from which they may be leased, then by number. That is plan order, so shards of one
    /// pool stay together.
    ready: BTreeSet<(Instant, u32)>,
    /// Leased shards by the time at which their lease ends.
    leased: BTreeSet<(Instant, u32)>,
    committed: usize,
    dead: BTreeMap<u32, String>,
    next_token: u64,
}

impl Ledger {
    /// Creates a ledger of `shards` shards, all ready except those already `committed`.
    pub fn new(shards: u32, committed: impl IntoIterator<Item = u32>, limits: LedgerLimits) -> Self {
        let ready = ShardState::Ready { not_before: Instant::ZERO };
        let mut ledger = Self {
            limits,
            shards: vec![Shard { state: ready, attempts: 0 }; shards as usize],
            ready: (0..shards).map(|shard| (Instant::ZERO, shard)).collect(),
            leased: BTreeSet::new(),
            committed: 0,
            dead: BTreeMap::new(),
            next_token: 1,
        };
        for shard in committed {
            ledger.commit(shard);
        }
        ledger
    }

    /// Leases the next shard, after taking back leases that have ended.
    pub fn lease(&mut self, now: Instant) -> Leasing {
        self.expire(now);
        let Some(&(not_before, shard)) = self.ready.first() else {
            return match self.leased.first() {
                Some(&(until, _)) => Leasing::Wait { until },
                None => Leasing::Finished,
            };
        };
        if not_before > now {
            let lease_end = self.leased.first().map_or(not_before, |&(until, _)| until);
            return Leasing::Wait { until: not_before.min(lease_end) };
        }
        let token = self.next_token;
        self.next_token += 1;
        let until = now + self.limits.lease;
        self.set(shard, ShardState::Leased { token, until });
        let attempts = &mut self.shards[shard as usize].attempts;
        *attempts += 1;
        Leasing::Shard { shard, attempt: *attempts, token }
    }

    /// Extends a lease. Returns `false` if the worker no longer holds it.
    pub fn heartbeat(&mut self, shard: u32, token: u64, now: Instant) -> bool {
        self.expire(now);
        let held = self.holds(shard, token);
        if held {
            self.set(shard, ShardState::Leased { token, until: now + self.limits.lease });
        }
        held
    }

    /// Records that the shard's output was seen in the store. This holds in any state, whoever wrote it.
    pub fn commit(&mut self, shard: u32) {
        if (shard as usize) < self.shards.len() {
            self.set(shard, ShardState::Committed);
        }
    }

    /// Records that an attempt failed. A late message from a lease that has ended changes nothing.
    pub fn fail(&mut self, shard: u32, token: u64, reason: &str, now: Instant) {
        if self.holds(shard, token) {
            self.end_attempt(shard, reason, now);
        }
    }

    /// Takes a shard back from a worker that did not fail: the attempt does not count.
    pub fn release(&mut self, shard: u32, token: u64, now: Instant) {
        if self.holds(shard, token) {
            self.shards[shard as usize].attempts -= 1;
            self.set(shard, ShardState::Ready { not_before: now });
        }
    }

    /// Returns the state of a shard.
    pub fn state(&self, shard: u32) -> Option<&ShardState> {
        self.shards.get(shard as usize).map(|s| &s.state)
    }

    /// Returns the number of shards in each state.
    pub fn counts(&self) -> LedgerCounts {
        LedgerCounts {
            ready: self.ready.len(),
            leased: self.leased.len(),
            committed: self.committed,
            dead: self.dead.len(),
        }
    }

    /// Returns the shards that were given up, by number, with the reason of their last attempt.
    pub fn dead(&self) -> Vec<(u32, String)> {
        self.dead.clone().into_iter().collect()
    }

    fn holds(&self, shard: u32, token: u64) -> bool {
        matches!(self.state(shard), Some(ShardState::Leased { token: t, .. }) if *t == token)
    }

    fn expire(&mut self, now: Instant) {
        while let Some(&(until, shard)) = self.leased.first()
            && until <= now
        {
            self.end_attempt(shard, "the worker stopped sending heartbeats", now);
        }
    }

    fn end_attempt(&mut self, shard: u32, reason: &str, now: Instant) {
        let attempts = self.shards[shard as usize].attempts;
        let next = if attempts >= self.limits.attempts {
            ShardState::Dead { reason: reason.to_owned() }
        } else {
            let doublings = attempts.saturating_sub(1).min(16);
            ShardState::Ready { not_before: now + self.limits.retry * (1 << doublings) }
        };
        self.set(shard, next);
    }

    /// Changes a shard's state. Nothing else does, so the indexes always agree with it.
    fn set(&mut self, shard: u32, next: ShardState) {
        let entry = &mut self.shards[shard as usize];
        match std::mem::replace(&mut entry.state, next.clone()) {
            ShardState::Ready { not_before } => drop(self.ready.remove(&(not_before, shard))),
            ShardState::Leased { until, .. } => drop(self.leased.remove(&(until, shard))),
            ShardState::Committed => self.committed -= 1,
            ShardState::Dead { .. } => drop(self.dead.remove(&shard)),
        }
        match next {
            ShardState::Ready { not_before } => drop(self.ready.insert((not_before, shard))),
            ShardState::Leased { until, .. } => drop(self.leased.insert((until, shard))),
            ShardState::Committed => self.committed += 1,
            ShardState::Dead { reason } => drop(self.dead.insert(shard, reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};

    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limits() -> LedgerLimits {
        LedgerLimits { lease: 3 * SECOND, attempts: 2, retry: SECOND }
    }

    fn take(ledger: &mut Ledger, now: Instant) -> (u32, u32, u64) {
        match ledger.lease(now) {
            Leasing::Shard { shard, attempt, token } => (shard, attempt, token),
            other => panic!("expected a shard, got {other:?}"),
        }
    }

    #[test]
    fn shards_come_in_plan_order_and_finish() {
        let mut ledger = Ledger::new(3, [1], limits());
        assert_eq!(take(&mut ledger, Instant::ZERO).0, 0);
        assert_eq!(take(&mut ledger, Instant::ZERO).0, 2);
        assert_eq!(ledger.lease(Instant::ZERO), Leasing::Wait { until: 3 * SECOND });
        ledger.commit(0);
        ledger.commit(2);
        assert_eq!(ledger.lease(Instant::ZERO), Leasing::Finished);
    }

    #[test]
    fn a_silent_worker_loses_its_lease_and_its_late_word_is_void() {
        let mut ledger = Ledger::new(1, [], limits());
        let (shard, _, old) = take(&mut ledger, Instant::ZERO);
        let later = 10 * SECOND;
        assert!(!ledger.heartbeat(shard, old, later));
        let (_, attempt, _) = take(&mut ledger, later + SECOND);
        assert_eq!(attempt, 2);
        ledger.fail(shard, old, "late", later + SECOND);
        assert!(matches!(ledger.state(0), Some(ShardState::Leased { .. })));
    }

    #[test]
    fn a_heartbeat_keeps_the_lease() {
        let mut ledger = Ledger::new(1, [], limits());
        let (shard, _, token) = take(&mut ledger, Instant::ZERO);
        assert!(ledger.heartbeat(shard, token, 2 * SECOND));
        assert!(ledger.heartbeat(shard, token, 4 * SECOND));
    }

    #[test]
    fn attempts_are_bounded_and_the_reason_is_kept() {
        let mut ledger = Ledger::new(1, [], limits());
        for attempt in 1..=2 {
            let now = attempt * 10 * SECOND;
            let (shard, n, token) = take(&mut ledger, now);
            assert_eq!(n, attempt);
            ledger.fail(shard, token, "out of memory", now);
        }
        assert_eq!(ledger.dead(), [(0, "out of memory".to_owned())]);
        assert_eq!(ledger.lease(100 * SECOND), Leasing::Finished);
        ledger.commit(0);
        assert_eq!(ledger.counts().dead, 0, "an output that turns up makes a dead shard committed");
    }

    #[test]
    fn a_released_shard_costs_no_attempt() {
        let mut ledger = Ledger::new(1, [], limits());
        for _ in 0..5 {
            let (shard, attempt, token) = take(&mut ledger, Instant::ZERO);
            assert_eq!(attempt, 1);
            ledger.release(shard, token, Instant::ZERO);
        }
    }

    #[derive(Debug, Clone)]
    enum Event {
        Lease,
        Heartbeat(usize),
        Commit(u32),
        Fail(usize),
        Release(usize),
        Pass(u32),
    }

    /// The ledger with an observer's memory, over which invariants are stated.
    #[derive(Clone)]
    struct World {
        ledger: Ledger,
        now: Instant,
        given: Vec<(u32, u64)>,
        committed: HashSet<u32>,
    }

    impl World {
        fn new(shards: u32) -> Self {
            let ledger = Ledger::new(shards, [], limits());
            Self { ledger, now: Instant::ZERO, given: vec![], committed: HashSet::new() }
        }

        fn apply(&mut self, event: &Event) {
            let lease = |i: &usize, given: &[(u32, u64)]| given.get(*i).copied();
            match event {
                Event::Lease => {
                    if let Leasing::Shard { shard, token, .. } = self.ledger.lease(self.now) {
                        assert!(!self.committed.contains(&shard), "a committed shard was leased");
                        self.given.push((shard, token));
                    }
                }
                Event::Heartbeat(i) => {
                    if let Some((shard, token)) = lease(i, &self.given) {
                        let held = self.ledger.heartbeat(shard, token, self.now);
                        assert!(!(held && self.committed.contains(&shard)));
                    }
                }
                Event::Commit(shard) => {
                    self.ledger.commit(*shard);
                    self.committed.insert(*shard);
                }
                Event::Fail(i) => {
                    if let Some((shard, token)) = lease(i, &self.given) {
                        self.ledger.fail(shard, token, "x", self.now);
                    }
                }
                Event::Release(i) => {
                    if let Some((shard, token)) = lease(i, &self.given) {
                        self.ledger.release(shard, token, self.now);
                    }
                }
                Event::Pass(seconds) => self.now += *seconds * SECOND,
            }
            self.invariants();
        }

        fn invariants(&self) {
            let counts = self.ledger.counts();
            let total = counts.ready + counts.leased + counts.committed + counts.dead;
            assert_eq!(total, self.ledger.shards.len(), "every shard is in exactly one state");
            assert_eq!(counts.committed, self.committed.len(), "a commit is never forgotten");
            let mut tokens = HashSet::new();
            for shard in &self.ledger.shards {
                assert!(shard.attempts <= limits().attempts);
                if let ShardState::Leased { token, .. } = shard.state {
                    assert!(tokens.insert(token), "two shards under one lease");
                }
            }
        }

        /// Equal worlds have equal futures: tokens are replaced by their index in `given`.
        fn key(&self) -> String {
            let place = |t: u64| self.given.iter().position(|(_, g)| *g == t);
            let left = |t: Instant| t.saturating_sub(self.now);
            let shards: Vec<_> = (self.ledger.shards.iter())
                .map(|s| match &s.state {
                    ShardState::Ready { not_before } => format!("r{:?}", left(*not_before)),
                    ShardState::Leased { token, until } => {
                        format!("l{:?}{:?}", place(*token), left(*until))
                    }
                    ShardState::Committed => "c".into(),
                    ShardState::Dead { .. } => "d".into(),
                } + &s.attempts.to_string())
                .collect();
            format!("{shards:?}")
        }
    }

    /// Explores every order of events to a depth over two shards, merging equal worlds.
    #[test]
    fn every_reachable_state_keeps_the_invariants_and_can_finish() {
        let events = [
            Event::Lease,
            Event::Heartbeat(0),
            Event::Heartbeat(1),
            Event::Commit(0),
            Event::Commit(1),
            Event::Fail(0),
            Event::Fail(1),
            Event::Release(0),
            Event::Pass(1),
            Event::Pass(4),
        ];
        let mut seen = HashSet::new();
        let mut queue = VecDeque::from([(World::new(2), 0)]);
        while let Some((world, depth)) = queue.pop_front() {
            if depth == 7 || !seen.insert(world.key()) {
                continue;
            }
            assert!(can_finish(world.clone()), "stuck in {}", world.key());
            for event in &events {
                let mut next = world.clone();
                next.apply(event);
                queue.push_back((next, depth + 1));
            }
        }
        assert!(seen.len() > 100, "only {} states explored", seen.len());
    }

    /// Checks that a worker that commits everything it gets ends the run from any state.
    fn can_finish(mut world: World) -> bool {
        for _ in 0..20 {
            match world.ledger.lease(world.now) {
                Leasing::Shard { shard, .. } => world.ledger.commit(shard),
                Leasing::Wait { until } => {
                    assert!(until > world.now, "waiting for the past");
                    world.now = until;
                }
                Leasing::Finished => return true,
            }
        }
        false
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => Just(Event::Lease),
            2 => (0usize..40).prop_map(Event::Heartbeat),
            1 => (0u32..8).prop_map(Event::Commit),
            2 => (0usize..40).prop_map(Event::Fail),
            1 => (0usize..40).prop_map(Event::Release),
            2 => (0u32..5).prop_map(Event::Pass),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
        #[test]
        fn random_histories_keep_the_invariants(events in prop::collection::vec(event(), 0..200)) {
            let mut world = World::new(8);
            for event in &events {
                world.apply(event);
            }
            prop_assert!(can_finish(world));
        }
    }
}
