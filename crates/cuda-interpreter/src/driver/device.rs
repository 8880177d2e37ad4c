//! One device: an H200, as its attributes say.

use std::ffi::{c_char, c_int, c_void};

use super::{Answer, SUCCESS};

const NAME: &[u8] = b"NVIDIA H200 (interpreted)\0";
const MEMORY: usize = 16 << 30;
/// The version of CUDA that the driver has.
const VERSION: c_int = 13000;

/// `CUdevice_attribute` and what the device has of it. Every other reads 1.
const ATTRIBUTES: [(c_int, c_int); 19] = [
    // Threads of a cube, and of each dimension.
    (1, 1024),
    (2, 1024),
    (3, 1024),
    (4, 64),
    // Cubes of each dimension.
    (5, i32::MAX),
    (6, 65535),
    (7, 65535),
    // Shared memory of a cube, and with leave.
    (8, 49152),
    (97, 232_448),
    // Threads of a warp, registers of a cube.
    (10, 32),
    (12, 65536),
    // Multiprocessors, and what each has.
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

macro_rules! succeeding {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $kind),*) -> Answer {
                SUCCESS
            }
        )*
    };
}

succeeding! {
    cuInit(_flags: u32);
    cuCtxSetCurrent(_context: *mut c_void);
    cuCtxSynchronize();
    cuCtxPushCurrent_v2(_context: *mut c_void);
    cuCtxPopCurrent_v2(_context: *mut *mut c_void);
    cuDevicePrimaryCtxRelease_v2(_device: c_int);
}

/// # Safety
///
/// `to` can be written.
unsafe fn answer<T>(to: *mut T, value: T) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { to.write(value) };
    SUCCESS
}

macro_rules! answering {
    ($($name:ident($to:ident: $kind:ty $(, $argument:ident: $other:ty)*) = $value:expr;)*) => {
        $(
            /// # Safety
            ///
            /// The place of the answer can be written.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($to: *mut $kind $(, $argument: $other)*) -> Answer {
                // SAFETY: as the caller promises.
                unsafe { answer($to, $value) }
            }
        )*
    };
}

answering! {
    cuDriverGetVersion(version: c_int) = VERSION;
    cuDeviceGetCount(count: c_int) = 1;
    cuDeviceGet(device: c_int, _ordinal: c_int) = 0;
    cuDeviceTotalMem_v2(bytes: usize, _device: c_int) = MEMORY;
    cuDevicePrimaryCtxRetain(context: *mut c_void, _device: c_int) = std::ptr::dangling_mut();
    cuCtxGetCurrent(context: *mut c_void) = std::ptr::dangling_mut();
    cuCtxGetDevice(device: c_int) = 0;
    cuDeviceGetAttribute(value: c_int, attribute: c_int, _device: c_int) =
        ATTRIBUTES.iter().find(|(known, _)| *known == attribute).map_or(1, |&(_, value)| value);
    cuDeviceGetUuid_v2(uuid: [u8; 16], _device: c_int) = *b"interpreted H200";
}

/// # Safety
///
/// The places can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { answer(free, MEMORY).max(answer(total, MEMORY)) }
}

/// # Safety
///
/// The places can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { answer(least, 0).max(answer(greatest, 0)) }
}

/// # Safety
///
/// `length` bytes can be written at `name`.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { text(name, length, NAME) }
}

/// # Safety
///
/// `length` bytes can be written at `id`.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, _device: c_int) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { text(id, length, b"0000:00:00.0\0") }
}

/// # Safety
///
/// Eight bytes and a mask can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetLuid(id: *mut [u8; 8], mask: *mut u32, _device: c_int) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { answer(id, [1; 8]).max(answer(mask, 1)) }
}

unsafe fn text(to: *mut c_char, length: c_int, from: &[u8]) -> Answer {
    let count = from.len().min(usize::try_from(length).unwrap_or(0));
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to, count) };
    SUCCESS
}

/// # Safety
///
/// The place of the answer can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: Answer, name: *mut *const c_char) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { answer(name, described(error)) }
}

/// # Safety
///
/// The place of the answer can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: Answer, text: *mut *const c_char) -> Answer {
    // SAFETY: as the caller promises.
    unsafe { answer(text, described(error)) }
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
