//! Asynchronous copies and the barriers that count them.

use super::bulk::{Bulk, Outside};
use super::counted::Counted;
use super::cube::Cube;
use super::memory::placed;
use super::op::Op;
use super::pending::{Effect, Pending, Way};
use super::races::{Access, Meeting};
use super::warp::{Copied, Flow, Warp, each};
use crate::error::Fault;
use crate::ptx::{Address, Argument, Decoded, Reader, Space};

pub fn copy(reader: &mut Reader) -> Decoded<Op> {
    let is_bulk = reader.has("bulk");
    Ok(match () {
        () if reader.has("wait_group") && is_bulk => Op::then(|warp, cube, lanes| {
            for lane in each(lanes) {
                let thread = (warp.number, lane);
                let is_its = |pending: &Pending| pending.is_store_of(thread);
                while let Some(at) = cube.pending.iter().position(is_its) {
                    cube.pending.remove(at).perform(cube)?;
                }
            }
            cube.watched(|races| races.wait_stores(warp.number));
            Ok(())
        }),
        // Waits until at most so many groups of copies are pending.
        () if reader.has("wait_group") => {
            let left = reader.slot()?;
            Op::then(move |warp, cube, lanes| {
                let left = warp.uniform(left, lanes) as usize;
                for lane in each(lanes) {
                    let closed = &mut warp.copies[lane].0;
                    let ended = closed.len().saturating_sub(left);
                    let ended: Vec<_> = closed.drain(..ended).flatten().collect();
                    arrive(warp, cube, ended, lane)?;
                }
                Ok(())
            })
        }
        () if reader.has("wait_all") => Op::by_lane(|warp, cube, lane| {
            let (closed, open) = std::mem::take(&mut warp.copies[lane]);
            let ended = closed.into_iter().flatten().chain(open).collect();
            arrive(warp, cube, ended, lane)
        }),
        () if reader.has("commit_group") && is_bulk => Op::nothing(),
        () if reader.has("commit_group") => Op::by_lane(|warp, _, lane| {
            let (closed, open) = &mut warp.copies[lane];
            closed.push(std::mem::take(open));
            Ok(())
        }),
        () if is_bulk => {
            let bulk = bulk(reader)?;
            Op::by_lane(move |warp, cube, lane| {
                let pending = Pending::asked(cube, warp, &bulk, lane)?;
                cube.pending.push(pending);
                Ok(())
            })
        }
        () if reader.has("mbarrier") => return reader.unknown(),
        () if reader.has("shared") || reader.has("shared::cta") => in_pieces(reader)?,
        () => return reader.unknown(),
    })
}

/// Decodes `cp.async`, which copies some bytes from global memory and fills the others with 0. It reads immediately and writes when the copy is waited for.
fn in_pieces(reader: &mut Reader) -> Decoded<Op> {
    let (to, from) = (reader.address()?, reader.address()?);
    let (bytes, read) = (reader.slot()?, reader.optional()?);
    Ok(Op::by_lane(move |warp, cube, lane| {
        let bytes = warp.at(bytes)[lane] as usize;
        let wanted = read.map_or(bytes, |slot| warp.at(slot)[lane] as u32 as usize);
        let wanted = wanted.min(bytes);
        let mut content = vec![0; bytes];
        if wanted > 0 {
            let from = (Space::Global, warp.address(from, lane), bytes);
            let place = warp.place(cube, from, lane, Access::Read)?;
            // SAFETY: `place` has checked the bounds of the access.
            unsafe { std::ptr::copy_nonoverlapping(place, content.as_mut_ptr(), wanted) };
        }
        let to = warp.address(to, lane);
        warp.copies[lane].1.push(Copied { to, bytes: content });
        Ok(())
    }))
}

fn arrive(warp: &mut Warp, cube: &mut Cube, ended: Vec<Copied>, lane: usize) -> Result<(), Fault> {
    for Copied { to, bytes } in ended {
        let to = (Space::Shared, to, bytes.len());
        let place = warp.place(cube, to, lane, Access::Write)?;
        // SAFETY: `place` has checked the bounds of the access.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }
    Ok(())
}

fn bulk(reader: &mut Reader) -> Decoded<Bulk> {
    let is_tensor = reader.has("tensor");
    let effect = match reader.has("reduce") {
        false => Effect::Replace,
        true if reader.has("add") && (reader.has("f32") || is_tensor) => Effect::AddF32,
        true => return reader.unknown(),
    };
    let place = |text: &str| {
        let mut modifiers = reader.modifiers.iter();
        modifiers.position(|found| found.split("::").next() == Some(text))
    };
    let is_load = match (place("shared"), place("global")) {
        (Some(shared), Some(global)) => shared < global,
        _ => return reader.unknown(),
    };
    if reader.has("multicast::cluster") || reader.has("im2col") {
        return reader.unknown();
    }
    // The destination comes first.
    let to = if is_load {
        Some(reader.address()?)
    } else {
        None
    };
    let outside = match is_tensor {
        true => reader.tensor()?,
        false => (reader.address()?, Vec::new()),
    };
    let shared = to.map_or_else(|| reader.address(), Ok)?;
    let outside = match (is_tensor, outside) {
        (true, (map, coordinates)) => Outside::Box { map, coordinates },
        (false, (at, _)) => Outside::Bytes {
            at,
            count: reader.slot()?,
        },
    };
    let way = match is_load {
        true => Way::In {
            barrier: reader.address()?,
        },
        false => Way::Out(effect),
    };
    Ok(Bulk {
        shared,
        outside,
        way,
    })
}

/// Returns the address of a barrier that a lane accesses. Initialization must be ordered before other accesses.
fn touched(
    warp: &Warp,
    cube: &mut Cube,
    at: Address,
    lane: usize,
    access: Access,
) -> Result<u64, Fault> {
    let (_, place) = placed(Space::Shared, warp.address(at, lane));
    if let Some(races) = &mut cube.races {
        races.access(warp.number, place, 8, access)?;
    }
    Ok(place)
}

pub fn counted(reader: &mut Reader) -> Decoded<Op> {
    let has = |name: &str| reader.has(name);
    if has("init") {
        let (at, count) = (reader.address()?, reader.slot()?);
        return Ok(Op::by_lane(move |warp, cube, lane| {
            let place = touched(warp, cube, at, lane, Access::Write)?;
            cube.set_counted(place, Counted::new(warp.at(count)[lane])?)
        }));
    }
    if has("inval") {
        return Ok(Op::nothing());
    }
    if has("try_wait") || has("test_wait") {
        let (to, at, phase) = (reader.slot()?, reader.address()?, reader.slot()?);
        return Ok(Op::new(move |warp, cube, active| {
            let mut values = [0; 32];
            for lane in each(active.lanes) {
                let place = touched(warp, cube, at, lane, Access::Atomic)?;
                let over = cube.counted(place)?.is_over(warp.at(phase)[lane] & 1 == 1);
                if over {
                    cube.watched(|races| races.wait(warp.number, Meeting::Counted(place)));
                }
                values[lane] = over.into();
            }
            warp.set(to, &values, active.lanes);
            let waits = each(active.lanes).any(|lane| values[lane] == 0);
            Ok(if waits { Flow::Yield } else { Flow::Next })
        }));
    }
    let (arrives, expects) = (has("arrive"), has("expect_tx"));
    if has("noComplete") || has("arrive_drop") || !(arrives || expects) {
        return reader.unknown();
    }
    let to = match reader.arguments.as_slice().first() {
        Some(Argument::Slot(_)) => Some(reader.slot()?),
        _ => None,
    };
    let (at, number) = (reader.address()?, reader.optional()?);
    Ok(Op::by_lane(move |warp, cube, lane| {
        let place = touched(warp, cube, at, lane, Access::Atomic)?;
        let barrier = cube.counted(place)?;
        if arrives {
            cube.watched(|races| races.arrive(warp.number, Meeting::Counted(place)));
        }
        let state = u64::from(barrier.is_odd());
        let number = number.map(|slot| warp.at(slot)[lane]);
        let expected = number.filter(|_| expects).map_or(0, |bytes| bytes as i32);
        let count = match arrives {
            true => number.filter(|_| !expects).unwrap_or(1),
            false => 0,
        };
        // In an arrival that also expects bytes, the phase cannot end in between.
        let barrier = barrier.expecting(expected).arrived(count)?;
        cube.set_counted(place, barrier)?;
        if let Some(to) = to {
            warp.registers[to as usize][lane] = state;
        }
        Ok(())
    }))
}
