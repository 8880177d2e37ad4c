//! Streams and events. Work is complete when its call returns, so waiting does nothing.

use std::ffi::c_void;
use std::time::Instant;

use super::{Answer, INVALID_VALUE, NOT_SUPPORTED, SUCCESS, answer};

/// Time of recording.
type Event = Option<Instant>;

fn boxed<T>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(value)).cast()
}

/// # Safety
///
/// `held` comes from [`boxed`] and is no longer in use.
unsafe fn dropped<T>(held: *mut c_void) -> Answer {
    // SAFETY: guaranteed by the caller.
    drop(unsafe { Box::from_raw(held.cast::<T>()) });
    SUCCESS
}

answering! {
    cuStreamCreate(stream: *mut *mut c_void, _flags: u32) = answer(stream, boxed(0_u64));
    cuStreamCreateWithPriority(stream: *mut *mut c_void, _flags: u32, _priority: i32) =
        answer(stream, boxed(0_u64));
    cuStreamDestroy_v2(stream: *mut c_void) = dropped::<u64>(stream);
    cuStreamSynchronize(_stream: *mut c_void) = SUCCESS;
    cuStreamQuery(_stream: *mut c_void) = SUCCESS;
    cuStreamWaitEvent(_stream: *mut c_void, _event: *mut c_void, _flags: u32) = SUCCESS;
    // Launches cannot be captured: they run immediately.
    cuStreamBeginCapture_v2(_stream: *mut c_void, _mode: u32) = NOT_SUPPORTED;
    cuEventCreate(event: *mut *mut c_void, _flags: u32) = answer(event, boxed(Event::None));
    cuEventRecord(event: *mut c_void, _stream: *mut c_void) =
        answer(event.cast(), Some(Instant::now()));
    cuEventSynchronize(_event: *mut c_void) = SUCCESS;
    cuEventQuery(_event: *mut c_void) = SUCCESS;
    cuEventDestroy_v2(event: *mut c_void) = dropped::<Event>(event);
    cuEventElapsedTime_v2(ms: *mut f32, start: *mut c_void, end: *mut c_void) =
        match [start, end].map(|event| *event.cast::<Event>()) {
            [Some(start), Some(end)] => {
                answer(ms, end.saturating_duration_since(start).as_secs_f32() * 1e3)
            }
            _ => INVALID_VALUE,
        };
}
