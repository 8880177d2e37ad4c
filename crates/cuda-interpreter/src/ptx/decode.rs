//! What an opcode with its operands does.

use super::Type;
use super::compare::comparison;
use super::convert::conversion;
use super::copies::{copy, counted};
use super::functions::pure;
use super::instruction::{Address, Binary, Op, Pure, Shuffle, Slot, Together, Vector, Vote};
use super::lanes::lanes;
use super::numbers::{E4M3, F32, Float};
use super::products::{fragments, group_product, product};
use super::reader::{Argument, Decoded, Reader};

/// The instruction, where `constant` gives numbers a place among the registers.
///
/// # Errors
///
/// What is not known here, in words.
pub fn decode(
    opcode: &str,
    arguments: Vec<Argument>,
    mut constant: impl FnMut(u64) -> Slot,
) -> Decoded<Op> {
    let mut words = opcode.split('.');
    let name = words.next().unwrap_or_default();
    let modifiers: Vec<&str> = words.collect();
    let kinds: Vec<Type> = modifiers
        .iter()
        .filter_map(|text| Type::named(text))
        .collect();
    let mut reader = Reader {
        opcode,
        modifiers,
        arguments: arguments.into_iter(),
    };
    let reader = &mut reader;
    let kind = kinds.last().copied();
    Ok(match name {
        "ret" | "exit" => Op::Exit,
        "trap" => Op::Trap,
        // Races are watched for in shared memory, for which a fence of global memory says nothing.
        "fence" if reader.has("proxy") && !reader.has("global") => Op::FenceAsync,
        // Memory has one order here, and nothing is fetched ahead.
        "membar" | "fence" | "prefetch" | "prefetchu" | "setmaxnreg" | "griddepcontrol"
        | "nanosleep" | "discard" | "applypriority" => Op::Nothing,
        "createpolicy" => Op::Pure {
            function: Pure::One(|_| [0; 32]),
            to: reader.slot()?,
            from: [constant(0); 4],
        },
        "mov" => moved(reader, kind)?,
        // Addresses of spaces are windows of the generic space: see [`Space::window`](super::Space::window).
        "cvta" => window(reader, constant)?,
        "cvt" if reader.has("tf32") => {
            // Ten bits of the fraction are left, and ties go away from 0.
            let function = Pure::One(|x| x.map(|bits| bits.wrapping_add(0x1000) & 0xffff_e000));
            function_of(reader, function, constant(0))?
        }
        "cvt" if reader.has("e4m3x2") && reader.has("satfinite") => {
            let function =
                lanes!(|high, low| E4M3::bits(F32::of(high)) << 8 | E4M3::bits(F32::of(low)));
            function_of(reader, function, constant(0))?
        }
        "cvt" => {
            let [to, from] = kinds[..] else {
                return reader.unknown();
            };
            let Some(function) = conversion(&reader.modifiers, to, from) else {
                return reader.unknown();
            };
            function_of(reader, function, constant(0))?
        }
        "setp" => compare(reader, &kinds)?,
        "ld" | "ldu" => {
            let slots = reader.slots()?;
            let at = reader.address()?;
            Op::Load(vector(reader, kind, at, slots)?)
        }
        "st" => {
            let at = reader.address()?;
            let slots = reader.slots()?;
            Op::Store(vector(reader, kind, at, slots)?)
        }
        "atom" | "red" => atomic(
            reader,
            name == "atom",
            kind.ok_or("an atomic of no type")?,
            constant(0),
        )?,
        "bar" | "barrier" => barrier(reader)?,
        "shfl" | "vote" | "match" | "redux" | "elect" => Op::Together {
            what: together(name, reader, kind)?,
            members: reader.slot()?,
        },
        "activemask" => Op::ActiveMask { to: reader.slot()? },
        "ldmatrix" if reader.has("b16") => Op::LoadMatrices {
            transposed: reader.has("trans"),
            to: reader.slots()?,
            at: reader.address()?,
        },
        "stmatrix" if reader.has("b16") => Op::StoreMatrices {
            transposed: reader.has("trans"),
            at: reader.address()?,
            from: reader.slots()?,
        },
        "movmatrix" => Op::TransposeMatrix {
            to: reader.slot()?,
            from: reader.slot()?,
        },
        "mma" => product(reader)?,
        "wmma" => fragments(reader)?,
        "wgmma" => group_product(reader)?,
        "cp" => copy(reader)?,
        "mbarrier" => counted(reader)?,
        _ => match pure(name, &reader.modifiers, &kinds) {
            Some(function) => function_of(reader, function, constant(0))?,
            None => return reader.unknown(),
        },
    })
}

fn function_of(reader: &mut Reader, function: Pure, none: Slot) -> Decoded<Op> {
    let to = reader.slot()?;
    let mut from = [none; 4];
    for slot in &mut from[..function.arguments()] {
        *slot = reader.slot()?;
    }
    if reader.left() > 0 {
        return reader.unknown();
    }
    Ok(Op::Pure { function, to, from })
}

fn vector(reader: &Reader, kind: Option<Type>, at: Address, slots: Vec<Slot>) -> Decoded<Vector> {
    Ok(Vector {
        space: reader.space(),
        kind: kind.ok_or("a load or a store of no type")?,
        at,
        slots,
    })
}

fn moved(reader: &mut Reader, kind: Option<Type>) -> Decoded<Op> {
    let bits = |parts: usize| 8 * kind.map_or(0, Type::bytes) as u32 / parts as u32;
    let mut arguments = reader.arguments.clone();
    Ok(match (arguments.next(), arguments.next()) {
        (Some(Argument::Slots(to)), Some(Argument::Slot(from))) => Op::Unpack {
            bits: bits(to.len()),
            to,
            from,
        },
        (Some(Argument::Slot(to)), Some(Argument::Slots(from))) => Op::Pack {
            bits: bits(from.len()),
            to,
            from,
        },
        (Some(Argument::Slot(to)), Some(Argument::Slot(from))) => Op::Pure {
            function: Pure::One(|x| *x),
            to,
            from: [from; 4],
        },
        _ => return reader.unknown(),
    })
}

fn window(reader: &mut Reader, mut constant: impl FnMut(u64) -> Slot) -> Decoded<Op> {
    let window = reader.space().window();
    let function = match reader.has("to") {
        true => lanes!(|x, window| x & !window),
        false => lanes!(|x, window| x | window),
    };
    let (to, from) = (reader.slot()?, reader.slot()?);
    let window = constant(window);
    Ok(Op::Pure {
        function,
        to,
        from: [from, window, window, window],
    })
}

fn compare(reader: &mut Reader, kinds: &[Type]) -> Decoded<Op> {
    let kind = kinds.last().copied().unwrap_or(Type::Predicate);
    let Some(function) = comparison(&reader.modifiers, kind) else {
        return reader.unknown();
    };
    let (to, opposite) = reader.pair()?;
    let from = [reader.slot()?, reader.slot()?];
    let combined = match reader.optional()? {
        None => None,
        Some(slot) => {
            let combine = reader.one_of::<Binary>(&[
                ("and", std::ops::BitAnd::bitand),
                ("or", std::ops::BitOr::bitor),
                ("xor", std::ops::BitXor::bitxor),
            ])?;
            Some((combine, slot))
        }
    };
    Ok(Op::Compare {
        function,
        to,
        opposite,
        from,
        combined,
    })
}

/// What an atomic or a reduction does with two numbers: the function of its name.
fn reduction(reader: &Reader, kind: Type) -> Decoded<Pure> {
    let names = ["add", "and", "or", "xor", "min", "max"];
    let name = names.into_iter().find(|name| reader.has(name));
    name.and_then(|name| pure(name, &[], &[kind]))
        .map_or_else(|| reader.unknown(), Ok)
}

/// What stands in memory is the first operand.
fn atomic(reader: &mut Reader, returns: bool, kind: Type, none: Slot) -> Decoded<Op> {
    let has = |name: &str| reader.has(name);
    let function = match kind {
        _ if has("exch") => lanes!(|_old, value| value),
        _ if has("cas") => lanes!(|old, expected, value| if old == expected { value } else { old }),
        Type::Unsigned(_) if has("inc") => {
            lanes!(|old, last| if old >= last { 0 } else { old + 1 })
        }
        Type::Unsigned(_) if has("dec") => lanes!(|old, last| if old == 0 || old > last {
            last
        } else {
            old - 1
        }),
        _ => reduction(reader, kind)?,
    };
    let to = if returns { Some(reader.slot()?) } else { None };
    let at = reader.address()?;
    let first = reader.slot()?;
    let second = reader.optional()?.unwrap_or(none);
    Ok(Op::Atomic {
        space: reader.space(),
        kind,
        function,
        to,
        at,
        from: [first, second],
    })
}

fn barrier(reader: &mut Reader) -> Decoded<Op> {
    if reader.has("warp") {
        return Ok(Op::Together {
            what: Together::Meet,
            members: reader.slot()?,
        });
    }
    let votes = reader.has("red");
    let waits = reader.has("sync") || votes && reader.has("or");
    if reader.has("cluster") || !(waits || reader.has("arrive")) {
        return reader.unknown();
    }
    if votes {
        let to = reader.slot()?;
        let (id, threads) = (reader.slot()?, Some(reader.slot()?));
        let any = Some([to, reader.slot()?]);
        return Ok(Op::Barrier {
            id,
            threads,
            waits,
            any,
        });
    }
    Ok(Op::Barrier {
        id: reader.slot()?,
        threads: reader.optional()?,
        waits,
        any: None,
    })
}

fn together(name: &str, reader: &mut Reader, kind: Option<Type>) -> Decoded<Together> {
    Ok(match name {
        "shfl" => {
            let mode = reader.one_of(&[
                ("up", Shuffle::Up),
                ("down", Shuffle::Down),
                ("bfly", Shuffle::Butterfly),
                ("idx", Shuffle::Index),
            ])?;
            let (to, valid) = reader.pair()?;
            Together::Shuffle {
                mode,
                to,
                valid,
                from: reader.slot()?,
                lane: reader.slot()?,
                clamp: reader.slot()?,
            }
        }
        "vote" => Together::Vote {
            mode: reader.one_of(&[
                ("all", Vote::All),
                ("any", Vote::Any),
                ("uni", Vote::Uniform),
                ("ballot", Vote::Ballot),
            ])?,
            to: reader.slot()?,
            from: reader.slot()?,
        },
        "match" if reader.has("any") => Together::Match {
            to: reader.slot()?,
            from: reader.slot()?,
        },
        "redux" => Together::Reduce {
            function: reduction(reader, kind.ok_or("a reduction of no type")?)?,
            to: reader.slot()?,
            from: reader.slot()?,
        },
        "elect" => {
            let (to, elected) = reader.pair()?;
            let elected = elected.ok_or("`elect` without a predicate")?;
            Together::Elect { to, elected }
        }
        _ => return reader.unknown(),
    })
}
