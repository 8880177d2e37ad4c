//! Captured computations and their replay.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::backend::BackendGraph;

use super::recording::Recording;
use crate::base::prelude::*;

/// Number of runs before the recording. From the second run on, fusion takes its final path, and memory pools then have what a run needs.
const WARM_UPS: usize = 3;

/// A computation that runs many times with the same sizes, such as a training step. It is captured once and replayed as one launch on devices that
/// support it (CUDA, HIP); elsewhere it runs again. Either way [`run`](Self::run) computes exactly once.
///
/// The first three runs call the closure. The fourth calls it to capture it, which computes nothing, and replays the result. Later runs do not call
/// the closure, so **host code runs four times only**. Read what changes between runs from [`StaticInput`](super::StaticInput)s that are written before each
/// run. Update persistent state in its own buffer. Scalars are frozen. From the fourth run on, functions of this crate return an error instead of
/// copying from the host inside the closure. They do so on every device, so a mistake also shows on a CPU.
///
/// Read results outside of the closure: a read inside makes the capture fail. The device keeps the buffers of a captured graph as long as the graph lives.
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
    /// Replays and writes must happen on the thread that recorded.
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
    /// Prepares a computation without running it. Nothing else may be recorded on the device until the fourth run.
    ///
    /// # Errors
    /// [`OpError`] if the device is not served.
    pub fn new(device: &Device, closure: F) -> Result<Self, OpError> {
        served(device)?;
        // Autodiff itself records nothing: its tensors may be used on the inner device.
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

    /// Runs the computation once. Replays always return the same tensors, with new values.
    ///
    /// # Errors
    /// Errors of the closure, and [`OpError::Read`] if a replay fails. If a run of the closure fails, its changes remain; a failed fourth run has computed
    /// nothing.
    pub fn run(&mut self) -> Result<&T, E> {
        if matches!(self.state, State::WarmingUp) && self.runs >= WARM_UPS {
            self.record()?;
        }
        match &self.state {
            State::Recorded(graph) => {
                // SAFETY: liveness: CubeCL pins the pages that the recording touched for as long as `graph` lives, and `self` owns the graph, the closure with
                // the tensors that it holds, and the recorded output. Same stream: `self` cannot leave the thread that recorded it, and neither can
                // `StaticInput`, through which inputs are written. No concurrent use: if another thread holds a clone of a tensor, it may see torn values, as
                // with any in-place update, but its memory stays valid by the first point.
                unsafe { Dispatch::graph_replay(self.device.as_dispatch(), graph) }
                    .map_err(OpError::read)?;
            }
            State::WarmingUp => {
                self.output = Some((self.closure)()?);
                // Fusion drops results that nothing holds any more. Without this sync the recording would be the first run to allocate for them.
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

    /// Records a call of the closure. If the device refuses, stores the reason in the state.
    fn record(&mut self) -> Result<(), E> {
        let device = self.device.as_dispatch();
        if let Err(error) = Dispatch::graph_start_capture(device) {
            self.state = State::Refused(reason(&error));
            return Ok(());
        }
        let guard = Recording::begin(&self.device);
        // A stream that stayed in recording mode would swallow all later work.
        let output = catch_unwind(AssertUnwindSafe(&mut self.closure));
        // Before the guard is dropped: queued operations are launched here.
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

    /// Returns whether runs replay a recording.
    pub fn is_recorded(&self) -> bool {
        matches!(self.state, State::Recorded(_))
    }

    /// Returns whether the next run replays a recording, or records and then replays it.
    pub fn replays_next(&self) -> bool {
        match self.state {
            State::WarmingUp => self.runs >= WARM_UPS,
            State::Recorded(_) => true,
            State::Refused(_) => false,
        }
    }

    /// Returns why runs call the closure instead of replaying it. `None` if they replay, or before the fourth run, when this is not known.
    pub fn fallback_reason(&self) -> Option<&str> {
        match &self.state {
            State::Refused(reason) => Some(reason),
            _ => None,
        }
    }

    /// Returns the output of the last run.
    pub fn output(&self) -> Option<&T> {
        self.output.as_ref()
    }
}

impl<T, F> Drop for CapturedGraph<T, F> {
    fn drop(&mut self) {
        // The device still expects the recording for which it was prepared; this cancels it.
        if matches!(self.state, State::WarmingUp) {
            let _ = Dispatch::graph_stop_capture(self.device.as_dispatch());
        }
    }
}

/// Returns the innermost cause of an error.
fn reason(error: &impl ToString) -> String {
    let text = error.to_string();
    let last = text.rsplit("Caused by:").next().unwrap_or(&text);
    last.trim().lines().next().unwrap_or_default().to_owned()
}
