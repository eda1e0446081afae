//! Both ends against peers that are made of bare sockets, and speak the protocol wrongly or not at all.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::recv::RecvConnection;
use super::send::SendConnection;
use super::service::Service;
use super::wire::{answer, kind, purpose, Frame, Hello, Post, ANSWER_LEN, FIRST, POST_LEN};
use super::{in_own_scope, set_options, Accepted, Address, Connecting, Listening, RING};
use crate::error::{Error, ResultCode};
use crate::transport::{End, RecvEnd, Region, SendEnd};

const LIMIT: Duration = Duration::from_secs(10);

/// Sockets that are connected with each other: `n` of ours and `n` of theirs.
fn sockets(n: usize) -> (Vec<TcpStream>, Vec<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    (0..n)
        .map(|_| {
            let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (ours, _) = listener.accept().unwrap();
            ours.set_nonblocking(true).unwrap();
            theirs.set_read_timeout(Some(LIMIT)).unwrap();
            set_options(&ours).unwrap();
            set_options(&theirs).unwrap();
            (ours, theirs)
        })
        .unzip()
}

fn receiver(n: usize) -> (RecvConnection, Vec<TcpStream>) {
    let (ours, theirs) = sockets(n);
    let peer = theirs[0].local_addr().unwrap();
    (
        RecvConnection::new(Service::get().unwrap(), ours, peer),
        theirs,
    )
}

fn sender(n: usize) -> (SendConnection, Vec<TcpStream>) {
    let (ours, theirs) = sockets(n);
    let peer = theirs[0].local_addr().unwrap();
    (
        SendConnection::new(Service::get().unwrap(), ours, peer),
        theirs,
    )
}

/// Sockets and helping threads.
const WAYS: [(usize, usize); 5] = [(1, 0), (4, 0), (1, 1), (4, 4), (5, 2)];

/// Both ends of one connection.
fn both((n, threads): (usize, usize)) -> (SendConnection, RecvConnection) {
    let (a, b) = sockets(n);
    for s in &b {
        s.set_nonblocking(true).unwrap();
    }
    let service = Service::get().unwrap();
    let at = b[0].local_addr().unwrap();
    (
        SendConnection::with_threads(service.clone(), a, at, threads),
        RecvConnection::with_threads(service, b, at, threads),
    )
}

fn registered(end: &impl End, bytes: &[u8]) -> Region {
    end.register(bytes.as_ptr() as u64, bytes.len() as u64, false)
        .unwrap()
}

fn data(seq: u32, total: u64, offset: u64, bytes: &[u8]) -> Vec<u8> {
    let f = Frame {
        kind: kind::DATA,
        seq,
        total,
        offset,
        len: bytes.len() as u64,
    };
    [&f.encode()[..], bytes].concat()
}

fn until<T>(mut f: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(t) = f() {
            return t;
        }
        assert!(Instant::now() < end, "still waiting after {LIMIT:?}");
        std::thread::yield_now();
    }
}

fn outcome(end: &impl End, index: usize) -> Result<usize, Error> {
    // As the proxy does: what no poll can see, a look now and then does.
    until(|| match end.poll(index).transpose() {
        None => end.check().err().map(Err),
        some => some,
    })
}

fn breach(end: &impl End, index: usize) {
    let e = outcome(end, index).unwrap_err();
    assert_eq!(e.code(), ResultCode::REMOTE, "{e}");
    assert!(e.text().contains("breaks the protocol"), "{e}");
}

fn post(end: &RecvConnection, index: usize, buffer: &mut [u8], region: &Region) {
    let (addr, len) = (buffer.as_mut_ptr() as u64, buffer.len() as u64);
    assert!(end.recv(index, addr, len, 0, region).unwrap());
}

fn send(end: &SendConnection, index: usize, bytes: &[u8], tag: u32, region: &Region) {
    let (addr, len) = (bytes.as_ptr() as u64, bytes.len() as u64);
    until(|| {
        end.send(index, addr, len, tag, region)
            .unwrap()
            .then_some(())
    });
}

#[test]
fn frames_that_no_receive_allows_are_refused() {
    let too_large = |total| {
        Frame {
            kind: kind::TOO_LARGE,
            seq: FIRST,
            total,
            offset: 0,
            len: 0,
        }
        .encode()
        .to_vec()
    };
    let whole = data(FIRST, 100, 0, &[1; 100]);
    for (what, bytes) in [
        ("not posted", data(FIRST + 1, 100, 0, &[1; 100])),
        ("posted long ago", data(FIRST - RING as u32, 8, 0, &[1; 8])),
        ("larger than its receive", data(FIRST, 101, 0, &[1; 101])),
        ("twice the same", [whole.clone(), whole.clone()].concat()),
        (
            "another message",
            [data(FIRST, 100, 0, &[1; 50]), data(FIRST, 99, 50, &[1; 49])].concat(),
        ),
        (
            "overlapping",
            [
                data(FIRST, 100, 0, &[1; 60]),
                data(FIRST, 100, 50, &[1; 40]),
            ]
            .concat(),
        ),
        (
            "more than the message",
            [
                data(FIRST, 100, 0, &[1; 60]),
                data(FIRST, 100, 50, &[1; 50]),
            ]
            .concat(),
        ),
        ("empty", data(FIRST, 100, 0, &[])),
        (
            "empty twice",
            [data(FIRST, 0, 0, &[]), data(FIRST, 0, 0, &[])].concat(),
        ),
        ("it would fit", too_large(100)),
        (
            "it has begun",
            [data(FIRST, 100, 0, &[1; 60]), too_large(200)].concat(),
        ),
        (
            "it did not fit",
            [too_large(200), data(FIRST, 100, 0, &[1; 60])].concat(),
        ),
        ("noise", vec![0xff; 32]),
    ] {
        let (r, mut peer) = receiver(1);
        let mut buffer = vec![0; 300];
        let region = registered(&r, &buffer);
        post(&r, 0, &mut buffer[100..200], &region);
        // So that the first request's answer does not hide what comes behind.
        post(&r, 1, &mut buffer[..0], &region);
        peer[0].write_all(&bytes).unwrap();
        let e = outcome(&r, 1).unwrap_err();
        assert!(e.text().contains("breaks the protocol"), "{what}: {e}");
        assert!(
            buffer[..100].iter().chain(&buffer[200..]).all(|b| *b == 0),
            "{what}"
        );
        // The peer is told at once.
        let mut rest = Vec::new();
        let _ = peer[0].read_to_end(&mut rest);
        assert_eq!(rest.len(), 2 * POST_LEN, "{what}");
        // And nothing is read any more.
        let _ = peer[0].write_all(&data(FIRST + 1, 0, 0, &[]));
        assert!(r.poll(1).is_err() && r.recv(2, 0, 0, 0, &region).is_err());
    }
}

#[test]
fn no_byte_is_written_behind_the_end_of_a_receive() {
    let (r, mut peer) = receiver(2);
    let mut buffer = vec![0; 1000];
    let region = registered(&r, &buffer);
    post(&r, 0, &mut buffer, &region);
    // Both say that they bring the whole message.
    peer[0]
        .write_all(&data(FIRST, 1000, 0, &[1; 1000])[..132])
        .unwrap();
    peer[1]
        .write_all(&data(FIRST, 1000, 0, &[2; 1000])[..132])
        .unwrap();
    breach(&r, 0);
    r.deregister(region).unwrap();
    let before = buffer.clone();
    let _ = peer[0].write_all(&[3; 900]);
    let _ = peer[1].write_all(&[3; 900]);
    for _ in 0..100 {
        assert!(r.poll(0).is_err());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(buffer, before);
}

/// Cuts of 0..total, in some order.
fn pieces() -> impl Strategy<Value = (u64, Vec<(u64, u64)>)> {
    (2u64..5000, proptest::collection::vec(any::<u64>(), 0..12)).prop_flat_map(|(total, cuts)| {
        let mut at: Vec<u64> = cuts.iter().map(|c| 1 + c % (total - 1)).collect();
        at.extend([0, total]);
        at.sort();
        at.dedup();
        let all: Vec<(u64, u64)> = at.windows(2).map(|w| (w[0], w[1])).collect();
        (Just(total), Just(all).prop_shuffle())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn frames_that_cover_their_message_are_taken_in_any_order((total, all) in pieces(), n in 1usize..5) {
        let (r, mut peer) = receiver(n);
        let message: Vec<u8> = (0..total).map(|i| (i * 7 + 3) as u8).collect();
        let mut buffer = vec![0; total as usize];
        let region = registered(&r, &buffer);
        post(&r, 0, &mut buffer, &region);
        for (i, (from, to)) in all.iter().enumerate() {
            let part = &message[*from as usize..*to as usize];
            peer[i % n].write_all(&data(FIRST, total, *from, part)).unwrap();
        }
        prop_assert_eq!(outcome(&r, 0).unwrap() as u64, total);
        prop_assert_eq!(buffer, message);
    }

    #[test]
    fn frames_that_do_not_are_not((total, mut all) in pieces(), which in any::<usize>(), by in 1u64..50) {
        // One is shifted, and its length kept.
        let i = which % all.len();
        let (from, to) = all[i];
        let shifted = match to + by <= total {
            true => (from + by, to + by),
            false if from >= by => (from - by, to - by),
            false => return Ok(()),
        };
        all[i] = shifted;
        let (r, mut peer) = receiver(1);
        let mut buffer = vec![0; total as usize];
        let region = registered(&r, &buffer);
        post(&r, 0, &mut buffer, &region);
        for (from, to) in &all {
            let part = vec![1; (to - from) as usize];
            let _ = peer[0].write_all(&data(FIRST, total, *from, &part));
        }
        prop_assert!(outcome(&r, 0).unwrap_err().text().contains("overlap"));
    }
}

/// Closes a socket so that its peer gets a reset.
fn reset(s: TcpStream) {
    let now = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    nix::sys::socket::setsockopt(&s, nix::sys::socket::sockopt::Linger, &now).unwrap();
}

#[test]
fn a_post_that_cannot_be_sent_ends_its_receive() {
    let (r, mut peer) = receiver(3);
    let mut buffer = vec![0; 100];
    let region = registered(&r, &buffer);
    // Nobody reads the socket of the posts, but for the resets nobody would know.
    reset(peer.remove(0));
    std::thread::sleep(Duration::from_millis(50));
    post(&r, 0, &mut buffer, &region);
    let started = Instant::now();
    let e = outcome(&r, 0).unwrap_err();
    assert_eq!(e.code(), ResultCode::REMOTE, "{e}");
    assert!(started.elapsed() < Duration::from_secs(4));
    // The sender is told too.
    let mut rest = Vec::new();
    assert!(peer[0].read_to_end(&mut rest).is_ok_and(|n| n == 0));
}

#[test]
fn what_other_sockets_brought_counts_after_one_broke() {
    let (r, mut peer) = receiver(2);
    let mut buffer = vec![0; 200];
    let region = registered(&r, &buffer);
    let (a, b) = buffer.split_at_mut(100);
    post(&r, 0, a, &region);
    post(&r, 1, b, &region);
    let mut second = peer.pop().unwrap();
    reset(peer.pop().unwrap());
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(r.poll(0).unwrap(), None);
    // What was on its way takes a while.
    second.write_all(&data(FIRST, 100, 0, &[7; 100])).unwrap();
    drop(second);
    assert_eq!(outcome(&r, 0).unwrap(), 100);
    assert_eq!(outcome(&r, 1).unwrap_err().code(), ResultCode::REMOTE);
    assert_eq!(buffer[..100], [7; 100]);
}

#[test]
fn half_a_message_is_an_error_in_whichever_place_it_ends() {
    let whole = data(FIRST, 100, 0, &[1; 100]);
    let half = data(FIRST, 100, 0, &[1; 50]);
    for bytes in [
        &whole[..0],
        &whole[..10],
        &whole[..32],
        &whole[..131],
        &half,
    ] {
        let (r, mut peer) = receiver(2);
        let mut buffer = vec![0; 100];
        let region = registered(&r, &buffer);
        post(&r, 0, &mut buffer, &region);
        peer[0].write_all(bytes).unwrap();
        let mut seen = vec![0; POST_LEN];
        peer[0].read_exact(&mut seen).unwrap();
        drop(peer);
        let e = outcome(&r, 0).unwrap_err();
        assert_eq!(e.code(), ResultCode::REMOTE, "{e}");
    }
}

#[test]
fn posts_that_break_the_protocol_end_the_sending_end() {
    let p = |seq: u32| {
        Post {
            seq,
            tag: 0,
            capacity: 8,
        }
        .encode()
        .to_vec()
    };
    let many: Vec<u8> = (0..=RING as u32)
        .flat_map(|i| p(FIRST.wrapping_add(i)))
        .collect();
    for (what, bytes) in [
        ("not the first", p(0)),
        ("twice", [p(FIRST), p(FIRST)].concat()),
        ("65 at a time", many),
    ] {
        let (s, mut peer) = sender(1);
        let buffer = vec![0; 8];
        let region = registered(&s, &buffer);
        peer[0].write_all(&bytes).unwrap();
        let addr = buffer.as_ptr() as u64;
        // No receive has that tag, so that the posts are looked at and not used.
        let e = until(|| s.send(0, addr, 8, 9, &region).err());
        assert!(e.text().contains("breaks the protocol"), "{what}: {e}");
        let mut rest = Vec::new();
        assert!(
            peer[0].read_to_end(&mut rest).is_ok_and(|n| n == 0),
            "{what}"
        );
    }
}

#[test]
fn sequence_numbers_wrap_and_tags_come_in_any_order() {
    for way in WAYS {
        let (s, r) = both(way);
        let out: Vec<u8> = (0..RING * 100).map(|i| (i / 100) as u8).collect();
        let mut inn = vec![0u8; RING * 100];
        let (from, to) = (registered(&s, &out), registered(&r, &inn));
        for round in 0..2000 / RING {
            for i in 0..RING {
                let addr = &raw mut inn[i * 100] as u64;
                assert!(r.recv(i, addr, 100, i as u32, &to).unwrap());
            }
            assert!(!r.recv(0, to.addr, 100, 0, &to).unwrap(), "no 65th");
            for i in (0..RING).map(|i| (i * 37 + round) % RING) {
                send(&s, i, &out[i * 100..][..100], i as u32, &from);
            }
            for i in (0..RING).rev() {
                assert_eq!(outcome(&s, i).unwrap(), 100);
                assert_eq!(outcome(&r, i).unwrap(), 100);
            }
            assert_eq!(inn, out);
            inn.fill(0xff);
        }
    }
}

#[test]
fn what_was_sent_arrives_although_receives_that_nobody_answers_are_posted() {
    for way in WAYS {
        let (mut s, r) = both(way);
        let out = vec![5u8; 300_000];
        let mut inn = vec![0u8; 300_000];
        let (from, to) = (registered(&s, &out), registered(&r, &inn));
        post(&r, 0, &mut inn, &to);
        for i in 1..8 {
            assert!(r.recv(i, to.addr, 0, 1, &to).unwrap());
        }
        send(&s, 0, &out, 0, &from);
        assert_eq!(outcome(&s, 0).unwrap(), out.len());
        for i in 8..16 {
            assert!(r.recv(i, to.addr, 0, 1, &to).unwrap());
        }
        s.close().unwrap();
        drop(s);
        std::thread::sleep(Duration::from_millis(50));
        // Of a sender that is gone.
        for i in 16..24 {
            let _ = r.recv(i, to.addr, 0, 1, &to);
        }
        assert_eq!(outcome(&r, 0).unwrap(), inn.len());
        assert_eq!(inn, out);
        for i in 1..16 {
            assert_eq!(outcome(&r, i).unwrap_err().code(), ResultCode::REMOTE);
        }
    }
}

/// Starts a transfer that does not end, because the receiver is not polled.
fn stuck(
    way: (usize, usize),
    out: &[u8],
    inn: &mut [u8],
) -> (SendConnection, RecvConnection, Region, Region) {
    let (s, r) = both(way);
    let (from, to) = (registered(&s, out), registered(&r, inn));
    post(&r, 0, inn, &to);
    send(&s, 0, out, 0, &from);
    assert_eq!(s.poll(0).unwrap(), None);
    (s, r, from, to)
}

#[test]
fn memory_that_goes_in_mid_transfer_ends_both_ends_at_once() {
    let out = vec![1u8; 64 << 20];
    for way in WAYS {
        let mut inn = vec![0u8; 64 << 20];
        let (s, r, from, _to) = stuck(way, &out, &mut inn);
        s.deregister(from).unwrap();
        assert_eq!(
            outcome(&s, 0).unwrap_err().code(),
            ResultCode::INVALID_USAGE
        );
        assert_eq!(outcome(&r, 0).unwrap_err().code(), ResultCode::REMOTE);

        let (s, r, _from, to) = stuck(way, &out, &mut inn);
        for _ in 0..3 {
            assert_eq!(r.poll(0).unwrap(), None);
        }
        r.deregister(to).unwrap();
        let before = inn.clone();
        assert_eq!(
            outcome(&r, 0).unwrap_err().code(),
            ResultCode::INVALID_USAGE
        );
        match outcome(&s, 0) {
            // Helping threads had read so much that the rest fitted the sockets.
            Ok(n) => assert_eq!(n, out.len()),
            Err(e) => assert_eq!(e.code(), ResultCode::REMOTE),
        }
        assert!(inn == before, "nothing is written into memory that is gone");
    }
}

/// The receiver gives up and stays; the sender's window is shut, and its threads wait for room.
#[test]
fn a_receiver_that_hangs_up_is_noticed_while_all_sockets_are_full() {
    let out = vec![1u8; 64 << 20];
    for way in WAYS {
        let mut inn = vec![0u8; 64 << 20];
        let (s, r, _from, to) = stuck(way, &out, &mut inn);
        // Until nothing goes on.
        let since = Instant::now();
        while since.elapsed() < Duration::from_millis(700) {
            assert_eq!(s.poll(0).unwrap(), None);
        }
        r.deregister(to).unwrap();
        let e = until(|| s.poll(0).and_then(|_| s.check()).err());
        assert_eq!(e.code(), ResultCode::REMOTE, "{way:?}");

        // Nobody tests what is in flight, but wants to send more.
        let (s, r, from, to) = stuck(way, &out, &mut inn);
        std::thread::sleep(Duration::from_millis(100));
        r.deregister(to).unwrap();
        let (addr, len) = (from.addr, from.len);
        let e = until(|| s.send(1, addr, len, 0, &from).err());
        assert_eq!(e.code(), ResultCode::REMOTE, "{way:?}");
    }
}

/// What the helpers have sent counts when the connection fails before they are asked: it may be all, and the
/// receiver gone because it has it.
#[test]
fn what_was_sent_whole_is_not_failed_by_a_receiver_that_goes() {
    for way in WAYS.into_iter().filter(|(_, threads)| *threads > 0) {
        // One range for each socket.
        let out = vec![7u8; way.0 << 20];
        let mut inn = vec![0u8; out.len()];
        let (s, mut r) = both(way);
        let (from, to) = (registered(&s, &out), registered(&r, &inn));
        // The first message starts the helpers.
        post(&r, 0, &mut inn, &to);
        send(&s, 0, &out, 0, &from);
        let mut sent = None;
        until(|| {
            sent = sent.or_else(|| s.poll(0).unwrap());
            r.poll(0).unwrap().and(sent)
        });
        post(&r, 1, &mut inn, &to);
        send(&s, 1, &out, 0, &from);
        assert_eq!(until(|| r.poll(1).unwrap()), out.len());
        r.close().unwrap();
        drop(r);
        // It finds that the receiver is gone before anybody asks the helpers.
        until(|| s.check().err());
        assert_eq!(outcome(&s, 1).unwrap(), out.len(), "{way:?}");
    }
}

#[test]
fn closing_in_mid_transfer_ends_the_other_end_at_once() {
    let out = vec![1u8; 64 << 20];
    for way in WAYS {
        let mut inn = vec![0u8; 64 << 20];
        let (mut s, r, ..) = stuck(way, &out, &mut inn);
        let started = Instant::now();
        s.close().unwrap();
        drop(s);
        assert!(started.elapsed() < Duration::from_secs(1));
        assert_eq!(outcome(&r, 0).unwrap_err().code(), ResultCode::REMOTE);

        let (s, mut r, ..) = stuck(way, &out, &mut inn);
        r.close().unwrap();
        drop(r);
        assert_eq!(outcome(&s, 0).unwrap_err().code(), ResultCode::REMOTE);
    }
}

#[test]
fn one_poll_moves_a_bounded_number_of_bytes() {
    // Other connections of the thread wait meanwhile.
    let out = vec![1u8; 64 << 20];
    let mut inn = vec![0u8; 64 << 20];
    let (s, r, ..) = stuck((1, 0), &out, &mut inn);
    let reads = std::thread::scope(|scope| {
        scope.spawn(|| outcome(&s, 0).unwrap());
        let mut polls = 1;
        while r.poll(0).unwrap().is_none() {
            polls += 1;
        }
        polls
    });
    assert!(reads >= 4, "{reads} polls");
}

/// Both ends at work at the same time, with whatever sizes.
#[test]
fn all_bytes_arrive_in_whatever_sizes() {
    let out: Vec<u8> = (0..4u32 << 20).map(|i| (i ^ (i >> 8)) as u8).collect();
    for way in WAYS {
        let (s, r) = both(way);
        let mut inn = vec![0u8; out.len()];
        let (from, to) = (registered(&s, &out), registered(&r, &inn));
        let size = |i: usize| match i % 4 {
            0 => i * 97 % 5000,
            1 => (64 << 10) + i * 31 % 7,
            _ => (i * 1_234_567) % out.len(),
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0..60 {
                    let n = size(i);
                    send(&s, 0, &out[out.len() - n..], 0, &from);
                    assert_eq!(outcome(&s, 0).unwrap(), n);
                }
            });
            for i in 0..60 {
                let n = size(i);
                post(&r, 0, &mut inn, &to);
                assert_eq!(outcome(&r, 0).unwrap(), n);
                assert!(inn[..n] == out[out.len() - n..], "message {i} of {way:?}");
            }
        });
    }
}

/// Whenever a registration ends: on return nobody reads or writes that memory.
#[test]
fn memory_that_goes_is_let_alone_from_then_on() {
    let out = vec![1u8; 8 << 20];
    for round in 0..100u64 {
        let way = WAYS[2 + round as usize % 3];
        let mut inn = vec![0u8; 8 << 20];
        let (s, r) = both(way);
        let (from, to) = (registered(&s, &out), registered(&r, &inn));
        post(&r, 0, &mut inn, &to);
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                send(&s, 0, &out, 0, &from);
                outcome(&s, 0)
            });
            let end = Instant::now() + Duration::from_micros(round * 40);
            while Instant::now() < end && r.poll(0).unwrap().is_none() {}
            r.deregister(to).unwrap();
            inn.fill(7);
            std::thread::sleep(Duration::from_micros(300));
            assert!(inn.iter().all(|b| *b == 7));
            drop(r);
            let _ = sending.join();
        });
    }
}

fn listening() -> Listening {
    Listening::new([7; 16], true, false).unwrap()
}

fn accepted(l: &Listening) -> Option<RecvConnection> {
    match l.accept().unwrap()? {
        Accepted::Connection(c) => Some(*c),
        Accepted::Verbs(..) => panic!("nobody asked for RDMA"),
    }
}

fn hello(to: &Address, connection: u8, socket: u16, sockets: u16) -> Hello {
    Hello {
        listener: to.listener,
        secret: to.secret,
        connection: [connection; 16],
        socket,
        sockets,
        purpose: purpose::TCP,
    }
}

fn guest(to: &Address, bytes: &[u8]) -> TcpStream {
    let mut s = TcpStream::connect(to.at).unwrap();
    s.set_read_timeout(Some(LIMIT)).unwrap();
    s.write_all(bytes).unwrap();
    s
}

fn turned_away(s: &mut TcpStream) {
    let mut byte = [0];
    match s.read(&mut byte) {
        Ok(n) => assert_eq!(n, 0),
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn strangers_are_turned_away_and_in_nobodys_way() {
    let l = listening();
    let to = l.address();
    let mut silent: Vec<TcpStream> = (0..200).map(|_| guest(&to, b"GET / HT")).collect();
    let good = hello(&to, 1, 0, 1);
    for bad in [
        [0xffu8; 64],
        Hello {
            secret: [8; 16],
            ..good
        }
        .encode(),
        Hello {
            listener: u64::MAX,
            ..good
        }
        .encode(),
    ] {
        turned_away(&mut guest(&to, &bad));
    }
    assert!(accepted(&l).is_none());
    // One byte at a time.
    let mut slow = TcpStream::connect(to.at).unwrap();
    slow.set_nodelay(true).unwrap();
    for b in good.encode() {
        slow.write_all(&[b]).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut answered = [0; ANSWER_LEN];
    slow.read_exact(&mut answered).unwrap();
    assert_eq!(answered, answer());
    let at = slow.local_addr().unwrap().to_string();
    assert!(until(|| accepted(&l)).describe().contains(&at));
    // They are still open: it is early days.
    silent[0].set_nonblocking(true).unwrap();
    assert!(silent[0].read(&mut [0]).is_err());
}

#[test]
fn the_sockets_of_a_connection_may_come_in_any_order_and_late() {
    let l = listening();
    let to = l.address();
    let mut kept = Vec::new();
    for i in [3, 0, 4, 1] {
        kept.push(guest(&to, &hello(&to, 2, i, 5).encode()));
        std::thread::sleep(Duration::from_millis(100));
        assert!(accepted(&l).is_none());
    }
    kept.push(guest(&to, &hello(&to, 2, 2, 5).encode()));
    let r = until(|| accepted(&l));
    let mut buffer = vec![0; 100];
    let region = registered(&r, &buffer);
    post(&r, 0, &mut buffer, &region);
    // The answer and the posts come over the first of them, which came second.
    let mut bytes = [0; ANSWER_LEN + POST_LEN];
    kept[1].read_exact(&mut bytes).unwrap();
    kept[4].write_all(&data(FIRST, 100, 0, &[9; 100])).unwrap();
    assert_eq!(outcome(&r, 0).unwrap(), 100);
}

#[test]
fn a_replayed_greeting_takes_nothing_from_a_connection() {
    let l = listening();
    let to = l.address();
    let first = hello(&to, 3, 0, 2).encode();
    // Before it is complete, and by one who disagrees on the number of sockets.
    let mut a = guest(&to, &first);
    turned_away(&mut guest(&to, &first));
    turned_away(&mut guest(&to, &hello(&to, 3, 1, 3).encode()));
    assert!(accepted(&l).is_none());
    let _second = guest(&to, &hello(&to, 3, 1, 2).encode());
    let r = until(|| accepted(&l));
    // After that.
    turned_away(&mut guest(&to, &first));
    turned_away(&mut guest(&to, &hello(&to, 3, 0, 1).encode()));
    assert!(accepted(&l).is_none());
    let mut buffer = vec![0; 10];
    let region = registered(&r, &buffer);
    post(&r, 0, &mut buffer, &region);
    a.write_all(&data(FIRST, 10, 0, &[1; 10])).unwrap();
    assert_eq!(outcome(&r, 0).unwrap(), 10);
}

#[test]
fn a_link_local_address_is_reached_through_ones_own_interface() {
    let own = |text: &str, scope| SocketAddrV6::new(text.parse().unwrap(), 0, 0, scope).into();
    let to = |text: &str, scope| SocketAddrV6::new(text.parse().unwrap(), 7, 0, scope).into();
    let cases: [(SocketAddr, SocketAddr, SocketAddr); 5] = [
        (to("fe80::2", 6), own("fe80::1", 2), to("fe80::2", 2)),
        // Where this end has none, theirs is as good as any.
        (to("fe80::2", 6), own("fd00::1", 0), to("fe80::2", 6)),
        (to("fd00::2", 0), own("fe80::1", 2), to("fd00::2", 0)),
        (
            ([10, 0, 0, 1], 7).into(),
            own("fe80::1", 2),
            ([10, 0, 0, 1], 7).into(),
        ),
        (
            to("fe80::2", 6),
            ([10, 0, 0, 2], 0).into(),
            to("fe80::2", 6),
        ),
    ];
    for (theirs, ours, reached) in cases {
        assert_eq!(in_own_scope(theirs, || Ok(ours)).unwrap(), reached);
    }
}

#[test]
fn a_listener_that_closes_turns_away_who_waits() {
    let l = listening();
    let other = listening();
    let to = l.address();
    let mut half = guest(&to, &hello(&to, 6, 0, 2).encode());
    let mut whole = Connecting::new(to, purpose::TCP).unwrap();
    let s = until(|| whole.poll().unwrap());
    drop(l);
    let region = registered(&s, &[0; 8]);
    let e = until(|| s.send(0, region.addr, 8, 0, &region).err());
    assert_eq!(e.code(), ResultCode::REMOTE, "{e}");
    let mut late = Connecting::new(to, purpose::TCP).unwrap();
    let e = until(|| match late.poll() {
        Ok(c) => {
            assert!(c.is_none());
            None
        }
        Err(e) => Some(e),
    });
    assert!(e.text().contains("turned the connection away"), "{e}");
    turned_away(&mut half);
    assert!(accepted(&other).is_none());
}

#[test]
fn whoever_listens_there_and_is_not_vccl_is_told_from_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = Address {
        at: listener.local_addr().unwrap(),
        listener: 1,
        secret: [0; 16],
    };
    for reply in [&b"HTTP/1.1 400"[..], b""] {
        let mut c = Connecting::new(to, purpose::TCP).unwrap();
        assert!(c.poll().unwrap().is_none());
        let (mut s, _) = listener.accept().unwrap();
        s.write_all(reply).unwrap();
        s.shutdown(Shutdown::Write).unwrap();
        let e = until(|| c.poll().err());
        assert_eq!(e.code(), ResultCode::REMOTE, "{e}");
    }
}

#[test]
fn the_limit_of_open_files_is_the_hard_one() {
    use nix::sys::resource::{getrlimit, Resource};
    let _service: Arc<Service> = Service::get().unwrap();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    assert!(soft == hard || soft >= 1 << 20, "{soft} of {hard}");
}
