//! The device: an H200, according to its attributes.

use std::ffi::{c_char, c_int, c_void};

use super::{Answer, SUCCESS, answer};

const NAME: &[u8] = b"NVIDIA H200 (interpreted)\0";
const MEMORY: usize = 16 << 30;
/// CUDA version that the driver reports.
const VERSION: c_int = 13000;

/// Pairs of `CUdevice_attribute` and its value. All other attributes read 1.
const ATTRIBUTES: [(c_int, c_int); 19] = [
    // Maximum threads of a cube, and of each dimension.
    (1, 1024),
    (2, 1024),
    (3, 1024),
    (4, 64),
    // Maximum cubes of each dimension.
    (5, i32::MAX),
    (6, 65535),
    (7, 65535),
    // Shared memory of a cube: the default limit and the opt-in limit.
    (8, 49152),
    (97, 232_448),
    // Threads of a warp, registers of a cube.
    (10, 32),
    (12, 65536),
    // Number of multiprocessors, and the resources of each.
    (16, 132),
    (39, 2048),
    (81, 233_472),
    (82, 65536),
    (106, 32),
    // Bytes of the L2 cache.
    (38, 50 << 20),
    // Compute capability 9.0.
    (75, 9),
    (76, 0),
];

answering! {
    cuInit(_flags: u32) = SUCCESS;
    cuCtxSetCurrent(_context: *mut c_void) = SUCCESS;
    cuCtxSynchronize() = SUCCESS;
    cuCtxPushCurrent_v2(_context: *mut c_void) = SUCCESS;
    cuCtxPopCurrent_v2(_context: *mut *mut c_void) = SUCCESS;
    cuDevicePrimaryCtxRelease_v2(_device: c_int) = SUCCESS;
    cuDriverGetVersion(version: *mut c_int) = answer(version, VERSION);
    cuDeviceGetCount(count: *mut c_int) = answer(count, 1);
    cuDeviceGet(device: *mut c_int, _ordinal: c_int) = answer(device, 0);
    cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) = answer(bytes, MEMORY);
    cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _device: c_int) =
        answer(context, std::ptr::dangling_mut());
    cuCtxGetCurrent(context: *mut *mut c_void) = answer(context, std::ptr::dangling_mut());
    cuCtxGetDevice(device: *mut c_int) = answer(device, 0);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) = {
        let known = ATTRIBUTES.iter().find(|(known, _)| *known == attribute);
        answer(value, known.map_or(1, |&(_, value)| value))
    };
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: c_int) = answer(uuid, *b"interpreted H200");
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) =
        answer(free, MEMORY).max(answer(total, MEMORY));
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) =
        answer(least, 0).max(answer(greatest, 0));
    cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) = text(name, length, NAME);
    cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, _device: c_int) =
        text(id, length, b"0000:00:00.0\0");
    cuDeviceGetLuid(id: *mut [u8; 8], mask: *mut u32, _device: c_int) =
        answer(id, [1; 8]).max(answer(mask, 1));
    cuGetErrorName(error: Answer, name: *mut *const c_char) = answer(name, described(error));
    cuGetErrorString(error: Answer, text: *mut *const c_char) = answer(text, described(error));
}

/// # Safety
///
/// `length` bytes can be written there.
unsafe fn text(to: *mut c_char, length: c_int, from: &[u8]) -> Answer {
    let count = from.len().min(usize::try_from(length).unwrap_or(0));
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to, count) };
    SUCCESS
}

fn described(error: Answer) -> *const c_char {
    let text = match error {
        super::SUCCESS => c"no error",
        super::INVALID_VALUE => c"invalid argument",
        super::OUT_OF_MEMORY => c"out of memory",
        super::INVALID_PTX => c"the interpreter does not know this PTX",
        super::NOT_FOUND => c"named symbol not found",
        super::LAUNCH_FAILED => c"a kernel was stopped",
        super::NOT_SUPPORTED => c"the interpreter does not do this",
        _ => c"unknown error",
    };
    text.as_ptr()
}
