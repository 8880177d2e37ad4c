//! Checks whether a pass gives the same bits every time.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

const UNITS: u32 = 256;
const CUBES: u32 = 264;

/// Returns a hash of a buffer of `words` 32-bit words, computed on the device.
pub fn hash(client: &Client, buffer: &Handle, words: usize) -> u64 {
    let hashes = (CUBES * UNITS) as usize;
    let output = client.empty(hashes * 4);
    // SAFETY: the kernel reads below `words`, the buffer's length, and each unit writes its own element.
    unsafe {
        hash_words::launch_unchecked(
            client,
            CubeCount::Static(CUBES, 1, 1),
            CubeDim::new_1d(UNITS),
            BufferArg::from_raw_parts(buffer.clone(), words),
            BufferArg::from_raw_parts(output.clone(), hashes),
            words,
        );
    }
    let bytes = client.read_one_unchecked(output);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Computes FNV-1a of a unit's words.
#[cube(launch_unchecked)]
fn hash_words(words: &[u32], hashes: &mut [u32], length: usize) {
    let mut hash = 0x811c_9dc5u32;
    let mut at = ABSOLUTE_POS;
    while at < length {
        hash = (hash ^ words[at]) * 16_777_619u32;
        at += comptime!((CUBES * UNITS) as usize);
    }
    hashes[ABSOLUTE_POS] = hash;
}
