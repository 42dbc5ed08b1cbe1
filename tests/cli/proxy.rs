//! A proxy between Laser and a server whose faults a test switches on and off.
//!
//! [`Proxy::tcp`] passes bytes, for NATS. [`Proxy::http`] passes one request a connection, for object stores, so that
//! it can answer itself, lose an answer, or hold one request.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// What is wrong with the network or the server.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// Every connection is closed, each new one at once.
    Cut,
    /// Connections stay open and nothing passes: half open.
    Stall,
    /// Whatever passes is late.
    Delay(Duration),
    /// HTTP: this status is the answer, and the server hears nothing.
    Answer(u16),
    /// HTTP: the server's `Last-Modified` is another.
    Modified(&'static str),
    /// HTTP: the server does not hear conditions, like one that knows none.
    Unconditional,
    /// HTTP: PUTs are carried out; if they succeed, their connections are closed without an answer.
    LoseAnswers,
    /// What contains the word waits until the fault is another, then its connection is closed. The server does not
    /// hear the PUT (HTTP) or half of the bytes (TCP), or hears it and its answer waits.
    Hold {
        /// In the bytes, or in a PUT's first line.
        word: &'static str,
        /// HTTP: the server hears the request.
        heard: bool,
    },
}

/// The proxy of one server. It passes until the process ends.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    state: Arc<State>,
    held: Receiver<()>,
}

struct State {
    server: u16,
    fault: Mutex<Fault>,
    changed: Condvar,
    open: Mutex<Vec<TcpStream>>,
    hold: SyncSender<()>,
}

impl Proxy {
    /// For the server at a port of this machine.
    pub(crate) fn tcp(server: u16) -> Self {
        Self::start(server, State::serve_bytes)
    }

    /// For the HTTP server at a port of this machine.
    pub(crate) fn http(server: u16) -> Self {
        Self::start(server, State::serve_request)
    }

    fn start(server: u16, serve: fn(Arc<State>, TcpStream) -> io::Result<()>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (hold, held) = sync_channel(1000);
        let state = Arc::new(State {
            server,
            fault: Mutex::new(Fault::None),
            changed: Condvar::new(),
            open: Mutex::default(),
            hold,
        });
        let serving = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let state = serving.clone();
                thread::spawn(move || serve(state, client));
            }
        });
        Self { port, state, held }
    }

    /// From now on; connections that are cut stay so.
    pub(crate) fn set(&self, fault: Fault) {
        let cut = matches!(fault, Fault::Cut);
        *self.state.fault.lock().unwrap() = fault;
        self.state.changed.notify_all();
        let mut open = self.state.open.lock().unwrap();
        if cut {
            open.drain(..).for_each(close);
        }
    }

    /// Has this fault for a while.
    pub(crate) fn suffer(&self, fault: Fault, length: Duration) {
        self.set(fault);
        // The outage itself; nobody waits for anything by it.
        thread::sleep(length);
        self.set(Fault::None);
    }

    /// Waits until something is held.
    pub(crate) fn wait_held(&self) {
        self.held.recv().unwrap();
    }
}

fn close(stream: TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

impl State {
    fn fault(&self) -> Fault {
        self.fault.lock().unwrap().clone()
    }

    /// A connection that [`Fault::Cut`] closes.
    fn keep(&self, stream: &TcpStream) -> io::Result<()> {
        self.open.lock().unwrap().push(stream.try_clone()?);
        match self.fault() {
            Fault::Cut => Err(io::ErrorKind::ConnectionReset.into()),
            _ => Ok(()),
        }
    }

    /// Waits for as long as the fault is such.
    fn wait_while(&self, is: fn(&Fault) -> bool) -> io::Result<()> {
        let fault = self.fault.lock().unwrap();
        let fault = self.changed.wait_while(fault, |f| is(f)).unwrap();
        match *fault {
            Fault::Cut => Err(io::ErrorKind::ConnectionReset.into()),
            _ => Ok(()),
        }
    }

    fn hold(&self) -> io::Error {
        let _ = self.hold.send(());
        let _ = self.wait_while(|f| matches!(f, Fault::Hold { .. }));
        io::ErrorKind::ConnectionReset.into()
    }

    fn serve_bytes(self: Arc<Self>, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(("127.0.0.1", self.server))?;
        self.keep(&client)?;
        let (state, from, to) = (self.clone(), server.try_clone()?, client.try_clone()?);
        thread::spawn(move || state.pump(from, to));
        self.pump(client, server);
        Ok(())
    }

    fn pump(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            if self.pass(&buffer[..read], &mut to).is_err() {
                break;
            }
        }
        close(from);
        close(to);
    }

    fn pass(&self, bytes: &[u8], to: &mut TcpStream) -> io::Result<()> {
        match self.fault() {
            Fault::Delay(late) => thread::sleep(late),
            Fault::Hold { word, .. } if contains(bytes, word) => {
                to.write_all(&bytes[..bytes.len() / 2])?;
                return Err(self.hold());
            }
            _ => self.wait_while(|f| matches!(f, Fault::Stall))?,
        }
        to.write_all(bytes)
    }

    fn serve_request(self: Arc<Self>, mut client: TcpStream) -> io::Result<()> {
        self.keep(&client)?;
        let mut request = read_request(&mut client)?;
        if matches!(self.fault(), Fault::Unconditional) {
            request = with_header(&request, "if-none-match", None);
        }
        let line = request.split(|b| *b == b'\n').next().unwrap_or_default();
        self.wait_while(|f| matches!(f, Fault::Stall))?;
        match self.fault() {
            Fault::Cut => return Ok(()),
            Fault::Answer(status) => {
                let answer = format!("HTTP/1.1 {status} Fault\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                return client.write_all(answer.as_bytes());
            }
            Fault::LoseAnswers if line.starts_with(b"PUT") => {
                let answer = self.forward(&request)?;
                if answer.starts_with(b"HTTP/1.1 200") {
                    return client.shutdown(Shutdown::Both);
                }
                return client.write_all(&answer);
            }
            Fault::Hold { word, heard } if line.starts_with(b"PUT") && contains(line, word) => {
                if heard {
                    self.forward(&request)?;
                }
                let _ = self.hold();
                return client.shutdown(Shutdown::Both);
            }
            Fault::Delay(late) => thread::sleep(late),
            _ => {}
        }
        let mut answer = self.forward(&request)?;
        if let Fault::Modified(time) = self.fault() {
            answer = with_header(&answer, "last-modified", Some(time));
        }
        client.write_all(&answer)?;
        client.shutdown(Shutdown::Write)
    }

    /// The server's answer.
    fn forward(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        let mut server = TcpStream::connect(("127.0.0.1", self.server))?;
        let line = request.iter().position(|b| *b == b'\n').unwrap_or_default() + 1;
        server.write_all(&request[..line])?;
        server.write_all(b"Connection: close\r\n")?;
        server.write_all(&request[line..])?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer)?;
        Ok(answer)
    }
}

fn contains(bytes: &[u8], word: &str) -> bool {
    bytes.windows(word.len()).any(|w| w == word.as_bytes())
}

/// The message with a header's value changed, or without the header.
fn with_header(message: &[u8], name: &str, value: Option<&str>) -> Vec<u8> {
    let end = head_length(message).unwrap() - 2;
    let mut changed = Vec::new();
    for line in message[..end].split_inclusive(|b| *b == b'\n') {
        let is_header = line.to_ascii_lowercase().starts_with(format!("{name}:").as_bytes());
        match value {
            Some(value) if is_header => changed.extend(format!("{name}: {value}\r\n").bytes()),
            None if is_header => {}
            _ => changed.extend(line),
        }
    }
    changed.extend(&message[end..]);
    changed
}

/// The length of a message's head, with the empty line that ends it.
pub(crate) fn head_length(message: &[u8]) -> Option<usize> {
    message.windows(4).position(|w| w == b"\r\n\r\n").map(|end| end + 4)
}

/// Head and body, by the head's length of the body.
pub(crate) fn read_request(client: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut request = Vec::new();
    let mut buffer = [0; 1 << 14];
    loop {
        if let Some(head) = head_length(&request) {
            let text = String::from_utf8_lossy(&request[..head]).to_lowercase();
            let length = text.lines().find_map(|l| l.strip_prefix("content-length:")?.trim().parse().ok());
            if request.len() >= head + length.unwrap_or(0) {
                return Ok(request);
            }
        }
        match client.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => request.extend_from_slice(&buffer[..read]),
        }
    }
}
