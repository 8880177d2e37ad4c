//! What an opcode with its operands does.

use super::Type;
use super::compare::comparison;
use super::convert::conversion;
use super::copies::{copy, counted};
use super::functions::pure;
use super::instruction::{Binary, Op, Pure, Shuffle, Slot, Vote};
use super::numbers::{bf16_to_f32, f16_to_f32, f32_of, f32_to_bf16, f32_to_f16, f64_of, of_f32};
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
        "fence" if reader.has("proxy") => Op::FenceAsync,
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
        "ld" | "ldu" => Op::Load {
            space: reader.space(),
            kind: kind.ok_or("a load of no type")?,
            to: reader.slots()?,
            at: reader.address()?,
        },
        "st" => Op::Store {
            space: reader.space(),
            kind: kind.ok_or("a store of no type")?,
            at: reader.address()?,
            from: reader.slots()?,
        },
        "atom" | "red" => atomic(
            reader,
            name == "atom",
            kind.ok_or("an atomic of no type")?,
            constant(0),
        )?,
        "bar" | "barrier" => barrier(reader)?,
        "shfl" => shuffle(reader)?,
        "vote" => vote(reader)?,
        "activemask" => Op::ActiveMask { to: reader.slot()? },
        "match" if reader.has("any") => Op::Match {
            to: reader.slot()?,
            from: reader.slot()?,
            members: reader.slot()?,
        },
        "redux" => Op::Reduce {
            function: reduction(reader, kind)?,
            to: reader.slot()?,
            from: reader.slot()?,
            members: reader.slot()?,
        },
        "elect" => {
            let (to, elected) = reader.pair()?;
            Op::Elect {
                to,
                elected: elected.ok_or("`elect` without a predicate")?,
                members: reader.slot()?,
            }
        }
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
        true => Pure::Two(|x, window| std::array::from_fn(|lane| x[lane] & !window[lane])),
        false => Pure::Two(|x, window| std::array::from_fn(|lane| x[lane] | window[lane])),
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
        Some(slot) if reader.has("and") => Some((std::ops::BitAnd::bitand as Binary, slot)),
        Some(slot) if reader.has("or") => Some((std::ops::BitOr::bitor as Binary, slot)),
        Some(slot) if reader.has("xor") => Some((std::ops::BitXor::bitxor as Binary, slot)),
        Some(_) => return reader.unknown(),
    };
    Ok(Op::Compare {
        function,
        to,
        opposite,
        from,
        combined,
    })
}

fn reduction(reader: &Reader, kind: Option<Type>) -> Decoded<Binary> {
    let signed = kind.is_some_and(Type::is_signed);
    let known: [(&str, Binary); 6] = [
        ("add", |a, b| (a as u32).wrapping_add(b as u32).into()),
        ("and", |a, b| a & b),
        ("or", |a, b| a | b),
        ("xor", |a, b| a ^ b),
        (
            "min",
            if signed {
                |a, b| (a as i32).min(b as i32) as u64
            } else {
                |a, b| (a as u32).min(b as u32).into()
            },
        ),
        (
            "max",
            if signed {
                |a, b| (a as i32).max(b as i32) as u64
            } else {
                |a, b| (a as u32).max(b as u32).into()
            },
        ),
    ];
    let found = known.iter().find(|(name, _)| reader.has(name));
    found.map_or_else(|| reader.unknown(), |&(_, function)| Ok(function))
}

/// The sum of numbers in half precision, or of pairs of them.
fn half_sum(kind: Type) -> fn(u64, u64, u64) -> u64 {
    fn sum(old: u64, value: u64, part: u32, to: fn(u16) -> f32, from: fn(f32) -> u16) -> u64 {
        let [old, value] = [old, value].map(|bits| to((bits >> part) as u16));
        u64::from(from(old + value)) << part
    }
    match kind {
        Type::F16 => |old, value, _| sum(old, value, 0, f16_to_f32, f32_to_f16),
        Type::BF16 => |old, value, _| sum(old, value, 0, bf16_to_f32, f32_to_bf16),
        Type::F16x2 => |old, value, _| {
            [0, 16]
                .map(|part| sum(old, value, part, f16_to_f32, f32_to_f16))
                .iter()
                .sum()
        },
        _ => |old, value, _| {
            [0, 16]
                .map(|part| sum(old, value, part, bf16_to_f32, f32_to_bf16))
                .iter()
                .sum()
        },
    }
}

fn atomic(reader: &mut Reader, returns: bool, kind: Type, none: Slot) -> Decoded<Op> {
    let has = |name: &str| reader.has(name);
    let function: fn(u64, u64, u64) -> u64 = match kind {
        Type::F64 if has("add") => |old, value, _| (f64_of(old) + f64_of(value)).to_bits(),
        Type::F16 | Type::BF16 | Type::F16x2 | Type::BF16x2 if has("add") => half_sum(kind),
        Type::F32 if has("add") => |old, value, _| of_f32(f32_of(old) + f32_of(value)),
        _ if !kind.is_integer() => return reader.unknown(),
        _ if has("add") => |old, value, _| old.wrapping_add(value),
        Type::Unsigned(_) if has("inc") => |old, last, _| if old >= last { 0 } else { old + 1 },
        Type::Unsigned(_) if has("dec") => |old, last, _| {
            if old == 0 || old > last {
                last
            } else {
                old - 1
            }
        },
        _ if has("exch") => |_, value, _| value,
        _ if has("cas") => |old, expected, value| if old == expected { value } else { old },
        _ if has("and") => |old, value, _| old & value,
        _ if has("or") => |old, value, _| old | value,
        _ if has("xor") => |old, value, _| old ^ value,
        Type::Signed(32) if has("min") => |old, value, _| (old as i32).min(value as i32) as u64,
        Type::Signed(32) if has("max") => |old, value, _| (old as i32).max(value as i32) as u64,
        Type::Unsigned(_) if has("min") => |old, value, _| old.min(value),
        Type::Unsigned(_) if has("max") => |old, value, _| old.max(value),
        _ => return reader.unknown(),
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
        return Ok(Op::WarpBarrier {
            members: reader.slot()?,
        });
    }
    let waits = reader.has("sync");
    if reader.has("cluster") || !(waits || reader.has("arrive")) {
        return reader.unknown();
    }
    Ok(Op::Barrier {
        id: reader.slot()?,
        threads: reader.optional()?,
        waits,
    })
}

fn shuffle(reader: &mut Reader) -> Decoded<Op> {
    let modes = [
        ("up", Shuffle::Up),
        ("down", Shuffle::Down),
        ("bfly", Shuffle::Butterfly),
        ("idx", Shuffle::Index),
    ];
    let Some((_, mode)) = modes.into_iter().find(|(name, _)| reader.has(name)) else {
        return reader.unknown();
    };
    let (to, valid) = reader.pair()?;
    Ok(Op::Shuffle {
        mode,
        to,
        valid,
        from: reader.slot()?,
        lane: reader.slot()?,
        clamp: reader.slot()?,
        members: reader.slot()?,
    })
}

fn vote(reader: &mut Reader) -> Decoded<Op> {
    let modes = [
        ("all", Vote::All),
        ("any", Vote::Any),
        ("uni", Vote::Uniform),
        ("ballot", Vote::Ballot),
    ];
    let Some((_, mode)) = modes.into_iter().find(|(name, _)| reader.has(name)) else {
        return reader.unknown();
    };
    Ok(Op::Vote {
        mode,
        to: reader.slot()?,
        from: reader.slot()?,
        members: reader.slot()?,
    })
}
