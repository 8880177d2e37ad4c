//! Recordings of launches, and what must not happen inside them.
//!
//! A launch that is recorded runs again at every replay, and so does a copy from the host: with the bytes it had, and on CUDA without an error. So nothing is
//! uploaded while a stream records; what a recording needs is made by a call before it.

use std::sync::{Mutex, PoisonError};

use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_environment::stream::StreamId;

use super::device_key::{DeviceKey, device_key};
use super::error::KernelError;

/// A stream of a device.
type StreamKey = (DeviceKey, StreamId);

/// The streams that record, once for each recording.
static RECORDING: Mutex<Vec<OfStream>> = Mutex::new(Vec::new());

struct OfStream {
    key: StreamKey,
    failure: Option<Failure>,
}

/// Why a recording is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// This would have been uploaded inside.
    Upload(&'static str),
    /// This would not have been updated where it lies.
    NotInPlace(&'static str),
}

/// Says that a stream records, until it is dropped. Warming up is no recording, which CubeCL does not tell apart.
#[derive(Debug)]
#[must_use]
pub struct Recording(StreamKey);

/// The stream of the thread, which that of operations is that it enqueued.
fn key_of(client: &Client) -> StreamKey {
    (device_key(client), StreamId::current())
}

impl Recording {
    /// Of this thread's stream on the client's device. It is held to it while it captures.
    pub fn begin(client: &Client) -> Self {
        let key = key_of(client);
        streams().push(OfStream { key, failure: None });
        Self(key)
    }

    /// What went wrong first, on the thread that launches.
    pub fn failure(&self) -> Option<Failure> {
        let streams = streams();
        let own = streams.iter().find(|of| of.key == self.0);
        own.and_then(|of| of.failure)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let mut streams = streams();
        if let Some(place) = streams.iter().position(|of| of.key == self.0) {
            streams.swap_remove(place);
        }
    }
}

fn streams() -> std::sync::MutexGuard<'static, Vec<OfStream>> {
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the client's stream records; if so, what goes wrong is kept for [`Recording::failure`].
pub fn fails(client: &Client, failure: Failure) -> bool {
    if !client.is_capturing() {
        return false;
    }
    let key = key_of(client);
    let mut streams = streams();
    let own = streams.iter_mut().find(|of| of.key == key);
    own.map(|of| of.failure.get_or_insert(failure)).is_some()
}

/// That the client's stream does not record.
///
/// # Errors
/// [`KernelError::Recording`] that names what would have been uploaded.
pub fn refuse_upload(client: &Client, what: &'static str) -> Result<(), KernelError> {
    match fails(client, Failure::Upload(what)) {
        true => Err(KernelError::Recording { what }),
        false => Ok(()),
    }
}

/// Numbers of the host on the client's device: the only place where these kernels upload any.
pub fn upload<T: bytemuck::NoUninit>(
    client: &Client,
    numbers: &[T],
    what: &'static str,
) -> Result<Handle, KernelError> {
    refuse_upload(client, what)?;
    Ok(client.create_from_slice(bytemuck::cast_slice(numbers)))
}
