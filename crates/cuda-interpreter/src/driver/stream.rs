//! Streams and events. Work is over when its call returns, so nothing is waited for.

use std::ffi::c_void;
use std::time::Instant;

use super::{Answer, NOT_SUPPORTED, SUCCESS};

/// When an event was recorded.
struct Event {
    at: Option<Instant>,
}

/// # Safety
///
/// The place of the answer can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _flags: u32) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { stream.write(Box::into_raw(Box::new(0_u64)).cast()) };
    SUCCESS
}

/// # Safety
///
/// The place of the answer can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut *mut c_void,
    flags: u32,
    _priority: i32,
) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { cuStreamCreate(stream, flags) }
}

/// # Safety
///
/// The stream was created here, and is not used any more.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> Answer {
    // SAFETY: as the caller promises.
    drop(unsafe { Box::from_raw(stream.cast::<u64>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(_stream: *mut c_void) -> Answer {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(_stream: *mut c_void) -> Answer {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(_stream: *mut c_void, _event: *mut c_void, _flags: u32) -> Answer {
    SUCCESS
}

/// Launches cannot be captured: they are over when they are asked for.
#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(_stream: *mut c_void, _mode: u32) -> Answer {
    NOT_SUPPORTED
}

/// # Safety
///
/// The place of the answer can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: u32) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { event.write(Box::into_raw(Box::new(Event { at: None })).cast()) };
    SUCCESS
}

/// # Safety
///
/// The event was created here.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventRecord(event: *mut c_void, _stream: *mut c_void) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { (*event.cast::<Event>()).at = Some(Instant::now()) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(_event: *mut c_void) -> Answer {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(_event: *mut c_void) -> Answer {
    SUCCESS
}

/// # Safety
///
/// The events were created here, and the place of the answer can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(
    ms: *mut f32,
    start: *mut c_void,
    end: *mut c_void,
) -> Answer {
    // SAFETY: as the caller promises.
    let [start, end] = [start, end].map(|event| unsafe { (*event.cast::<Event>()).at });
    let elapsed = match (start, end) {
        (Some(start), Some(end)) => end.saturating_duration_since(start).as_secs_f32() * 1e3,
        _ => return super::INVALID_VALUE,
    };
    // SAFETY: as the caller promises.
    unsafe { ms.write(elapsed) };
    SUCCESS
}

/// # Safety
///
/// The event was created here, and is not used any more.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> Answer {
    // SAFETY: as the caller promises.
    drop(unsafe { Box::from_raw(event.cast::<Event>()) });
    SUCCESS
}
