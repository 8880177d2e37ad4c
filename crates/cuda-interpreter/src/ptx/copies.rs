//! Copies that go on by themselves, and the barriers that count them.

use super::instruction::{Bulk, Effect, Op};
use super::reader::{Argument, Decoded, Reader};

fn effect(reader: &Reader) -> Decoded<Effect> {
    match reader.has("reduce") {
        false => Ok(Effect::Replace),
        true if reader.has("add") && (reader.has("f32") || reader.has("tensor")) => {
            Ok(Effect::AddF32)
        }
        true => reader.unknown(),
    }
}

pub fn copy(reader: &mut Reader) -> Decoded<Op> {
    if reader.has("wait_group") {
        let bulk = reader.has("bulk");
        return Ok(match (bulk, reader.opcode) {
            (true, _) => Op::WaitBulk,

            (false, _) => Op::WaitCopies(reader.slot()?),
        });
    }
    if reader.has("wait_all") {
        return Ok(Op::WaitAllCopies);
    }
    if reader.has("commit_group") {
        return Ok(if reader.has("bulk") {
            Op::Nothing
        } else {
            Op::CommitCopies
        });
    }
    if !reader.has("bulk") {
        if !reader.has("shared") && !reader.has("shared::cta") || reader.has("mbarrier") {
            return reader.unknown();
        }
        let (to, from, bytes) = (reader.address()?, reader.address()?, reader.slot()?);
        return Ok(Op::Copy {
            to,
            from,

            bytes,
            read: reader.optional()?,
        });
    }
    let effect = effect(reader)?;
    let place = |text: &str| {
        reader
            .modifiers
            .iter()
            .position(|found| found.split("::").next() == Some(text))
    };
    let to_shared = match (place("shared"), place("global")) {
        (Some(shared), Some(global)) => shared < global,
        _ => return reader.unknown(),
    };
    if reader.has("multicast::cluster") || reader.has("im2col") {
        return reader.unknown();
    }
    let bulk = match (to_shared, reader.has("tensor")) {
        (true, true) => {
            let to = reader.address()?;
            let (map, coordinates) = reader.tensor()?;
            Bulk::LoadTensor {
                to,
                map,
                coordinates,
                barrier: reader.address()?,
            }
        }
        (true, false) => Bulk::Load {
            to: reader.address()?,
            from: reader.address()?,
            bytes: reader.slot()?,
            barrier: reader.address()?,
        },
        (false, true) => {
            let (map, coordinates) = reader.tensor()?;
            Bulk::StoreTensor {
                map,
                coordinates,
                from: reader.address()?,
                effect,
            }
        }
        (false, false) => Bulk::Store {
            to: reader.address()?,
            from: reader.address()?,
            bytes: reader.slot()?,
            effect,
        },
    };
    Ok(Op::Bulk(Box::new(bulk)))
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
