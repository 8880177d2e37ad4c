//! Decodes opcodes with their operands.

use super::copies::{copy, counted};
use super::exchange::{Shuffle, Vote, matching, shuffle, transposed, vote};
use super::fragments::fragments;
use super::matrix::{group_product, product};
use super::memory::{read, write};
use super::op::Op;
use super::races::Access;
use super::warp::{Flow, Wait, Warp, each};
use crate::error::Fault;
use crate::ptx::{
    Address, Argument, Binary, Decoded, E4M3, F32, Float, Lanes, Pure, Reader, Slot, Space, Type,
    comparison, conversion, lanes, pure,
};

/// # Errors
///
/// A message that names what is unknown.
pub fn decode(
    opcode: &str,
    arguments: Vec<Argument>,
    mut constant: impl FnMut(u64) -> Slot,
) -> Decoded<Op> {
    let mut words = opcode.split('.');
    let name = words.next().unwrap_or_default();
    let modifiers: Vec<&str> = words.collect();
    let kinds = modifiers.iter().filter_map(|text| Type::named(text));
    let kinds: &[Type] = &kinds.collect::<Vec<Type>>();
    let reader = &mut Reader {
        opcode,
        modifiers,
        arguments: arguments.into_iter(),
    };
    let typed = || kinds.last().copied().ok_or("an access of no type");
    Ok(match name {
        "ret" | "exit" => Op::new(|_, _, active| {
            let lanes = active.lanes;
            Ok(Flow::End { lanes })
        }),
        "trap" => Op::new(|_, _, _| Err(Fault::Trap)),
        // Makes writes of threads visible to tensor cores and the copy engine. Races are only detected in shared memory, so fences of global memory
        // have no effect.
        "fence" if reader.has("proxy") && !reader.has("global") => Op::then(|warp, cube, _| {
            cube.watched(|races| races.fence(warp.number));
            Ok(())
        }),
        // Memory has one global order here, and nothing is prefetched.
        "membar" | "fence" | "prefetch" | "prefetchu" | "setmaxnreg" | "griddepcontrol"
        | "nanosleep" | "discard" | "applypriority" => Op::nothing(),
        "createpolicy" => function(reader.slot()?, Pure::One(|_| [0; 32]), vec![constant(0)]),
        "mov" => moved(reader, kinds.last().copied())?,
        // Address spaces are windows of the generic space: see [`Space::window`].
        "cvta" => {
            let at = constant(reader.space().window());
            let window = match reader.has("to") {
                true => lanes!(|x, window| x & !window),
                false => lanes!(|x, window| x | window),
            };
            function(reader.slot()?, window, vec![reader.slot()?, at])
        }
        // Ten bits of the fraction remain; ties round away from 0.
        "cvt" if reader.has("tf32") => function_of(
            reader,
            lanes!(|bits| bits.wrapping_add(0x1000) & 0xffff_e000),
        )?,
        "cvt" if reader.has("e4m3x2") && reader.has("satfinite") => function_of(
            reader,
            lanes!(|high, low| E4M3::bits(F32::of(high)) << 8 | E4M3::bits(F32::of(low))),
        )?,
        "cvt" => {
            let known = match *kinds {
                [to, from] => conversion(&reader.modifiers, to, from),
                _ => None,
            };
            let conversion = known.map_or_else(|| reader.unknown(), Ok)?;
            function_of(reader, conversion)?
        }
        "setp" => compare(reader, kinds)?,
        "ld" | "ldu" => {
            let slots = reader.slots()?;
            load(reader.space(), typed()?, reader.address()?, slots)
        }
        "st" => {
            let at = reader.address()?;
            store(reader.space(), typed()?, at, reader.slots()?)
        }
        "atom" | "red" => atomic(reader, name == "atom", typed()?)?,
        "bar" | "barrier" => barrier(reader)?,
        "shfl" | "vote" | "match" | "redux" | "elect" => together(name, reader, typed)?,
        "activemask" => {
            let to = reader.slot()?;
            Op::then(move |warp, _, lanes| {
                warp.set(to, &[lanes.into(); 32], lanes);
                Ok(())
            })
        }
        "ldmatrix" if reader.has("b16") => {
            let (turns, to, at) = (reader.has("trans"), reader.slots()?, reader.address()?);
            Op::whole(move |warp, cube, lanes| {
                for (matrix, &slot) in to.iter().enumerate() {
                    let mut values = [0; 32];
                    for (place, value) in values.iter_mut().enumerate() {
                        *value = warp.load(cube, matrix_part(warp, at, matrix, place), place)?;
                    }
                    let values = if turns { transposed(&values) } else { values };
                    warp.set(slot, &values, lanes);
                }
                Ok(())
            })
        }
        "stmatrix" if reader.has("b16") => {
            let (turns, at, from) = (reader.has("trans"), reader.address()?, reader.slots()?);
            Op::whole(move |warp, cube, _| {
                for (matrix, &slot) in from.iter().enumerate() {
                    let values = *warp.at(slot);
                    let values = if turns { transposed(&values) } else { values };
                    for (place, &value) in values.iter().enumerate() {
                        let to = matrix_part(warp, at, matrix, place);
                        warp.store(cube, to, place, value)?;
                    }
                }
                Ok(())
            })
        }
        "movmatrix" => {
            let (to, from) = (reader.slot()?, reader.slot()?);
            Op::whole(move |warp, _, lanes| {
                warp.set(to, &transposed(warp.at(from)), lanes);
                Ok(())
            })
        }
        "mma" => product(reader)?,
        "wmma" => fragments(reader)?,
        "wgmma" => group_product(reader)?,
        "cp" => copy(reader)?,
        "mbarrier" => counted(reader)?,
        _ => match pure(name, &reader.modifiers, kinds) {
            Some(function) => function_of(reader, function)?,
            None => return reader.unknown(),
        },
    })
}

/// Returns the four bytes of an 8 × 8 matrix row that belong to a lane. The addresses of the lanes are those of rows.
fn matrix_part(warp: &Warp, at: Address, matrix: usize, lane: usize) -> (Space, u64, usize) {
    let row = warp.address(at, 8 * matrix + lane / 4);
    (Space::Shared, row + (lane % 4 * 4) as u64, 4)
}

/// Creates a function of registers alone.
fn function(to: Slot, function: Pure, from: Vec<Slot>) -> Op {
    let reads = from.clone();
    Op::then(move |warp, _, lanes| {
        let value = |index: usize| warp.at(from.get(index).copied().unwrap_or(from[0]));
        let values = function.over([0, 1, 2, 3].map(value));
        warp.set(to, &values, lanes);
        Ok(())
    })
    .reading(&reads)
}

fn function_of(reader: &mut Reader, of: Pure) -> Decoded<Op> {
    let to = reader.slot()?;
    let from = (0..of.arguments()).map(|_| reader.slot());
    let from = from.collect::<Decoded<Vec<Slot>>>()?;
    match reader.left() {
        0 => Ok(function(to, of, from)),
        _ => reader.unknown(),
    }
}

fn moved(reader: &mut Reader, kind: Option<Type>) -> Decoded<Op> {
    let bits = |parts: usize| 8 * kind.map_or(0, Type::bytes) as u32 / parts as u32;
    let mut arguments = reader.arguments.clone();
    Ok(match (arguments.next(), arguments.next()) {
        (Some(Argument::Slots(to)), Some(Argument::Slot(from))) => {
            let bits = bits(to.len());
            let mask = u64::MAX >> (64 - bits);
            Op::then(move |warp, _, lanes| {
                let from = *warp.at(from);
                for (part, &slot) in to.iter().enumerate() {
                    let values = from.map(|value| value >> (bits * part as u32) & mask);
                    warp.set(slot, &values, lanes);
                }
                Ok(())
            })
            .reading(&[from])
        }
        (Some(Argument::Slot(to)), Some(Argument::Slots(from))) => {
            let (bits, reads) = (bits(from.len()), from.clone());
            let mask = u64::MAX >> (64 - bits);
            Op::then(move |warp, _, lanes| {
                let values = std::array::from_fn(|lane| {
                    let parts = from.iter().enumerate();
                    parts.fold(0, |value, (part, &slot)| {
                        value | (warp.at(slot)[lane] & mask) << (bits * part as u32)
                    })
                });
                warp.set(to, &values, lanes);
                Ok(())
            })
            .reading(&reads)
        }
        (Some(Argument::Slot(to)), Some(Argument::Slot(from))) => {
            function(to, Pure::One(|x| *x), vec![from])
        }
        _ => return reader.unknown(),
    })
}

/// Decodes a comparison that sets a predicate, and optionally its complement.
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
    Ok(Op::then(move |warp, _, lanes| {
        let found = function(warp.at(from[0]), warp.at(from[1]));
        let combine = |values: Lanes| match combined {
            None => values,
            Some((combine, other)) => {
                let other = warp.at(other);
                std::array::from_fn(|lane| combine(values[lane], other[lane]) & 1)
            }
        };
        let (values, others) = (combine(found), combine(found.map(|value| value ^ 1)));
        warp.set(to, &values, lanes);
        if let Some(opposite) = opposite {
            warp.set(opposite, &others, lanes);
        }
        Ok(())
    })
    .reading(&from))
}

fn load(space: Space, kind: Type, at: Address, slots: Vec<Slot>) -> Op {
    let size = kind.bytes();
    Op::by_lane(move |warp, cube, lane| {
        let from = (space, warp.address(at, lane), size * slots.len());
        let place = warp.place(cube, from, lane, Access::Read)?;
        for (part, &slot) in slots.iter().enumerate() {
            // SAFETY: `place` has checked the bounds of the access.
            let bits = unsafe { read(place.add(size * part), size) };
            let value = if size < 4 {
                kind.widen(bits) as u64
            } else {
                bits
            };
            warp.registers[slot as usize][lane] = value;
        }
        Ok(())
    })
}

fn store(space: Space, kind: Type, at: Address, slots: Vec<Slot>) -> Op {
    let (size, reads) = (kind.bytes(), slots.clone());
    Op::then(move |warp, cube, lanes| {
        for lane in each(lanes) {
            let to = (space, warp.address(at, lane), size * slots.len());
            let place = warp.place(cube, to, lane, Access::Write)?;
            for (part, &slot) in slots.iter().enumerate() {
                // SAFETY: `place` has checked the bounds of the access.
                unsafe { write(place.add(size * part), size, warp.at(slot)[lane]) };
            }
        }
        cube.events += 1;
        Ok(())
    })
    .reading(&reads)
}

/// Returns the binary function of an atomic or a reduction, by its name.
fn reduction(reader: &Reader, kind: Type) -> Decoded<Pure> {
    let names = ["add", "and", "or", "xor", "min", "max"];
    let name = names.into_iter().find(|name| reader.has(name));
    name.and_then(|name| pure(name, &[], &[kind]))
        .map_or_else(|| reader.unknown(), Ok)
}

/// Decodes an atomic: replaces a value in memory by a function of it and up to two operands.
fn atomic(reader: &mut Reader, returns: bool, kind: Type) -> Decoded<Op> {
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
    let (at, first) = (reader.address()?, reader.slot()?);
    let from = [first, reader.optional()?.unwrap_or(first)];
    let (space, size) = (reader.space(), kind.bytes());
    Ok(Op::then(move |warp, cube, lanes| {
        for lane in each(lanes) {
            let at = (space, warp.address(at, lane), size);
            let place = warp.place(cube, at, lane, Access::Atomic)?;
            let [first, second] = from.map(|slot| kind.truncate(warp.at(slot)[lane]));
            // SAFETY: `place` has checked the bounds of the access.
            let old = unsafe { read(place, size) };
            unsafe { write(place, size, function.once([old, first, second])) };
            if let Some(to) = to {
                warp.registers[to as usize][lane] = old;
            }
        }
        cube.events += 1;
        Ok(())
    }))
}

fn barrier(reader: &mut Reader) -> Decoded<Op> {
    if reader.has("warp") {
        return Ok(Op::together(reader.slot()?, |_, _, _| {}));
    }
    let votes = reader.has("red");
    let waits = reader.has("sync") || votes && reader.has("or");
    if reader.has("cluster") || !(waits || reader.has("arrive")) {
        return reader.unknown();
    }
    // The register of the result (whether any predicate is true), and the thread's own predicate.
    let to = if votes { Some(reader.slot()?) } else { None };
    let (id, threads) = (reader.slot()?, reader.optional()?);
    let says = if votes { Some(reader.slot()?) } else { None };
    Ok(Op::new(move |warp, cube, active| {
        let lanes = active.lanes;
        let threads = threads.map(|slot| warp.uniform(slot, lanes) & u64::from(u32::MAX));
        let id = warp.uniform(id, lanes) & u64::from(u32::MAX);
        if says.is_some_and(|from| each(lanes).any(|lane| warp.at(from)[lane] & 1 != 0)) {
            cube.say(id);
        }
        let round = cube.arrive(warp.number, id, lanes.count_ones(), threads)?;
        let any = to;
        Ok(match waits {
            true => Flow::Wait(Wait::Barrier { id, round, any }),
            false => Flow::Next,
        })
    }))
}

/// Decodes instructions that the named threads of a warp execute together.
fn together(
    name: &str,
    reader: &mut Reader,
    typed: impl Fn() -> Result<Type, &'static str>,
) -> Decoded<Op> {
    Ok(match name {
        "shfl" => {
            let mode = reader.one_of(&[
                ("up", Shuffle::Up),
                ("down", Shuffle::Down),
                ("bfly", Shuffle::Butterfly),
                ("idx", Shuffle::Index),
            ])?;
            let (to, valid) = reader.pair()?;
            let from = [reader.slot()?, reader.slot()?, reader.slot()?];
            Op::together(reader.slot()?, move |warp, _, lanes| {
                let [from, lane, clamp] = from.map(|slot| warp.at(slot));
                let (values, within) = shuffle(mode, from, lane, clamp);
                warp.set(to, &values, lanes);
                if let Some(valid) = valid {
                    warp.set(valid, &within, lanes);
                }
            })
            .reading(&from[..1])
        }
        "vote" => {
            let mode = reader.one_of(&[
                ("all", Vote::All),
                ("any", Vote::Any),
                ("uni", Vote::Uniform),
                ("ballot", Vote::Ballot),
            ])?;
            let (to, from) = (reader.slot()?, reader.slot()?);
            Op::together(reader.slot()?, move |warp, members, lanes| {
                let value = vote(mode, warp.at(from), members);
                warp.set(to, &[value; 32], lanes);
            })
        }
        "match" if reader.has("any") => {
            let (to, from) = (reader.slot()?, reader.slot()?);
            Op::together(reader.slot()?, move |warp, members, lanes| {
                let values = matching(warp.at(from), members);
                warp.set(to, &values, lanes);
            })
        }
        "redux" => {
            let function = reduction(reader, typed()?)?;
            let (to, from) = (reader.slot()?, reader.slot()?);
            Op::together(reader.slot()?, move |warp, members, lanes| {
                let values = warp.at(from);
                let all = each(members).map(|lane| values[lane]);
                let value = all.reduce(|a, b| function.once([a, b, b])).unwrap_or(0);
                warp.set(to, &[value; 32], lanes);
            })
        }
        "elect" => {
            let (to, elected) = reader.pair()?;
            let elected = elected.ok_or("`elect` without a predicate")?;
            Op::together(reader.slot()?, move |warp, members, lanes| {
                let leader = members.trailing_zeros();
                warp.set(to, &[leader.into(); 32], lanes);
                let is_leader = std::array::from_fn(|lane| (lane as u32 == leader).into());
                warp.set(elected, &is_leader, lanes);
            })
        }
        _ => return reader.unknown(),
    })
}
