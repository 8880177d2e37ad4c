//! Files that are written: their modes, and errors that name them.

use std::fs;
use std::path::Path;

use crate::shell::words;
use crate::support::*;

/// Every written file has the mode of the umask.
#[cfg(unix)]
#[test]
fn every_file_has_the_mode_of_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    let folder = Folder::new();
    let out = folder.path("out");
    fs::create_dir(&out).unwrap();
    let run = format!("{out}/run");
    let train = folder.nano("out/run", "--steps 2 --tensorboard --attention dense");
    let of_run = format!("--checkpoint {run}");
    for line in [
        train,
        format!("export --out {out}/burnpack --format burnpack {of_run}"),
        format!("export --out {out}/safetensors --format safetensors {of_run}"),
        format!("draw --out {out}/pattern.png"),
        format!("draw --out {out}/pattern.svg"),
        format!("sample --length 5 --output {out}/sample.bin --json {out}/sample.json {of_run}"),
        format!("search-selection --selection topk:8,2 --out {out}/heads.json {of_run}"),
        format!("recall --selection topk:8,2 --json {out}/recall.jsonl --windows 2 {of_run}"),
        format!(
            "import --weights {out}/safetensors/model.safetensors --like {run} --run {out}/imported"
        ),
    ] {
        let program = env!("CARGO_BIN_EXE_enwik8");
        let output = Command::new("sh")
            .args(["-c", "umask 027; exec \"$0\" \"$@\"", program])
            .args(words(&line))
            .output()
            .unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
    }
    let written = files(Path::new(&out));
    assert!(written.len() > 15, "{written:?}");
    for file in written {
        let mode = fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o640, "{}: {mode:o}", file.display());
    }
}

/// A full disk, for each file that may not fit.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_cannot_be_written_is_named() {
    let folder = Folder::new();
    folder.train("run", "--steps 2");
    let of_run = format!("--checkpoint {}", folder.path("run"));
    for row in rows(
        "
        sample --length 5 RUN --output | a.bin
        sample --length 5 RUN --json | a.json
        recall --selection topk:8,2 RUN --json | a.jsonl
        search-selection --selection topk:8,2 RUN --out | b.json
        draw --out | a.png
        draw --out | a.svg
        bench --iterations 1 NANO --json | c.json
        ",
    ) {
        let [line, name] = row[..] else {
            panic!("{row:?}");
        };
        let line = line.replace("RUN", &of_run).replace("NANO", &nano(""));
        let path = folder.path(name);
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let output = run(format!("{line} {path}"));
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}: {message}");
        says(message, &path);
    }
}

/// Weights with NaN are an error of every command that evaluates them.
#[test]
fn weights_that_are_no_numbers_are_refused() {
    let folder = Folder::new();
    folder.train("run", "--steps 2 --attention dense");
    let (run, exported) = (folder.path("run"), folder.path("exported"));
    let line = format!("export --out {exported} --format safetensors --checkpoint {run}");
    succeed(line);
    let weights = format!("{exported}/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for number in bytes[8 + header..].chunks_exact_mut(4) {
        number.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    fs::write(&weights, bytes).unwrap();
    let damaged = folder.path("damaged");
    let line = format!("import --weights {weights} --like {run} --run {damaged}");
    succeed(line);
    for row in rows(
        "
        eval | is not finite, got NaN | damaged
        eval --windows 2 | is not finite, got NaN | damaged
        eval --cache all | is not finite, got NaN | damaged
        recall --selection topk:8,2 | is not finite, got NaN | damaged
        sample | not finite
        ",
    ) {
        let message = fail(format!("{} --checkpoint {damaged}", row[0]), 1);
        says_all(message, &row[1..]);
    }
}
