//! Device memory, which is host memory. Every copy is complete when its call returns.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use super::{Answer, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, listed};
use crate::machine::Regions;

const ALIGNMENT: usize = 512;

/// Addresses of allocations, with their sizes in bytes.
static ALLOCATED: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// Returns the memory that kernels may access: all allocations and `others`.
pub fn regions(others: impl Iterator<Item = (u64, u64)>) -> Regions {
    let allocated = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner);
    let allocated = allocated
        .iter()
        .map(|(&start, &bytes)| (start, start + bytes as u64));
    Regions::new(allocated.chain(others).collect())
}

fn layout(bytes: usize) -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
}

/// # Safety
///
/// The result pointer is writable.
unsafe fn allocate(to: *mut u64, bytes: usize) -> Answer {
    let Some(layout) = layout(bytes) else {
        return OUT_OF_MEMORY;
    };
    // SAFETY: the layout is not empty.
    let memory = unsafe { std::alloc::alloc(layout) };
    if memory.is_null() {
        return OUT_OF_MEMORY;
    }
    // The contents of new memory are undefined: here all floats are NaN, or zeros if no kernel runs to write them.
    let byte = if listed::is_on() { 0 } else { 0xff };
    // SAFETY: `bytes` bytes were allocated.
    unsafe { memory.write_bytes(byte, bytes) };
    let mut allocated = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner);
    allocated.insert(memory as u64, bytes);
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(memory as u64) };
    SUCCESS
}

fn free(address: u64) -> Answer {
    let mut allocated = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner);
    match allocated.remove(&address).and_then(layout) {
        Some(layout) => {
            // SAFETY: `allocate` returned this memory with this layout.
            unsafe { std::alloc::dealloc(address as *mut u8, layout) };
            SUCCESS
        }
        None => INVALID_VALUE,
    }
}

/// # Safety
///
/// `bytes` bytes are readable at `from` and writable at `to`.
unsafe fn copy(to: u64, from: u64, bytes: usize) -> Answer {
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    SUCCESS
}

answering! {
    cuMemAlloc_v2(to: *mut u64, bytes: usize) = allocate(to, bytes);
    cuMemAllocAsync(to: *mut u64, bytes: usize, _stream: *mut c_void) = allocate(to, bytes);
    cuMemAllocHost_v2(to: *mut u64, bytes: usize) = allocate(to, bytes);
    cuMemHostAlloc(to: *mut u64, bytes: usize, _flags: u32) = allocate(to, bytes);
    cuMemFree_v2(address: u64) = free(address);
    cuMemFreeAsync(address: u64, _stream: *mut c_void) = free(address);
    cuMemFreeHost(address: u64) = free(address);
    // Host and device share one address space.
    cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) = copy(to, from, bytes);
    cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) = copy(to, from, bytes);
    cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) = copy(to, from, bytes);
    cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: *mut c_void) = copy(to, from, bytes);
    cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, _stream: *mut c_void) = copy(to, from, bytes);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: *mut c_void) = copy(to, from, bytes);
    cuMemsetD8Async(to: *mut u8, value: u8, bytes: usize, _stream: *mut c_void) = {
        to.write_bytes(value, bytes);
        SUCCESS
    };
}

/// `CUDA_MEMCPY2D`: offsets in bytes and lines within memory of the host, a device or an array.
#[repr(C)]
struct Place {
    x: usize,
    y: usize,
    kind: u32,
    host: *mut u8,
    device: u64,
    array: *mut c_void,
    pitch: usize,
}

#[repr(C)]
struct Rectangle {
    from: Place,
    to: Place,
    width: usize,
    height: usize,
}

impl Place {
    fn line(&self, line: usize) -> *mut u8 {
        // `CU_MEMORYTYPE_HOST` is 1.
        let start = if self.kind == 1 {
            self.host as u64
        } else {
            self.device
        };
        (start + ((self.y + line) * self.pitch + self.x) as u64) as *mut u8
    }
}

/// # Safety
///
/// The rectangle's lines can be read and written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const Rectangle, _stream: *mut c_void) -> Answer {
    // SAFETY: guaranteed by the caller.
    let copy = unsafe { &*copy };
    for line in 0..copy.height {
        // SAFETY: guaranteed by the caller.
        unsafe { std::ptr::copy(copy.from.line(line), copy.to.line(line), copy.width) };
    }
    SUCCESS
}
