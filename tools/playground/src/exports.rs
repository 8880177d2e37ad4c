//! What WebAssembly exports: one buffer, which the page fills with a request and reads the answer from.

use std::cell::RefCell;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Makes the buffer `length` bytes long, and says where it begins.
#[unsafe(no_mangle)]
pub extern "C" fn playground_buffer(length: usize) -> *mut u8 {
    BUFFER.with_borrow_mut(|buffer| {
        buffer.resize(length, 0);
        buffer.as_mut_ptr()
    })
}

/// Replaces the request in the buffer by its answer, and says how long that is.
#[unsafe(no_mangle)]
pub extern "C" fn playground_answer() -> usize {
    BUFFER.with_borrow_mut(|buffer| {
        *buffer = crate::answer(&String::from_utf8_lossy(buffer)).into_bytes();
        buffer.len()
    })
}
