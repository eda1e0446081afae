//! What a pointer is: `cuPointerGetAttribute`.

use crate::abi::*;
use crate::driver::{entry, Driver, Kind, State};
use crate::space::Region;

/// The value of one attribute.
enum Value {
    U64(u64),
    U32(u32),
    I32(i32),
    Bool(bool),
}

impl Value {
    fn store(self, to: usize) -> Res {
        match self {
            Value::U64(v) => Out::at(to).set(v),
            Value::U32(v) => Out::at(to).set(v),
            Value::I32(v) => Out::at(to).set(v),
            Value::Bool(v) => Out::at(to).set(u8::from(v)),
        }
    }

    /// What `cuPointerGetAttributes` stores where the attribute does not apply.
    fn none(attribute: i32) -> Res<Value> {
        Ok(match attribute {
            1 | 3 | 4 | 7 | 11 | 12 | 17 | 18 | 19 | 20 => Value::U64(0),
            2 | 14 | 16 => Value::U32(0),
            9 => Value::I32(DEVICE_INVALID),
            6 | 8 | 10 | 13 | 15 => Value::Bool(false),
            _ => return Err(ERROR_INVALID_VALUE),
        })
    }
}

const HOST: u32 = 1;
const DEVICE: u32 = 2;

fn attribute(drv: &Driver, state: &State, which: i32, at: u64) -> Res<Value> {
    if let Some((base, region)) = state.regions.find(at) {
        return match region {
            Region::Host(reg) => host_attribute(drv, reg, which, at - base),
            _ => device_attribute(drv, state, which, at, base, region),
        };
    }
    let reg = state.registered(at).ok_or(ERROR_INVALID_VALUE)?;
    host_attribute(drv, reg, which, at - reg.host as u64)
}

fn host_attribute(drv: &Driver, reg: &crate::host::HostReg, which: i32, offset: u64) -> Res<Value> {
    Ok(match which {
        1 => Value::U64(reg.ctx),
        2 => Value::U32(HOST),
        3 => Value::U64(reg.alias + offset),
        4 => Value::U64(reg.host as u64 + offset),
        7 => Value::U64(reg.buffer_id),
        9 => Value::I32(drv.ordinal(reg.device)),
        11 | 19 => Value::U64(reg.host as u64),
        12 | 18 => Value::U64(reg.size as u64),
        13 => Value::Bool(true),
        6 | 8 | 10 | 15 => Value::Bool(false),
        14 => Value::U32(0),
        16 => Value::U32(3),
        20 => Value::U64(reg.buffer_id),
        _ => return Err(ERROR_INVALID_VALUE),
    })
}

fn device_attribute(
    drv: &Driver,
    state: &State,
    which: i32,
    at: u64,
    base: u64,
    region: &Region,
) -> Res<Value> {
    let s = drv.settings().clone();
    // The context, the whole range and the mapping in it, the block's id, IPC, what it exports as.
    let (ctx, phys, range, mapped, block, ipc, exports) = match region {
        Region::Alloc(a) => {
            let own = a.opens.is_none();
            let (block, block_size) = match state.blocks.get(&a.block) {
                Some(b) => (b.id, b.size),
                None => (a.buffer_id, a.size),
            };
            let mapped = (a.block, block_size);
            (
                a.ctx,
                &a.phys,
                (base, a.size),
                mapped,
                block,
                own && s.ipc,
                0,
            )
        }
        Region::Mapping(m) => {
            let size = state
                .reservations
                .get(&m.reservation)
                .copied()
                .unwrap_or(m.size);
            let exports = state.handles.get(&m.handle).map_or(0, |h| h.types());
            let id = m.buffer_id;
            (
                0,
                &m.phys,
                (m.reservation, size),
                (base, m.size),
                id,
                false,
                exports,
            )
        }
        Region::Host(_) => return Err(ERROR_INVALID_VALUE),
    };
    Ok(match which {
        1 => Value::U64(ctx),
        2 => Value::U32(DEVICE),
        3 => Value::U64(at),
        // Device memory has no host address.
        4 => return Err(ERROR_INVALID_VALUE),
        6 | 8 => Value::Bool(false),
        7 => Value::U64(region.buffer_id()),
        9 => Value::I32(drv.ordinal(phys.device)),
        10 => Value::Bool(ipc),
        11 => Value::U64(range.0),
        12 => Value::U64(range.1),
        13 => Value::Bool(true),
        14 => Value::U32(exports as u32),
        15 => Value::Bool(false),
        16 => Value::U32(3),
        17 => Value::U64(0),
        18 => Value::U64(mapped.1),
        19 => Value::U64(mapped.0),
        20 => Value::U64(block),
        _ => return Err(ERROR_INVALID_VALUE),
    })
}

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, the only one that can be set.
const SYNC_MEMOPS: i32 = 6;

entry!(Kind::Plain, fn cuPointerGetAttribute(data: usize, which: i32, at: u64) |drv| {
    if data == 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let state = drv.state()?;
    attribute(drv, &state, which, at)?.store(data)
});

entry!(
    Kind::Plain,
    fn cuPointerGetAttributes(count: u32, which: In<i32>, data: In<usize>, at: u64)
    |drv| {
        let state = drv.state()?;
        for i in 0..count as usize {
            let (which, to) = (which.get_at(i)?, data.get_at(i)?);
            // A pointer that the driver does not know is no error here: every value is nought.
            attribute(drv, &state, which, at).or_else(|_| Value::none(which))?.store(to)?;
        }
        Ok(())
    }
);

entry!(Kind::Plain, fn cuPointerSetAttribute(value: In<u32>, which: i32, at: u64) |drv| {
    let state = drv.state()?;
    value.get()?;
    if which != SYNC_MEMOPS || state.regions.find(at).is_none() {
        return Err(ERROR_INVALID_VALUE);
    }
    Ok(())
});
