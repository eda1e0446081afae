//! What two ends say to each other over TCP: fixed sizes, little endian, every field checked.
//!
//! Each socket begins with a [`Hello`] of the connector. Over the first one the listener answers, and from
//! then on the receiver posts its receives ([`Post`]); over all of them the sender sends frames, a
//! [`Frame`] with that many bytes behind it.

use crate::error::{Error, Result};

/// Sockets that one connection can have.
pub const MAX_SOCKETS: usize = 64;

/// Bytes of a [`Hello`].
pub const HELLO_LEN: usize = 64;
/// Bytes of an answer.
pub const ANSWER_LEN: usize = 8;
/// Bytes of a [`Post`].
pub const POST_LEN: usize = 16;
/// Bytes of a [`Frame`].
pub const FRAME_LEN: usize = 32;

/// Number of a connection's first receive: near the wrap, so that every connection that lives goes through it.
pub const FIRST: u32 = u32::MAX - 255;

pub(crate) const HELLO_MAGIC: [u8; 8] = *b"vcclTCP2";
const ANSWER_MAGIC: [u8; 4] = *b"vans";

fn take<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    from[at..at + N].try_into().expect("within the message")
}

/// How a connector introduces one of its sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The listener.
    pub listener: u64,
    /// Proof of holding its handle.
    pub secret: [u8; 16],
    /// The connection, the same on all its sockets.
    pub connection: [u8; 16],
    /// Which of them this is.
    pub socket: u16,
    /// How many there are: 1 to [`MAX_SOCKETS`].
    pub sockets: u16,
    /// What they are for: one of [`purpose`].
    pub purpose: u16,
}

/// What sockets are for.
pub mod purpose {
    /// Data.
    pub const TCP: u16 = 0;
    /// Setting up RDMA: one socket.
    pub const VERBS: u16 = 1;
}

impl Hello {
    /// Writes it.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut to = [0; HELLO_LEN];
        to[0..8].copy_from_slice(&HELLO_MAGIC);
        to[8..16].copy_from_slice(&self.listener.to_le_bytes());
        to[16..32].copy_from_slice(&self.secret);
        to[32..48].copy_from_slice(&self.connection);
        to[48..50].copy_from_slice(&self.socket.to_le_bytes());
        to[50..52].copy_from_slice(&self.sockets.to_le_bytes());
        to[52..54].copy_from_slice(&self.purpose.to_le_bytes());
        to
    }

    /// Reads it; `None`: it is none.
    pub fn decode(from: &[u8; HELLO_LEN]) -> Option<Hello> {
        let h = Hello {
            listener: u64::from_le_bytes(take(from, 8)),
            secret: take(from, 16),
            connection: take(from, 32),
            socket: u16::from_le_bytes(take(from, 48)),
            sockets: u16::from_le_bytes(take(from, 50)),
            purpose: u16::from_le_bytes(take(from, 52)),
        };
        let good = from[..8] == HELLO_MAGIC
            && from[54..].iter().all(|b| *b == 0)
            && (h.purpose == purpose::TCP || h.purpose == purpose::VERBS && h.sockets == 1)
            && h.socket < h.sockets
            && h.sockets as usize <= MAX_SOCKETS;
        good.then_some(h)
    }
}

/// The listener took the connection.
pub fn answer() -> [u8; ANSWER_LEN] {
    let mut to = [0; ANSWER_LEN];
    to[..4].copy_from_slice(&ANSWER_MAGIC);
    to
}

/// Checks an answer.
pub fn check_answer(from: &[u8; ANSWER_LEN]) -> Result<()> {
    match *from == answer() {
        true => Ok(()),
        false => Err(Error::remote(
            "whatever listens there is not vccl, or not this version of it",
        )),
    }
}

/// A posted receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Post {
    /// Its number: one more than that of the one before.
    pub seq: u32,
    /// NCCL's tag.
    pub tag: u32,
    /// Bytes that fit.
    pub capacity: u64,
}

impl Post {
    /// Writes it.
    pub fn encode(&self) -> [u8; POST_LEN] {
        let mut to = [0; POST_LEN];
        to[0..4].copy_from_slice(&self.seq.to_le_bytes());
        to[4..8].copy_from_slice(&self.tag.to_le_bytes());
        to[8..16].copy_from_slice(&self.capacity.to_le_bytes());
        to
    }

    /// Reads it.
    pub fn decode(from: &[u8; POST_LEN]) -> Post {
        Post {
            seq: u32::from_le_bytes(take(from, 0)),
            tag: u32::from_le_bytes(take(from, 4)),
            capacity: u64::from_le_bytes(take(from, 8)),
        }
    }
}

/// What a frame is.
pub mod kind {
    /// A part of a message, with its bytes behind.
    pub const DATA: u32 = 1;
    /// The message does not fit its receive: no bytes.
    pub const TOO_LARGE: u32 = 2;
}

/// The head of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame {
    /// One of [`kind`].
    pub kind: u32,
    /// The receive.
    pub seq: u32,
    /// Bytes of the whole message.
    pub total: u64,
    /// Where in the message these bytes lie.
    pub offset: u64,
    /// Bytes behind this head.
    pub len: u64,
}

impl Frame {
    /// Writes it.
    pub fn encode(&self) -> [u8; FRAME_LEN] {
        let mut to = [0; FRAME_LEN];
        to[0..4].copy_from_slice(&self.kind.to_le_bytes());
        to[4..8].copy_from_slice(&self.seq.to_le_bytes());
        to[8..16].copy_from_slice(&self.total.to_le_bytes());
        to[16..24].copy_from_slice(&self.offset.to_le_bytes());
        to[24..32].copy_from_slice(&self.len.to_le_bytes());
        to
    }

    /// Reads it; `None` where it contradicts itself.
    pub fn decode(from: &[u8; FRAME_LEN]) -> Option<Frame> {
        let f = Frame {
            kind: u32::from_le_bytes(take(from, 0)),
            seq: u32::from_le_bytes(take(from, 4)),
            total: u64::from_le_bytes(take(from, 8)),
            offset: u64::from_le_bytes(take(from, 16)),
            len: u64::from_le_bytes(take(from, 24)),
        };
        let good = match f.kind {
            kind::DATA => f
                .offset
                .checked_add(f.len)
                .is_some_and(|end| end <= f.total),
            kind::TOO_LARGE => f.offset == 0 && f.len == 0,
            _ => false,
        };
        good.then_some(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn round_trips() {
        let h = Hello {
            listener: 5,
            secret: [1; 16],
            connection: [2; 16],
            socket: 3,
            sockets: 4,
            purpose: purpose::TCP,
        };
        assert_eq!(Hello::decode(&h.encode()), Some(h));
        let p = Post {
            seq: 1,
            tag: 2,
            capacity: 3,
        };
        assert_eq!(Post::decode(&p.encode()), p);
        let f = Frame {
            kind: kind::DATA,
            seq: 9,
            total: 10,
            offset: 4,
            len: 6,
        };
        assert_eq!(Frame::decode(&f.encode()), Some(f));
        assert!(check_answer(&answer()).is_ok());
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let good = Hello {
            listener: 5,
            secret: [1; 16],
            connection: [2; 16],
            socket: 0,
            sockets: 1,
            purpose: purpose::VERBS,
        };
        assert_eq!(Hello::decode(&good.encode()), Some(good));
        for bad in [
            Hello { socket: 1, ..good },
            Hello { sockets: 0, ..good },
            Hello { sockets: 2, ..good },
            Hello { purpose: 2, ..good },
            Hello {
                sockets: MAX_SOCKETS as u16 + 1,
                ..good
            },
        ] {
            assert_eq!(Hello::decode(&bad.encode()), None, "{bad:?}");
        }
        let mut bytes = good.encode();
        bytes[60] = 1;
        assert_eq!(Hello::decode(&bytes), None);
        let good = Frame {
            kind: kind::DATA,
            seq: 9,
            total: 10,
            offset: 4,
            len: 6,
        };
        for bad in [
            Frame { kind: 0, ..good },
            Frame { kind: 3, ..good },
            Frame { len: 7, ..good },
            Frame {
                offset: u64::MAX,
                ..good
            },
            Frame {
                kind: kind::TOO_LARGE,
                ..good
            },
        ] {
            assert_eq!(Frame::decode(&bad.encode()), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn noise_does_not_panic(bytes in any::<[u8; 32]>(), more in any::<[u8; 32]>()) {
            let mut hello = [0; HELLO_LEN];
            hello[..32].copy_from_slice(&bytes);
            hello[32..].copy_from_slice(&more);
            prop_assert_eq!(Hello::decode(&hello), None);
            let _ = Frame::decode(&bytes);
        }
    }
}
