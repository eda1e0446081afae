//! What two ends say to each other: over a socket while they connect, and then in each other's memory.
//!
//! Over the socket, fixed sizes, little endian, every field checked: the connector's [`Offer`], the listener's
//! [`Reply`], and [`GO`] once a write has gone through. In memory, the receiver writes [`Descriptor`]s of
//! posted receives and counts of free chunks to the sender, and the sender writes bytes, and totals that
//! the 32 bits of an [`Imm`] have no room for, to the receiver.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::ibverbs::sys::{Gid, MTU_256, MTU_4096};
use crate::transport::staging::{CHUNKS, LARGE};

/// Ports that one device of NCCL's can have.
pub const MAX_PORTS: usize = 4;
/// Queue pairs that one connection can have.
pub const MAX_QPS: usize = 64;
/// GIDs that a port offers at most.
pub const MAX_GIDS: usize = 8;
/// Receives that may be posted at a time: slots of the ring of descriptors.
pub const RING: usize = 64;

/// Number of the first receive: soon before the numbers go round, so that this is nothing rare.
pub const FIRST: u32 = u32::MAX - 99;

pub(crate) const OFFER_MAGIC: [u8; 8] = *b"vcclIBo2";
pub(crate) const REPLY_MAGIC: [u8; 8] = *b"vcclIBr2";
/// The connector's word that the way has been proved.
pub const GO: [u8; 8] = *b"vcclIBgo";

/// What a GID is good for, as it travels.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct GidEntry {
    /// The GID.
    pub gid: Gid,
    /// RoCE: its version, 1 or 2. InfiniBand: 0.
    pub version: u8,
}

/// A port of one end.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PortOffer {
    /// InfiniBand's local identifier.
    pub lid: u16,
    /// `IBV_MTU_*`
    pub mtu: u8,
    /// The key of the end's control block with that port's device.
    pub rkey: u32,
    /// GIDs, those it likes best first; the others are zero.
    pub gids: [GidEntry; MAX_GIDS],
    /// How many.
    pub n_gids: u8,
    /// The device's name, as far as it fits, for messages to people.
    pub name: [u8; 16],
    /// The port's number, for them too.
    pub number: u8,
}

impl PortOffer {
    /// The device's name and its port's number.
    pub fn name(&self) -> String {
        let n = self
            .name
            .iter()
            .position(|b| *b == 0)
            .unwrap_or(self.name.len());
        format!("{}:{}", plain(&self.name[..n]), self.number)
    }
}

/// What a peer says to people, without what steers their terminals.
fn plain(text: &[u8]) -> String {
    String::from_utf8_lossy(text).replace(char::is_control, " ")
}

/// A queue pair of one end.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QpOffer {
    /// Its number: 24 bits.
    pub number: u32,
    /// The first packet number that it sends: 24 bits.
    pub psn: u32,
}

/// Where in a port's bytes its number is: behind the GIDs.
const NUMBER: usize = 24 + MAX_GIDS * 17;
/// The bytes that a port takes.
const PORT_LEN: usize = NUMBER + 16;
const OFFER_HEAD: usize = 32;
/// Bytes of an [`Offer`].
pub const OFFER_LEN: usize = OFFER_HEAD + MAX_PORTS * PORT_LEN + MAX_QPS * 8;
/// Bytes of the reason in a [`Reply`].
pub(crate) const REASON: usize = 256;
/// Bytes of a [`Reply`].
pub const REPLY_LEN: usize = OFFER_LEN + MAX_QPS * 2 + REASON + 8;

/// What an end brings into a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The first byte of its control block.
    pub block: u64,
    /// Its ports: 1 to [`MAX_PORTS`].
    pub ports: Vec<PortOffer>,
    /// Its queue pairs: 1 to [`MAX_QPS`]. Which port has which follows from the two numbers of ports.
    pub qps: Vec<QpOffer>,
    /// Whether its ports speak InfiniBand and not RoCE.
    pub infiniband: bool,
    /// The traffic class of both directions; the connector's counts.
    pub traffic_class: u8,
    /// Memory of its GPU goes through chunks, because its devices do not reach it.
    pub stages: bool,
}

fn take<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    from[at..at + N].try_into().expect("within the message")
}

impl Offer {
    fn put(&self, to: &mut [u8; OFFER_LEN], magic: [u8; 8]) {
        to.fill(0);
        to[..8].copy_from_slice(&magic);
        to[8..16].copy_from_slice(&self.block.to_le_bytes());
        to[16] = self.ports.len() as u8;
        to[17] = self.qps.len() as u8;
        to[18] = self.infiniband as u8;
        to[19] = self.traffic_class;
        to[20] = self.stages as u8;
        for (i, p) in self.ports.iter().enumerate() {
            let at = &mut to[OFFER_HEAD + i * PORT_LEN..][..PORT_LEN];
            at[0..2].copy_from_slice(&p.lid.to_le_bytes());
            at[2] = p.mtu;
            at[3] = p.n_gids;
            at[4..8].copy_from_slice(&p.rkey.to_le_bytes());
            at[8..24].copy_from_slice(&p.name);
            at[NUMBER] = p.number;
            for (j, g) in p.gids.iter().enumerate() {
                at[24 + j * 17..][..16].copy_from_slice(&g.gid.0);
                at[24 + j * 17 + 16] = g.version;
            }
        }
        for (i, q) in self.qps.iter().enumerate() {
            let at = &mut to[OFFER_HEAD + MAX_PORTS * PORT_LEN + i * 8..][..8];
            at[..4].copy_from_slice(&q.number.to_le_bytes());
            at[4..].copy_from_slice(&q.psn.to_le_bytes());
        }
    }

    fn get(from: &[u8; OFFER_LEN], magic: [u8; 8]) -> Option<Offer> {
        let (n_ports, n_qps) = (from[16] as usize, from[17] as usize);
        let good = from[..8] == magic
            && (1..=MAX_PORTS).contains(&n_ports)
            && (1..=MAX_QPS).contains(&n_qps)
            && from[18] <= 1
            && from[20] <= 1;
        if !good {
            return None;
        }
        let mut ports = Vec::new();
        for i in 0..n_ports {
            let at = &from[OFFER_HEAD + i * PORT_LEN..][..PORT_LEN];
            let mut gids = [GidEntry::default(); MAX_GIDS];
            for (j, g) in gids.iter_mut().enumerate() {
                *g = GidEntry {
                    gid: Gid(take(at, 24 + j * 17)),
                    version: at[24 + j * 17 + 16],
                };
            }
            let p = PortOffer {
                lid: u16::from_le_bytes(take(at, 0)),
                mtu: at[2],
                n_gids: at[3],
                rkey: u32::from_le_bytes(take(at, 4)),
                name: take(at, 8),
                number: at[NUMBER],
                gids,
            };
            let mtus = MTU_256 as u8..=MTU_4096 as u8;
            if !mtus.contains(&p.mtu) || p.n_gids as usize > MAX_GIDS {
                return None;
            }
            ports.push(p);
        }
        let qps: Vec<QpOffer> = (0..n_qps)
            .map(|i| {
                let at = &from[OFFER_HEAD + MAX_PORTS * PORT_LEN + i * 8..][..8];
                QpOffer {
                    number: u32::from_le_bytes(take(at, 0)),
                    psn: u32::from_le_bytes(take(at, 4)),
                }
            })
            .collect();
        if qps.iter().any(|q| q.number >> 24 != 0 || q.psn >> 24 != 0) {
            return None;
        }
        let offer = Offer {
            block: u64::from_le_bytes(take(from, 8)),
            ports,
            qps,
            infiniband: from[18] == 1,
            traffic_class: from[19],
            stages: from[20] == 1,
        };
        let known = |g: &GidEntry| match offer.infiniband {
            true => g.version == 0,
            false => g.version == 1 || g.version == 2,
        };
        let good = offer.ports.iter().all(|p| {
            let (used, free) = p.gids.split_at(p.n_gids.into());
            used.iter().all(known) && free.iter().all(|g| *g == GidEntry::default())
        });
        // Nothing stands where nothing belongs: each offer is written in one way.
        let mut again = [0; OFFER_LEN];
        offer.put(&mut again, magic);
        (good && again == *from).then_some(offer)
    }

    /// Writes the connector's.
    pub fn encode(&self) -> Box<[u8; OFFER_LEN]> {
        let mut to = Box::new([0; OFFER_LEN]);
        self.put(&mut to, OFFER_MAGIC);
        to
    }

    /// Reads the connector's; `None`: it is none.
    pub fn decode(from: &[u8; OFFER_LEN]) -> Option<Offer> {
        Offer::get(from, OFFER_MAGIC)
    }
}

/// The GIDs that a queue pair uses, as numbers in the offers of its two ports.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct GidPair {
    /// In the connector's port.
    pub connector: u8,
    /// In the listener's port.
    pub listener: u8,
}

/// The listener's answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// It has built its queue pairs.
    Ready {
        /// What it brings.
        offer: Offer,
        /// For each queue pair, which GIDs it uses.
        gids: Vec<GidPair>,
    },
    /// It cannot, and why.
    Refused(String),
}

impl Reply {
    /// Writes it.
    pub fn encode(&self) -> Box<[u8; REPLY_LEN]> {
        let mut to = Box::new([0; REPLY_LEN]);
        match self {
            Reply::Ready { offer, gids } => {
                let mut bytes = [0; OFFER_LEN];
                offer.put(&mut bytes, REPLY_MAGIC);
                to[..OFFER_LEN].copy_from_slice(&bytes);
                for (i, g) in gids.iter().enumerate() {
                    to[OFFER_LEN + 2 * i] = g.connector;
                    to[OFFER_LEN + 2 * i + 1] = g.listener;
                }
                to[REPLY_LEN - 8] = 1;
            }
            Reply::Refused(why) => {
                to[..8].copy_from_slice(&REPLY_MAGIC);
                let why = why.replace(char::is_control, " ");
                let mut n = why.len().min(REASON);
                while !why.is_char_boundary(n) {
                    n -= 1;
                }
                to[OFFER_LEN + MAX_QPS * 2..][..n].copy_from_slice(&why.as_bytes()[..n]);
                to[REPLY_LEN - 8] = 2;
            }
        }
        to
    }

    /// Reads it; `None`: it is none.
    pub fn decode(from: &[u8; REPLY_LEN]) -> Option<Reply> {
        if from[..8] != REPLY_MAGIC {
            return None;
        }
        let reply = match from[REPLY_LEN - 8] {
            1 => {
                let offer = Offer::get(&take(from, 0), REPLY_MAGIC)?;
                let gids = (0..offer.qps.len())
                    .map(|i| GidPair {
                        connector: from[OFFER_LEN + 2 * i],
                        listener: from[OFFER_LEN + 2 * i + 1],
                    })
                    .collect();
                Reply::Ready { offer, gids }
            }
            2 => {
                let text = &from[OFFER_LEN + MAX_QPS * 2..][..REASON];
                let n = text.iter().position(|b| *b == 0).unwrap_or(REASON);
                Reply::Refused(std::str::from_utf8(&text[..n]).ok()?.to_string())
            }
            _ => return None,
        };
        (*reply.encode() == *from).then_some(reply)
    }
}

/// A posted receive.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Descriptor {
    /// Its number: one more than that of the one before, 0 left out; the first is [`FIRST`].
    pub seq: u32,
    /// NCCL's tag.
    pub tag: u32,
    /// Where the bytes go, unless they are staged.
    pub addr: u64,
    /// Bytes that fit.
    pub capacity: u64,
    /// The buffer's key with the device of each of the receiver's ports.
    pub rkeys: [u32; MAX_PORTS],
    /// Bytes of each of the receiver's chunks, which the message goes through; 0: it does not.
    pub chunk: u32,
}

/// Words of a [`Descriptor`] in memory.
pub const DESCRIPTOR_WORDS: usize = 12;
/// Its bytes.
pub const DESCRIPTOR_LEN: usize = DESCRIPTOR_WORDS * 4;

impl Descriptor {
    /// As it is written.
    #[inline]
    pub fn words(&self) -> [u32; DESCRIPTOR_WORDS] {
        let mut w = [
            self.addr as u32,
            (self.addr >> 32) as u32,
            self.capacity as u32,
            (self.capacity >> 32) as u32,
            self.rkeys[0],
            self.rkeys[1],
            self.rkeys[2],
            self.rkeys[3],
            self.tag,
            self.chunk,
            self.seq,
            0,
        ];
        w[11] = check(&w[..11]);
        w
    }

    /// Reads number `seq`; `None`: it is not there, or not whole yet.
    #[inline]
    pub fn of(w: &[u32; DESCRIPTOR_WORDS], seq: u32) -> Option<Descriptor> {
        if w[10] != seq || w[11] != check(&w[..11]) || w[9] > LARGE as u32 {
            return None;
        }
        Some(Descriptor {
            seq,
            tag: w[8],
            addr: u64::from(w[1]) << 32 | u64::from(w[0]),
            capacity: u64::from(w[3]) << 32 | u64::from(w[2]),
            rkeys: [w[4], w[5], w[6], w[7]],
            chunk: w[9],
        })
    }
}

/// Tells a whole descriptor from one of which only a part has been placed: the order in which a device places
/// the bytes of one write is its own.
#[inline]
pub(crate) fn check(words: &[u32]) -> u32 {
    words.iter().fold(0x9e37_79b9, |h, w| {
        (h ^ w).rotate_left(5).wrapping_mul(0x0100_0193)
    })
}

/// How a message ends that the receiver cannot learn from an [`Imm`].
pub mod done {
    /// All its bytes were written.
    pub const WRITTEN: u32 = 1;
    /// It does not fit its receive: no bytes.
    pub const TOO_LARGE: u32 = 2;
}

/// A total: two words of it, what kind it is, and the check of those.
#[inline]
pub fn done_words(total: u64, kind: u32, striped: bool) -> [u32; 4] {
    let mut w = [
        total as u32,
        (total >> 32) as u32,
        kind | u32::from(striped) << 8,
        0,
    ];
    w[3] = check(&w[..3]);
    w
}

/// Reads them: total, kind, whether all queue pairs have a part.
#[inline]
pub fn done_of(w: &[u32; 4]) -> Option<(u64, u32, bool)> {
    let good = w[3] == check(&w[..3]) && w[2] >> 9 == 0;
    good.then_some((
        u64::from(w[1]) << 32 | u64::from(w[0]),
        w[2] & 0xff,
        w[2] & 0x100 != 0,
    ))
}

/// The block of memory of each end that the other writes to.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Block {
    /// At the sender: the ring of descriptors.
    pub ring: [Slot; RING],
    /// At the receiver: totals, by slot.
    pub done: [Done; RING],
    /// At the sender: chunks that the receiver has freed since the start; each count has the place after that
    /// of the one before, and the highest is the newest.
    pub credits: [AtomicU64; CHUNKS],
    /// What proves the way.
    pub proof: AtomicU64,
    /// Where an end's own descriptors and totals are written from, by slot. Each stays as it is until the slot
    /// is used again, and a write that is tried again with newer words says nothing wrong.
    pub source: [Slot; RING],
    /// The same for the count of chunks and the proof.
    pub source_word: AtomicU64,
}

/// A descriptor's place.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot(pub [AtomicU32; 16]);

/// A total's place.
#[repr(C, align(16))]
#[derive(Debug)]
pub struct Done(pub [AtomicU32; 4]);

/// Where in a [`Block`] its parts are.
pub mod offset {
    use super::{Block, CHUNKS, RING};
    use std::mem::offset_of;

    /// A descriptor.
    #[inline]
    pub fn slot(seq: u32) -> u64 {
        (offset_of!(Block, ring) + (seq as usize % RING) * 64) as u64
    }

    /// A total.
    #[inline]
    pub fn done(slot: u32) -> u64 {
        (offset_of!(Block, done) + (slot as usize % RING) * 16) as u64
    }

    /// A count of chunks.
    #[inline]
    pub fn credits(freed: u32) -> u64 {
        (offset_of!(Block, credits) + (freed as usize % CHUNKS) * 8) as u64
    }

    /// The proof.
    pub const PROOF: u64 = offset_of!(Block, proof) as u64;
}

/// Reads words that a device writes. Whether they belong together their check tells.
#[inline]
pub fn load<const N: usize>(from: &[AtomicU32]) -> [u32; N] {
    std::array::from_fn(|i| from[i].load(Ordering::Acquire))
}

/// The 32 bits that announce a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Imm {
    /// A whole message of so many bytes, or this queue pair's part of one.
    Short {
        /// The receive's slot.
        slot: u32,
        /// Bytes of the whole message: below [`SHORT`].
        total: u32,
        /// All queue pairs have a part.
        striped: bool,
    },
    /// The same, and the total lies in [`Block::done`].
    Long {
        /// The receive's slot.
        slot: u32,
    },
    /// A chunk of a message.
    Chunk {
        /// The receive's slot.
        slot: u32,
        /// The chunk.
        chunk: u32,
        /// Its bytes.
        bytes: u32,
        /// It is the message's last.
        last: bool,
    },
}

/// Messages of fewer bytes than this have their size in the [`Imm`].
pub const SHORT: u64 = 1 << 23;

const _: () = assert!(RING <= 1 << 6 && CHUNKS <= 1 << 3 && LARGE < 1 << 20);

impl Imm {
    /// As bits.
    #[inline]
    pub fn encode(self) -> u32 {
        match self {
            Imm::Short {
                slot,
                total,
                striped,
            } => slot << 24 | u32::from(striped) << 23 | total,
            Imm::Long { slot } => 1 << 30 | slot << 24,
            Imm::Chunk {
                slot,
                chunk,
                bytes,
                last,
            } => 2 << 30 | slot << 24 | u32::from(last) << 23 | chunk << 20 | bytes,
        }
    }

    /// From bits; `None` where they mean nothing.
    #[inline]
    pub fn decode(bits: u32) -> Option<Imm> {
        let slot = bits >> 24 & 63;
        match bits >> 30 {
            0 => Some(Imm::Short {
                slot,
                total: bits & ((1 << 23) - 1),
                striped: bits >> 23 & 1 != 0,
            }),
            1 if bits & 0xff_ffff == 0 => Some(Imm::Long { slot }),
            2 if (bits & 0xf_ffff) as usize <= LARGE => Some(Imm::Chunk {
                slot,
                chunk: bits >> 20 & 7,
                bytes: bits & 0xf_ffff,
                last: bits >> 23 & 1 != 0,
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offer() -> Offer {
        let mut gids = [GidEntry::default(); MAX_GIDS];
        gids[0] = GidEntry {
            gid: Gid([7; 16]),
            version: 0,
        };
        let port = PortOffer {
            lid: 5,
            mtu: 3,
            rkey: 77,
            gids,
            n_gids: 1,
            name: *b"mlx5_0\0\0\0\0\0\0\0\0\0\0",
            number: 2,
        };
        Offer {
            block: 0x1234_5678_9abc,
            ports: vec![port, PortOffer { lid: 6, ..port }],
            qps: vec![
                QpOffer {
                    number: 0xff_ffff,
                    psn: 1
                };
                3
            ],
            infiniband: true,
            traffic_class: 106,
            stages: true,
        }
    }

    #[test]
    fn round_trips() {
        let o = offer();
        assert_eq!(Offer::decode(&o.encode()), Some(o.clone()));
        assert_eq!(o.ports[0].name(), "mlx5_0:2");
        let pair = GidPair {
            connector: 1,
            listener: 2,
        };
        let ready = Reply::Ready {
            gids: vec![pair; o.qps.len()],
            offer: o,
        };
        assert_eq!(Reply::decode(&ready.encode()), Some(ready));
        let long = "é".repeat(300);
        let Some(Reply::Refused(text)) = Reply::decode(&Reply::Refused(long.clone()).encode())
        else {
            panic!("not refused");
        };
        assert!(long.starts_with(&text) && text.len() >= REASON - 1);
        let d = Descriptor {
            seq: 9,
            tag: 8,
            addr: u64::MAX - 3,
            capacity: 1 << 40,
            rkeys: [1, 2, 3, 4],
            chunk: 4096,
        };
        assert_eq!(Descriptor::of(&d.words(), 9), Some(d));
        assert_eq!(Descriptor::of(&d.words(), 10), None);
        assert_eq!(
            done_of(&done_words(u64::MAX, done::TOO_LARGE, true)),
            Some((u64::MAX, done::TOO_LARGE, true))
        );
    }

    #[test]
    fn a_peers_texts_stay_on_one_line() {
        let mut o = offer();
        o.ports[0].name = *b"a\nb\x1b[2Jc\xff\0\0\0\0\0\0\0";
        let o = Offer::decode(&o.encode()).unwrap();
        assert!(!o.ports[0].name().chars().any(char::is_control));
        let r = Reply::decode(&Reply::Refused("x\ny\r".into()).encode());
        assert_eq!(r, Some(Reply::Refused("x y ".into())));
    }

    #[test]
    fn a_descriptor_in_parts_is_not_taken() {
        let (a, b) = (
            Descriptor {
                seq: 5,
                addr: 1,
                ..Descriptor::default()
            },
            Descriptor {
                seq: 5 + RING as u32,
                addr: 2,
                tag: 3,
                ..Descriptor::default()
            },
        );
        let (a, b) = (a.words(), b.words());
        for mask in 0..(1u32 << DESCRIPTOR_WORDS) - 1 {
            let mixed = std::array::from_fn(|i| if mask >> i & 1 != 0 { b[i] } else { a[i] });
            let same = mixed == b;
            assert_eq!(Descriptor::of(&mixed, 5 + RING as u32).is_some(), same);
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let good = offer();
        let changed = |f: &dyn Fn(&mut Offer)| {
            let mut o = good.clone();
            f(&mut o);
            Offer::decode(&o.encode())
        };
        assert!(changed(&|_| ()).is_some());
        assert_eq!(changed(&|o| o.ports[1].mtu = 0), None);
        assert_eq!(changed(&|o| o.ports[1].mtu = 6), None);
        assert_eq!(changed(&|o| o.ports[0].n_gids = 9), None);
        assert_eq!(changed(&|o| o.qps[2].number = 1 << 24), None);
        assert_eq!(changed(&|o| o.qps[0].psn = 1 << 24), None);
        assert_eq!(changed(&|o| o.qps.clear()), None);
        assert_eq!(changed(&|o| o.ports.clear()), None);
        let mut bytes = good.encode();
        bytes[16] = MAX_PORTS as u8 + 1;
        assert_eq!(Offer::decode(&bytes), None);
        assert_eq!(Reply::decode(&[0; REPLY_LEN]), None);
    }

    #[test]
    fn what_stands_where_nothing_belongs_is_refused() {
        let o = offer();
        let good = o.encode();
        let port = OFFER_HEAD + PORT_LEN;
        let qps = OFFER_HEAD + MAX_PORTS * PORT_LEN;
        for (what, at, byte) in [
            ("neither staged nor not", 20, 2),
            ("the head's free bytes", 21, 1),
            ("the head's last", OFFER_HEAD - 1, 1),
            ("a GID that is not offered", port + 24 + 17, 1),
            ("its version", port + 24 + 7 * 17 + 16, 1),
            ("a version that InfiniBand has not", port + 24 + 16, 1),
            ("a port too many", OFFER_HEAD + 2 * PORT_LEN, 1),
            ("a queue pair too many", qps + 3 * 8, 1),
            ("the last of them", OFFER_LEN - 1, 1),
        ] {
            let mut bytes = good.clone();
            bytes[at] = byte;
            assert_eq!(Offer::decode(&bytes), None, "{what}");
        }
        let mut roce = o.clone();
        roce.infiniband = false;
        for (version, allowed) in [(0, false), (1, true), (2, true), (3, false)] {
            roce.ports
                .iter_mut()
                .for_each(|p| p.gids[0].version = version);
            assert_eq!(
                Offer::decode(&roce.encode()).is_some(),
                allowed,
                "{version}"
            );
        }
        let ready = Reply::Ready {
            gids: vec![GidPair::default(); o.qps.len()],
            offer: o,
        };
        let refused = Reply::Refused("no".into());
        let reason = OFFER_LEN + MAX_QPS * 2;
        for (reply, at, byte) in [
            (&ready, OFFER_LEN + 2 * 3, 1),
            (&ready, reason, b'x'),
            (&ready, REPLY_LEN - 1, 1),
            (&refused, 8, 1),
            (&refused, OFFER_LEN, 1),
            (&refused, reason, b'\n'),
            (&refused, reason, 0xff),
            (&refused, reason + 3, b'x'),
            (&refused, REPLY_LEN - 7, 1),
        ] {
            let mut bytes = reply.encode();
            assert_eq!(Reply::decode(&bytes).as_ref(), Some(reply));
            bytes[at] = byte;
            assert_eq!(Reply::decode(&bytes), None, "byte {at} of {reply:?}");
        }
        // What is ours is made fit for a log, and so is a name.
        let ours = Reply::Refused("a\nb\u{9b}".into());
        let plain = Reply::Refused("a b ".into());
        assert_eq!(Reply::decode(&ours.encode()), Some(plain));
        let p = PortOffer {
            name: *b"a\x1b[2J\n\0\0\0\0\0\0\0\0\0\0",
            ..PortOffer::default()
        };
        assert_eq!(p.name(), "a [2J :0");
        // Chunks of a size that nobody has.
        let mut w = Descriptor::default().words();
        for bits in [LARGE as u32 + 1, 1 << 31, u32::MAX] {
            w[9] = bits;
            w[11] = check(&w[..11]);
            assert_eq!(Descriptor::of(&w, 0), None, "{bits}");
        }
    }

    proptest! {
        #[test]
        fn immediates(slot in 0..RING as u32, total in 0..SHORT as u32, chunk in 0..CHUNKS as u32,
                      bytes in 0..=LARGE as u32, flag in any::<bool>(), noise in any::<u32>()) {
            for imm in [
                Imm::Short { slot, total, striped: flag },
                Imm::Long { slot },
                Imm::Chunk { slot, chunk, bytes, last: flag },
            ] {
                prop_assert_eq!(Imm::decode(imm.encode()), Some(imm));
            }
            if let Some(imm) = Imm::decode(noise) {
                prop_assert_eq!(imm.encode(), noise);
            }
        }

        #[test]
        fn noise_does_not_panic(mut bytes in proptest::collection::vec(any::<u8>(), REPLY_LEN), good in any::<bool>()) {
            if good {
                bytes[..8].copy_from_slice(&REPLY_MAGIC);
            }
            let _ = Reply::decode(&bytes.clone().try_into().unwrap());
            bytes[..8].copy_from_slice(&OFFER_MAGIC);
            let _ = Offer::decode(&bytes[..OFFER_LEN].try_into().unwrap());
        }
    }
}
