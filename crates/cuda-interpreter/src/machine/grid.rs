//! Runs a launch: cubes in the order of their index, several at a time, with their warps taking turns.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::cube::Cube;
use super::launch::{Launch, Settings};
use super::op::{Active, guarded};
use super::warp::{Flow, Group, Wait, Warp};
use crate::error::{Fault, Stopped};

struct Running<'a> {
    cube: Cube<'a>,
    warps: Vec<Warp>,
}

/// Runs a kernel to its end.
///
/// # Errors
///
/// [`Stopped`] for a fault or a deadlock.
pub fn run<'a>(launch: &'a Launch<'a>, settings: Settings) -> Result<(), Stopped> {
    let [x, y, z] = launch.cubes.map(u64::from);
    let (total, mut next) = (x * y * z, 0);
    let threads: u32 = launch.threads.iter().product();
    let mut turns = ChaCha8Rng::seed_from_u64(settings.seed);
    let mut running: Vec<Running> = Vec::new();
    let (mut idle, mut events, mut clock) = (0, 0, 0);
    while next < total || !running.is_empty() {
        while next < total && running.len() < settings.resident {
            let index = [next % x, next / x % y, next / x / y].map(|at| at as u32);
            let cube = Cube::new(launch, index, settings.watches_races);
            let warps = (0..threads.div_ceil(32) as usize).map(|number| Warp::new(&cube, number));
            let warps = warps.collect();
            running.push(Running { cube, warps });
            next += 1;
        }
        let mut ran = 0;
        let first = turns.random_range(0..running.len());
        for step in 0..running.len() {
            let at = (first + step) % running.len();
            let Running { cube, warps } = &mut running[at];
            let mut kept = std::mem::take(&mut cube.pending);
            while let Some(pending) = take(&mut kept, &mut turns) {
                (pending.perform(cube)).map_err(|fault| stopped(cube, 0, 0, fault))?;
                ran += 1;
            }
            cube.pending.extend(kept);
            let first = turns.random_range(0..warps.len());
            for step in 0..warps.len() {
                let number = (first + step) % warps.len();
                let turn = turns.random_range(1..=u64::from(settings.turn));
                warps[number].tick(launch, clock);
                let instructions = turn_of(cube, &mut warps[number], turn)?;
                (ran, clock) = (ran + instructions, clock + instructions);
            }
            events += std::mem::take(&mut cube.events);
        }
        let waiting = running
            .iter()
            .any(|running| !running.cube.pending.is_empty());
        if ran == 0 && !waiting {
            return Err(deadlock(&running[0]));
        }
        idle = if events > 0 { 0 } else { idle + ran };
        events = 0;
        if idle > settings.patience {
            let Running { cube, warps } = &running[0];
            let line = warps
                .iter()
                .find_map(|warp| warp.groups.first())
                .map_or(0, |group| line_of(launch, group));
            return Err(stopped(cube, 0, line, Fault::Livelock(idle)));
        }
        for Running { cube, warps } in &mut running {
            warps.retain(|warp| !warp.groups.is_empty());
            if warps.is_empty() {
                for pending in std::mem::take(&mut cube.pending) {
                    (pending.perform(cube)).map_err(|fault| stopped(cube, 0, 0, fault))?;
                }
            }
        }
        running.retain(|running| !running.warps.is_empty());
    }
    Ok(())
}

/// Takes a random pending copy, with probability 1/2.
fn take<T>(pending: &mut Vec<T>, turns: &mut ChaCha8Rng) -> Option<T> {
    if pending.is_empty() || turns.random_bool(0.5) {
        return None;
    }
    let at = turns.random_range(0..pending.len());
    Some(pending.remove(at))
}

fn stopped(cube: &Cube, warp: usize, line: u32, fault: Fault) -> Stopped {
    Stopped {
        kernel: cube.launch.kernel.name.clone(),
        cube: cube.index,
        warp,
        line,
        fault,
    }
}

fn line_of(launch: &Launch, group: &Group) -> u32 {
    launch.kernel.code[group.at as usize].line
}

fn deadlock(running: &Running) -> Stopped {
    let waits: Vec<String> = running
        .warps
        .iter()
        .flat_map(|warp| {
            warp.groups.iter().map(|group| {
                let line = line_of(running.cube.launch, group);
                format!(
                    "warp {} lanes {:#x} line {line}: {:?}",
                    warp.number, group.lanes, group.wait
                )
            })
        })
        .collect();
    let fault = Fault::Deadlock(waits.join("; "));
    stopped(&running.cube, 0, 0, fault)
}

/// Runs a warp for at most `turn` instructions. Returns how many it ran.
fn turn_of(cube: &mut Cube, warp: &mut Warp, turn: u64) -> Result<u64, Stopped> {
    let mut ran = 0;
    'groups: while ran < turn {
        let Some(index) = warp.choose(cube) else {
            break;
        };
        // The next location of another group of the warp, up to which this group runs alone.
        let others = warp
            .groups
            .iter()
            .enumerate()
            .filter(|&(other, _)| other != index);
        let meets = others
            .map(|(_, group)| group.at)
            .filter(|&at| at > warp.groups[index].at)
            .min();
        loop {
            let Group { at, lanes, .. } = warp.groups[index];
            let instruction = &cube.launch.kernel.code[at as usize];
            cube.watched(|races| races.line = instruction.line);
            let active = guarded(warp, instruction, lanes);
            ran += 1;
            let flow = match active {
                0 => Ok(Flow::Next),
                _ => {
                    let (here, op) = (lanes, &instruction.op);
                    op.run(
                        warp,
                        cube,
                        Active {
                            here,
                            lanes: active,
                        },
                    )
                }
            };
            let flow = flow.map_err(|fault| stopped(cube, warp.number, instruction.line, fault))?;
            match flow {
                Flow::Next => warp.groups[index].at += 1,
                Flow::Jump { to, lanes: jumping } => {
                    if jumping == lanes {
                        warp.groups[index].at = to;
                        warp.groups[index].rounds += u32::from(to <= at && warp.groups.len() > 1);
                    } else {
                        warp.groups[index] = Group::new(to, jumping);
                        warp.groups.push(Group::new(at + 1, lanes & !jumping));
                    }
                    if warp.groups.len() > 1 {
                        continue 'groups;
                    }
                }
                Flow::End { lanes: ending } => {
                    cube.end(ending.count_ones());
                    let left = lanes & !ending;
                    if left == 0 {
                        warp.groups.swap_remove(index);
                    } else {
                        warp.groups[index] = Group::new(at + 1, left);
                    }
                    continue 'groups;
                }
                Flow::Wait(wait) => {
                    warp.groups[index].at += 1;
                    warp.groups[index].wait = Some(wait);
                    continue 'groups;
                }
                Flow::Again => {
                    warp.groups[index].wait = Some(Wait::Others);
                    ran -= 1;
                    continue 'groups;
                }
                Flow::Yield => {
                    warp.groups[index].at += 1;
                    break 'groups;
                }
            }
            if ran >= turn {
                break 'groups;
            }
            if meets.is_some_and(|meets| warp.groups[index].at >= meets) {
                continue 'groups;
            }
        }
    }
    Ok(ran)
}
