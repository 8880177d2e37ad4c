//! The code in the README and in the tutorial, as it is printed there. `build.rs` makes a test of each block.
#![cfg(feature = "flex")]

/// Where the pictures go that the examples draw.
fn in_a_folder_of_its_own() -> std::io::Result<()> {
    std::env::set_current_dir(env!("CARGO_TARGET_TMPDIR"))
}

include!(concat!(env!("OUT_DIR"), "/pages.rs"));
