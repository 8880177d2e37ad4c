//! Devices of other processes. They receive the orders of threads, and send their reports, as messages.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use burn::tensor::TensorData;
use burn_blocksparse::{Message, OpError, Processes};

use super::error::Lost;
use super::group::Group;
use super::messages::unknown;
use super::worker::{Answer, Order, Post, Replica, Report};
use crate::checkpoint::Checkpoint;
use crate::exit;

/// How long a process that knows of a loss may take to end by itself.
const GRACE: Duration = Duration::from_secs(10);

/// Lanes of messages: orders and reports, and requests to end the run.
const ORDERS: u16 = 0;
const STOPS: u16 = 1;

/// Runs this process's part of a run. Others are notified of its failure, and it reports another's error if that one failed first.
pub fn settled<T>(processes: &Processes, part: impl FnOnce() -> Result<T>) -> Result<T> {
    processes.on_loss(|lost| {
        thread::sleep(GRACE);
        eprintln!("error: {}", of_loss(lost));
        exit::at_once(1);
    });
    let done = part();
    match (done, processes.lost()) {
        (Ok(done), _) => {
            processes.leave();
            Ok(done)
        }
        (Err(_), Some(lost)) => Err(of_loss(lost)),
        (Err(error), None) => {
            let reason = match error.downcast_ref::<Lost>() {
                Some(failed) => failed.reason.clone(),
                None => format!("{error:#}"),
            };
            processes.fail(&reason);
            Err(error)
        }
    }
}

fn of_loss(lost: OpError) -> anyhow::Error {
    match lost {
        OpError::Lost { rank, reason } => {
            let what = format!("rank {rank} is lost");
            Lost { what, reason }.into()
        }
        other => other.into(),
    }
}

/// Asks rank 0 to end the run.
pub fn ask_to_stop(processes: &Processes) {
    let _ = processes.send(0, STOPS, &Message::default());
}

/// Sets `stop` once another process asks for it.
pub fn hear_of_stops(processes: &Arc<Processes>, stop: &Arc<AtomicBool>) {
    for rank in 1..processes.count() {
        let (processes, stop) = (processes.clone(), stop.clone());
        thread::spawn(move || {
            if processes.receive(rank, STOPS).is_ok() {
                stop.store(true, Ordering::Relaxed);
            }
        });
    }
}

/// Returns the initial state of another process.
pub(super) fn beginning(group: &Group, checkpoint: Checkpoint) -> Result<Message> {
    let header = serde_json::to_vec(&checkpoint.header)?;
    let parts = [header, checkpoint.model, checkpoint.optimizer];
    let data = parts.map(|bytes| {
        let length = bytes.len();
        TensorData::new(bytes, [length])
    });
    Ok(Message {
        words: ways(group),
        tensors: data.into(),
    })
}

/// Returns the settings that all processes must share.
fn ways(group: &Group) -> Vec<u64> {
    vec![group.share() as u64, group.adds_by_nccl().into()]
}

/// Runs a thread of rank 0 that relays a device's orders to the process of another rank.
pub(super) fn relay(
    Post { rank, device, .. }: &Post,
    processes: &Processes,
    beginning: &Message,
    orders: Receiver<Order>,
    answers: Sender<Answer>,
) {
    let passed = || -> Result<()> {
        processes.send(*rank, ORDERS, beginning)?;
        loop {
            let report = processes.receive(*rank, ORDERS)?;
            let report = Report::of_message(report, &device.device)?;
            if answers.send((*rank, Ok(report))).is_err() {
                return Ok(());
            }
            let Ok(order) = orders.recv() else {
                return Ok(());
            };
            processes.send(*rank, ORDERS, &order.message()?)?;
        }
    };
    if let Err(error) = passed() {
        // The receiver may be gone.
        let _ = answers.send((*rank, Err(error)));
    }
}

/// Runs a process other than rank 0: it obeys rank 0's orders until that one leaves.
pub fn serve(group: &Group) -> Result<ExitCode> {
    let processes = group.processes().context("no other process")?;
    let next = || match processes.receive(0, ORDERS) {
        Ok(message) => Ok(Some(message)),
        Err(OpError::Left { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    let Some(Message { words, tensors }) = next()? else {
        return Ok(ExitCode::SUCCESS);
    };
    ensure!(
        words == ways(group),
        "--shard, --share and --reduce must be those of rank 0: start all processes with the same flags"
    );
    let tensors: Result<[TensorData; 3], _> = tensors.try_into();
    let [header, model, optimizer] = tensors.map_err(|_| unknown())?;
    let checkpoint = Checkpoint {
        header: serde_json::from_slice(header.as_bytes())?,
        model: model.as_bytes().to_vec(),
        optimizer: optimizer.as_bytes().to_vec(),
    };
    let mut posts = group.posts().context("no way to add gradients")?;
    let post = posts.swap_remove(processes.rank());
    let device = post.device.device.clone();
    let mut replica = Replica::restore(post, None, &checkpoint)?;
    drop(checkpoint);
    let shard = group.shards(&*replica.steps.model()?)?.pop();
    replica.shard = shard;
    let mut report = Report::Done;
    loop {
        processes.send(0, ORDERS, &report.message()?)?;
        let Some(order) = next()? else {
            return Ok(ExitCode::SUCCESS);
        };
        report = replica.obey(Order::of_message(order, &device)?)?;
    }
}
