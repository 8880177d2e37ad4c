use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressStyle};

/// Returns a bar of `steps` steps, hidden without a terminal.
pub fn bar(steps: usize, what: &str) -> ProgressBar {
    if !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let template = format!("{{bar:40}} {{pos}}/{{len}} {what}, {{eta}} left");
    let style = ProgressStyle::with_template(&template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(steps as u64).with_style(style)
}
