//! Connections between two processes of one host (or within one): GPU memory is exported by the
//! receiver, mapped by the sender, and written by the sender's copy engine, one copy per message;
//! host memory goes through chunks in shared memory.

pub mod engine;
pub mod export;
pub mod import;
pub mod link;
pub mod memory;
pub mod recv;
pub mod regions;
pub mod ring;
pub mod send;
pub mod shm;
pub mod steps;
pub mod wire;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::link::{Link, Listener, Service};
use self::recv::RecvConnection;
use self::send::{Phase, SendConnection, SendControl};
use self::shm::Shm;
use self::wire::{Message, Nonce};
use crate::config;
use crate::error::{Error, Result};

/// What connectors need to know of a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// The listening process.
    pub process: Nonce,
    /// The listener in it.
    pub listener: u64,
    /// Proof of holding the handle.
    pub secret: Nonce,
}

/// A listener of this process.
#[derive(Debug)]
pub struct Listening {
    service: Arc<Service>,
    listener: Arc<Listener>,
}

impl Listening {
    /// Starts to listen.
    pub fn new() -> Result<Listening> {
        Ok(Listening::of(Service::get()?))
    }

    pub(crate) fn of(service: Arc<Service>) -> Listening {
        let listener = service.listen();
        Listening { service, listener }
    }

    /// What goes into the handle.
    pub fn address(&self) -> Address {
        Address {
            process: *self.service.nonce(),
            listener: self.listener.id,
            secret: self.listener.secret,
        }
    }

    /// The next connection that was asked for, if there is one.
    pub fn accept(&self) -> Option<(Arc<Service>, RecvConnection)> {
        let accepted = self
            .listener
            .waiting
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .as_mut()?
            .pop_front()?;
        Some((self.service.clone(), RecvConnection::new(accepted)))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        for a in self.service.unlisten(&self.listener) {
            a.control.abandon();
        }
    }
}

/// A connection that is being asked for.
#[derive(Debug)]
pub struct Connecting {
    service: Arc<Service>,
    address: Address,
    started: Instant,
    asked: Option<(Arc<Link>, Arc<SendControl>)>,
}

impl Connecting {
    /// Starts to connect.
    pub fn new(address: Address) -> Result<Connecting> {
        Ok(Connecting::of(Service::get()?, address))
    }

    pub(crate) fn of(service: Arc<Service>, address: Address) -> Connecting {
        Connecting {
            service,
            address,
            started: Instant::now(),
            asked: None,
        }
    }

    /// How long it has been going on.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Goes on; `None`: not yet.
    pub fn poll(&mut self) -> Result<Option<(Arc<Service>, SendConnection)>> {
        if self.asked.is_none() {
            if let Some(link) = self.service.link_to(&self.address.process)? {
                let (control, message, fd) = ask(&link, &self.address)?;
                link.send(&message, vec![fd]);
                self.asked = Some((link, control));
            }
        }
        if let Some((_, control)) = &self.asked {
            match control.phase() {
                Phase::Connected => {
                    let c = SendConnection::new(control.clone());
                    self.asked = None;
                    return Ok(Some((self.service.clone(), c)));
                }
                Phase::Refused(why) => return Err(Error::remote(why)),
                Phase::Asked => {}
            }
        }
        let limit = config::current().connect_timeout_s;
        if self.started.elapsed() >= Duration::from_secs(limit) {
            return Err(Error::remote(format!(
                "no answer from the listening process within {limit} s (VCCL_CONNECT_TIMEOUT); is it stopped?"
            )));
        }
        Ok(None)
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        // Given up: whoever accepted it shall not wait.
        if let Some((_, control)) = self.asked.take() {
            control.give_up();
        }
    }
}

fn ask(link: &Arc<Link>, address: &Address) -> Result<(Arc<SendControl>, Message, OwnedFd)> {
    let host_chunk = config::current().host_chunk;
    let (shm, fd) = Shm::create(host_chunk)?;
    let conn = link.new_conn();
    let control = SendControl::new(Arc::new(shm), link.clone(), conn, steps::FIRST)?;
    link.attach_send(conn, &control);
    let message = Message::Connect {
        conn,
        listener: address.listener,
        secret: address.secret,
        host_chunk: host_chunk as u64,
        first: steps::FIRST,
    };
    Ok((control, message, fd))
}
