//! What ends a run early.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::exit;
use crate::progress::warn;

/// Programs that stop others (`timeout`, service managers, schedulers) may signal a process and its group, which then hears of it twice.
const SAME: Duration = Duration::from_secs(1);

/// Set by the first Ctrl-C, SIGTERM or SIGHUP, which calls `then`; a later one ends the process at once.
pub(super) fn on_ctrl_c(then: impl Fn() + Send + 'static) -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    let first = OnceLock::new();
    ctrlc::set_handler(move || {
        let first = first.get_or_init(Instant::now);
        if !seen.swap(true, Ordering::Relaxed) {
            warn("stopping after this step; Ctrl-C again to stop at once");
            then();
        } else if first.elapsed() > SAME {
            exit::at_once(130);
        }
    })
    .context("cannot listen for Ctrl-C")?;
    Ok(stop)
}
