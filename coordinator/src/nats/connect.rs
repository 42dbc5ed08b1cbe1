//! The connection to NATS and its events.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::{self, Context};
use async_nats::rustls::crypto::ring;
use async_nats::{Client, ConnectOptions, Event, ServerAddr, ServerError};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::config::{bad_file, read};
use super::{NatsConfig, NatsError};

/// The first version that keeps one message per subject (`discard_new_per_subject`).
const SERVER_MIN: (u64, u64, u64) = (2, 9, 0);
/// How long a server may be unreachable before a request fails; enough for a restart or an election.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// The wait between two attempts.
pub(super) const PAUSE: Duration = Duration::from_millis(200);

/// A connection to NATS. Clones share it.
///
/// The connection is kept: if it is lost, the client reconnects in the background for ever.
#[derive(Debug, Clone)]
pub struct NatsClient {
    pub(super) client: Client,
    pub(super) jetstream: Context,
    pub(super) config: Arc<NatsConfig>,
    pub(super) name: String,
    events: Arc<NatsEvents>,
}

impl NatsClient {
    /// Returns the events of the connection.
    pub fn events(&self) -> &Arc<NatsEvents> {
        &self.events
    }

    pub(super) fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Waits for an answer as long as the connection that the request was sent on lasts; `None` means that it was lost.
    pub(super) async fn while_connected<T>(&self, answer: impl Future<Output = T>) -> Option<T> {
        let lost = self.events.lost.notified();
        tokio::pin!(lost);
        // Register before asking for the state, so that no loss falls in between.
        lost.as_mut().enable();
        if !self.is_connected() {
            return None;
        }
        tokio::select! {
            answer = answer => Some(answer),
            () = lost => None,
        }
    }

    /// Repeats a request if the connection was lost meanwhile, for 30 s. Use it only for requests that may be repeated.
    /// A refusal or a missing permission is not retried.
    pub(super) async fn patiently<T, F: Future<Output = Result<T, NatsError>>>(
        &self,
        question: impl Fn() -> F,
    ) -> Result<T, NatsError> {
        let started = Instant::now();
        loop {
            match self.while_connected(question()).await {
                Some(Ok(answer)) => return Ok(answer),
                Some(Err(error)) if self.is_connected() => return Err(error),
                _ if started.elapsed() > PATIENCE => {
                    return Err(NatsError::Away);
                }
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// The version of the server that we are connected to.
    pub fn server_version(&self) -> String {
        self.client.server_info().version
    }
}

/// How often each event has happened to a connection.
#[derive(Debug, Default)]
pub struct NatsEvents {
    /// Number of connections made.
    pub connected: AtomicU64,
    /// Number of connections lost.
    pub disconnected: AtomicU64,
    /// How often messages came faster than they were taken.
    pub slow_consumers: AtomicU64,
    /// Number of requests refused for lack of a permission. Their senders only see a timeout.
    pub permission_violations: AtomicU64,
    /// Number of other errors of server and client.
    pub errors: AtomicU64,
    /// Wakes tasks whose answer was lost with a connection.
    lost: Notify,
}

impl NatsEvents {
    fn record(&self, event: &Event) {
        let counter = match event {
            Event::Connected => &self.connected,
            Event::Disconnected => &self.disconnected,
            Event::SlowConsumer(_) | Event::ServerError(ServerError::SlowConsumer(_)) => &self.slow_consumers,
            Event::ServerError(ServerError::Other(text)) if text.to_lowercase().contains("permissions violation") => {
                &self.permission_violations
            }
            Event::ServerError(_) | Event::ClientError(_) => &self.errors,
            Event::LameDuckMode | Event::Draining | Event::Closed => {
                tracing::info!(%event, "nats");
                return;
            }
        };
        counter.fetch_add(1, Ordering::Relaxed);
        if *event == Event::Disconnected {
            self.lost.notify_waiters();
        }
        match event {
            Event::Connected => tracing::info!(%event, "nats"),
            _ => tracing::warn!(%event, "nats"),
        }
    }
}

/// Connects as `name` (shown in the server's list of connections) and checks the server.
///
/// # Errors
/// [`NatsError`]: an invalid configuration, no server that accepts the connection, a server older than 2.9.0 or without
/// JetStream.
pub async fn connect(config: &NatsConfig, name: &str) -> Result<NatsClient, NatsError> {
    config.validate()?;
    let addresses = addresses(config)?;
    let events = Arc::new(NatsEvents::default());
    let mut options = options(config, name, events.clone()).await?;
    let user = addresses.iter().find_map(|a| a.username().zip(a.password()));
    if let Some((user, password)) = user {
        options = options.user_and_password(user.to_owned(), password.to_owned());
    }
    let client = options
        .connect(&addresses[..])
        .await
        .map_err(|error| NatsError::Connect { servers: shown(&addresses), reason: error.to_string() })?;
    check_server(&client)?;
    let jetstream = jetstream::new(client.clone());
    Ok(NatsClient { client, jetstream, config: Arc::new(config.clone()), name: name.to_owned(), events })
}

fn addresses(config: &NatsConfig) -> Result<Vec<ServerAddr>, NatsError> {
    let parse = |url: &str| {
        url.parse().map_err(|error| NatsError::Config {
            key: "url",
            reason: format!("{error}; expected nats://host:port or tls://host:port"),
        })
    };
    config.url.split(',').map(str::trim).map(parse).collect()
}

/// Formats the addresses without the user names and passwords that they may carry.
fn shown(addresses: &[ServerAddr]) -> String {
    let one = |a: &ServerAddr| format!("{}:{}", a.host(), a.port());
    addresses.iter().map(one).collect::<Vec<_>>().join(", ")
}

async fn options(config: &NatsConfig, name: &str, events: Arc<NatsEvents>) -> Result<ConnectOptions, NatsError> {
    let mut options = ConnectOptions::new()
        .name(name)
        // A dead connection is noticed after two unanswered pings, so within a lease.
        .ping_interval((config.lease() / 3).clamp(Duration::from_secs(1), Duration::from_secs(20)))
        .event_callback(move |event| {
            let events = events.clone();
            async move { events.record(&event) }
        });
    if let Some(prefix) = &config.inbox_prefix {
        options = options.custom_inbox_prefix(prefix);
    }
    if let Some(file) = &config.nkey_seed {
        options = options.nkey(seed(file)?);
    }
    if let Some(file) = &config.credentials {
        const EXPECTED: &str = "credentials file";
        let text = read("credentials", file, EXPECTED)?;
        options =
            options.credentials(&text).map_err(|error| bad_file("credentials", file, EXPECTED, error.to_string()))?;
    }
    tls(config, options)
}

fn seed(file: &Path) -> Result<String, NatsError> {
    const EXPECTED: &str = "file with the seed of a user's nkey";
    let text = read("nkey_seed", file, EXPECTED)?;
    let seed = text.trim();
    if !seed.starts_with("SU") {
        let reason = "expected one line that starts with SU".to_owned();
        return Err(bad_file("nkey_seed", file, EXPECTED, reason));
    }
    Ok(seed.to_owned())
}

fn tls(config: &NatsConfig, mut options: ConnectOptions) -> Result<ConnectOptions, NatsError> {
    // Two providers are linked in (object stores bring the other), so rustls cannot choose. An error means that one has
    // been chosen already, which is fine.
    let _ = ring::default_provider().install_default();
    let files = [("tls_ca", &config.tls_ca), ("tls_cert", &config.tls_cert), ("tls_key", &config.tls_key)];
    for (key, file) in files {
        let Some(file) = file else { continue };
        if !read(key, file, "PEM file")?.contains("-----BEGIN ") {
            let reason = "it has no PEM block".to_owned();
            return Err(bad_file(key, file, "PEM file", reason));
        }
        options = options.require_tls(true);
    }
    if let Some(ca) = &config.tls_ca {
        options = options.add_root_certificates(ca.clone());
    }
    if let (Some(cert), Some(key)) = (&config.tls_cert, &config.tls_key) {
        options = options.add_client_certificate(cert.clone(), key.clone());
    }
    Ok(options)
}

fn check_server(client: &Client) -> Result<(), NatsError> {
    let info = client.server_info();
    let problem = if version(&info.version).is_none_or(|version| version < SERVER_MIN) {
        format!(
            "has version {}, expected 2.9.0 or later: it would not keep one message for each shard; upgrade it",
            info.version
        )
    } else if !info.jetstream {
        "runs without jetstream; add a `jetstream` block to its configuration".to_owned()
    } else {
        return Ok(());
    };
    Err(NatsError::Server { server: info.server_name, problem })
}

/// Parses `2.9.10` or `2.14.0-RC.1` into numbers.
fn version(text: &str) -> Option<(u64, u64, u64)> {
    let release = text.split(['-', '+']).next()?;
    let mut numbers = release.split('.').map(str::parse);
    let mut next = || numbers.next()?.ok();
    Some((next()?, next()?, next()?))
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(version("2.9.10"), Some((2, 9, 10)));
        assert!(version("2.14.0-RC.1") > version("2.9.10"));
        assert_eq!(version("2.9"), None);
        assert_eq!(version(""), None);
    }
}
