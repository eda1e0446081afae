//! The messages that two processes exchange over their link: one message per packet.
//!
//! They come from another process: decoding checks every length, and refuses what is left over.

/// Changes when a message, or the shared memory's layout, changes.
pub const PROTOCOL: u32 = 1;

/// The largest packet. A bound on what a peer can make us allocate.
pub const MAX_PACKET: usize = 8 << 10;

/// The most file descriptors that one packet carries: the kernel's limit is 253.
pub const MAX_FDS: usize = 64;

/// Bytes of text that travel in a refusal.
pub(crate) const MAX_TEXT: usize = 1024;

/// Names a process for its life. 128 random bits.
pub type Nonce = [u8; 16];

/// What an export is made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExportKind {
    /// VMM allocations that follow one another; a packet's descriptors go with its `sizes`.
    Vmm {
        /// Bytes of each allocation in this packet.
        sizes: Vec<u64>,
        /// How many allocations the export has in all.
        total: u32,
    },
    /// A cudaMalloc allocation.
    Ipc {
        /// The handle that the peer opens.
        handle: [u8; 64],
        /// The allocation's address in the exporting process.
        base: u64,
        /// Bytes of the allocation.
        size: u64,
    },
}

/// How a registered region is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// At `offset` in the mapped export.
    Mapped {
        /// The export.
        export: u64,
        /// Bytes from its start to the region's.
        offset: u64,
    },
    /// Through the ring in shared host memory.
    HostRing,
    /// Through the ring in the receiver's GPU, which `export` is.
    DeviceRing {
        /// The export.
        export: u64,
        /// Bytes of each chunk.
        chunk: u64,
    },
}

/// One message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// First word of the process that connects, to the one that it means to reach.
    Hello {
        /// [`PROTOCOL`]
        version: u32,
        /// Whom it means to reach.
        target: Nonce,
        /// Who it is.
        source: Nonce,
    },
    /// The answer of the right process.
    Welcome,
    /// The answer to what cannot be served.
    Refused {
        /// Why.
        text: String,
    },
    /// Asks for a connection; the descriptor of its shared memory goes with it.
    Connect {
        /// The connection's number on this link.
        conn: u64,
        /// Which listener.
        listener: u64,
        /// Proof of holding the listener's handle.
        secret: Nonce,
        /// Bytes of a chunk of the host ring.
        host_chunk: u64,
        /// Sequence number of the first receive.
        first: u32,
    },
    /// The connection waits for the listener's accept.
    Connected {
        /// The connection.
        conn: u64,
    },
    /// There will be no connection.
    ConnectFailed {
        /// The connection.
        conn: u64,
        /// Why.
        text: String,
    },
    /// The receiver offers memory; descriptors go with it for `Vmm`.
    Export {
        /// Its number on this link.
        export: u64,
        /// Which GPU holds it.
        uuid: [u8; 16],
        /// What it is made of.
        kind: ExportKind,
    },
    /// The receiver registered memory for a connection.
    Region {
        /// The connection.
        conn: u64,
        /// Its number in the connection.
        region: u32,
        /// Bytes.
        len: u64,
        /// How the sender reaches it.
        target: Target,
    },
    /// The sender can reach the region.
    RegionReady {
        /// The connection.
        conn: u64,
        /// The region.
        region: u32,
    },
    /// The sender cannot reach the region in this way.
    RegionFailed {
        /// The connection.
        conn: u64,
        /// The region.
        region: u32,
        /// Why.
        text: String,
    },
    /// The receiver takes a region back.
    Drop {
        /// The connection.
        conn: u64,
        /// The region.
        region: u32,
    },
    /// The sender will write to the region no more, and has unmapped it.
    Dropped {
        /// The connection.
        conn: u64,
        /// The region.
        region: u32,
    },
    /// The sender has host memory that its GPU cannot read: the receiver shall drain the host ring
    /// into its GPU.
    WantHostDrain {
        /// The connection.
        conn: u64,
    },
    /// The receiver can drain the host ring into its GPU.
    HostDrainReady {
        /// The connection.
        conn: u64,
    },
    /// It cannot.
    HostDrainFailed {
        /// The connection.
        conn: u64,
        /// Why.
        text: String,
    },
    /// This end of the connection is closed.
    Close {
        /// The connection.
        conn: u64,
    },
    /// The receiver will name an export no more.
    Withdraw {
        /// The export.
        export: u64,
    },
    /// The sender will write to none of the connection's regions any more.
    CloseAck {
        /// The connection.
        conn: u64,
    },
}

struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, v: u32) -> &mut Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    fn u64(&mut self, v: u64) -> &mut Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    fn bytes(&mut self, v: &[u8]) -> &mut Self {
        self.0.extend_from_slice(v);
        self
    }
    fn text(&mut self, v: &str) -> &mut Self {
        let v = v.replace(char::is_control, " ");
        let mut end = v.len().min(MAX_TEXT);
        while !v.is_char_boundary(end) {
            end -= 1;
        }
        self.u32(end as u32).bytes(&v.as_bytes()[..end])
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }
    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }
    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
    fn text(&mut self) -> Option<String> {
        let n = self.u32()? as usize;
        if n > MAX_TEXT {
            return None;
        }
        let text = std::str::from_utf8(self.take(n)?).ok()?;
        // People read it in a log.
        (!text.contains(char::is_control)).then(|| text.to_string())
    }
}

impl Message {
    /// The packet's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::with_capacity(64));
        match self {
            Message::Hello {
                version,
                target,
                source,
            } => {
                w.u32(1).u32(*version).bytes(target).bytes(source);
            }
            Message::Welcome => {
                w.u32(2);
            }
            Message::Refused { text } => {
                w.u32(3).text(text);
            }
            Message::Connect {
                conn,
                listener,
                secret,
                host_chunk,
                first,
            } => {
                w.u32(4)
                    .u64(*conn)
                    .u64(*listener)
                    .bytes(secret)
                    .u64(*host_chunk)
                    .u32(*first);
            }
            Message::Connected { conn } => {
                w.u32(5).u64(*conn);
            }
            Message::ConnectFailed { conn, text } => {
                w.u32(6).u64(*conn).text(text);
            }
            Message::Export { export, uuid, kind } => {
                w.u32(7).u64(*export).bytes(uuid);
                match kind {
                    ExportKind::Vmm { sizes, total } => {
                        w.u32(0).u32(*total).u32(sizes.len() as u32);
                        for s in sizes {
                            w.u64(*s);
                        }
                    }
                    ExportKind::Ipc { handle, base, size } => {
                        w.u32(1).bytes(handle).u64(*base).u64(*size);
                    }
                }
            }
            Message::Region {
                conn,
                region,
                len,
                target,
            } => {
                w.u32(8).u64(*conn).u32(*region).u64(*len);
                match target {
                    Target::Mapped { export, offset } => w.u32(0).u64(*export).u64(*offset),
                    Target::HostRing => w.u32(1),
                    Target::DeviceRing { export, chunk } => w.u32(2).u64(*export).u64(*chunk),
                };
            }
            Message::RegionReady { conn, region } => {
                w.u32(9).u64(*conn).u32(*region);
            }
            Message::RegionFailed { conn, region, text } => {
                w.u32(10).u64(*conn).u32(*region).text(text);
            }
            Message::Drop { conn, region } => {
                w.u32(11).u64(*conn).u32(*region);
            }
            Message::Dropped { conn, region } => {
                w.u32(12).u64(*conn).u32(*region);
            }
            Message::WantHostDrain { conn } => {
                w.u32(13).u64(*conn);
            }
            Message::HostDrainReady { conn } => {
                w.u32(14).u64(*conn);
            }
            Message::HostDrainFailed { conn, text } => {
                w.u32(15).u64(*conn).text(text);
            }
            Message::Close { conn } => {
                w.u32(16).u64(*conn);
            }
            Message::CloseAck { conn } => {
                w.u32(17).u64(*conn);
            }
            Message::Withdraw { export } => {
                w.u32(18).u64(*export);
            }
        }
        w.0
    }

    /// The message of a packet, or `None` for what is none.
    pub fn decode(packet: &[u8]) -> Option<Message> {
        let mut r = Reader(packet);
        let m = match r.u32()? {
            1 => Message::Hello {
                version: r.u32()?,
                target: r.array()?,
                source: r.array()?,
            },
            2 => Message::Welcome,
            3 => Message::Refused { text: r.text()? },
            4 => Message::Connect {
                conn: r.u64()?,
                listener: r.u64()?,
                secret: r.array()?,
                host_chunk: r.u64()?,
                first: r.u32()?,
            },
            5 => Message::Connected { conn: r.u64()? },
            6 => Message::ConnectFailed {
                conn: r.u64()?,
                text: r.text()?,
            },
            7 => Message::Export {
                export: r.u64()?,
                uuid: r.array()?,
                kind: match r.u32()? {
                    0 => {
                        let total = r.u32()?;
                        let n = r.u32()? as usize;
                        if n > MAX_FDS {
                            return None;
                        }
                        let sizes = (0..n).map(|_| r.u64()).collect::<Option<Vec<u64>>>()?;
                        ExportKind::Vmm { sizes, total }
                    }
                    1 => ExportKind::Ipc {
                        handle: r.array()?,
                        base: r.u64()?,
                        size: r.u64()?,
                    },
                    _ => return None,
                },
            },
            8 => Message::Region {
                conn: r.u64()?,
                region: r.u32()?,
                len: r.u64()?,
                target: match r.u32()? {
                    0 => Target::Mapped {
                        export: r.u64()?,
                        offset: r.u64()?,
                    },
                    1 => Target::HostRing,
                    2 => Target::DeviceRing {
                        export: r.u64()?,
                        chunk: r.u64()?,
                    },
                    _ => return None,
                },
            },
            9 => Message::RegionReady {
                conn: r.u64()?,
                region: r.u32()?,
            },
            10 => Message::RegionFailed {
                conn: r.u64()?,
                region: r.u32()?,
                text: r.text()?,
            },
            11 => Message::Drop {
                conn: r.u64()?,
                region: r.u32()?,
            },
            12 => Message::Dropped {
                conn: r.u64()?,
                region: r.u32()?,
            },
            13 => Message::WantHostDrain { conn: r.u64()? },
            14 => Message::HostDrainReady { conn: r.u64()? },
            15 => Message::HostDrainFailed {
                conn: r.u64()?,
                text: r.text()?,
            },
            16 => Message::Close { conn: r.u64()? },
            17 => Message::CloseAck { conn: r.u64()? },
            18 => Message::Withdraw { export: r.u64()? },
            _ => return None,
        };
        r.0.is_empty().then_some(m)
    }

    /// Whether a packet with `fds` descriptors can be this message.
    pub fn fits_descriptors(&self, fds: usize) -> bool {
        fds == match self {
            Message::Connect { .. } => 1,
            Message::Export {
                kind: ExportKind::Vmm { sizes, .. },
                ..
            } => sizes.len(),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kind() -> impl Strategy<Value = ExportKind> {
        prop_oneof![
            (
                proptest::collection::vec(any::<u64>(), 0..=MAX_FDS),
                any::<u32>()
            )
                .prop_map(|(sizes, total)| ExportKind::Vmm { sizes, total }),
            (
                any::<[u8; 32]>(),
                any::<[u8; 32]>(),
                any::<u64>(),
                any::<u64>()
            )
                .prop_map(|(a, b, base, size)| {
                    let mut handle = [0; 64];
                    handle[..32].copy_from_slice(&a);
                    handle[32..].copy_from_slice(&b);
                    ExportKind::Ipc { handle, base, size }
                }),
        ]
    }

    fn target() -> impl Strategy<Value = Target> {
        prop_oneof![
            (any::<u64>(), any::<u64>())
                .prop_map(|(export, offset)| Target::Mapped { export, offset }),
            Just(Target::HostRing),
            (any::<u64>(), any::<u64>())
                .prop_map(|(export, chunk)| Target::DeviceRing { export, chunk }),
        ]
    }

    fn message() -> impl Strategy<Value = Message> {
        let conn = any::<u64>();
        let region = any::<u32>();
        let text = "\\PC{0,200}";
        prop_oneof![
            (any::<u32>(), any::<Nonce>(), any::<Nonce>()).prop_map(|(version, target, source)| {
                Message::Hello {
                    version,
                    target,
                    source,
                }
            }),
            Just(Message::Welcome),
            text.prop_map(|text| Message::Refused { text }),
            (
                conn,
                any::<u64>(),
                any::<Nonce>(),
                any::<u64>(),
                any::<u32>()
            )
                .prop_map(|(conn, listener, secret, host_chunk, first)| {
                    Message::Connect {
                        conn,
                        listener,
                        secret,
                        host_chunk,
                        first,
                    }
                }),
            conn.prop_map(|conn| Message::Connected { conn }),
            (conn, text).prop_map(|(conn, text)| Message::ConnectFailed { conn, text }),
            (any::<u64>(), any::<[u8; 16]>(), kind())
                .prop_map(|(export, uuid, kind)| Message::Export { export, uuid, kind }),
            (conn, region, any::<u64>(), target()).prop_map(|(conn, region, len, target)| {
                Message::Region {
                    conn,
                    region,
                    len,
                    target,
                }
            }),
            (conn, region).prop_map(|(conn, region)| Message::RegionReady { conn, region }),
            (conn, region, text).prop_map(|(conn, region, text)| Message::RegionFailed {
                conn,
                region,
                text
            }),
            (conn, region).prop_map(|(conn, region)| Message::Drop { conn, region }),
            (conn, region).prop_map(|(conn, region)| Message::Dropped { conn, region }),
            conn.prop_map(|conn| Message::WantHostDrain { conn }),
            conn.prop_map(|conn| Message::HostDrainReady { conn }),
            (conn, text).prop_map(|(conn, text)| Message::HostDrainFailed { conn, text }),
            conn.prop_map(|conn| Message::Close { conn }),
            conn.prop_map(|conn| Message::CloseAck { conn }),
            any::<u64>().prop_map(|export| Message::Withdraw { export }),
        ]
    }

    proptest! {
        #[test]
        fn round_trip(m in message()) {
            let packet = m.encode();
            prop_assert!(packet.len() <= MAX_PACKET);
            prop_assert_eq!(Message::decode(&packet), Some(m));
        }

        #[test]
        fn every_cut_and_every_tail_is_refused(m in message(), extra in 1usize..9) {
            let mut packet = m.encode();
            for n in 0..packet.len() {
                prop_assert_eq!(Message::decode(&packet[..n]), None);
            }
            packet.resize(packet.len() + extra, 0);
            prop_assert_eq!(Message::decode(&packet), None);
        }

        #[test]
        fn noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Message::decode(&bytes);
        }
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let m = Message::Refused {
            text: "é".repeat(2000),
        };
        let Some(Message::Refused { text }) = Message::decode(&m.encode()) else {
            panic!()
        };
        assert_eq!(text, "é".repeat(512));
    }

    #[test]
    fn texts_are_fit_for_a_log() {
        let packet = |text: &[u8]| {
            let mut w = Writer(Vec::new());
            w.u32(3).u32(text.len() as u32).bytes(text);
            w.0
        };
        assert!(Message::decode(&packet("é".as_bytes())).is_some());
        // No UTF-8 (which grows threefold where it is replaced), ends of lines, what steers a terminal.
        for bad in [
            &[0xff; MAX_TEXT][..],
            b"\xc3",
            b"a\nb",
            b"\x1b[2J",
            "\u{9b}".as_bytes(),
        ] {
            assert_eq!(Message::decode(&packet(bad)), None, "{bad:?}");
        }
        // What is ours is made so.
        let m = Message::Refused {
            text: "a\n\u{9b}b".into(),
        };
        let text = "a  b".into();
        assert_eq!(
            Message::decode(&m.encode()),
            Some(Message::Refused { text })
        );
    }
}
