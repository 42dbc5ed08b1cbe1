//! The servers of tests: real programs, each on a port of its own.

use std::io::{BufRead, BufReader, pipe};
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
        // The command holds its end of the pipe open, and a server that ends is to end its log.
        drop(command);
        let mut lines = BufReader::new(log).lines().map_while(Result::ok);
        let (mut seen, mut port) = (String::new(), None);
        for line in lines.by_ref() {
            if let Some((_, address)) = line.split_once(address) {
                port = address.rsplit(':').next().and_then(|port| port.trim().parse().ok());
            }
            if let (Some(port), true) = (port, line.contains(ready)) {
                // The log is read to its end, since a full pipe stops the server.
                std::thread::spawn(move || lines.for_each(drop));
                return Self { child, port };
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
