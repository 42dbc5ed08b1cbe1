//! The coordinator renders prompts, plans shards, keeps the ledger, publishes what was committed, and removes outdated
//! nights.

pub mod canary;
pub mod catalogue;
pub mod finalise;
pub mod gate;
pub mod ledger;
pub mod local_queue;
pub mod nats;
pub mod order;
pub mod plan;
pub mod priority;
pub mod prompt;
pub mod retention;
