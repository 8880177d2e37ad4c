//! Kernel compilation while a model with content-based selection trains: if only contents change, nothing is compiled again. CubeCL's log counts
//! kernels, in a separate process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use burn::tensor::{Tensor, TensorData};
use burn_blocksparse_tests::devices::devices;
use burn_fused_ops::optim::FusedAdamWConfig;
use burn_sparse_transformer::{Factorization, Pattern, Recompute, SparseTransformerConfig};

/// Path of the log, for the counting process.
const LOG: &str = "BURN_SPARSE_COMPILED";
/// Selections of every method, with the patterns that restrict them.
const SELECTIONS: [(&str, &str); 8] = [
    ("topk:8,p=0.6", "causal"),
    ("topk:8,2", "local:40"),
    ("xattention:8,4,0.7", "causal"),
    ("sparge:8,0.6,0.1", "causal"),
    ("flexprefill:8,0.7,0.1,16", "causal"),
    ("minference:8,4,5,9,sinks=2,window=3", "causal"),
    ("moba:8,3", "causal"),
    ("quest:8,24", "causal"),
];
const CONTEXT: usize = 64;
const VOCAB: usize = 13;
/// Steps in which Burn's fusion may still search for operations to fuse, and two more.
const STEPS: usize = 5;
const SETTLED: usize = 3;

/// Returns the kernels that were compiled so far, once the log is complete.
fn compiled(log: &Path) -> Vec<String> {
    let lines = || -> Vec<String> {
        let text = fs::read_to_string(log).unwrap_or_default();
        let kernels = text
            .lines()
            .filter(|line| line.starts_with("[Compiling kernel]"));
        kernels.map(str::to_owned).collect()
    };
    let mut before = lines();
    loop {
        std::thread::sleep(Duration::from_millis(300));
        let now = lines();
        if now.len() == before.len() {
            return now;
        }
        before = now;
    }
}

/// Training steps with different data, whose kernels are counted.
#[test]
#[ignore = "later_steps_compile_nothing runs it in a process of its own, whose log it reads"]
fn steps_in_a_process_of_their_own() {
    let log = PathBuf::from(std::env::var(LOG).expect("the log's path"));
    let device = devices().remove(0).autodiff();
    for (text, pattern) in SELECTIONS {
        let pattern: Pattern = pattern.parse().unwrap();
        let model = SparseTransformerConfig::new(16, 2, Factorization::from(pattern))
            .with_vocab_size(VOCAB)
            .with_context(CONTEXT)
            .with_n_layers(1)
            .with_block_size(8)
            .with_selections(Some(vec![text.parse().unwrap()]));
        let mut model = model.try_init(&device).unwrap();
        let mut optimizer = FusedAdamWConfig::new().init();
        let mut before = compiled(&log).len();
        for step in 0..STEPS {
            let [tokens, targets] = [0, 1].map(|offset| {
                let byte = |at: usize| ((at + offset) * (step + 3) / 2 % VOCAB) as i32;
                let bytes: Vec<i32> = (0..2 * CONTEXT).map(byte).collect();
                Tensor::from_data(TensorData::new(bytes, [2, CONTEXT]), &device)
            });
            let seed = step as u64;
            let (loss, gradients) = model
                .loss_and_gradients(tokens, targets, seed, Recompute::None)
                .unwrap();
            let (trained, norm) = optimizer.step(1e-2, model, gradients).unwrap();
            model = trained;
            let numbers = [loss.into_scalar::<f32>(), norm.into_scalar::<f32>()];
            let is_right = numbers.iter().all(|number| number.is_finite());
            assert!(is_right, "{numbers:?}");
            let all = compiled(&log);
            let new = &all[before..];
            before = all.len();
            let ours: Vec<_> = new
                .iter()
                .filter(|name| name.contains("blocksparse"))
                .collect();
            eprintln!(
                "{text}, step {step}: {} compiled, {} of them ours",
                new.len(),
                ours.len()
            );
            match step {
                // Some methods share all of their kernels with earlier ones.
                0 => assert!(!all.is_empty(), "{text}: nothing is counted"),
                _ => assert!(ours.is_empty(), "{text}, step {step}: {ours:?}"),
            }
            let is_right = step < SETTLED || new.is_empty();
            assert!(is_right, "{text}, step {step}: {new:?}");
        }
    }
}

#[test]
fn later_steps_compile_nothing() {
    let device = format!("{:?}", devices()[0]);
    // Other devices compile nothing.
    if !device.contains("Cube") {
        return;
    }
    let folder = std::env::temp_dir().join(format!("compiled-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let log = folder.join("compiled.log");
    let config = format!(
        "[compilation]\nlogger = {{ level = \"basic\", file = {:?} }}\n",
        log.display().to_string()
    );
    fs::write(folder.join("cubecl.toml"), config).unwrap();
    let name = "compiled::steps_in_a_process_of_their_own";
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", name, "--nocapture"])
        .current_dir(&folder)
        .env(LOG, &log)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}\n{said}");
    assert!(told.contains("1 passed"), "{told}\n{said}");
    fs::remove_dir_all(&folder).unwrap();
}
