//! What is asked for, and what is refused.

use std::path::Path;

use burn_blocksparse::Pattern;

use crate::support::*;

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
        "import",
        "cargo run -p enwik8 -- train",
    ] {
        assert!(help.contains(word), "{word}");
    }
    for command in [
        "train", "eval", "sample", "bench", "draw", "export", "import",
    ] {
        assert!(
            succeed(&[command, "--help"]).contains("Examples:"),
            "{command}"
        );
    }
    for text in [succeed(&["patterns"]), succeed(&["help", "patterns"])] {
        for form in Pattern::NOTATION.iter().chain(&["topk:BLOCK", "tova:C"]) {
            assert!(text.contains(form), "{form}");
        }
    }
}

/// At the width of a terminal, or of 100 columns where there is none.
#[test]
fn help_is_wrapped_and_grouped() {
    for command in words("train bench import sample eval recall export") {
        for help in [["help", command], [command, "-h"]] {
            let text = succeed(&help);
            for line in text.lines() {
                assert!(line.chars().count() <= 100, "{help:?}: {line}");
            }
            assert!(!text.contains("deepspeed"), "{help:?}");
        }
    }
    let [short, long] = [["train", "-h"], ["train", "--help"]].map(|words| succeed(&words));
    for heading in ["Device:", "Model (", "Attention (", "Recipe ("] {
        assert!(short.contains(heading) && long.contains(heading));
    }
    for heading in ["Attention by content:", "Images:", "Block-sparse feed"] {
        assert!(!short.contains(heading) && long.contains(heading));
    }
}

#[test]
fn presets_are_listed_with_their_values() {
    let text = succeed(&["presets"]);
    for words in [
        "tiny           2",
        "8,400 steps",
        "local:96 / strided:96",
        "segment:2",
        "18.5 min on an H100",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("n/a"), "{text}");
}

#[test]
fn models_are_named_by_either_flag() {
    let folder = Folder::new();
    let none = folder.path("none");
    let file = folder.file("file", b"no checkpoint");
    for command in ["eval", "sample", "report", "sample-images"] {
        for flag in ["--run", "--checkpoint"] {
            for (path, reason) in [(&none, "there is no checkpoint"), (&file, "is not")] {
                let message = fail(&[command, flag, path], 1);
                let named = message.contains(&format!("error: {flag}")) && message.contains(path);
                assert!(named && message.contains(reason), "{command}: {message}");
            }
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
        says(&message, file.as_str());
        says(&message, reason);
        assert!(
            !Path::new(&run).exists(),
            "nothing is written before the input is known to be good"
        );
    }
}

#[test]
fn bad_flags_list_the_choices() {
    for row in rows(
        "
        train --preset huge | tiny | small | paper
        train --preset tinny | similar value exists: 'tiny'
        train --pattern spiral:3 | for '--pattern <PATTERN>': there is no pattern 'spiral' | patterns' lists them all
        draw --pattern lokal:8 | no pattern 'lokal', did you mean local:WINDOW?
        train --pattern local:64+ | 'local:64+' as a pattern: expected a pattern after '+' at character 9, got nothing
        draw --pattern fixed:a,b | whole numbers, got 'a' | fixed:STRIDE
        train --steps 0 | at least 1
        train --dropout 1.5 | from 0
        train --ff-density 0.5 --ff-layout ring | 'ring' | small-world | barabasi-albert
        train --ff-block 32 | --ff-density
        train --attention lsh:16 | 'lsh:16' for '--attention | must be lsh:BUCKET,ROUNDS[,dedup]
        train --attention spars | no attention 'spars', did you mean sparse?
        recall --selection qest:16,64 | no selection 'qest', did you mean quest:PAGE,BUDGET
        sample --cache snapvk:64 | no policy 'snapvk', did you mean snapkv:C[,M,F]?
        train --recompute some | for '--recompute [<MODE>]': must be none, mlp, block
        train --selection topk:16 | 'topk:16' as a selection: expected topk:BLOCK,KEEP[,LOCAL,FIRST], got 1 number
        ",
    ) {
        let message = fail(&words(row[0]), 2);
        assert!(row[1..].iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn impossible_models_are_explained() {
    let folder = Folder::new();
    let run = folder.path("run");
    for row in rows(
        "
        --d-model 130 | multiple of --heads
        --block 12 | --block must be 8, 16, 32, 64 or 128, got 12
        --pattern dense | 'dense': it lets a position see later ones
        --pattern tree:2 | not known to be causal
        --pattern tree:2 | 'tree:2&causal'
        --pattern tree:2+local:8 | '(tree:2+local:8)&causal'
        --pattern fixed:32,5 | 'fixed:32,5': fixed(32, 5): stride
        --pattern fixed:32,8,3 | heads must be a multiple of
        --context 64 --pattern fixed:128,32 | --position-width must be at most --context = 64, got 128
        --context 64 --position-width 128 | --position-width must be at most --context = 64, got 128
        --pattern causal --pattern local:8 --pattern strided:8 --factorization multi-head | --heads must be a multiple of the 3 patterns
        --ff-density 0.5 --ff-block 8 | --ff-block must be 16, 32, 64 or 128, got 8
        --ff-density 0.5 --d-model 96 | --ff-block must be a divisor of --d-model = 96, got 64
        --ff-density 0.5 --ff-prune 0.75 --ff-prune-until 100 | --ff-prune must be at most --ff-density = 0.5, got 0.75
        --ff-density 0.5 --ff-prune 0.25 --ff-prune-until 10 --ff-prune-from 20 | --ff-prune-until must be at least the 20 steps of --ff-prune-from, got 10
        --ff-density 0.5 --d-ff 500 | --ff-block must be a divisor of --d-ff = 500, got 64
        --selection moba:16,2 --pattern local:8 | --selection moba:16,2: every byte chooses for itself, from every earlier one, and not within the pattern local:8
        --selection topk:16,2 --selection quest:16,48 --attention sparse | --selection quest:16,48: every byte chooses for itself, from every earlier one, and not within the pattern fixed:32,8
        --recall-every 5 | are of a choice by content; add --selection or --selection-file
        --local-heads 2 | --local-heads are those beside heads that choose by content; add --attention
        --attention lsh:16,2 --commitment 0.1 | --commitment and --means-decay are of clusters; add --attention routing:WINDOW
        --attention routing:16 --local-heads 1,2,3 | --local-heads must be one number, or 2, one for each of --layers, got 3
        --attention nsa:8,4,8,4,16 --local-heads 1 | --attention nsa:8,4,8,4,16 is all heads of a layer; leave out --local-heads
        --attention nsa:8,4,8,4,16 --indexer-warmup 5 | --indexer-warmup, --indexer-lr and --indexer-from are of an indexer; add --attention dsa:KEEP,NEAR or msa:BLOCK,KEEP
        --indexer-lr 0.01 | --indexer-warmup, --indexer-lr and --indexer-from are of an indexer; add --attention dsa:KEEP,NEAR or msa:BLOCK,KEEP
        --attention dsa:32,4,2,8 --indexer-lr 0.01 | --indexer-lr is the rate of the warm-up of indexers; add --indexer-warmup STEPS
        --attention dsa:32,4,2,8 --indexer-from 5 | --indexer-from is where the warm-up of indexers begins; add --indexer-warmup STEPS
        --attention msa:32,4,8 --pattern local:16 | --attention msa:32,4,8 chooses from all earlier bytes; leave out --pattern
        --attention dsa:32,4,2,8 --pattern local:16 | --attention dsa:32,4,2,8 chooses from all earlier bytes; leave out --pattern
        --kv-heads 3 | --kv-heads must be a divisor of --heads = 4, got 3
        --attention routing:16 --kv-heads 2 | --kv-heads are of heads whose keys are not their queries; leave it out with --attention routing:16
        --attention routing:16 --local-heads 5 | --local-heads must be from 1 to --heads = 4
        --attention lsh:16,2 --selection topk:16,2 | --selection and --attention lsh:16,2 are two ways to choose
        --attention lsh:16,2 --graph | leave it out with --attention lsh:16,2
        --device tpu | choices
        ",
    ) {
        let message = fail(&[&["train", "--run", &run], &words(row[0])[..]].concat(), 1);
        assert!(message.contains(row[1]), "{message}");
        assert!(!Path::new(&run).exists());
    }
}

/// A negative number is the value of the flag before it, not a flag.
#[test]
fn negative_numbers_are_refused_by_name_and_range() {
    for row in rows(
        "
        train | context layers heads d-model d-ff block position-width ff-block | must be a whole number, at least 1
        train | batch steps eval-every eval-windows checkpoint-every log-every | must be a whole number, at least 1
        train | warmup seed | must be a whole number, at least 0
        train | dropout beta1 beta2 | must be a number from 0 up to, not including, 1
        train | init-scale epochs lr epsilon clip | must be a number above 0
        train | weight-decay | must be a number, at least 0
        eval | min-context | must be a whole number, at least 0
        eval | batch windows chunk | must be a whole number, at least 1
        sample | slack | must be a whole number, at least 0
        sample | length seed | must be a whole number, at least 0
        sample | batch speculate | must be a whole number, at least 1
        sample | temperature | must be a number, at least 0
        sample | top-k | -1 is not in 1..=256
        train | ff-density | must be a number above 0, at most 1
        sample | top-p | must be a number above 0, at most 1
        sample | min-p | must be a number from 0 to 1
        sample | repetition | must be a number above 0
        bench | iterations | -1 is not in 1..
        bench | peak-tflops | must be a number above 0
        draw | seq block heads | must be a whole number, at least 1
        ",
    ) {
        let [command, flags, range] = row[..] else {
            panic!("{row:?}");
        };
        for flag in flags.split(' ') {
            let message = fail(&[command, &format!("--{flag}"), "-1"], 2);
            let named = message.contains("invalid value '-1' for '--") && message.contains(flag);
            assert!(named && message.contains(range), "{command}: {message}");
        }
    }
    let message = fail(&["sample", "--temperature", "-0.5"], 2);
    assert!(message.contains("'-0.5' for '--temperature"), "{message}");
}

#[test]
fn devices_that_cannot_be_used_are_explained() {
    let folder = Folder::new();
    let run = folder.path("run");
    let output = enwik8()
        .args(["train", "--run", &run, "--device", "cuda"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    let words = match cfg!(feature = "cuda") {
        true => "install NVIDIA's driver",
        false => "build with --features cuda",
    };
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(
        message.contains(words) && !message.contains("panicked"),
        "{message}"
    );
    assert!(!Path::new(&run).exists());
}
