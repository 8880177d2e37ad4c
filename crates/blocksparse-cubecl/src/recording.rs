//! Recordings of launches, and checks of what must not happen inside them.
//!
//! Every replay of a recording repeats its launches, and also its copies from the host: with the original bytes, and on CUDA without an error. So nothing
//! is uploaded while a stream records. A call before the recording must upload what it needs.

use std::sync::{Mutex, PoisonError};

use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_environment::stream::StreamId;

use super::device_key::{DeviceKey, device_key};
use super::error::KernelError;

/// A stream of a device.
type StreamKey = (DeviceKey, StreamId);

/// The recording streams, with one entry per recording.
static RECORDING: Mutex<Vec<OfStream>> = Mutex::new(Vec::new());

struct OfStream {
    key: StreamKey,
    failure: Option<Failure>,
}

/// Reason why a recording is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// This data would have been uploaded inside it.
    Upload(&'static str),
    /// This buffer would not have been updated in place.
    NotInPlace(&'static str),
}

/// Marks a stream as recording until it is dropped. A warm-up run has no such mark; CubeCL does not distinguish the two.
#[derive(Debug)]
#[must_use]
pub struct Recording(StreamKey);

/// Key of the current thread's stream, to which its operations are enqueued.
fn key_of(client: &Client) -> StreamKey {
    (device_key(client), StreamId::current())
}

impl Recording {
    /// Begins a recording on this thread's stream on the client's device. The thread keeps that stream while it captures.
    pub fn begin(client: &Client) -> Self {
        let key = key_of(client);
        streams().push(OfStream { key, failure: None });
        Self(key)
    }

    /// Returns the first failure on the thread that launches.
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

/// Whether the client's stream records. If so, stores the first failure for [`Recording::failure`].
pub fn fails(client: &Client, failure: Failure) -> bool {
    if !client.is_capturing() {
        return false;
    }
    let key = key_of(client);
    let mut streams = streams();
    let own = streams.iter_mut().find(|of| of.key == key);
    own.map(|of| of.failure.get_or_insert(failure)).is_some()
}

/// Checks that the client's stream does not record.
///
/// # Errors
/// [`KernelError::Recording`] that names what would have been uploaded.
pub fn refuse_upload(client: &Client, what: &'static str) -> Result<(), KernelError> {
    match fails(client, Failure::Upload(what)) {
        true => Err(KernelError::Recording { what }),
        false => Ok(()),
    }
}

/// Uploads host data to the client's device. This is the only place where these kernels upload.
pub fn upload<T: bytemuck::NoUninit>(
    client: &Client,
    numbers: &[T],
    what: &'static str,
) -> Result<Handle, KernelError> {
    refuse_upload(client, what)?;
    Ok(client.create_from_slice(bytemuck::cast_slice(numbers)))
}
