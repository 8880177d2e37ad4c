//! Copies that go on by themselves, and the barriers that count them.

use super::instruction::{Bulk, Effect, Op, Outside, Way};
use super::reader::{Argument, Decoded, Reader};

pub fn copy(reader: &mut Reader) -> Decoded<Op> {
    let is_bulk = reader.has("bulk");
    Ok(match () {
        () if reader.has("wait_group") && is_bulk => Op::WaitBulk,
        () if reader.has("wait_group") => Op::WaitCopies(reader.slot()?),
        () if reader.has("wait_all") => Op::WaitAllCopies,
        () if reader.has("commit_group") && is_bulk => Op::Nothing,
        () if reader.has("commit_group") => Op::CommitCopies,
        () if is_bulk => Op::Bulk(Box::new(bulk(reader)?)),
        () if reader.has("mbarrier") => return reader.unknown(),
        () if reader.has("shared") || reader.has("shared::cta") => Op::Copy {
            to: reader.address()?,
            from: reader.address()?,
            bytes: reader.slot()?,
            read: reader.optional()?,
        },
        () => return reader.unknown(),
    })
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
    // Where to comes first.
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

pub fn counted(reader: &mut Reader) -> Decoded<Op> {
    let has = |name: &str| reader.has(name);
    if has("init") {
        return Ok(Op::CountedInit {
            at: reader.address()?,
            count: reader.slot()?,
        });
    }
    if has("inval") {
        return Ok(Op::Nothing);
    }
    if has("try_wait") || has("test_wait") {
        return Ok(Op::CountedWait {
            to: reader.slot()?,
            at: reader.address()?,
            phase: reader.slot()?,
        });
    }
    let arrives = has("arrive");
    let expects = has("expect_tx");
    if has("noComplete") || has("arrive_drop") || !(arrives || expects) {
        return reader.unknown();
    }
    let to = match reader.arguments.as_slice().first() {
        Some(Argument::Slot(_)) => Some(reader.slot()?),
        _ => None,
    };
    let at = reader.address()?;
    let number = reader.optional()?;
    Ok(Op::CountedArrive {
        at,
        count: number.filter(|_| !expects),
        expects: number.filter(|_| expects),
        arrives,
        to,
    })
}
