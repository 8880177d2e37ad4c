//! Early end of a run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::exit;
use crate::progress::warn;

/// Programs that stop others (`timeout`, service managers, schedulers) may signal a process and its group, so that the signal arrives twice. Signals within
/// this time count once.
const SAME: Duration = Duration::from_secs(1);

/// Installs the handler. The first Ctrl-C, SIGTERM or SIGHUP sets the returned flag and calls `then`; a later one ends the process at once.
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
