//! What several cases need: to post one message, to wait for it, to expect an error in time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vccl::error::ResultCode;

use crate::error::{Context, Error, Result};
use crate::memory::Buffer;
use crate::net::{
    code_name, Comm, Handle, ListenComm, Progress, RecvComm, Registered, Request, SendComm,
};
use crate::pattern::{self, Key};
use crate::rank::{Ctx, Link, CONNECT_LIMIT};
use crate::worker::Idle;
use crate::{ensure, fail};

/// How long a survivor may be left in doubt about a peer that died or closed.
pub const REMOTE_LIMIT: Duration = Duration::from_secs(5);

/// How long connecting to nobody may take to fail.
pub const NOBODY_LIMIT: Duration = Duration::from_secs(10);

/// How long anything may take that should simply work.
pub const WORK_LIMIT: Duration = Duration::from_secs(20);

/// Calls `f` on the progress thread until it gives something.
pub fn until<T: Send>(
    ctx: &Ctx,
    what: &str,
    limit: Duration,
    mut f: impl FnMut(&Progress) -> Result<Option<T>> + Send,
) -> Result<T> {
    let found = ctx.progress(|io| {
        let end = Instant::now() + limit;
        let mut idle = Idle::patient();
        loop {
            if let Some(t) = f(io)? {
                return Ok(t);
            }
            ensure!(Instant::now() < end, "still waiting after {limit:?}");
            idle.wait();
        }
    });
    found.context(|| what)
}

/// Posts a receive.
pub fn recv(
    ctx: &Ctx,
    link: &Link,
    memory: &Registered,
    offset: usize,
    capacity: usize,
    tag: i32,
) -> Result<Request> {
    let Comm::Recv(c) = link.comm else {
        fail!("connection {} does not receive here", link.id)
    };
    let what = format!("connection {}, irecv of {capacity} bytes", link.id);
    until(ctx, &what, WORK_LIMIT, |io| {
        io.irecv(c, memory, offset, capacity, tag)
    })
}

/// Posts a send.
pub fn send(
    ctx: &Ctx,
    link: &Link,
    memory: &Registered,
    offset: usize,
    size: usize,
    tag: i32,
) -> Result<Request> {
    let c = sender(link)?;
    let what = format!("connection {}, isend of {size} bytes", link.id);
    until(ctx, &what, WORK_LIMIT, |io| {
        io.isend(c, memory, offset, size, tag)
    })
}

/// The sending object of a link.
pub fn sender(link: &Link) -> Result<SendComm> {
    match link.comm {
        Comm::Send(c) => Ok(c),
        Comm::Recv(_) => fail!("connection {} does not send here", link.id),
    }
}

/// The receiving object of a link.
pub fn receiver(link: &Link) -> Result<RecvComm> {
    match link.comm {
        Comm::Recv(c) => Ok(c),
        Comm::Send(_) => fail!("connection {} does not receive here", link.id),
    }
}

/// Waits for a request.
pub fn wait(ctx: &Ctx, what: &str, request: Request) -> Result<usize> {
    until(ctx, what, WORK_LIMIT, |io| io.test(request))
}

/// Waits for the error that `f` must end with: on the progress thread, within `limit`.
pub fn error_within(
    ctx: &Ctx,
    what: &str,
    limit: Duration,
    mut f: impl FnMut(&Progress) -> Result<()> + Send,
) -> Result<Error> {
    ctx.state(format!("waiting for the error of {what}"));
    ctx.progress(|io| {
        let end = Instant::now() + limit;
        let mut idle = Idle::patient();
        loop {
            if let Err(e) = f(io) {
                return Ok(e);
            }
            ensure!(
                Instant::now() < end,
                "{what} gave no error within {limit:?}"
            );
            idle.wait();
        }
    })
}

/// Checks that an error is `ncclRemoteError`.
pub fn is_remote(what: &str, e: &Error) -> Result<()> {
    match e.code() {
        Some(ResultCode::REMOTE) => Ok(()),
        Some(c) => fail!(
            "{what} should give ncclRemoteError and gave {}: {e}",
            code_name(c)
        ),
        None => Err(e.clone().context(what)),
    }
}

/// Waits for a request of a peer that is gone: the error must be ncclRemoteError and come in time.
/// A request that had completed before is fine, and the result is false.
pub fn remote_error_of(ctx: &Ctx, what: &str, request: Request) -> Result<bool> {
    let mut completed = false;
    let e = error_within(ctx, what, REMOTE_LIMIT, |io| {
        if io.test(request)?.is_some() {
            completed = true;
            fail!("completed");
        }
        Ok(())
    })?;
    if completed {
        return Ok(false);
    }
    is_remote(what, &e)?;
    // NCCL up to 2.21 goes on testing until the communicator is aborted, and reports the last answer.
    for _ in 0..3 {
        match ctx.progress(|io| io.test(request).err()) {
            Some(e) => is_remote(&format!("{what}, tested again"), &e)?,
            None => fail!("{what}: it failed, and a second test says that it did not"),
        }
    }
    Ok(true)
}

/// Sends until that gives the error that a gone peer must give, in time.
pub fn remote_error_of_send(ctx: &Ctx, link: &Link, memory: &Registered) -> Result<()> {
    let c = sender(link)?;
    let what = format!("connection {}, isend to a peer that is gone", link.id);
    let mut open: Vec<Request> = Vec::new();
    let e = error_within(ctx, &what, REMOTE_LIMIT, |io| {
        if open.len() < 8 {
            if let Some(r) = io.isend(c, memory, 0, 8.min(memory.len), 0)? {
                open.push(r);
            }
        }
        if let Some(first) = open.first() {
            if io.test(*first)?.is_some() {
                open.remove(0);
            }
        }
        Ok(())
    })?;
    is_remote(&what, &e)
}

/// Polls `connect` until it gives a comm.
pub fn connect(ctx: &Ctx, handle: &mut Handle) -> Result<SendComm> {
    match connect_within(ctx, handle, CONNECT_LIMIT)? {
        Some(c) => Ok(c),
        None => fail!("connect still gives NULL after {CONNECT_LIMIT:?}"),
    }
}

/// Polls `connect` until it gives a comm or an error, or `limit` has passed.
pub fn connect_within(ctx: &Ctx, handle: &mut Handle, limit: Duration) -> Result<Option<SendComm>> {
    let dev = ctx.dev;
    ctx.service(|net| {
        let end = Instant::now() + limit;
        let mut idle = Idle::patient();
        loop {
            if let Some(c) = net.connect(dev, handle)? {
                return Ok(Some(c));
            }
            if Instant::now() > end {
                return Ok(None);
            }
            idle.wait();
        }
    })
}

/// Polls `accept` until it gives a comm or an error, or `limit` has passed.
pub fn accept_within(ctx: &Ctx, listener: ListenComm, limit: Duration) -> Result<Option<RecvComm>> {
    ctx.service(|net| {
        let end = Instant::now() + limit;
        let mut idle = Idle::patient();
        loop {
            if let Some(c) = net.accept(listener)? {
                return Ok(Some(c));
            }
            if Instant::now() > end {
                return Ok(None);
            }
            idle.wait();
        }
    })
}

/// Polls `accept` until it gives a comm.
pub fn accept(ctx: &Ctx, listener: ListenComm) -> Result<RecvComm> {
    match accept_within(ctx, listener, CONNECT_LIMIT)? {
        Some(c) => Ok(c),
        None => fail!("accept still gives NULL after {CONNECT_LIMIT:?}"),
    }
}

/// Listens on this rank's device.
pub fn listen(ctx: &Ctx) -> Result<(Handle, ListenComm)> {
    let dev = ctx.dev;
    ctx.service(|net| net.listen(dev))
}

/// Closes a listener, in time.
pub fn close_listen(ctx: &Ctx, listener: ListenComm) -> Result<()> {
    ctx.bounded("closeListen", crate::rank::close_limit(), |net| {
        net.close_listen(listener)
    })?
}

/// Writes a message's data into memory.
pub fn put(buffer: &Buffer, offset: usize, len: usize, key: Key) -> Result<()> {
    let mut bytes = vec![0u8; len];
    pattern::fill(key, &mut bytes);
    buffer.write(offset, &bytes)
}

/// Compares memory with a message's data.
pub fn verify(buffer: &Buffer, offset: usize, len: usize, key: Key) -> Result<()> {
    let mut bytes = vec![0u8; len];
    buffer.read(offset, &mut bytes)?;
    match pattern::check(key, &bytes) {
        None => Ok(()),
        Some(m) => fail!(
            "connection {}, message {}: {m}",
            key.connection,
            key.message
        ),
    }
}

/// Memory of one end of a connection, registered.
pub fn memory(ctx: &Ctx, link: &Link, len: usize) -> Result<(Arc<Buffer>, Registered)> {
    let buffer = ctx.buffer(link, len)?;
    let memory = ctx.register(link, &buffer)?;
    Ok((buffer, memory))
}
