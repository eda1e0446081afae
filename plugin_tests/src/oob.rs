//! How the ranks of a run talk beside the plugin: through the process that started them, over one
//! socket for each process. Handles, barriers, and what is reported travel here; no test data does.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::fail;

/// The address of the process that started the ranks.
pub const PARENT: u32 = u32::MAX;

/// The longest a rank waits for another one.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Parent to process: what to do.
    Spec,
    /// Rank to rank.
    Data,
    /// Rank to parent: where it is, for the report of a hang.
    State,
    /// Rank to parent: its result. Payload: 0 ok, 1 failed, 2 skipped; then a text.
    Done,
    /// Rank to parent: anything that the entry wants to report.
    Up,
    /// Parent to ranks: that rank is gone.
    Gone,
    /// To an agent: a rank to start; see [`crate::nodes`].
    Start,
    /// From an agent: what its rank wrote to stderr.
    Stderr,
    /// From an agent: how its rank ended.
    Exit,
    /// To an agent: nothing more will come.
    Stop,
}

impl Kind {
    fn from_byte(b: u8) -> Option<Kind> {
        [
            Kind::Spec,
            Kind::Data,
            Kind::State,
            Kind::Done,
            Kind::Up,
            Kind::Gone,
            Kind::Start,
            Kind::Stderr,
            Kind::Exit,
            Kind::Stop,
        ]
        .into_iter()
        .find(|k| *k as u8 == b)
    }
}

/// One message between processes.
#[derive(Clone, Debug)]
pub struct Frame {
    /// What it is.
    pub kind: Kind,
    /// The rank that it comes from.
    pub from: u32,
    /// The rank that it goes to.
    pub to: u32,
    /// Its content.
    pub payload: Vec<u8>,
}

/// Reads a frame; `None` at the end of the stream.
pub fn read_frame(from: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut head = [0u8; 13];
    match from.read_exact(&mut head) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let word = |i: usize| u32::from_le_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
    let kind = Kind::from_byte(head[0])
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "unknown frame"))?;
    let mut payload = vec![0u8; word(9) as usize];
    from.read_exact(&mut payload)?;
    Ok(Some(Frame {
        kind,
        from: word(1),
        to: word(5),
        payload,
    }))
}

/// Writes a frame.
pub fn write_frame(to: &mut impl Write, frame: &Frame) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(13 + frame.payload.len());
    bytes.push(frame.kind as u8);
    bytes.extend(frame.from.to_le_bytes());
    bytes.extend(frame.to.to_le_bytes());
    bytes.extend((frame.payload.len() as u32).to_le_bytes());
    bytes.extend(&frame.payload);
    to.write_all(&bytes)
}

#[derive(Default)]
struct Boxes {
    mail: HashMap<(u32, u32), VecDeque<Vec<u8>>>,
    gone: HashMap<u32, Instant>,
}

/// A process's end of the socket, shared by its ranks.
pub struct Post {
    writer: Mutex<UnixStream>,
    boxes: Mutex<Boxes>,
    changed: Condvar,
}

impl Post {
    /// Starts a thread that sorts what comes in. When the stream ends the process ends: nobody is
    /// left to report to.
    pub fn start(stream: UnixStream) -> Result<Arc<Post>> {
        let mut reader = stream.try_clone()?;
        let post = Arc::new(Post {
            writer: Mutex::new(stream),
            boxes: Mutex::default(),
            changed: Condvar::new(),
        });
        let shared = post.clone();
        std::thread::Builder::new()
            .name("post".into())
            .spawn(move || loop {
                match read_frame(&mut reader) {
                    Ok(Some(f)) => shared.deliver(f),
                    // SAFETY: _exit only ends the process.
                    Ok(None) | Err(_) => unsafe { libc::_exit(98) },
                }
            })?;
        Ok(post)
    }

    fn deliver(&self, f: Frame) {
        let mut boxes = self.boxes.lock().unwrap_or_else(|e| e.into_inner());
        match f.kind {
            Kind::Gone => {
                boxes.gone.entry(f.from).or_insert_with(Instant::now);
            }
            _ => boxes
                .mail
                .entry((f.to, f.from))
                .or_default()
                .push_back(f.payload),
        }
        drop(boxes);
        self.changed.notify_all();
    }

    fn send(&self, frame: &Frame) -> Result<()> {
        let mut w = self.writer.lock().unwrap_or_else(|e| e.into_inner());
        Ok(write_frame(&mut *w, frame)?)
    }
}

/// One rank's way to talk.
#[derive(Clone)]
pub struct Oob {
    post: Arc<Post>,
    rank: u32,
    nranks: u32,
}

impl Oob {
    /// The way to talk of `rank`.
    pub fn new(post: Arc<Post>, rank: usize, nranks: usize) -> Oob {
        Oob {
            post,
            rank: rank as u32,
            nranks: nranks as u32,
        }
    }

    fn frame(&self, kind: Kind, to: u32, payload: impl Into<Vec<u8>>) -> Frame {
        Frame {
            kind,
            from: self.rank,
            to,
            payload: payload.into(),
        }
    }

    /// Sends bytes to a rank; that may be this one.
    pub fn send(&self, to: usize, bytes: impl Into<Vec<u8>>) -> Result<()> {
        let frame = self.frame(Kind::Data, to as u32, bytes);
        if to as u32 == self.rank {
            self.post.deliver(frame);
            return Ok(());
        }
        self.post.send(&frame)
    }

    /// The next bytes from a rank.
    pub fn recv(&self, from: usize) -> Result<Vec<u8>> {
        self.recv_within(from, PATIENCE)
    }

    /// The next bytes from a rank, if they come in time.
    pub fn recv_within(&self, from: usize, limit: Duration) -> Result<Vec<u8>> {
        let key = (self.rank, from as u32);
        let until = Instant::now() + limit;
        let mut boxes = self.post.boxes.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            if let Some(m) = boxes.mail.get_mut(&key).and_then(VecDeque::pop_front) {
                return Ok(m);
            }
            if boxes.gone.contains_key(&(from as u32)) {
                fail!("rank {from} is gone, and rank {} waited for it", self.rank);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                fail!("rank {} waited {limit:?} for rank {from}", self.rank);
            }
            boxes = self
                .post
                .changed
                .wait_timeout(boxes, left)
                .unwrap_or_else(|e| e.into_inner())
                .0;
        }
    }

    /// Every rank's bytes, in order of the ranks.
    pub fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        for to in 0..self.nranks {
            self.send(to as usize, mine)?;
        }
        (0..self.nranks)
            .map(|from| self.recv(from as usize))
            .collect()
    }

    /// Waits for all ranks.
    pub fn barrier(&self) -> Result<()> {
        self.barrier_of(&(0..self.nranks as usize).collect::<Vec<_>>())
    }

    /// Waits for some ranks, this one among them; all of them name the same ones.
    pub fn barrier_of(&self, ranks: &[usize]) -> Result<()> {
        for to in ranks {
            self.send(*to, b"barrier".to_vec())?;
        }
        for from in ranks {
            let m = self.recv(*from)?;
            if m != b"barrier" {
                return Err(Error::new(format!(
                    "rank {from} is not at the same barrier"
                )));
            }
        }
        Ok(())
    }

    /// Tells where this rank is; the last such text is in the report of a hang.
    pub fn state(&self, text: impl Into<String>) {
        let _ = self
            .post
            .send(&self.frame(Kind::State, PARENT, text.into()));
    }

    /// Reports something to the process that started the ranks.
    pub fn up(&self, bytes: impl Into<Vec<u8>>) -> Result<()> {
        self.post.send(&self.frame(Kind::Up, PARENT, bytes))
    }

    /// Reports this rank's result.
    pub fn done(&self, result: &Result<()>) -> Result<()> {
        let mut payload = Vec::new();
        match result {
            Ok(()) => payload.push(0),
            Err(e) => {
                payload.push(if e.is_skip() { 2 } else { 1 });
                payload.extend(e.text().as_bytes());
            }
        }
        self.post.send(&self.frame(Kind::Done, PARENT, payload))
    }

    /// When the other rank was found to be gone, if it is.
    pub fn gone(&self, rank: usize) -> Option<Instant> {
        let boxes = self.post.boxes.lock().unwrap_or_else(|e| e.into_inner());
        boxes.gone.get(&(rank as u32)).copied()
    }

    /// Waits until the other rank is gone.
    pub fn wait_gone(&self, rank: usize) -> Result<Instant> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(t) = self.gone(rank) {
                return Ok(t);
            }
            if Instant::now() > until {
                fail!("rank {rank} should have died and did not");
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_trip() {
        let f = Frame {
            kind: Kind::Up,
            from: 3,
            to: PARENT,
            payload: vec![1, 2, 3],
        };
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &f).unwrap();
        let mut from = &bytes[..];
        let g = read_frame(&mut from).unwrap().unwrap();
        assert_eq!(
            (g.kind, g.from, g.to, g.payload),
            (f.kind, f.from, f.to, f.payload)
        );
        assert!(read_frame(&mut from).unwrap().is_none());
        assert!(read_frame(&mut &bytes[..14]).is_err());
        assert!(read_frame(&mut &[77u8; 20][..]).is_err());
    }
}
