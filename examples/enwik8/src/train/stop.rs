//! What ends a run early.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use crate::progress::warn;

/// Set by the first Ctrl-C; the second ends the process at once.
pub(super) fn on_ctrl_c() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        warn("stopping after this step; Ctrl-C again to stop at once");
    })
    .context("cannot listen for Ctrl-C")?;
    Ok(stop)
}
