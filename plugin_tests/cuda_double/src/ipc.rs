//! `cuIpc*`: memory of `cuMemAlloc` opened by another process.
//!
//! A handle names the exporting process and its descriptor of the block; the opener reaches it
//! through `/proc`. It speaks of one allocation, and opening it gives the address of that allocation
//! within a mapping of the whole block. Handles of two buffers in a block share that mapping. All
//! this is as on driver 580.

use crate::abi::*;
use crate::driver::{entry, Driver, Kind, State};
use crate::memory::check_idle;
use crate::phys::Phys;
use crate::space::{Alloc, Region};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

const MAGIC: u64 = u64::from_le_bytes(*b"vcclIPC\x01");

/// A block of another process, mapped once per context.
pub struct Import {
    at: u64,
    phys: Arc<Phys>,
    opens: u64,
}

/// The fields of a handle, in order, as 64-bit words.
struct Fields {
    pid: u32,
    fd: i32,
    block_size: u64,
    offset: u64,
    size: u64,
    device: u32,
    id: u64,
}

impl Fields {
    fn words(&self) -> [u64; 8] {
        let mut words = [
            MAGIC,
            u64::from(self.pid) << 32 | self.fd as u32 as u64,
            self.block_size,
            self.offset,
            self.size,
            u64::from(self.device),
            self.id,
            0,
        ];
        words[7] = checksum(&words);
        words
    }

    fn pack(&self) -> IpcMemHandle {
        let mut bytes = [0; 64];
        for (to, word) in bytes.chunks_exact_mut(8).zip(self.words()) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        IpcMemHandle { bytes }
    }

    fn unpack(handle: &IpcMemHandle) -> Option<Fields> {
        let mut words = [0u64; 8];
        for (word, from) in words.iter_mut().zip(handle.bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(from.try_into().ok()?);
        }
        let fields = Fields {
            pid: (words[1] >> 32) as u32,
            fd: words[1] as u32 as i32,
            block_size: words[2],
            offset: words[3],
            size: words[4],
            device: u32::try_from(words[5]).ok()?,
            id: words[6],
        };
        let fits = fields.size > 0
            && fields
                .offset
                .checked_add(fields.size)
                .is_some_and(|end| end <= fields.block_size);
        (fields.words() == words && fits).then_some(fields)
    }
}

fn checksum(words: &[u64; 8]) -> u64 {
    words[..7]
        .iter()
        .fold(0x9e37_79b9_7f4a_7c15, |sum: u64, word| {
            (sum ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
        })
}

entry!(Kind::Slow("exports memory"), fn cuIpcGetMemHandle(handle: Out<IpcMemHandle>, at: u64) |drv| {
    let state = drv.state()?;
    state.working()?;
    if !drv.settings().ipc {
        return Err(ERROR_NOT_SUPPORTED);
    }
    // Neither mappings nor another process's memory can be exported so.
    let Some((_, Region::Alloc(alloc))) = state.regions.find(at) else {
        return Err(ERROR_INVALID_VALUE);
    };
    if alloc.opens.is_some() {
        return Err(ERROR_INVALID_VALUE);
    }
    let fields = Fields {
        pid: std::process::id(),
        fd: alloc.phys.file().as_raw_fd(),
        block_size: alloc.phys.size() as u64,
        offset: alloc.offset,
        size: alloc.size,
        device: alloc.phys.device,
        id: alloc.phys.id,
    };
    handle.set(fields.pack())
});

fn reach(fields: &Fields) -> Res<Arc<Phys>> {
    let path = format!("/proc/{}/fd/{}", fields.pid, fields.fd);
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|_| ERROR_INVALID_VALUE)?;
    // The descriptor's number may have found another use since the handle was made.
    Phys::adopt(OwnedFd::from(file))
        .filter(|p| p.id == fields.id && p.device == fields.device)
        .filter(|p| p.size() as u64 == fields.block_size)
        .ok_or(ERROR_INVALID_VALUE)
}

fn open(drv: &Driver, state: &mut State, fields: &Fields) -> Res<u64> {
    let core = state.working()?;
    if fields.pid == std::process::id() {
        return Err(ERROR_INVALID_CONTEXT);
    }
    if !drv.settings().can_access(core.device, fields.device) {
        return Err(ERROR_PEER_ACCESS_UNSUPPORTED);
    }
    let key = (core.handle, fields.id);
    if !state.imports.contains_key(&key) {
        let phys = reach(fields)?;
        let at = state.va.take(fields.block_size, 0)?;
        state.imports.insert(key, Import { at, phys, opens: 0 });
    }
    let buffer_id = state.new_buffer_id();
    let import = state.imports.get_mut(&key).ok_or(ERROR_UNKNOWN)?;
    import.opens += 1;
    let (at, phys) = (import.at, import.phys.clone());
    let base = at + fields.offset;
    if let Some(Region::Alloc(a)) = state.regions.get_mut(base) {
        a.opens = a.opens.map(|n| n + 1);
        // The exporter may have put a larger buffer where a smaller one was.
        a.size = a.size.max(fields.size);
        return Ok(base);
    }
    let alloc = Alloc {
        size: fields.size,
        ctx: core.handle,
        phys,
        offset: fields.offset,
        block: at,
        buffer_id,
        pending: Arc::default(),
        opens: Some(1),
    };
    state.regions.insert(base, Region::Alloc(alloc));
    Ok(base)
}

/// Closes an opened allocation once, or for good.
pub fn close(drv: &Driver, state: &mut State, base: u64, all: bool) {
    let Some(Region::Alloc(alloc)) = state.regions.get_mut(base) else {
        return;
    };
    let opens = alloc.opens.unwrap_or(1);
    let closed = if all { opens } else { 1 };
    alloc.opens = Some(opens - closed);
    let key = (alloc.ctx, alloc.phys.id);
    if opens == closed {
        if let Some(Region::Alloc(gone)) = state.regions.remove(base) {
            check_idle(drv, "closed", base, &gone.pending);
        }
    }
    let Some(import) = state.imports.get_mut(&key) else {
        return;
    };
    import.opens = import.opens.saturating_sub(u64::from(closed));
    if import.opens == 0 {
        let (at, size) = (import.at, import.phys.size() as u64);
        state.imports.remove(&key);
        state.va.give(at, size);
    }
}

entry!(
    Kind::Slow("opens memory"),
    fn cuIpcOpenMemHandle_v2(at: Out<u64>, handle: IpcMemHandle, flags: u32)
    |drv| {
        let mut state = drv.state()?;
        state.working()?;
        if !drv.settings().ipc {
            return Err(ERROR_NOT_SUPPORTED);
        }
        let fields = Fields::unpack(&handle).ok_or(ERROR_INVALID_VALUE)?;
        if flags != IPC_LAZY_ENABLE_PEER {
            return Err(ERROR_INVALID_VALUE);
        }
        let found = open(drv, &mut state, &fields)?;
        at.set(found)
    }
);

entry!(Kind::Slow("closes memory"), fn cuIpcCloseMemHandle(at: u64) |drv| {
    let mut state = drv.state()?;
    state.working()?;
    match state.regions.get(at) {
        Some(Region::Alloc(a)) if a.opens.is_some() => {}
        _ => return Err(ERROR_INVALID_VALUE),
    }
    close(drv, &mut state, at, false);
    Ok(())
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_travel_and_garbage_does_not() {
        let fields = Fields {
            pid: 1234,
            fd: 7,
            block_size: 2 << 20,
            offset: 1024,
            size: 1000,
            device: 3,
            id: 42,
        };
        let handle = fields.pack();
        let back = Fields::unpack(&handle).unwrap();
        assert_eq!(back.words(), fields.words());
        for i in 0..64 {
            let mut bad = handle;
            bad.bytes[i] ^= 0x10;
            assert!(Fields::unpack(&bad).is_none(), "byte {i}");
        }
        assert!(Fields::unpack(&IpcMemHandle { bytes: [0; 64] }).is_none());
    }
}
