//! Where ranks run: here, in a network namespace, or on another host, whose agent starts them.
//!
//! For a rank on another host a process is started here all the same: it carries the rank's messages
//! and its stderr between the driver and the agent, and ends as the rank does. So the driver knows
//! local processes only.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::fail;
use crate::launch::RANK_VAR;
use crate::oob::{read_frame, write_frame, Frame, Kind, PARENT};

/// Names the agent in the environment of a process that stands for a rank elsewhere.
pub const AGENT_VAR: &str = "VCCL_DRIVER_AGENT";

/// How long an agent may take to be there.
const AGENT_LIMIT: Duration = Duration::from_secs(30);

/// Where a rank's process runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// As the driver itself.
    Here,
    /// In the network namespace of that name, as `ip netns` names them.
    Namespace(String),
    /// Where the agent at that address, HOST:PORT, is.
    Agent(String),
}

impl std::str::FromStr for Node {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Node, String> {
        match text {
            "" | "." | ".." => Err(format!("{text:?} names no node")),
            "here" => Ok(Node::Here),
            t if t.contains('/') => Err(format!("{t} is not the name of a network namespace")),
            t if t.contains(':') => Ok(Node::Agent(t.into())),
            t => Ok(Node::Namespace(t.into())),
        }
    }
}

/// Which variables a rank elsewhere gets from here.
fn travels(name: &str) -> bool {
    let known = ["VCCL_", "NCCL_", "RUST_"];
    name != AGENT_VAR && (name == "LD_LIBRARY_PATH" || known.iter().any(|p| name.starts_with(p)))
}

fn frame(kind: Kind, payload: Vec<u8>) -> Frame {
    Frame {
        kind,
        from: PARENT,
        to: PARENT,
        payload,
    }
}

/// A program, its arguments and its variables, as the payload of a frame.
fn encode(program: &str, args: &[String], env: &[(String, String)]) -> Vec<u8> {
    let mut words = vec![program.to_string(), args.len().to_string()];
    words.extend(args.iter().cloned());
    words.extend(env.iter().map(|(k, v)| format!("{k}={v}")));
    words.join("\0").into_bytes()
}

fn decode(payload: &[u8]) -> Option<Command> {
    let text = std::str::from_utf8(payload).ok()?;
    let mut words = text.split('\0');
    let mut command = Command::new(words.next()?);
    let args: usize = words.next()?.parse().ok()?;
    for _ in 0..args {
        command.arg(words.next()?);
    }
    for word in words {
        let (name, value) = word.split_once('=')?;
        command.env(name, value);
    }
    Some(command)
}

fn connect(address: &str) -> Result<TcpStream> {
    let end = Instant::now() + AGENT_LIMIT;
    loop {
        match TcpStream::connect(address) {
            Ok(s) => {
                s.set_nodelay(true)?;
                return Ok(s);
            }
            Err(e) if Instant::now() > end => {
                return Err(Error::new(format!("no agent at {address}: {e}")))
            }
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Stands for a rank that the agent at `address` starts, and ends as it does.
pub fn stand_in(address: &str) -> Result<std::convert::Infallible> {
    let stdin = std::io::stdin();
    let mut parent = UnixStream::from(stdin.as_fd().try_clone_to_owned()?);
    // Ctrl-C reaches the whole foreground group; the parent decides what becomes of its ranks.
    // SAFETY: ignoring a signal installs no handler.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
    let mut agent = connect(address)?;
    let program = std::env::current_exe()?.to_string_lossy().into_owned();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let env: Vec<(String, String)> = std::env::vars().filter(|(k, _)| travels(k)).collect();
    write_frame(
        &mut agent,
        &frame(Kind::Start, encode(&program, &args, &env)),
    )?;
    let (mut from, mut to) = (parent.try_clone()?, agent.try_clone()?);
    std::thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    while let Some(f) = read_frame(&mut agent).context(|| "the agent's connection")? {
        match f.kind {
            Kind::Stderr => io::stderr().write_all(&f.payload)?,
            Kind::Exit => {
                let raw: [u8; 4] = f.payload.try_into().unwrap_or_default();
                end_as(ExitStatus::from_raw(i32::from_le_bytes(raw)));
            }
            _ => write_frame(&mut parent, &f)?,
        }
    }
    fail!("the agent at {address} is gone")
}

fn end_as(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        // SAFETY: the signal goes to this process, which has nothing left to lose.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::kill(libc::getpid(), signal);
        }
    }
    std::process::exit(status.code().unwrap_or(97))
}

/// Starts ranks for drivers elsewhere until it is told to stop. It runs whatever it is asked to: for
/// networks where nobody else is.
pub fn agent(address: &str) -> Result<()> {
    let listener = TcpListener::bind(address).context(|| format!("cannot listen on {address}"))?;
    for stream in listener.incoming() {
        let mut stream = stream?;
        stream.set_nodelay(true)?;
        std::thread::spawn(move || match read_frame(&mut stream) {
            Ok(Some(f)) if f.kind == Kind::Stop => std::process::exit(0),
            Ok(Some(f)) if f.kind == Kind::Start => {
                if let Err(e) = start(&f.payload, stream) {
                    eprintln!("agent: {e}");
                }
            }
            _ => eprintln!("agent: a stranger"),
        });
    }
    Ok(())
}

/// Stops the agent at that address.
pub fn stop_agent(address: &str) -> Result<()> {
    let mut agent = connect(address)?;
    Ok(write_frame(&mut agent, &frame(Kind::Stop, Vec::new()))?)
}

/// Writes whole frames, from several threads.
fn say(driver: &Mutex<TcpStream>, frame: &Frame) -> io::Result<()> {
    let mut w = driver.lock().unwrap_or_else(|e| e.into_inner());
    write_frame(&mut *w, frame)
}

/// Starts a rank, carries its messages until it has ended, and then says how it did.
fn start(payload: &[u8], mut from: TcpStream) -> Result<()> {
    let driver = Arc::new(Mutex::new(from.try_clone()?));
    let Some(mut command) = decode(payload) else {
        fail!("what is to be started cannot be understood")
    };
    let (mut rank, theirs) = UnixStream::pair()?;
    let child = command
        .env(RANK_VAR, "1")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    // It holds the rank's end of the socket.
    drop(command);
    let mut child = match child {
        Ok(c) => c,
        Err(e) => {
            let text = format!("the agent cannot start a rank: {e}\n");
            say(&driver, &frame(Kind::Stderr, text.into_bytes()))?;
            let failed = ExitStatus::from_raw(97 << 8);
            return Ok(say(&driver, &exit(failed))?);
        }
    };
    let mut to = rank.try_clone()?;
    std::thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        // A rank whose driver is gone ends by itself.
        let _ = to.shutdown(Shutdown::Both);
    });
    let mut pipe = child.stderr.take().expect("stderr is piped");
    let to = driver.clone();
    let errors = std::thread::spawn(move || {
        let mut piece = [0u8; 4096];
        while let Ok(n) = pipe.read(&mut piece) {
            if n == 0 || say(&to, &frame(Kind::Stderr, piece[..n].to_vec())).is_err() {
                break;
            }
        }
    });
    while let Ok(Some(f)) = read_frame(&mut rank) {
        // A driver that is gone is noticed above.
        let _ = say(&driver, &f);
    }
    let status = child.wait()?;
    let _ = errors.join();
    Ok(say(&driver, &exit(status))?)
}

fn exit(status: ExitStatus) -> Frame {
    frame(Kind::Exit, status.into_raw().to_le_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_told_apart() {
        assert_eq!("here".parse(), Ok(Node::Here));
        assert_eq!("n0".parse(), Ok(Node::Namespace("n0".into())));
        assert_eq!("h:7".parse(), Ok(Node::Agent("h:7".into())));
        for wrong in ["", ".", "..", "a/b"] {
            assert!(wrong.parse::<Node>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn commands_survive_the_trip() {
        let args = ["a b".to_string(), String::new()];
        let env = [("X".to_string(), "y=z".to_string())];
        let c = decode(&encode("/bin/p", &args, &env)).unwrap();
        assert_eq!(c.get_program(), "/bin/p");
        assert_eq!(c.get_args().collect::<Vec<_>>(), ["a b", ""]);
        let set: Vec<_> = c.get_envs().collect();
        assert_eq!(set, [("X".as_ref(), Some("y=z".as_ref()))]);
        assert!(decode(b"/bin/p").is_none());
    }

    #[test]
    fn only_what_concerns_the_plugin_travels() {
        assert!(travels("NCCL_DEBUG") && travels("VCCL_TRANSPORT"));
        assert!(!travels("HOME") && !travels("TMPDIR") && !travels(AGENT_VAR));
    }
}
