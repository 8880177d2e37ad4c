//! Progress of a run: a bar on a terminal, plain lines elsewhere.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::data::thousands;
use crate::device;
use crate::log::Trained;

/// Prints a line. A reader that has closed the output (`| head`) must not end a training run.
pub fn say(line: impl Display) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// Prints a warning about a problem that was handled.
pub fn warn(line: impl Display) {
    let _ = writeln!(io::stderr(), "warning: {line}");
}

/// Returns how the user calls this program: `cargo run` with the same backends, if it runs under cargo.
pub fn program() -> String {
    if std::env::var_os("CARGO_MANIFEST_DIR").is_none() {
        return "enwik8".to_owned();
    }
    let features: Vec<_> = device::compiled_names()
        .into_iter()
        .filter(|&name| name != "flex")
        .collect();
    match features.is_empty() {
        true => "cargo run -p enwik8 --".to_owned(),
        false => format!("cargo run -p enwik8 --features {} --", features.join(",")),
    }
}

pub struct Progress {
    steps: usize,
    log_every: usize,
    unit: &'static str,
    bar: Option<ProgressBar>,
    /// Steps since the last printed line.
    recent: Vec<Trained>,
}

impl Progress {
    /// Creates the progress of a run that has taken `step` of `steps` steps and prints every `log_every`, with losses in `unit`.
    pub fn new(step: usize, steps: usize, log_every: usize, unit: &'static str) -> Self {
        let terminal = io::stdout().is_terminal() && io::stderr().is_terminal();
        Progress {
            steps,
            log_every,
            unit,
            bar: terminal.then(|| bar(step, steps, "{pos}/{len} {bar:24} {msg}  {eta} left")),
            recent: Vec::new(),
        }
    }

    /// Reports a step.
    pub fn step(&mut self, done: Trained) {
        self.recent.push(done);
        let step = done.step;
        if let Some(bar) = &self.bar {
            bar.set_position(step as u64);
            bar.set_message(summary(&self.recent, self.unit));
        }
        if step.is_multiple_of(self.log_every) || step == self.steps {
            if self.bar.is_none() {
                let remaining = mean(&self.recent, |of| of.ms) * (self.steps - step) as f64;
                let left = clock(Duration::from_secs_f64(remaining / 1_000.0));
                say(format!(
                    "step {step}/{}  {}  {left} left",
                    self.steps,
                    summary(&self.recent, self.unit)
                ));
            }
            self.recent.clear();
        }
    }

    /// Prints a permanent line, above the bar if there is one.
    pub fn note(&self, line: impl Display) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// Returns a bar for some work, invisible without a terminal.
pub fn plain_bar(what: &str) -> ProgressBar {
    match io::stderr().is_terminal() {
        true => bar(
            0,
            0,
            &format!("{what} {{pos}}/{{len}} {{bar:24}} {{eta}} left"),
        ),
        false => ProgressBar::hidden(),
    }
}

fn bar(position: usize, length: usize, template: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(length as u64).with_style(style);
    bar.set_position(position as u64);
    // The time of earlier processes does not predict this one's.
    bar.reset_eta();
    bar
}

fn mean(steps: &[Trained], of: fn(&Trained) -> f64) -> f64 {
    steps.iter().map(of).sum::<f64>() / steps.len() as f64
}

/// Formats means over one or more steps, and the last learning rate.
fn summary(steps: &[Trained], unit: &str) -> String {
    let mean = |of| mean(steps, of);
    let indexers: Vec<f64> = steps.iter().filter_map(|of| of.indexer_loss).collect();
    let indexers = match indexers.len() {
        0 => String::new(),
        count => format!(
            "  indexer {:.4}",
            indexers.iter().sum::<f64>() / count as f64
        ),
    };
    let tokens = mean(|of| of.tokens_per_s * of.ms / 1_000.0);
    format!(
        "loss {:.3}  {:.3} {unit}  lr {:.1e}  grad {:.2}{indexers}  {} tokens/s  {:.0} ms",
        mean(|of| of.loss),
        mean(|of| of.bits_per_byte),
        steps[steps.len() - 1].learning_rate,
        mean(|of| of.grad_norm),
        thousands((tokens / (mean(|of| of.ms) / 1_000.0).max(1e-9)) as usize),
        mean(|of| of.ms),
    )
}

/// Formats `75 s` as `1m 15s`.
pub fn clock(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h {:02}m", seconds / 3_600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_over_the_steps_since_the_last_line() {
        let steps = [(1.0, 100.0), (3.0, 300.0)].map(|(loss, ms)| Trained {
            step: 1,
            loss,
            bits_per_byte: loss * 2.0,
            learning_rate: 1e-3,
            grad_norm: loss,
            indexer_loss: (loss < 2.0).then_some(loss),
            tokens_per_s: 1_000.0 / ms * 1_000.0,
            ms,
        });
        let expected = "loss 2.000  4.000 bits/byte  lr 1.0e-3  grad 2.00  indexer 1.0000  5,000 tokens/s  200 ms";
        assert_eq!(summary(&steps, "bits/byte"), expected);
    }

    #[test]
    fn durations_are_short() {
        let clocks = [5, 75, 3_700].map(|seconds| clock(Duration::from_secs(seconds)));
        assert_eq!(clocks, ["5s", "1m 15s", "1h 01m"]);
    }
}
