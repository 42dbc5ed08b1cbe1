//! The servers of tests: real programs, each on a port of its own.

use std::io::{BufRead, BufReader, Write, pipe};
use std::net::TcpListener;
use std::process::{Child, Command};

/// What a script of tests/ has installed and named in the environment.
pub(crate) fn installed(variable: &str, script: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: pass the tests with tests/run.sh, or `source tests/{script}` first")
    })
}

/// A running server; it is killed when dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) port: u16,
}

impl Server {
    /// Returns once the server has logged its port, at the end of a line after `address`, and the word `ready`.
    pub(crate) fn start(mut command: Command, address: &str, ready: &str) -> Self {
        let (log, end) = pipe().unwrap();
        let child = command.stdout(end.try_clone().unwrap()).stderr(end).spawn().unwrap();
        let mut server = Self { child, port: 0 };
        // The command holds its end of the pipe open, and a server that ends is to end its log.
        drop(command);
        let mut lines = BufReader::new(log).lines().map_while(Result::ok);
        let mut seen = String::new();
        for line in lines.by_ref() {
            if let Some((_, address)) = line.split_once(address) {
                server.port = address.rsplit(':').next().and_then(|port| port.trim().parse().ok()).unwrap_or(0);
            }
            if server.port > 0 && line.contains(ready) {
                // The log is read to its end, since a full pipe stops the server.
                std::thread::spawn(move || lines.for_each(drop));
                return server;
            }
            seen += &(line + "\n");
        }
        panic!("the server did not start:\n{seen}");
    }

    /// As `kill -9` does.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port at which nobody listens.
pub(crate) fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Greets as a NATS server would that cannot be installed. Returns its port.
pub(crate) fn greet(version: &str, jetstream: bool) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let info = serde_json::json!({
        "server_id": "X", "server_name": "granny", "version": version, "jetstream": jetstream,
        "headers": true, "max_payload": 1_048_576, "proto": 1,
    });
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        write!(socket, "INFO {info}\r\n").unwrap();
        let lines = BufReader::new(socket.try_clone().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            if line.starts_with("PING") {
                socket.write_all(b"PONG\r\n").unwrap();
            }
        }
    });
    port
}
