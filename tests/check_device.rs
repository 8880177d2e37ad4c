//! Runs every check of the table on one device, where `cargo test` is not at hand: a machine with a GPU and no
//! Rust. Outputs are filled with NaN before every launch. Exits with 1 if a check fails.

use std::panic::catch_unwind;
use std::process::ExitCode;
use std::time::Instant;

use burn_blocksparse_tests::devices::devices;
use burn_blocksparse_tests::{CHECKS, NAMED, gate};

const USAGE: &str = "usage: BURN_SPARSE_DEVICE=cuda check-device [PART OF A NAME]...";

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    if wanted.iter().any(|arg| arg.starts_with('-')) {
        eprintln!("{USAGE}\n\nchecks:");
        CHECKS.iter().for_each(|(name, _)| eprintln!("  {name}"));
        eprintln!("and, only if named:");
        NAMED.iter().for_each(|(name, _)| eprintln!("  {name}"));
        return ExitCode::from(2);
    }
    // Safe: nothing else runs yet.
    unsafe { std::env::set_var("BLOCKSPARSE_POISON", "1") };
    let devices = devices();
    println!("{devices:?}");
    let mut failed = 0;
    let mut ran = 0;
    let named = |name: &str| wanted.iter().any(|part| name.contains(part.as_str()));
    let checks = CHECKS
        .iter()
        .filter(|(name, _)| wanted.is_empty() || named(name));
    for (name, check) in checks.chain(NAMED.iter().filter(|(name, _)| named(name))) {
        if gate::is_on() {
            devices.iter().for_each(|device| device.seed(1));
        }
        let start = Instant::now();
        let result = catch_unwind(|| check(&devices));
        let verdict = if result.is_ok() { "ok    " } else { "FAILED" };
        let seconds = start.elapsed().as_secs_f64();
        match gate::is_on() {
            true => println!("{verdict} {name} ({seconds:.1} s) {}", gate::take()),
            false => println!("{verdict} {name} ({seconds:.1} s)"),
        }
        failed += usize::from(result.is_err());
        ran += 1;
    }
    println!("{ran} checks, {failed} failed");
    match (ran, failed) {
        (0, _) => {
            eprintln!("no check is named so\n{USAGE}");
            ExitCode::from(2)
        }
        (_, 0) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
