//! This process's allocations that a peer may map: each offered once, and counted.

use std::collections::HashMap;

use super::link::Link;
use super::memory::{Exportable, Identity};
use super::wire::Message;
use crate::error::Result;

/// What one link's peer has been offered.
#[derive(Default, Debug)]
pub struct Exports {
    by_identity: HashMap<Identity, u64>,
    live: HashMap<u64, (Exportable, usize)>,
    next: u64,
}

impl Exports {
    /// Offers an allocation, if the peer does not have it yet, and counts one more user of it.
    pub fn offer(&mut self, link: &Link, e: Exportable, uuid: [u8; 16]) -> Result<u64> {
        if let Some(id) = self.by_identity.get(&e.identity) {
            if let Some((_, users)) = self.live.get_mut(id) {
                *users += 1;
                return Ok(*id);
            }
        }
        // One packet at a time: a large export has more allocations than the process may have open
        // files.
        let id = self.next;
        self.next += 1;
        for offer in e.offers() {
            match offer {
                Ok((kind, fds)) => {
                    let m = Message::Export {
                        export: id,
                        uuid,
                        kind,
                    };
                    link.send(&m, fds);
                }
                Err(e) => {
                    link.send(&Message::Withdraw { export: id }, Vec::new());
                    return Err(e);
                }
            }
        }
        self.by_identity.insert(e.identity.clone(), id);
        self.live.insert(id, (e, 1));
        Ok(id)
    }

    /// One user less; the last one's leaving withdraws the offer. The caller sends the message that ends
    /// the use while it holds this cache, so that what is offered later is a new export.
    pub fn withdraw(&mut self, link: &Link, id: u64) {
        if let Some((e, users)) = self.live.get_mut(&id) {
            *users -= 1;
            if *users == 0 {
                self.by_identity.remove(&e.identity);
                self.live.remove(&id);
                link.send(&Message::Withdraw { export: id }, Vec::new());
            }
        }
    }
}
