//! Handles: the `void *` by which NCCL names what we made.
//!
//! Each points at a [`Tagged`] whose first word says what it is, so that a NULL, a handle of another
//! kind and a handle that was closed are told apart from a good one before anything behind it is
//! used. A closed handle's memory stays in place for a while ([`KEPT`] handles of its kind), so that
//! a second close soon after the first reads the mark of the first and not somebody else's data.
//! This is help for finding mistakes, and no proof against every one of them: a pointer to memory
//! that was never ours cannot be told from a handle without reading it.

use std::{
    alloc::Layout,
    collections::VecDeque,
    ffi::c_void,
    ops::Deref,
    ptr::{self, NonNull},
    sync::{
        atomic::{AtomicU64, Ordering},
        Mutex, PoisonError,
    },
};

use crate::error::{Error, Result};

/// How many closed handles of one kind keep their memory.
pub const KEPT: usize = 256;

/// What a handle can stand for.
pub trait HandleKind: Send + Sync + 'static {
    /// The first word of every handle of this kind; one of [`tag`].
    const TAG: u64;
    /// For messages, with its article: "a send communicator".
    const NAME: &'static str = tag::name(Self::TAG);
}

/// The tags of all kinds: eight letters each, so that a debugger shows what a handle is.
pub mod tag {
    /// What `listen` makes.
    pub const LISTEN: u64 = u64::from_le_bytes(*b"vcclLstn");
    /// What `connect` makes.
    pub const SEND: u64 = u64::from_le_bytes(*b"vcclSend");
    /// What `accept` makes.
    pub const RECV: u64 = u64::from_le_bytes(*b"vcclRecv");
    /// What `regMr` makes.
    pub const MEMORY: u64 = u64::from_le_bytes(*b"vcclMemR");
    /// What `isend` and `irecv` make.
    pub const REQUEST: u64 = u64::from_le_bytes(*b"vcclRqst");
    /// What `init` makes from version 11 on.
    pub const CONTEXT: u64 = u64::from_le_bytes(*b"vcclCtxt");

    /// The tag that takes the place of `tag` when the handle is closed.
    pub(super) const fn closed(tag: u64) -> u64 {
        !tag
    }

    /// What a tag stands for.
    pub const fn name(tag: u64) -> &'static str {
        match tag {
            LISTEN => "a listen communicator",
            SEND => "a send communicator",
            RECV => "a receive communicator",
            MEMORY => "a memory registration",
            REQUEST => "a request",
            CONTEXT => "a context",
            _ => "no handle of vccl",
        }
    }
}

/// A value with a first word that says what it is.
#[repr(C)]
pub struct Tagged<T: HandleKind> {
    tag: AtomicU64,
    value: T,
}

impl<T: HandleKind> Tagged<T> {
    /// `value`, marked as what it is. For a pool of handles that are never given to [`take`].
    pub const fn new(value: T) -> Tagged<T> {
        Tagged {
            tag: AtomicU64::new(T::TAG),
            value,
        }
    }

    /// The pointer that NCCL gets. It is good for as long as `self` stays where it is.
    pub fn as_raw(&self) -> *mut c_void {
        ptr::from_ref(self).cast_mut().cast()
    }
}

impl<T: HandleKind> Deref for Tagged<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: HandleKind> Drop for Tagged<T> {
    fn drop(&mut self) {
        // Whoever still holds the pointer finds a closed handle, until the memory has a new use.
        self.tag.store(tag::closed(T::TAG), Ordering::Release);
    }
}

/// Gives `value` to NCCL as a handle. [`take`] gets it back.
pub fn into_raw<T: HandleKind>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(Tagged::new(value))).cast()
}

/// The value behind a handle.
///
/// # Safety
/// `handle` is NULL, or it points at 8 readable bytes. If these hold `T`'s tag, a `Tagged<T>` is
/// there, and it is neither dropped nor taken during `'a`.
#[inline]
pub unsafe fn borrow<'a, T: HandleKind>(handle: *mut c_void, argument: &str) -> Result<&'a T> {
    // SAFETY: the caller's promise about `handle` is the one that `tag_of` asks for.
    let found = unsafe { tag_of(handle) };
    if found != Some(T::TAG) {
        return Err(wrong(argument, T::NAME, handle, found));
    }
    // SAFETY: the tag matched, so by the caller's promise a `Tagged<T>` is there for `'a`. Others
    // only ever share it: `take`, which would end it, is excluded by the same promise.
    Ok(unsafe { &(*handle.cast::<Tagged<T>>()).value })
}

/// Ends a handle and gives back what it stood for. Of several calls with the same handle one alone
/// succeeds.
///
/// # Safety
/// As [`borrow`]; and if the tag is there, the handle came from [`into_raw`], and no borrow of it is
/// in use any more.
pub unsafe fn take<T: HandleKind>(handle: *mut c_void, argument: &str) -> Result<T> {
    // SAFETY: the caller's promise about `handle` is the one that `tag_word` asks for.
    let Some(word) = (unsafe { tag_word(handle) }) else {
        return Err(wrong(argument, T::NAME, handle, None));
    };
    if let Err(found) = word.compare_exchange(
        T::TAG,
        tag::closed(T::TAG),
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        return Err(wrong(argument, T::NAME, handle, Some(found)));
    }
    let tagged = handle.cast::<Tagged<T>>();
    // SAFETY: the exchange changed the tag from `T`'s, which by the caller's promise means that
    // `into_raw` made this handle, and which can happen once: the value is ours alone. It is moved
    // out here. What stays is zeroed, so that no stale pointer into it (a request of a closed
    // communicator) finds a tag, and is never dropped as a `T` again.
    let value = unsafe {
        let value = ptr::addr_of_mut!((*tagged).value);
        let moved = value.read();
        value.write_bytes(0, 1);
        moved
    };
    // SAFETY: `into_raw` allocated this as a `Box<Tagged<T>>`, its value has been moved out, and
    // only we won the exchange.
    unsafe { park::<T>(tagged) };
    Ok(value)
}

/// The first word of what `handle` points at, or nothing if it is NULL or misaligned.
///
/// # Safety
/// `handle` is NULL, or it points at 8 readable bytes.
#[inline]
pub unsafe fn tag_of(handle: *mut c_void) -> Option<u64> {
    // SAFETY: the promise is the same.
    unsafe { tag_word(handle) }.map(|word| word.load(Ordering::Acquire))
}

/// # Safety
/// `handle` is NULL, or it points at 8 bytes that can be read for as long as the result is used.
#[inline]
unsafe fn tag_word<'a>(handle: *mut c_void) -> Option<&'a AtomicU64> {
    let word = handle.cast::<AtomicU64>();
    if word.is_null() || !word.is_aligned() {
        return None;
    }
    // SAFETY: not NULL, aligned, and readable by the caller's promise. We only change the word
    // (in `take`) where it holds one of our tags, and there it is an `AtomicU64`.
    Some(unsafe { &*word })
}

/// The error for a handle that is not what the call needs. `found` is the word at `handle`, if that
/// could be read.
#[cold]
pub fn wrong(argument: &str, expected: &str, handle: *mut c_void, found: Option<u64>) -> Error {
    let found = match found {
        None if handle.is_null() => "NULL".to_string(),
        None => format!("the misaligned pointer {handle:p}"),
        Some(word) if tag::name(tag::closed(word)) != tag::name(0) => {
            let name = tag::name(tag::closed(word));
            format!("{name} that is closed already ({handle:p})")
        }
        Some(word) => format!("{} ({handle:p})", tag::name(word)),
    };
    Error::invalid_argument(format!("{argument} must be {expected}, but is {found}"))
}

/// Memory of a closed handle: its tag says so, and nothing in it is alive.
struct Parked {
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory that no thread owns any more but the queue; its tag word is only read, and
// atomically.
unsafe impl Send for Parked {}

impl Drop for Parked {
    fn drop(&mut self) {
        // SAFETY: `park` got this memory from the allocator of `Box`, which is the global one, with
        // this layout, and gave it to this `Parked` alone.
        unsafe { std::alloc::dealloc(self.memory.as_ptr(), self.layout) };
    }
}

/// The parked memory of each kind, by tag, oldest first.
static PARKED: Mutex<Vec<(u64, VecDeque<Parked>)>> = Mutex::new(Vec::new());

/// Keeps the memory of a closed handle for a while, then frees it.
///
/// # Safety
/// `tagged` was allocated as a `Box<Tagged<T>>`, belongs to the caller, and its value is moved out.
unsafe fn park<T: HandleKind>(tagged: *mut Tagged<T>) {
    let Some(memory) = NonNull::new(tagged.cast::<u8>()) else {
        return;
    };
    let parked = Parked {
        memory,
        layout: Layout::new::<Tagged<T>>(),
    };
    let mut kinds = PARKED.lock().unwrap_or_else(PoisonError::into_inner);
    let at = match kinds.iter().position(|(tag, _)| *tag == T::TAG) {
        Some(at) => at,
        None => {
            kinds.push((T::TAG, VecDeque::with_capacity(KEPT + 1)));
            kinds.len() - 1
        }
    };
    let queue = &mut kinds[at].1;
    queue.push_back(parked);
    if queue.len() > KEPT {
        queue.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::error::ResultCode;

    struct Left(&'static AtomicUsize);
    struct Right([u64; 4]);

    impl HandleKind for Left {
        const TAG: u64 = tag::LISTEN;
    }
    impl HandleKind for Right {
        const TAG: u64 = tag::RECV;
    }
    impl Drop for Left {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn text<T>(result: Result<T>) -> String {
        match result {
            Ok(_) => panic!("should have failed"),
            Err(error) => {
                assert_eq!(error.code(), ResultCode::INVALID_ARGUMENT);
                error.text().to_string()
            }
        }
    }

    #[test]
    fn comes_back_once() {
        static DROPS: AtomicUsize = AtomicUsize::new(0);
        let handle = into_raw(Left(&DROPS));
        // SAFETY: the handle is from `into_raw`, and stays parked after it is taken.
        unsafe {
            assert_eq!(
                borrow::<Left>(handle, "x")
                    .unwrap()
                    .0
                    .load(Ordering::Relaxed),
                0
            );
            let value = take::<Left>(handle, "x").unwrap();
            assert_eq!(DROPS.load(Ordering::Relaxed), 0);
            drop(value);
            assert_eq!(DROPS.load(Ordering::Relaxed), 1);
            let second = text(take::<Left>(handle, "listenComm"));
            assert!(
                second.starts_with("listenComm must be a listen communicator, but is a listen communicator that is closed already"),
                "{second}"
            );
            assert!(text(borrow::<Left>(handle, "x")).contains("closed already"));
            assert!(
                text(borrow::<Right>(handle, "x")).contains("a listen communicator that is closed")
            );
        }
        assert_eq!(DROPS.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn tells_kinds_apart() {
        let handle = into_raw(Right([1, 2, 3, 4]));
        let mut junk = [7u64; 4];
        let junk = junk.as_mut_ptr().cast::<c_void>();
        // SAFETY: the handles are NULL, from `into_raw`, or point at an array of ours.
        unsafe {
            assert_eq!(
                text(borrow::<Left>(ptr::null_mut(), "listenComm")),
                "listenComm must be a listen communicator, but is NULL"
            );
            assert!(text(take::<Left>(handle, "x")).contains("but is a receive communicator (0x"));
            assert!(text(borrow::<Left>(junk, "x")).contains("but is no handle of vccl"));
            assert!(text(borrow::<Left>(junk.byte_add(1), "x")).contains("misaligned"));
            assert!(text(take::<Left>(junk.byte_add(4), "x")).contains("misaligned"));
            assert_eq!(take::<Right>(handle, "x").unwrap().0, [1, 2, 3, 4]);
        }
    }

    #[test]
    fn of_many_closers_one_wins() {
        static DROPS: AtomicUsize = AtomicUsize::new(0);
        for round in 1..=50 {
            let handle = into_raw(Left(&DROPS)) as usize;
            let won: usize = std::thread::scope(|scope| {
                let closers: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(move || {
                            // SAFETY: from `into_raw`; parked memory outlives this test's rounds.
                            unsafe { take::<Left>(handle as *mut c_void, "x") }.is_ok() as usize
                        })
                    })
                    .collect();
                closers
                    .into_iter()
                    .map(|closer| closer.join().unwrap())
                    .sum()
            });
            assert_eq!(won, 1);
            assert_eq!(DROPS.load(Ordering::Relaxed), round);
        }
    }

    #[test]
    fn parking_is_bounded() {
        struct Many(#[allow(dead_code)] u8);
        impl HandleKind for Many {
            const TAG: u64 = 0x1234_5678_9abc_def0;
            const NAME: &'static str = "one of many";
        }
        for _ in 0..3 * KEPT {
            let handle = into_raw(Many(1));
            // SAFETY: from `into_raw`, taken once.
            unsafe { take::<Many>(handle, "x") }.unwrap();
        }
        let kinds = PARKED.lock().unwrap();
        let (_, queue) = kinds.iter().find(|(tag, _)| *tag == Many::TAG).unwrap();
        assert_eq!(queue.len(), KEPT);
    }

    #[test]
    fn a_dropped_pool_leaves_closed_tags() {
        let mut storage = std::mem::MaybeUninit::<Tagged<Right>>::uninit();
        let pooled = storage.write(Tagged::new(Right([0; 4])));
        let handle = pooled.as_raw();
        // SAFETY: the storage outlives all uses; after the drop only its tag is read.
        unsafe {
            assert!(borrow::<Right>(handle, "request").is_ok());
            ptr::drop_in_place(storage.as_mut_ptr());
            let handle = storage.as_mut_ptr().cast();
            assert!(text(borrow::<Right>(handle, "request")).contains("closed already"));
        }
    }
}
