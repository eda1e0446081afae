//! GPU memory that RDMA devices read and write themselves, where a test shows that they can.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::adapter::Adapter;
use super::rails::{id, Rails, Write};
use crate::config::Ib;
use crate::cuda::{driver, DevicePtr, Driver, Relaxed};
use crate::error::{Error, Result};
use crate::ibverbs::devices::Port;
use crate::ibverbs::{sys, Mr};
use crate::transport::copy_engine::engine::Gpu;

/// How a device gets at GPU memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// By a dma-buf: kernel and drivers since 2022.
    DmaBuf,
    /// By its address: with a module that knows the GPU's memory (nvidia-peermem).
    Address,
}

/// What there is to do once bytes have come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// The GPU sees them.
    Nothing,
    /// The driver must be asked.
    Driver,
}

/// What is written to.
const TO: u32 = sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE;
/// Bytes of the test.
const LEN: usize = 64 << 10;
/// How long each of its writes may take.
const LIMIT: Duration = Duration::from_secs(5);

/// What must be done so that GPU `ordinal` sees what RDMA devices write; the error is a reason not to let them.
pub fn flush_of(ordinal: i32) -> std::result::Result<Flush, String> {
    let driver = driver().map_err(str::to_string)?;
    match driver.remote_writes(ordinal) {
        Ok((true, _)) => Ok(Flush::Nothing),
        Ok((false, true)) => Ok(Flush::Driver),
        Ok((false, false)) => Err(
            "the GPU orders no writes of other devices, and the driver cannot flush them".into(),
        ),
        Err(e) => Err(e.text().to_string()),
    }
}

/// GPU memory for the test.
struct Memory {
    driver: &'static Driver,
    gpu: Gpu,
    at: DevicePtr,
}

impl Memory {
    fn new(ordinal: i32) -> Result<Memory> {
        let driver = driver().map_err(Error::invalid_usage)?;
        let gpu = Gpu::of_device(ordinal)?;
        let at = {
            let _entered = driver.enter(gpu.context)?;
            driver.allocate(LEN)?
        };
        Ok(Memory { driver, gpu, at })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(_entered) = self.driver.enter(self.gpu.context) {
            // SAFETY: allocated by `new`, and its registrations are gone.
            unsafe { self.driver.free(self.at) };
        }
    }
}

/// Registers GPU memory with a device.
///
/// # Safety
/// As for [`Adapter::register`].
pub unsafe fn register(
    adapter: &Adapter,
    how: How,
    addr: u64,
    len: u64,
    access: u32,
) -> Result<Arc<Mr>> {
    match how {
        // SAFETY: the caller's promise.
        How::Address => unsafe { adapter.register(addr, len, access) },
        How::DmaBuf => {
            let export = |at: u64, len: u64| {
                let driver = driver().map_err(Error::invalid_usage)?;
                driver.dma_buf(at, len as usize)
            };
            // SAFETY: the caller's promise.
            unsafe {
                adapter.register_by(addr, len, access, |from, len| {
                    let file = export(from, len)?;
                    let pd = adapter.pd();
                    pd.reg_dmabuf_mr(file.as_fd(), 0, len as usize, from, access)
                })
            }
        }
    }
}

/// How that port's device gets at memory of GPU `ordinal`, found out by doing it; the error says why it does not.
pub fn probe(
    adapter: &Adapter,
    port: &Port,
    ordinal: i32,
    ib: &Ib,
) -> std::result::Result<How, String> {
    // Whatever entry point first needs to know: it allocates.
    let _relaxed = Relaxed::begin();
    let text = |e: Error| e.text().to_string();
    flush_of(ordinal)?;
    let memory = Memory::new(ordinal).map_err(text)?;
    let mut reasons = Vec::new();
    for how in [How::DmaBuf, How::Address] {
        match moves(adapter, port, &memory, how, ib) {
            Ok(()) => return Ok(how),
            Err(e) => reasons.push(format!("{how:?}: {}", e.text())),
        }
    }
    Err(reasons.join("; "))
}

/// Writes to the GPU's memory and back over a connection of the port with itself.
fn moves(adapter: &Adapter, port: &Port, memory: &Memory, how: How, ib: &Ib) -> Result<()> {
    // SAFETY: the memory is there for this, and outlives its registration.
    let gpu = unsafe { register(adapter, how, memory.at, LEN as u64, TO) }?;
    let ports = [port.clone()];
    let mut out = Rails::new(&ports, 1, 1, true, 0, ib)?;
    let mut back = Rails::new(&ports, 1, 1, false, 0, ib)?;
    let gids = back.choose(&out.offer(), ib)?;
    let offers = (out.offer(), back.offer());
    back.connect(&offers.0, &gids, ib)?;
    out.connect(&offers.1, &gids, ib)?;
    let mut from: Vec<u8> = (0..LEN).map(|i| (i * 131 + i / 251) as u8).collect();
    let mut to = vec![0u8; LEN];
    // SAFETY: both vectors outlive their registrations, and are looked at when nothing is under way.
    let (source, target) = unsafe {
        (
            adapter.register(from.as_mut_ptr() as u64, LEN as u64, 0)?,
            adapter.register(to.as_mut_ptr() as u64, LEN as u64, TO)?,
        )
    };
    let write = |addr: u64, lkey, to: u64, rkey| -> Result<()> {
        let w = Write {
            wr_id: id::of(id::PROOF, 0, 0, 0),
            addr,
            len: LEN as u32,
            lkey,
            to,
            rkey,
            imm: None,
            signal: true,
            host: false,
        };
        // SAFETY: all is registered until the write has completed, or the queue pair is gone.
        unsafe { out.write(0, &w) }?;
        let begun = Instant::now();
        let mut wcs = [sys::Wc::default(); 4];
        while out.poll(0, &mut wcs)? == 0 {
            if begun.elapsed() > LIMIT {
                return Err(Error::remote("a write within the host does not complete"));
            }
            std::thread::yield_now();
        }
        match wcs[0].status {
            sys::WC_SUCCESS => Ok(()),
            _ => Err(out.failed(&wcs[0])),
        }
    };
    write(from.as_ptr() as u64, source.lkey(), memory.at, gpu.rkey())?;
    write(memory.at, gpu.lkey(), to.as_ptr() as u64, target.rkey())?;
    // The queue pairs go first: nothing is under way any more.
    drop((out, back));
    drop((source, target));
    match from == to {
        true => Ok(()),
        false => Err(Error::remote(
            "bytes written to the GPU came back as others",
        )),
    }
}
