//! Moves messages over connections and checks every byte: of what was received, of what surrounds
//! it, and of what the plugin says about sizes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use crate::error::{Context, Result};
use crate::flow::{self, Flow, Message};
use crate::memory::Buffer;
use crate::net::Registered;
use crate::pattern::{self, Key};
use crate::rank::{Ctx, Link};
use crate::worker::Idle;
use crate::{ensure, fail};

/// Bytes between messages in a buffer that nobody may touch.
pub const GUARD: usize = 64;

/// One message's shape.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Bytes that are sent.
    pub size: usize,
    /// Room that the receive offers.
    pub capacity: usize,
    /// Distance from an aligned address, for both ends.
    pub offset: usize,
}

impl Shape {
    /// A message that fills its receive, at an aligned address.
    pub fn plain(size: usize) -> Shape {
        Shape {
            size,
            capacity: size,
            offset: 0,
        }
    }
}

/// The messages of one connection; both ends pass the same.
pub struct Stream<'a> {
    /// This rank's end.
    pub link: &'a Link,
    /// How many messages.
    pub count: usize,
    /// How many in flight.
    pub window: usize,
    /// How many have their own memory: after that many, the data is checked and the memory used
    /// again.
    pub slots: usize,
    /// The shape of each message.
    pub shape: &'a (dyn Fn(usize) -> Shape + Sync),
    /// Distinguishes the data from that of other streams on the same connection.
    pub seed: u64,
    /// The address to ask for, if not 0; set to the address that came out.
    pub place: Option<&'a AtomicUsize>,
}

impl<'a> Stream<'a> {
    /// Messages that all have their own memory, with NCCL's number of steps in flight.
    pub fn new(link: &'a Link, count: usize, shape: &'a (dyn Fn(usize) -> Shape + Sync)) -> Self {
        Stream {
            link,
            count,
            window: 8,
            slots: count.max(1),
            shape,
            seed: 0,
            place: None,
        }
    }

    fn key(&self, me: usize, message: usize) -> Key {
        let rank = if self.link.sends() {
            me
        } else {
            self.link.peer
        };
        Key {
            seed: self.seed,
            rank,
            connection: self.link.id,
            message,
        }
    }
}

/// The memory of one stream: slots with guards between them.
struct Area {
    memory: Registered,
    buffer: Arc<Buffer>,
    base: usize,
    stride: usize,
    guard: Vec<u8>,
}

/// What fills the memory around messages.
fn guard_key(id: usize) -> Key {
    Key {
        seed: 0x6a7d,
        rank: usize::MAX,
        connection: id,
        message: 0,
    }
}

/// With more streams than this, those of one direction share one allocation: an allocation of the
/// GPU has at least 2 MiB.
const SHARE_ABOVE: usize = 64;

fn stride(s: &Stream) -> usize {
    let mut most = 0;
    for i in 0..s.count {
        let h = (s.shape)(i);
        most = most.max(h.offset + if s.link.sends() { h.size } else { h.capacity });
    }
    (GUARD + most + GUARD).next_multiple_of(GUARD)
}

fn areas(ctx: &Ctx, streams: &[Stream]) -> Result<Vec<Area>> {
    let strides: Vec<usize> = streams.iter().map(stride).collect();
    let mut shared: [Option<(Arc<Buffer>, usize)>; 2] = [None, None];
    if streams.len() > SHARE_ABOVE {
        for (i, share) in shared.iter_mut().enumerate() {
            let of_it = || {
                streams
                    .iter()
                    .zip(&strides)
                    .filter(|(s, _)| s.link.sends() == (i == 1))
            };
            if let Some((first, _)) = of_it().next() {
                let total = of_it().map(|(s, stride)| s.slots * stride).sum();
                *share = Some((ctx.buffer(first.link, total)?, 0));
            }
        }
    }
    let mut out = Vec::new();
    for (s, stride) in streams.iter().zip(strides) {
        let len = stride * s.slots;
        let (buffer, base) = match &mut shared[usize::from(s.link.sends())] {
            Some((buffer, next)) => {
                let base = *next;
                *next += len;
                (buffer.clone(), base)
            }
            None => {
                let wanted = s.place.map_or(0, |p| p.load(Ordering::Relaxed));
                let buffer = ctx.buffer_at(s.link, len, wanted)?;
                if let Some(p) = s.place {
                    p.store(buffer.address(), Ordering::Relaxed);
                }
                (buffer, 0)
            }
        };
        let memory = ctx
            .service(|net| net.reg_mr(s.link.comm, &buffer, base, len))
            .context(|| format!("connection {}", s.link.id))?;
        let mut guard = Vec::new();
        if !s.link.sends() {
            guard.resize(len, 0);
            pattern::fill(guard_key(s.link.id), &mut guard);
        }
        out.push(Area {
            memory,
            buffer,
            base,
            stride,
            guard,
        });
    }
    Ok(out)
}

impl Area {
    fn start(&self, slot: usize, shape: Shape) -> usize {
        slot * self.stride + GUARD + shape.offset
    }

    /// Writes what is sent next, or the guards that must survive.
    fn prepare(&self, ctx: &Ctx, s: &Stream, first: usize, n: usize) -> Result<()> {
        if !s.link.sends() {
            return self.buffer.write(self.base, &self.guard[..n * self.stride]);
        }
        let mut image = vec![0u8; n * self.stride];
        for i in 0..n {
            let h = (s.shape)(first + i);
            let at = self.start(i, h);
            pattern::fill(s.key(ctx.rank, first + i), &mut image[at..at + h.size]);
        }
        self.buffer.write(self.base, &image)
    }

    fn verify(&self, ctx: &Ctx, s: &Stream, first: usize, n: usize) -> Result<()> {
        if s.link.sends() {
            return Ok(());
        }
        let mut found = vec![0u8; n * self.stride];
        self.buffer.read(self.base, &mut found)?;
        let mut expected = self.guard[..n * self.stride].to_vec();
        for i in 0..n {
            let h = (s.shape)(first + i);
            let at = self.start(i, h);
            pattern::fill(s.key(ctx.rank, first + i), &mut expected[at..at + h.size]);
        }
        if expected == found {
            return Ok(());
        }
        for i in 0..n {
            let h = (s.shape)(first + i);
            let at = self.start(i, h);
            let name = format!("connection {}, message {} ({h:?})", s.link.id, first + i);
            if let Some(m) = pattern::check(s.key(ctx.rank, first + i), &found[at..at + h.size]) {
                fail!("{name}: {m}");
            }
            for b in i * self.stride..(i + 1) * self.stride {
                if expected[b] != found[b] {
                    let place = b as isize - at as isize;
                    fail!("{name}: the byte at {place} from its start was overwritten");
                }
            }
        }
        fail!(
            "connection {}: the data differs and no message does",
            s.link.id
        )
    }
}

/// Moves all messages of all streams through the progress thread and checks them.
pub fn exchange(ctx: &Ctx, streams: &[Stream]) -> Result<()> {
    let areas = areas(ctx, streams).context(|| "memory")?;
    let mut batch = 0;
    loop {
        // The part of each stream that this round moves.
        let parts: Vec<(usize, usize)> = streams
            .iter()
            .map(|s| {
                let first = (batch * s.slots).min(s.count);
                (first, s.slots.min(s.count - first))
            })
            .collect();
        if parts.iter().all(|p| p.1 == 0) {
            break;
        }
        for ((s, a), (first, n)) in streams.iter().zip(&areas).zip(&parts) {
            a.prepare(ctx, s, *first, *n)?;
        }
        ctx.progress(|io| {
            let mut flows: Vec<Flow> = streams
                .iter()
                .zip(&areas)
                .zip(&parts)
                .map(|((s, a), (first, n))| flow_of(s, a, *first, *n))
                .collect();
            flow::run(io, &mut flows, Idle::patient())
        })?;
        for ((s, a), (first, n)) in streams.iter().zip(&areas).zip(&parts) {
            a.verify(ctx, s, *first, *n)?;
        }
        batch += 1;
    }
    ctx.deregister(areas.into_iter().map(|a| a.memory).collect())
}

fn flow_of<'a>(s: &'a Stream<'a>, a: &'a Area, first: usize, n: usize) -> Flow<'a> {
    let sends = s.link.sends();
    let role = if sends { "send" } else { "receive" };
    Flow::new(
        format!(
            "connection {} with rank {} ({role}, from message {first})",
            s.link.id, s.link.peer
        ),
        s.link.comm,
        n,
        s.window,
        move |i| {
            let h = (s.shape)(first + i);
            Message {
                memory: &a.memory,
                offset: a.start(i, h),
                size: if sends { h.size } else { h.capacity },
                tag: 0,
            }
        },
        move |i, size| {
            let want = (s.shape)(first + i).size;
            ensure!(size == want, "test gave {size} bytes, and {want} were sent");
            Ok(())
        },
    )
    .with_flush(!sends && a.buffer.kind().is_device())
}

/// Moves `count` messages of `size` bytes over each link at once and checks them.
pub fn simple(ctx: &Ctx, links: &[Link], count: usize, size: usize, seed: u64) -> Result<()> {
    let shape = move |_: usize| Shape::plain(size);
    let streams: Vec<Stream> = links
        .iter()
        .map(|l| Stream {
            seed,
            ..Stream::new(l, count, &shape)
        })
        .collect();
    exchange(ctx, &streams)
}
