//! Training on several devices: each takes an equal part of every batch, and all take the same step.
//!
//! ```text
//! the first device, on the main thread   every other device, on a thread of its own
//! gradients of its part                  gradients of its part             (until all of them have theirs)
//! the mean over all devices              the same numbers                  reduce.rs
//! clipping and AdamW                     the same, bit for bit: norms are compared in every step
//! ```
//!
//! No device enters the sum before all have their gradients, so that a failure in one device's part leaves no other waiting. The first device's model is
//! evaluated, stored and continued. Each device of another process has a thread in rank 0 that relays messages: processes.rs.

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
