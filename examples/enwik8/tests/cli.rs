//! The program as its users meet it: a process with arguments, files, signals and exit codes.

use std::f64::consts::LN_2;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use burn::config::Config;
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, Device, Int, Tensor, TensorData};
use burn_blocksparse::Pattern;
use burn_sparse_transformer::{Factorization, SparseTransformer, SparseTransformerConfig};
use serde_json::Value;
use tempfile::TempDir;

/// A model that trains hundreds of steps a second.
const NANO: &[&str] = &[
    "--layers",
    "1",
    "--heads",
    "2",
    "--d-model",
    "16",
    "--context",
    "32",
    "--block",
    "8",
    "--pattern",
    "fixed:8,2",
    "--batch",
    "2",
    "--warmup",
    "5",
    "--eval-windows",
    "2",
    "--dropout",
    "0.1",
];

fn enwik8() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_enwik8"));
    command.stdin(Stdio::null()).env("RUST_BACKTRACE", "1");
    command
}

fn run(arguments: &[&str]) -> Output {
    enwik8().args(arguments).output().unwrap()
}

/// Runs a command that must succeed; its standard output.
fn succeed(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that must fail with `code`; its one message.
fn fail(arguments: &[&str], code: i32) -> String {
    let output = run(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    assert_eq!(message.matches("error: ").count(), 1, "{message}");
    assert!(
        !message.contains("panicked") && !message.contains("backtrace"),
        "{message}"
    );
    message
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn file(&self, name: &str, bytes: &[u8]) -> String {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    /// A few thousand bytes with some structure.
    fn data(&self) -> String {
        let bytes: Vec<u8> = (0..4_000u32)
            .map(|i| (i * i / 7 % 61 + i % 5) as u8 + 32)
            .collect();
        self.file("data", &bytes)
    }

    /// Arguments of a nano run in folder `run`.
    fn nano(&self, run: &str, more: &[&str]) -> Vec<String> {
        let mut arguments = vec!["train".to_owned(), "--run".to_owned(), self.path(run)];
        arguments.extend(["--data".to_owned(), self.data()]);
        arguments.extend(NANO.iter().chain(more).map(|&argument| argument.to_owned()));
        arguments
    }

    fn train(&self, run: &str, more: &[&str]) -> String {
        let arguments = self.nano(run, more);
        succeed(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn resume(&self, run: &str, more: &[&str]) -> String {
        let path = self.path(run);
        succeed(&[&["train", "--resume", "--run", &path], more].concat())
    }

    fn log(&self, run: &str) -> Vec<Value> {
        let log = fs::read_to_string(Path::new(&self.path(run)).join("log.jsonl")).unwrap();
        log.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// Kind, step and loss of each log line.
    fn losses(&self, run: &str) -> Vec<(String, u64, f64)> {
        let row = |row: &Value| {
            let kind = row["kind"].as_str().unwrap().to_owned();
            (
                kind,
                row["step"].as_u64().unwrap(),
                row["loss"].as_f64().unwrap(),
            )
        };
        self.log(run).iter().map(row).collect()
    }

    fn checkpoint(&self, run: &str, step: usize) -> PathBuf {
        Path::new(&self.path(run)).join(format!("step-{step:08}.ckpt"))
    }
}

/// The model's and the optimizer's bytes in a checkpoint: after the preamble and the header, as long as the second
/// and the third length say.
fn state_of(checkpoint: &Path) -> [Vec<u8>; 2] {
    let bytes = fs::read(checkpoint).unwrap();
    let length = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let (_, rest) = bytes.split_at(36 + length(12));
    let (model, optimizer) = rest.split_at(length(20));
    assert_eq!(optimizer.len(), length(28));
    [model.to_vec(), optimizer.to_vec()]
}

fn model_of(checkpoint: &Path) -> Vec<u8> {
    let [model, _] = state_of(checkpoint);
    model
}

/// Without printing either model.
fn assert_same_model(a: &Path, b: &Path) {
    assert!(
        model_of(a) == model_of(b),
        "{} and {} hold different models",
        a.display(),
        b.display()
    );
}

fn wait_for(path: &Path, child: &mut Child) {
    let began = Instant::now();
    while !path.exists() {
        assert!(
            child.try_wait().unwrap().is_none(),
            "training ended too early"
        );
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{} never came",
            path.display()
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn help_shows_what_to_type() {
    let help = succeed(&["--help"]);
    for word in [
        "train",
        "eval",
        "sample",
        "bench",
        "draw",
        "export",
        "cargo run -p enwik8 -- train",
    ] {
        assert!(help.contains(word), "{word}");
    }
    for command in ["train", "eval", "sample", "bench", "draw", "export"] {
        assert!(
            succeed(&[command, "--help"]).contains("Examples:"),
            "{command}"
        );
    }
    for command in ["train", "bench", "draw"] {
        let help = succeed(&["help", command]);
        for form in Pattern::NOTATION {
            assert!(help.contains(form), "{command}: {form}");
        }
    }
}

#[test]
fn callbacks_made_causal_are_trained() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "2", "--pattern", "tree:2&causal"]);
    assert!(folder.checkpoint("run", 2).exists());
}

#[test]
fn bad_data_is_named() {
    let folder = Folder::new();
    let run = folder.path("run");
    let missing = folder.path("missing.txt");
    let empty = folder.file("empty.txt", b"");
    let short = folder.file("short.txt", &[b'x'; 600]);
    for (file, reason) in [
        (&missing, "cannot read"),
        (&empty, "is empty"),
        (&short, "too short"),
    ] {
        let message = fail(&["train", "--run", &run, "--data", file], 1);
        assert!(
            message.contains(file.as_str()) && message.contains(reason),
            "{message}"
        );
        assert!(
            !Path::new(&run).exists(),
            "nothing is written before the input is known to be good"
        );
    }
}

#[test]
fn bad_flags_list_the_choices() {
    for (arguments, words) in [
        (
            vec!["train", "--preset", "huge"],
            vec!["tiny", "small", "paper"],
        ),
        (
            vec!["train", "--pattern", "spiral:3"],
            vec!["got 'spiral'", "strided:STRIDE"],
        ),
        (
            vec!["draw", "--pattern", "fixed:a,b"],
            vec!["whole numbers, got 'a'", "fixed:STRIDE"],
        ),
        (vec!["train", "--steps", "0"], vec!["at least 1"]),
        (vec!["train", "--dropout", "1.5"], vec!["from 0"]),
    ] {
        let message = fail(&arguments, 2);
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
}

#[test]
fn impossible_models_are_explained() {
    let folder = Folder::new();
    let run = folder.path("run");
    let width = "--position-width must be at most --context = 64, got 128";
    let heads = "--heads must be a multiple of the 3 patterns";
    for (flags, words) in [
        ("--d-model 130", "multiple of --heads"),
        ("--block 12", "--block must be 8, 16, 32, 64 or 128, got 12"),
        (
            "--pattern dense",
            "'dense': it lets a position see later ones",
        ),
        ("--pattern tree:2", "not known to be causal"),
        ("--pattern tree:2", "'tree:2&causal'"),
        ("--pattern tree:2+local:8", "'(tree:2+local:8)&causal'"),
        ("--pattern fixed:32,5", "'fixed:32,5': fixed(32, 5): stride"),
        ("--pattern fixed:32,8,3", "heads must be a multiple of"),
        ("--context 64 --pattern fixed:128,32", width),
        ("--context 64 --position-width 128", width),
        (
            "--pattern causal --pattern local:8 --pattern strided:8 --factorization multi-head",
            heads,
        ),
        ("--device tpu", "choices"),
    ] {
        let flags: Vec<&str> = flags.split(' ').collect();
        let message = fail(&[&["train", "--run", &run], &flags[..]].concat(), 1);
        assert!(message.contains(words), "{message}");
        assert!(!Path::new(&run).exists());
    }
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let folder = Folder::new();
    let flags = [
        "--steps",
        "20",
        "--checkpoint-every",
        "10",
        "--eval-every",
        "5",
    ];
    folder.train("whole", &flags);
    folder.train("parts", &flags);
    // What a run leaves that was stopped after step 10, and killed while it was writing something.
    fs::remove_file(folder.checkpoint("parts", 20)).unwrap();
    fs::write(
        folder
            .checkpoint("parts", 20)
            .with_extension("ckpt.partial"),
        "half",
    )
    .unwrap();
    let text = folder.resume("parts", &[]);
    assert!(text.contains("step-00000010.ckpt"), "{text}");
    assert_same_model(
        &folder.checkpoint("parts", 20),
        &folder.checkpoint("whole", 20),
    );
    assert!(
        !folder
            .checkpoint("parts", 20)
            .with_extension("ckpt.partial")
            .exists()
    );

    assert_eq!(
        folder.losses("parts"),
        folder.losses("whole"),
        "the log has each step once, with the same loss"
    );

    let again = folder.resume("parts", &[]);
    assert!(again.contains("nothing to do"), "{again}");
    let longer = folder.resume("parts", &["--steps", "25"]);
    assert!(
        longer.contains("step-00000020.ckpt") && folder.checkpoint("parts", 25).exists(),
        "{longer}"
    );
}

#[test]
fn mixed_precision_follows_f32_and_resumes_bit_for_bit() {
    let folder = Folder::new();
    let flags = ["--steps", "20", "--checkpoint-every", "10"];
    let bf16 = [&flags[..], &["--precision", "bf16"]].concat();
    folder.train("f32", &flags);
    let text = folder.train("whole", &bf16);
    assert!(text.contains("context 32, bf16"), "{text}");
    folder.train("parts", &bf16);
    fs::remove_file(folder.checkpoint("parts", 20)).unwrap();
    let path = folder.path("parts");
    let message = fail(
        &["train", "--resume", "--run", &path, "--precision", "f32"],
        1,
    );
    assert!(message.contains("precision \"bf16\""), "{message}");
    folder.resume("parts", &[]);

    // The second half used the first half's moments.
    assert_same_model(
        &folder.checkpoint("parts", 20),
        &folder.checkpoint("whole", 20),
    );
    assert_eq!(folder.losses("parts"), folder.losses("whole"));
    let lengths = |run| state_of(&folder.checkpoint(run, 20)).map(|bytes| bytes.len());
    // Ids of parameters are random, and so is what they take: a little.
    for (bf16, f32) in lengths("whole").into_iter().zip(lengths("f32")) {
        assert!(
            bf16.abs_diff(f32) * 50 < f32,
            "weights and moments are f32: {bf16} and {f32} bytes"
        );
    }
    assert_ne!(folder.losses("whole"), folder.losses("f32"));
    for (bf16, f32) in folder.losses("whole").iter().zip(folder.losses("f32")) {
        assert!((bf16.2 / f32.2 - 1.0).abs() < 5e-3, "{bf16:?} {f32:?}");
    }

    let eval = |precision| succeed(&["eval", "--checkpoint", &path, "--precision", precision]);
    for precision in ["f32", "tf32", "bf16"] {
        assert!(eval(precision).contains("bits per byte"));
    }
    succeed(&[
        "sample",
        "--checkpoint",
        &path,
        "--length",
        "5",
        "--precision",
        "f32",
    ]);
}

#[test]
fn recomputed_blocks_train_the_same_model() {
    let folder = Folder::new();
    folder.train("stored", &["--steps", "3"]);
    folder.train("recomputed", &["--steps", "3", "--recompute"]);
    // Gradients are summed in another order, so equal but for rounding.
    for (stored, recomputed) in folder
        .losses("stored")
        .iter()
        .zip(folder.losses("recomputed"))
    {
        let error = (stored.2 - recomputed.2).abs() / stored.2;
        assert!(error < 1e-5, "{stored:?} {recomputed:?}");
    }
}

#[test]
fn a_killed_run_resumes_to_the_same_model() {
    let folder = Folder::new();
    let flags = [
        "--steps",
        "300",
        "--checkpoint-every",
        "20",
        "--eval-every",
        "1000",
    ];
    folder.train("whole", &flags);
    let mut child = enwik8()
        .args(folder.nano("killed", &flags))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&folder.checkpoint("killed", 40), &mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        !folder.checkpoint("killed", 300).exists(),
        "the run was killed too late to show anything"
    );
    folder.resume("killed", &[]);
    assert_same_model(
        &folder.checkpoint("killed", 300),
        &folder.checkpoint("whole", 300),
    );
}

#[test]
#[cfg(unix)]
fn ctrl_c_writes_a_checkpoint() {
    let folder = Folder::new();
    let flags = [
        "--steps",
        "100000",
        "--checkpoint-every",
        "30",
        "--eval-every",
        "1000",
    ];
    let mut child = enwik8()
        .args(folder.nano("run", &flags))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&folder.checkpoint("run", 30), &mut child);
    let signalled = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(signalled.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let step = folder.losses("run").last().unwrap().1 as usize;
    assert!(folder.checkpoint("run", step).exists(), "no step is lost");
}

#[test]
fn damaged_checkpoints_are_noticed_and_the_previous_one_is_used() {
    let folder = Folder::new();
    folder.train(
        "run",
        &[
            "--steps",
            "20",
            "--checkpoint-every",
            "10",
            "--eval-every",
            "100",
        ],
    );
    let newest = folder.checkpoint("run", 20);
    let good = fs::read(&newest).unwrap();
    let reference = folder.file("good", &good);
    let path = newest.to_str().unwrap();

    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 0x10;
    for (bad, word) in [
        (flipped.as_slice(), "corrupted"),
        (&good[..good.len() - 7], "truncated"),
    ] {
        fs::write(&newest, bad).unwrap();
        for command in ["eval", "sample"] {
            let message = fail(&[command, "--checkpoint", path], 1);
            assert!(
                message.contains(word) && message.contains(path),
                "{message}"
            );
        }
        let output = run(&["train", "--resume", "--run", &folder.path("run")]);
        let warning = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{warning}");
        assert!(
            warning.contains(word) && warning.contains("falling back"),
            "{warning}"
        );
        assert_same_model(&newest, Path::new(&reference));
    }

    for entry in fs::read_dir(folder.path("run")).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "ckpt")
        {
            fs::write(path, b"garbage").unwrap();
        }
    }
    let message = fail(&["train", "--resume", "--run", &folder.path("run")], 1);
    assert!(message.contains("no usable checkpoint"), "{message}");
}

#[test]
fn runs_are_never_overwritten_unasked() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "2"]);
    let before = model_of(&folder.checkpoint("run", 2));
    let arguments = folder.nano("run", &["--steps", "3"]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let message = fail(&arguments, 1);
    assert!(
        message.contains("--resume") && message.contains("--overwrite"),
        "{message}"
    );
    assert!(model_of(&folder.checkpoint("run", 2)) == before);
    succeed(&[&arguments[..], &["--overwrite"]].concat());
    assert!(!folder.checkpoint("run", 2).exists() && folder.checkpoint("run", 3).exists());
}

#[test]
fn resume_says_what_is_wrong() {
    let folder = Folder::new();
    let message = fail(&["train", "--resume", "--run", &folder.path("none")], 1);
    assert!(message.contains("nothing to resume"), "{message}");

    folder.train("run", &["--steps", "2"]);
    let run = folder.path("run");
    let message = fail(&["train", "--resume", "--run", &run, "--layers", "3"], 1);
    assert!(
        message.contains("layers 1") && message.contains("layers 3"),
        "{message}"
    );
    let other = folder.file("other", &[b'z'; 4_000]);
    let message = fail(&["train", "--resume", "--run", &run, "--data", &other], 1);
    assert!(
        message.contains("data are not those of the run"),
        "{message}"
    );

    for entry in fs::read_dir(&run).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "ckpt")
        {
            fs::remove_file(path).unwrap();
        }
    }
    let message = fail(&["train", "--resume", "--run", &run], 1);
    assert!(message.contains("no checkpoint yet"), "{message}");
}

#[test]
fn a_checkpoint_is_evaluated_and_sampled() {
    let folder = Folder::new();
    let trained = folder.train("run", &["--steps", "30", "--lr", "0.01"]);
    assert!(trained.contains("whole validation split"), "{trained}");
    let run = folder.path("run");

    for (split, min_context, bytes) in [
        ("validation", "0", "199 bytes"),
        ("test", "24", "199 bytes"),
    ] {
        let text = succeed(&[
            "eval",
            "--checkpoint",
            &run,
            "--split",
            split,
            "--min-context",
            min_context,
        ]);
        assert!(
            text.contains("bits per byte") && text.contains(bytes),
            "{text}"
        );
    }
    let message = fail(&["eval", "--checkpoint", &run, "--min-context", "32"], 1);
    assert!(
        message.contains("below the model's context of 32"),
        "{message}"
    );
    let message = fail(&["eval", "--checkpoint", &folder.path("none.ckpt")], 1);
    assert!(message.contains("none.ckpt"), "{message}");

    // Longer than the context, so that the window slides.
    let sample = [
        "sample",
        "--checkpoint",
        &run,
        "--prompt",
        "abc",
        "--length",
        "100",
        "--seed",
        "4",
    ];
    let text = succeed(&sample);
    assert!(text.starts_with("abc"), "{text}");
    assert_eq!(
        text,
        succeed(&sample),
        "the same seed writes the same bytes"
    );
    let file = folder.path("sample.bin");
    let silent = succeed(
        &[
            &sample[..],
            &["--output", &file, "--top-k", "5", "--temperature", "0.5"],
        ]
        .concat(),
    );
    assert!(silent.is_empty());
    assert_eq!(fs::read(&file).unwrap().len(), 103);
}

/// What `docs/training.md` shows: a model from the files that `export` wrote.
fn load_exported(folder: &str) -> SparseTransformer {
    let folder = Path::new(folder);
    let config = SparseTransformerConfig::load(folder.join("model.json")).unwrap();
    let record = ModuleRecord::load(folder.join("model.bpk")).unwrap();
    let model = config.init(&Device::flex()).unwrap();
    model.try_load_record(record).unwrap()
}

/// Logits of every byte that follows one of `bytes`, `[bytes, 256]`.
fn logits(model: &SparseTransformer, bytes: &[u8]) -> Vec<f32> {
    let tokens: Vec<i32> = bytes.iter().map(|&byte| i32::from(byte)).collect();
    let tokens = TensorData::new(tokens, [1, bytes.len()]);
    let tokens = Tensor::<2, Int>::from_data(tokens, &Device::flex());
    let logits = model.forward(tokens).unwrap();
    logits.try_into_vec_as().unwrap()
}

#[test]
fn an_exported_model_loads_in_a_program_of_its_own() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "30", "--lr", "0.01"]);
    let (run, out) = (folder.path("run"), folder.path("exported"));
    let text = succeed(&["export", "--run", &run, "--out", &out]);
    assert!(text.contains("best.ckpt: step 30"), "{text}");
    let exported = load_exported(&out);

    // The checkpoint's own record, in a model that is configured here.
    let fixed = Factorization::Merged(vec![Pattern::fixed(8, 2)]);
    let [record, _] = state_of(&Path::new(&run).join("best.ckpt"));
    let trained = SparseTransformerConfig::new(16, 2, fixed)
        .with_vocab_size(256)
        .with_context(32)
        .with_n_layers(1)
        .with_embedding_width(Some(8))
        .with_block_size(8)
        .init(&Device::flex())
        .unwrap()
        .load_record(ModuleRecord::from_bytes(Bytes::from_bytes_vec(record)).unwrap());
    let data = fs::read(folder.data()).unwrap();
    let window = &data[100..132];
    assert!(logits(&exported, window) == logits(&trained, window));

    // The last 200 bytes are the test split, which eval cuts into windows of 32 predictions, the last one at its end.
    let test = &data[3_800..];
    let (mut predicted, mut bits) = (0, 0.0);
    while predicted < 199 {
        let start = predicted.min(199 - 32);
        let logits = logits(&exported, &test[start..start + 32]);
        for (row, target) in logits
            .chunks(256)
            .zip(&test[start + 1..])
            .skip(predicted - start)
        {
            let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
            bits += (sum.ln() - f64::from(row[usize::from(*target)])) / LN_2;
        }
        predicted = start + 32;
    }
    let eval = succeed(&["eval", "--checkpoint", &run, "--split", "test"]);
    let expected: f64 = eval
        .lines()
        .last()
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!((bits / 199.0 - expected).abs() < 1e-4, "{bits} {eval}");
}

#[test]
fn exports_destroy_nothing_and_say_what_they_cannot_hold() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "2"]);
    let run = folder.path("run");
    let export = ["export", "--checkpoint", &run, "--out", &run];
    succeed(&export);
    let message = fail(&export, 1);
    assert!(
        message.contains("model.bpk exists") && message.contains("--overwrite"),
        "{message}"
    );
    succeed(&[&export[..], &["--overwrite"]].concat());
    // The folder is still that of a run.
    folder.resume("run", &["--steps", "3"]);

    folder.train("tree", &["--steps", "2", "--pattern", "tree:2&causal"]);
    let (run, out) = (folder.path("tree"), folder.path("out"));
    let message = fail(&["export", "--checkpoint", &run, "--out", &out], 1);
    assert!(
        message.contains("tree(2)") && message.contains("callback"),
        "{message}"
    );
    assert!(!Path::new(&out).exists());
}

#[test]
fn a_run_draws_its_loss() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "10"]);
    let picture = fs::read(Path::new(&folder.path("run")).join("loss.png")).unwrap();
    assert!(picture.starts_with(b"\x89PNG"));
}

#[test]
fn patterns_are_drawn() {
    let folder = Folder::new();
    for (name, magic) in [("pattern.png", &b"\x89PNG"[..]), ("pattern.svg", b"<svg")] {
        let out = folder.path(name);
        let text = succeed(&[
            "draw",
            "--pattern",
            "fixed:32,8",
            "--seq",
            "128",
            "--block",
            "8",
            "--out",
            &out,
        ]);
        assert!(
            text.contains("pairs allowed") && text.contains(&out),
            "{text}"
        );
        let picture = fs::read(&out).unwrap();
        assert!(
            picture
                .windows(magic.len())
                .take(200)
                .any(|bytes| bytes == magic)
        );
    }
    let message = fail(&["draw", "--out", &folder.path("pattern.bmp")], 1);
    assert!(message.contains(".png or .svg"), "{message}");
}

#[test]
fn bench_compares_sparse_and_dense() {
    let text = succeed(&[&["bench", "--iterations", "1"], NANO].concat());
    assert!(
        text.contains("fixed(8, 2)") && text.contains("dense causal"),
        "{text}"
    );
}

#[test]
fn bench_writes_what_it_measured() {
    let folder = Folder::new();
    let file = folder.path("bench.json");
    let flags = [
        "bench",
        "--iterations",
        "1",
        "--attention",
        "sparse",
        "--precision",
        "bf16",
    ];
    let output = ["--peak-tflops", "0.5", "--json", &file];
    let text = succeed(&[&flags[..], NANO, &output].concat());
    assert!(!text.contains("dense causal"), "{text}");
    let rows: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let [row] = rows.as_array().unwrap().as_slice() else {
        panic!("{rows}")
    };
    assert_eq!(
        (&row["precision"], &row["batch"]),
        (&"bf16".into(), &2.into())
    );
    let number = |name: &str| row[name].as_f64().unwrap();
    let rate = number("model_tflop") / (number("ms") / 1e3);
    assert!(
        (number("utilisation") * 0.5 / rate - 1.0).abs() < 1e-9,
        "{row}"
    );
    // 64 tokens, two operations per weight; two windows, 16 channels, four operations per pair and channel; three passes.
    let weights = 4.0 * 256.0 + 8.0 * 256.0 + 16.0 * 256.0;
    let pairs = 4.0 * 36.0 + 8.0 * 2.0 * (1.0 + 2.0 + 3.0);
    let forward = 64.0 * 2.0 * weights + 2.0 * 16.0 * 4.0 * pairs;
    assert!(
        (number("model_tflop") / (3.0 * forward / 1e12) - 1.0).abs() < 1e-9,
        "{row}"
    );
    assert!(number("loss") > 0.0 && row["parts"]["gradients"].as_f64().unwrap() > 0.0);
}
