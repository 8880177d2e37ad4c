//! Training on several devices: each takes an equal part of every batch, and all take the same step.
//!
//! ```text
//! the first device, on the main thread   every other device, on a thread of its own
//! gradients of its part                  gradients of its part             (until all of them have theirs)
//! the mean over all devices              the same numbers                  reduce.rs
//! clipping and AdamW                     the same, bit for bit: norms are compared in every step
//! ```
//!
//! Nobody enters the sum before all devices have their gradients, so that one that fails in its own part leaves no other waiting. The model that
//! is evaluated, stored and continued is the first device's. Devices of other processes have a thread of rank 0 that passes messages on: processes.rs.

mod bundle;
mod error;
mod group;
mod messages;
mod processes;
mod reduce;
mod replicas;
mod training;
mod worker;

pub use group::{DEVICE, DeviceArgs, Group};
pub use processes::{ask_to_stop, hear_of_stops, serve, settled};
pub use training::Training;
