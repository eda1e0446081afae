//! NCCL's progress loop for one rank: posts messages on several connections, keeps a number of
//! them in flight on each, and tests them in order.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::net::{Comm, Progress, Registered, Request};
use crate::worker::Idle;

/// A message: where in which memory, how many bytes, which tag.
#[derive(Clone, Copy)]
pub struct Message<'a> {
    /// Registered memory.
    pub memory: &'a Registered,
    /// Where in it.
    pub offset: usize,
    /// Bytes to send, or room for what is received.
    pub size: usize,
    /// The tag.
    pub tag: i32,
}

enum Step {
    Moving(Request),
    Flushing(Request, usize),
}

/// What a flow does with its next message.
type Source<'a> = Box<dyn FnMut(usize) -> Message<'a> + Send + 'a>;

/// What a flow tells about a message that is done: its number and its bytes.
type Sink<'a> = Box<dyn FnMut(usize, usize) -> Result<()> + Send + 'a>;

/// The messages of one end of a connection.
pub struct Flow<'a> {
    name: String,
    comm: Comm,
    count: usize,
    window: usize,
    source: Source<'a>,
    sink: Sink<'a>,
    posted: usize,
    done: usize,
    steps: VecDeque<Step>,
    flush: bool,
}

impl<'a> Flow<'a> {
    /// `count` messages, at most `window` in flight. `source` gives each message, `sink` hears of
    /// each that is done. `flush` makes received device memory visible as NCCL does.
    pub fn new(
        name: String,
        comm: Comm,
        count: usize,
        window: usize,
        source: impl FnMut(usize) -> Message<'a> + Send + 'a,
        sink: impl FnMut(usize, usize) -> Result<()> + Send + 'a,
    ) -> Flow<'a> {
        Flow {
            name,
            comm,
            count,
            window,
            source: Box::new(source),
            sink: Box::new(sink),
            posted: 0,
            done: 0,
            steps: VecDeque::with_capacity(window),
            flush: false,
        }
    }

    /// Flushes each receive before it counts as done.
    pub fn with_flush(mut self, flush: bool) -> Flow<'a> {
        self.flush = flush;
        self
    }

    /// How many messages are done.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Whether all of its messages are done.
    pub fn finished(&self) -> bool {
        self.done == self.count
    }

    /// Lets it move `more` messages.
    pub fn extend(&mut self, more: usize) {
        self.count += more;
    }

    /// Where it is, for the report of a hang.
    pub fn describe(&self) -> String {
        format!(
            "{}: {} of {} messages done, {} in flight",
            self.name,
            self.done,
            self.count,
            self.steps.len()
        )
    }

    fn at(&self, message: usize, call: &str) -> String {
        format!("{}, message {message}, {call}", self.name)
    }

    /// Posts and tests once; true if anything moved.
    pub fn poll(&mut self, io: &Progress) -> Result<bool> {
        let mut moved = false;
        while self.posted < self.count && self.steps.len() < self.window {
            let m = (self.source)(self.posted);
            let (request, call) = match self.comm {
                Comm::Send(c) => (io.isend(c, m.memory, m.offset, m.size, m.tag), "isend"),
                Comm::Recv(c) => (io.irecv(c, m.memory, m.offset, m.size, m.tag), "irecv"),
            };
            match request.context(|| self.at(self.posted, call))? {
                Some(r) => {
                    self.steps.push_back(Step::Moving(r));
                    self.posted += 1;
                    moved = true;
                }
                None => break,
            }
        }
        while let Some(step) = self.steps.front_mut() {
            let number = self.done;
            match step {
                Step::Moving(r) => {
                    let size = match io
                        .test(*r)
                        .context(|| format!("{}, message {number}", self.name))?
                    {
                        Some(size) => size,
                        None => break,
                    };
                    moved = true;
                    if let (true, Comm::Recv(c), true) = (self.flush, self.comm, size > 0) {
                        let m = (self.source)(number);
                        let flush = io
                            .iflush(c, m.memory, m.offset, size.min(m.size))
                            .context(|| format!("{}, message {number}", self.name))?;
                        if let Some(r) = flush {
                            *step = Step::Flushing(r, size);
                            continue;
                        }
                    }
                    self.complete(size)?;
                }
                Step::Flushing(r, size) => {
                    let size = *size;
                    if !io
                        .test_flush(*r)
                        .context(|| format!("{}, flush {number}", self.name))?
                    {
                        break;
                    }
                    moved = true;
                    self.complete(size)?;
                }
            }
        }
        Ok(moved)
    }

    /// Tests what is in flight after an error, and posts no more; true once all has ended, however.
    pub fn wind_up(&mut self, io: &Progress) -> bool {
        self.steps.retain(|s| match s {
            Step::Moving(r) => matches!(io.test(*r), Ok(None)),
            Step::Flushing(r, _) => matches!(io.test_flush(*r), Ok(false)),
        });
        self.steps.is_empty()
    }

    fn complete(&mut self, size: usize) -> Result<()> {
        self.steps.pop_front();
        let number = self.done;
        self.done += 1;
        (self.sink)(number, size).context(|| self.at(number, "completion"))
    }
}

/// How long flows may stand still before that is an error.
pub const STALL_LIMIT: Duration = Duration::from_secs(20);

/// How long it may be until one of several messages of so many bytes ends, before they count as hung: even at 4
/// MiB/s it has by then.
pub fn stall_limit(size: usize) -> Duration {
    STALL_LIMIT + Duration::from_secs(size as u64 >> 22)
}

/// Progresses flows until all are finished.
pub fn run(io: &Progress, flows: &mut [Flow<'_>], mut idle: Idle) -> Result<()> {
    let mut last = Instant::now();
    let mut quiet = 0u32;
    while flows.iter().any(|f| !f.finished()) {
        let mut moved = false;
        for f in flows.iter_mut().filter(|f| !f.finished()) {
            moved |= f.poll(io)?;
        }
        if moved {
            quiet = 0;
            idle.reset();
            continue;
        }
        idle.wait();
        quiet += 1;
        if quiet == 1 {
            last = Instant::now();
        } else if quiet.is_multiple_of(1024) && last.elapsed() > STALL_LIMIT {
            return Err(stalled(flows, STALL_LIMIT));
        }
    }
    Ok(())
}

/// The error of flows that stand still.
pub fn stalled(flows: &[Flow<'_>], limit: Duration) -> Error {
    let open: Vec<String> = flows
        .iter()
        .filter(|f| !f.finished())
        .take(8)
        .map(Flow::describe)
        .collect();
    Error::new(format!(
        "no message ended for {limit:?}: {}",
        open.join("; ")
    ))
}
