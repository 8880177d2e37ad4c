//! Flags that are accepted, and flags that are refused.

use burn_blocksparse::Pattern;

use crate::support::*;

#[test]
fn texts_are_listed() {
    says(succeed("--help"), "cargo run -p enwik8 -- train");
    for text in [succeed("patterns"), succeed("help patterns")] {
        says_all(&text, Pattern::NOTATION);
        says_all(&text, &["topk:BLOCK", "tova:C"]);
    }
    let text = succeed("presets");
    let words = [
        "tiny           2",
        "8,400 steps",
        "local:96 / strided:96",
        "segment:2",
        "36.6 GiB on an H100",
    ];
    says_all(&text, &words);
    assert!(!text.contains("n/a"), "{text}");
}

/// At the width of a terminal, or of 100 columns without a terminal.
#[test]
fn help_is_wrapped_and_grouped() {
    for command in "train bench import sample eval recall export".split(' ') {
        for help in [format!("help {command}"), format!("{command} -h")] {
            let text = succeed(&help);
            for line in text.lines() {
                assert!(line.chars().count() <= 100, "{help}: {line}");
            }
            assert!(!text.contains("deepspeed"), "{help}");
        }
    }
    let [short, long] = ["train -h", "train --help"].map(succeed);
    let headings = ["Device:", "Model (", "Attention (", "Recipe ("];
    says_all(&short, &headings);
    says_all(&long, &headings);
    for heading in ["Attention by content:", "Images:", "Block-sparse feed"] {
        assert!(!short.contains(heading) && long.contains(heading));
    }
}

#[test]
fn models_are_named_by_either_flag() {
    let folder = Folder::new();
    let none = folder.path("none");
    let file = folder.file("file", "no checkpoint");
    for command in ["eval", "sample", "report", "sample-images"] {
        for flag in ["--run", "--checkpoint"] {
            for (path, reason) in [(&none, "there is no checkpoint"), (&file, "is not")] {
                let message = fail(format!("{command} {flag} {path}"), 1);
                says_all(message, &[&format!("error: {flag}"), path, reason]);
            }
        }
    }
}

#[test]
fn bad_data_is_named() {
    let folder = Folder::new();
    let run = folder.path("run");
    for (file, reason) in [
        (folder.path("missing.txt"), "cannot read"),
        (folder.file("empty.txt", ""), "is empty"),
        (folder.file("short.txt", [b'x'; 600]), "too short"),
    ] {
        let message = fail(format!("train --run {run} --data {file}"), 1);
        says_all(message, &[&file, reason]);
        let is_right = !folder.exists("run");
        assert!(
            is_right,
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
        draw --pattern causal&(local:8+Stride:4) | no pattern 'Stride', did you mean strided:STRIDE?
        draw --pattern packed:0,8(foo) | no pattern 'foo'
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
        sample --cache= | must be all, reachable
        sample --cache snapvk:64 | no policy 'snapvk', did you mean snapkv:C[,M,F]?
        train --recompute some | for '--recompute [<MODE>]': must be none, mlp, block
        train --selection topk:16 | 'topk:16' as a selection: expected topk:BLOCK,KEEP[,LOCAL,FIRST], got 1 number
        ",
    ) {
        says_all(fail(row[0], 2), &row[1..]);
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
        --local-heads 2 | --local-heads are those next to content-based heads; add --attention
        --attention lsh:16,2 --commitment 0.1 | --commitment and --means-decay are of clusters; add --attention routing:WINDOW
        --attention routing:16 --local-heads 1,2,3 | --local-heads must be one number, or 2, one for each of --layers, got 3
        --attention nsa:8,4,8,4,16 --local-heads 1 | --attention nsa:8,4,8,4,16 is all heads of a layer; leave out --local-heads
        --attention nsa:8,4,8,4,16 --indexer-warmup 5 | --indexer-warmup, --indexer-lr and --indexer-from are of an indexer; add --attention dsa:KEEP,NEAR or msa:BLOCK,KEEP
        --indexer-lr 0.01 | --indexer-warmup, --indexer-lr and --indexer-from are of an indexer; add --attention dsa:KEEP,NEAR or msa:BLOCK,KEEP
        --attention dsa:32,4,2,8 --indexer-lr 0.01 | --indexer-lr is the rate of the warm-up of indexers; add --indexer-warmup STEPS
        --attention dsa:32,4,2,8 --indexer-from 5 | --indexer-from is where the warm-up of indexers begins; add --indexer-warmup STEPS
        --attention msa:32,4,8 --pattern local:16 | --attention msa:32,4,8 chooses from all earlier bytes; leave out --pattern
        --attention dsa:32,4,2,8 --pattern local:16 | --attention dsa:32,4,2,8 chooses from all earlier bytes; leave out --pattern
        --share-every 2 | --share-every must be 1 where no layer chooses by a selection, dsa or msa, got 2
        --attention nsa:8,4,8,4,16 --share-every 2 | --share-every must be 1 where no layer chooses by a selection, dsa or msa, got 2
        --selection topk:16,2 --selection topk:16,4 --share-every 2 | --selection must be one, where layers share a choice, got 2
        --kv-heads 3 | --kv-heads must be a divisor of --heads = 4, got 3
        --attention routing:16 --kv-heads 2 | --kv-heads are of heads whose keys are not their queries; leave it out with --attention routing:16
        --attention routing:16 --local-heads 5 | --local-heads must be from 1 to --heads = 4
        --attention lsh:16,2 --selection topk:16,2 | --selection and --attention lsh:16,2 are two ways to choose
        --attention lsh:16,2 --graph | leave it out with --attention lsh:16,2
        --device tpu | choices
        --device flex:1 | an index goes with cuda only, as in cuda:1
        ",
    ) {
        says(fail(format!("train --run {run} {}", row[0]), 1), row[1]);
        assert!(!folder.exists("run"));
    }
}

/// A negative number is the value of the preceding flag, not a flag.
#[test]
fn negative_numbers_are_refused_by_name_and_range() {
    for row in rows(
        "
        train | context layers heads d-model d-ff block position-width ff-block | must be a whole number, at least 1
        train | batch steps eval-every eval-windows checkpoint-every log-every | must be a whole number, at least 1
        train | warmup seed | must be a whole number, at least 0
        train | dropout beta1 beta2 | must be a number from 0 up to, not including, 1
        train | init-scale epochs lr epsilon clip softmax-threshold | must be a number above 0
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
            let message = fail(format!("{command} --{flag} -1"), 2);
            says_all(message, &["invalid value '-1' for '--", flag, range]);
        }
    }
    let message = fail("sample --temperature -0.5", 2);
    says(message, "'-0.5' for '--temperature");
}

#[test]
fn devices_that_cannot_be_used_are_explained() {
    let folder = Folder::new();
    let output = enwik8()
        .args(["train", "--run", &folder.path("run"), "--device", "cuda"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(!message.contains("panicked"), "{message}");
    let words = match cfg!(feature = "cuda") {
        true => "install NVIDIA's driver",
        false => "build with --features cuda",
    };
    says(message, words);
    assert!(!folder.exists("run"));
}
