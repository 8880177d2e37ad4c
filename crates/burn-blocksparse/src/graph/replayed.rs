//! A computation, and what a device recorded of it.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::backend::BackendGraph;

use super::recording::Recording;
use crate::base::prelude::*;

/// Runs before the recording. Fusion takes the path that it stays on from the second run on, and pools then have what a run needs.
const WARM_UPS: usize = 3;

/// A computation that runs many times with the same sizes, such as a training step. It is captured once and replayed as one launch where the device
/// can (CUDA, HIP); elsewhere it runs again. Either way [`run`](Self::run) computes exactly once.
///
/// The first three runs call the closure. The fourth calls it to capture it, which computes nothing, and replays the result; later runs do not call
/// the closure, so **host code runs four times only**. Read what changes between runs from [`StaticInput`](super::StaticInput)s, written before each
/// run. Update lasting state in its own buffer. Scalars are frozen. From the fourth run on, functions of this crate return an error instead of
/// copying from the host inside the closure, on every device, so that a mistake shows on a CPU too.
///
/// Read results outside: reading inside makes the capture fail. The device holds the buffers of a captured graph as long as it lives.
///
/// ```
/// use burn::tensor::{Device, TensorData};
/// use burn_blocksparse::OpError;
/// use burn_blocksparse::graph::{StaticInput, CapturedGraph};
///
/// let device = Device::flex();
/// let x = StaticInput::<1>::new(TensorData::from([1f32, 2.0]), &device)?;
/// let mut squares = CapturedGraph::new(&device, {
///     let x = x.clone();
///     move || Ok::<_, OpError>(x.tensor().square().sum())
/// })?;
/// for step in 0..6 {
///     x.write(TensorData::from([step as f32, 1.0]))?;
///     let sum = squares.run()?.clone().into_scalar::<f32>();
///     assert_eq!(sum, (step * step + 1) as f32);
/// }
/// # Ok::<(), OpError>(())
/// ```
pub struct CapturedGraph<T, F> {
    device: Device,
    closure: F,
    runs: usize,
    output: Option<T>,
    state: State,
    /// Replays and writes must come from the thread that recorded.
    _thread: PhantomData<*const ()>,
}

enum State {
    WarmingUp,
    Recorded(BackendGraph<Dispatch>),
    Refused(String),
}

impl<T, E, F> CapturedGraph<T, F>
where
    E: From<OpError>,
    F: FnMut() -> Result<T, E>,
{
    /// Nothing runs yet. Nothing else may be recorded on the device from here to the fourth run.
    ///
    /// # Errors
    /// [`OpError`] if the device is not served.
    pub fn new(device: &Device, closure: F) -> Result<Self, OpError> {
        served(device)?;
        // Autodiff records nothing itself: tensors of it may be used on the device beneath.
        let device = device.clone().without_autodiff();
        let state = match Dispatch::graph_prepare(device.as_dispatch()) {
            Ok(()) => State::WarmingUp,
            Err(error) => State::Refused(reason(&error)),
        };
        Ok(Self {
            device,
            closure,
            runs: 0,
            output: None,
            state,
            _thread: PhantomData,
        })
    }

    /// Runs the computation once. On a recording the output is the same tensors every time, with new values.
    ///
    /// # Errors
    /// The closure's, and [`OpError::Read`] if a replay fails. A run of the closure that fails leaves what it has changed; in the fourth run, nothing is computed.
    pub fn run(&mut self) -> Result<&T, E> {
        if matches!(self.state, State::WarmingUp) && self.runs >= WARM_UPS {
            self.record()?;
        }
        match &self.state {
            State::Recorded(graph) => {
                // SAFETY: liveness: CubeCL pins the pages that the recording touched for as long as `graph` lives, and `self` owns the graph, the closure with
                // the tensors that it holds, and the recorded output. Same stream: `self` cannot leave its thread, on which it was recorded, and `StaticInput`,
                // through which inputs are written, cannot either. No concurrent use: a tensor that another thread holds a clone of may show torn numbers
                // there, as with any in-place update, but its memory stays valid by the first point.
                unsafe { Dispatch::graph_replay(self.device.as_dispatch(), graph) }
                    .map_err(OpError::read)?;
            }
            State::WarmingUp => {
                self.output = Some((self.closure)()?);
                // Fusion leaves out what nobody holds any more; then the recording would be the first to allocate for it.
                Dispatch::sync(self.device.as_dispatch()).map_err(OpError::read)?;
            }
            State::Refused(_) => {
                let guard = (self.runs >= WARM_UPS).then(|| Recording::begin(&self.device));
                let output = (self.closure)();
                drop(guard);
                self.output = Some(output?);
            }
        }
        self.runs += 1;
        Ok(self.output.as_ref().expect("of this run or the recording"))
    }

    /// Records a call of the closure, or says in the state why the device does not.
    fn record(&mut self) -> Result<(), E> {
        let device = self.device.as_dispatch();
        if let Err(error) = Dispatch::graph_start_capture(device) {
            self.state = State::Refused(reason(&error));
            return Ok(());
        }
        let guard = Recording::begin(&self.device);
        // A stream that is left recording would swallow all that follows.
        let output = catch_unwind(AssertUnwindSafe(&mut self.closure));
        // Before the guard falls: operations that wait in a queue are launched here.
        let graph = catch_unwind(AssertUnwindSafe(|| Dispatch::graph_stop_capture(device)));
        let failure = guard.failure();
        drop(guard);
        self.state = State::Refused("its recording failed".to_string());
        if let Some(failure) = failure {
            return Err(failure.into());
        }
        self.output = Some(output.unwrap_or_else(|panic| resume_unwind(panic))?);
        let graph = graph.unwrap_or_else(|panic| resume_unwind(panic));
        self.state = State::Recorded(graph.map_err(OpError::read)?);
        Ok(())
    }

    /// Returns whether runs are replays of a recording.
    pub fn is_recorded(&self) -> bool {
        matches!(self.state, State::Recorded(_))
    }

    /// Returns whether the next run is a replay, or records what is replayed.
    pub fn replays_next(&self) -> bool {
        match self.state {
            State::WarmingUp => self.runs >= WARM_UPS,
            State::Recorded(_) => true,
            State::Refused(_) => false,
        }
    }

    /// Why runs call the closure instead of replaying it. None while that is not known, before the fourth run.
    pub fn fallback_reason(&self) -> Option<&str> {
        match &self.state {
            State::Refused(reason) => Some(reason),
            _ => None,
        }
    }

    /// The output of the last run.
    pub fn output(&self) -> Option<&T> {
        self.output.as_ref()
    }
}

impl<T, F> Drop for CapturedGraph<T, F> {
    fn drop(&mut self) {
        // The device still waits for the recording that it was prepared for; this says that there is none to come.
        if matches!(self.state, State::WarmingUp) {
            let _ = Dispatch::graph_stop_capture(self.device.as_dispatch());
        }
    }
}

/// What an error comes from in the end, without the layers that it went through.
fn reason(error: &impl ToString) -> String {
    let text = error.to_string();
    let last = text.rsplit("Caused by:").next().unwrap_or(&text);
    last.trim().lines().next().unwrap_or_default().to_owned()
}
