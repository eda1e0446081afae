//! Data that says where it belongs: every 8 bytes are a function of who sent them, on which
//! connection, in which message, and of their place in it. Cheap enough to make and to check while
//! gigabytes flow.

/// Whose data it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Distinguishes runs and phases.
    pub seed: u64,
    /// The rank that sends.
    pub rank: usize,
    /// The connection's number.
    pub connection: usize,
    /// The message's number on that connection.
    pub message: usize,
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Key {
    fn word0(&self) -> u64 {
        let mut x = mix(self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
        for part in [self.rank, self.connection, self.message] {
            x = mix(x ^ (part as u64).wrapping_add(0x9e37_79b9_7f4a_7c15));
        }
        x
    }
}

#[inline(always)]
fn word(first: u64, i: u64) -> u64 {
    let x = first.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x ^ (x >> 29)
}

/// Writes the message's bytes from byte `from` on into `out`; `from` must be a multiple of 8.
pub fn fill_from(key: Key, from: usize, out: &mut [u8]) {
    debug_assert!(from.is_multiple_of(8));
    let first = key.word0();
    let mut i = (from / 8) as u64;
    let mut chunks = out.chunks_exact_mut(8);
    for c in &mut chunks {
        c.copy_from_slice(&word(first, i).to_le_bytes());
        i += 1;
    }
    let rest = chunks.into_remainder();
    let last = word(first, i).to_le_bytes();
    let n = rest.len();
    rest.copy_from_slice(&last[..n]);
}

/// Writes the message's bytes into `out`.
pub fn fill(key: Key, out: &mut [u8]) {
    fill_from(key, 0, out);
}

/// What is wrong with a message's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The first wrong byte.
    pub offset: usize,
    /// What should stand there.
    pub expected: u8,
    /// What stands there.
    pub found: u8,
    /// How many bytes of what was checked are wrong.
    pub count: usize,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "byte {} is {:#04x} and should be {:#04x}; {} bytes wrong",
            self.offset, self.found, self.expected, self.count
        )
    }
}

/// Compares bytes with the message's bytes from byte `from` on; `from` must be a multiple of 8.
pub fn check_from(key: Key, from: usize, found: &[u8]) -> Option<Mismatch> {
    debug_assert!(from.is_multiple_of(8));
    let first = key.word0();
    let base = (from / 8) as u64;
    let mut bad: Option<Mismatch> = None;
    let mut note = |offset: usize, expected: u8, found: u8| {
        let m = bad.get_or_insert(Mismatch {
            offset,
            expected,
            found,
            count: 0,
        });
        m.count += 1;
    };
    let chunks = found.chunks_exact(8);
    let rest = chunks.remainder();
    let whole = found.len() / 8;
    for (i, c) in chunks.enumerate() {
        let want = word(first, base + i as u64);
        let have = u64::from_le_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]);
        if want != have {
            for (k, (w, h)) in want.to_le_bytes().iter().zip(c).enumerate() {
                if w != h {
                    note(from + i * 8 + k, *w, *h);
                }
            }
        }
    }
    let last = word(first, base + whole as u64).to_le_bytes();
    for (k, (w, h)) in last.iter().zip(rest).enumerate() {
        if w != h {
            note(from + whole * 8 + k, *w, *h);
        }
    }
    bad
}

/// Compares bytes with the whole message's bytes.
pub fn check(key: Key, found: &[u8]) -> Option<Mismatch> {
    check_from(key, 0, found)
}

/// A small deterministic generator for choices that should vary and yet repeat.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator; the same seed gives the same numbers.
    pub fn new(seed: u64) -> Rng {
        Rng(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)))
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.number() % n.max(1) as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key {
        seed: 1,
        rank: 2,
        connection: 3,
        message: 4,
    };

    #[test]
    fn what_is_filled_checks_and_a_flipped_bit_is_found() {
        for len in [0usize, 1, 7, 8, 9, 4095, 4097] {
            let mut data = vec![0u8; len];
            fill(KEY, &mut data);
            assert_eq!(check(KEY, &data), None);
            for at in [0, len / 2, len.saturating_sub(1)] {
                if at < len {
                    data[at] ^= 0x10;
                    let m = check(KEY, &data).expect("a flipped bit");
                    assert_eq!((m.offset, m.count), (at, 1));
                    data[at] ^= 0x10;
                }
            }
        }
    }

    #[test]
    fn parts_continue_the_whole() {
        let mut whole = vec![0u8; 1000];
        fill(KEY, &mut whole);
        let mut part = vec![0u8; 1000 - 504];
        fill_from(KEY, 504, &mut part);
        assert_eq!(&whole[504..], &part[..]);
        assert_eq!(check_from(KEY, 504, &part), None);
    }

    #[test]
    fn keys_differ_in_every_part() {
        let mut data = vec![0u8; 64];
        fill(KEY, &mut data);
        for other in [
            Key { seed: 9, ..KEY },
            Key { rank: 9, ..KEY },
            Key {
                connection: 9,
                ..KEY
            },
            Key { message: 9, ..KEY },
            Key {
                rank: 3,
                connection: 2,
                ..KEY
            },
        ] {
            assert!(
                check(other, &data).is_some_and(|m| m.count > 32),
                "{other:?}"
            );
        }
        // A shift by a word does not pass either.
        assert!(check(KEY, &data[8..]).is_some());
    }
}
