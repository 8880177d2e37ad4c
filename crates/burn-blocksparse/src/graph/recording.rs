//! Tracks whether this thread records, and rejects what must not happen then.

use std::cell::Cell;

use burn::tensor::Device;

use crate::error::OpError;

thread_local! {
    static RECORDING: Cell<bool> = const { Cell::new(false) };
}

/// A guard that marks a thread as recording on a device until it is dropped.
///
/// Public functions run on the calling thread, so a thread-local flag serves them. The operations that they enqueue may run on another thread, so kernels and
/// the reference check the device and its stream.
pub struct Recording {
    before: bool,
    #[cfg(feature = "cube")]
    launches: Option<blocksparse_cubecl::recording::Recording>,
}

impl Recording {
    pub fn begin(_device: &Device) -> Self {
        Self {
            before: RECORDING.replace(true),
            #[cfg(feature = "cube")]
            launches: crate::base::device::cube::of(_device)
                .map(|device| blocksparse_cubecl::recording::Recording::begin(&device.client())),
        }
    }

    /// Returns an error that could not be returned where it occurred.
    pub fn failure(&self) -> Option<OpError> {
        #[cfg(feature = "cube")]
        if let Some(failure) = (self.launches.as_ref()).and_then(|launches| launches.failure()) {
            use blocksparse_cubecl::recording::Failure;
            return Some(match failure {
                Failure::Upload(what) => OpError::Recording { what },
                Failure::NotInPlace(what) => OpError::NotInPlace { what },
            });
        }
        None
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDING.set(self.before);
    }
}

/// Returns whether this thread records.
pub fn is_recording() -> bool {
    RECORDING.get()
}

/// Checks that this thread does not capture a graph. Call it before you copy host data to a device: replays of a
/// [`CapturedGraph`](crate::graph::CapturedGraph) would copy the same data again.
///
/// # Errors
/// [`OpError::Recording`] names what would be copied.
pub fn ensure_not_capturing(what: &'static str) -> Result<(), OpError> {
    match is_recording() {
        true => Err(OpError::Recording { what }),
        false => Ok(()),
    }
}

/// Panics where [`ensure_not_capturing`] returns an error.
#[track_caller]
pub fn expect_no_upload(what: &'static str) {
    if let Err(error) = ensure_not_capturing(what) {
        panic!("{error}");
    }
}

/// Makes the current recording fail as a whole if a backend uploads host data during it. The launching thread cannot return the error to
/// anyone. Only CubeCL records: a CPU runs the operation again with the current host data.
pub fn doom_by_upload<D: 'static>(_device: &D, _what: &'static str) {
    #[cfg(feature = "cube")]
    if let Some(device) = (_device as &dyn std::any::Any).downcast_ref::<burn_cubecl::CubeDevice>()
    {
        let _ = blocksparse_cubecl::recording::refuse_upload(&device.client(), _what);
    }
}
