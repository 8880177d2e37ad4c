//! Errors of loading modules and running kernels.

/// Text that cannot be parsed, with its line.
#[derive(Debug, thiserror::Error)]
#[error("PTX, line {line}: {what}")]
pub struct Unread {
    pub line: u32,
    pub what: String,
}

/// An invalid operation of a kernel.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("{bytes} bytes at {address:#x} of {space} memory lie outside of what the kernel has")]
    OutOfBounds {
        space: &'static str,
        address: u64,
        bytes: usize,
    },
    #[error("{bytes} bytes at {address:#x} of {space} memory are not aligned")]
    Misaligned {
        space: &'static str,
        address: u64,
        bytes: usize,
    },
    #[error("a barrier: {0}")]
    Barrier(String),
    #[error("a tensor map: {0}")]
    TensorMap(String),
    #[error("every thread waits: {0}")]
    Deadlock(String),
    #[error("nothing came of {0} instructions: threads wait in a loop for what never comes")]
    Livelock(u64),
    #[error("a race: {0}")]
    Race(String),
    #[error("trap")]
    Trap,
    #[error("the launch: {0}")]
    Launch(String),
}

/// A fault and its location.
#[derive(Debug, thiserror::Error)]
#[error("kernel {kernel}, cube {cube:?}, warp {warp}, PTX line {line}: {fault}")]
pub struct Stopped {
    pub kernel: String,
    pub cube: [u32; 3],
    pub warp: usize,
    pub line: u32,
    pub fault: Fault,
}
