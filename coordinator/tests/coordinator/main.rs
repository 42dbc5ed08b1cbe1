//! Planning and publishing on real folders, with a worker that writes texts without a model; queues, on real
//! NATS servers.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as well")]

mod gate;
mod lists;
mod nats;
mod nats_server;
mod plan;
mod priority;
mod publish;
mod queue_conformance;
mod retention;
#[path = "../../../tests/cli/server.rs"]
mod server;
mod support;
mod together;
