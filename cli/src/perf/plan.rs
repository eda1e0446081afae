//! Which bytes go where: the messages of one iteration of an operation.

use plugin_tests::net::MAX_MESSAGE;

use super::sizes::ELEMENT;
use super::{Op, Way};

/// A connection's part of one iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where it begins in the sender's buffer.
    pub from: usize,
    /// Where it begins in the receiver's buffer.
    pub to: usize,
    /// Its bytes.
    pub len: usize,
}

/// The connections that an operation needs, in an order that all ranks share.
pub fn pairs(op: Op, ranks: usize, channels: usize, way: Way) -> Vec<(usize, usize)> {
    let mut out = Vec::new();
    match (op, way) {
        (Op::Sendrecv, Way::PingPong) => out.extend([(0, 1), (1, 0)]),
        (Op::Sendrecv, Way::One) => out.push((0, 1)),
        (Op::Sendrecv, Way::Both) => out.extend((0..ranks).map(|r| (r, (r + 1) % ranks))),
        (Op::Alltoall | Op::Allgather, _) => {
            for distance in 1..ranks {
                out.extend((0..ranks).map(|r| (r, (r + distance) % ranks)));
            }
        }
    }
    out.into_iter()
        .flat_map(|p| std::iter::repeat_n(p, channels))
        .collect()
}

/// The bytes that one rank sends to one other: nccl-tests' size is what a rank holds in all.
pub fn chunk(op: Op, size: usize, ranks: usize) -> usize {
    match op {
        Op::Sendrecv => size,
        Op::Alltoall | Op::Allgather => {
            let element = ELEMENT as usize;
            size / ranks / element * element
        }
    }
}

/// The bytes of a rank's send and receive buffers.
pub fn buffers(op: Op, size: usize, ranks: usize) -> (usize, usize) {
    let chunk = chunk(op, size, ranks);
    match op {
        Op::Sendrecv => (size, size),
        Op::Alltoall => (chunk * ranks, chunk * ranks),
        Op::Allgather => (chunk, chunk * ranks),
    }
}

/// What the connection `channel` of `channels` from rank `from` to rank `to` moves in an iteration.
/// NCCL splits what is larger than 1 GiB.
pub fn messages(
    op: Op,
    size: usize,
    ranks: usize,
    (from, to): (usize, usize),
    (channel, channels): (usize, usize),
) -> Vec<Part> {
    let chunk = chunk(op, size, ranks);
    let (source, target) = match op {
        Op::Sendrecv => (0, 0),
        Op::Alltoall => (to * chunk, from * chunk),
        Op::Allgather => (0, from * chunk),
    };
    let element = ELEMENT as usize;
    let share = chunk.div_ceil(channels).next_multiple_of(element);
    let begin = (channel * share).min(chunk);
    let end = (begin + share).min(chunk);
    let mut out = Vec::new();
    let mut at = begin;
    while at < end {
        let len = MAX_MESSAGE.min(end - at);
        out.push(Part {
            from: source + at,
            to: target + at,
            len,
        });
        at += len;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_receive_buffer_is_written_once() {
        for op in [Op::Sendrecv, Op::Alltoall, Op::Allgather] {
            for (ranks, channels) in [(2, 1), (3, 1), (4, 3), (8, 2)] {
                for size in [4usize, 8, 100, 4096, 100_004] {
                    for me in 0..ranks {
                        let (send, recv) = buffers(op, size, ranks);
                        let mut hits = vec![0; recv];
                        let mut channel = std::collections::HashMap::new();
                        for pair in pairs(op, ranks, channels, Way::Both) {
                            let c = channel.entry(pair).or_insert(0);
                            if pair.1 == me {
                                for p in messages(op, size, ranks, pair, (*c, channels)) {
                                    assert!(p.from + p.len <= send);
                                    hits[p.to..p.to + p.len].iter_mut().for_each(|h| *h += 1);
                                }
                            }
                            *c += 1;
                        }
                        let own = match op {
                            Op::Sendrecv => 0..0,
                            _ => me * chunk(op, size, ranks)..(me + 1) * chunk(op, size, ranks),
                        };
                        for (at, h) in hits.iter().enumerate() {
                            let want = if own.contains(&at) { 0 } else { 1 };
                            assert_eq!(*h, want, "{op:?} {ranks} {channels} {size} {me} {at}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn large_messages_are_split_at_1_gib() {
        let parts = messages(Op::Sendrecv, 5 << 29, 2, (0, 1), (0, 1));
        let lens: Vec<usize> = parts.iter().map(|p| p.len).collect();
        assert_eq!(lens, [1 << 30, 1 << 30, 1 << 29]);
        assert_eq!(parts[2].from, 2 << 30);
    }
}
