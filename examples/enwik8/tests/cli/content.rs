//! Models whose heads choose by content.

use std::fs;

use serde_json::Value;

use crate::support::*;

/// A model that trains some ten steps a second.
fn micro() -> Vec<&'static str> {
    words(
        "--layers 2 --heads 2 --d-model 32 --context 64 --block 8 --position-width 8 --batch 2 \
         --warmup 5 --lr 0.01 --eval-windows 2",
    )
}

fn train(folder: &Folder, run: &str, more: &[&str]) -> String {
    let text = "the quick brown fox jumps over the lazy dog; ".repeat(90);
    let (path, data) = (folder.path(run), folder.file("text", text.as_bytes()));
    let run = ["train", "--run", &path, "--data", &data];
    succeed(&[&run[..], &micro(), more].concat())
}

/// A run in one go and one in two parts give the same bytes, means and what follows from seeds included, and bytes are learned.
fn learns_and_resumes(attention: &str, shown: &str, more: &[&str]) {
    let folder = Folder::new();
    let flags = format!("--attention {attention} --steps 60 --checkpoint-every 30 --recompute");
    let flags = words(&flags);
    let flags = [&flags[..], more].concat();
    let text = train(&folder, "whole", &flags);
    assert!(text.contains(shown), "{text}");
    let leaks = text.contains("later bytes take part in the choice");
    let is_stable = ["nsa", "dsa", "msa"].contains(&&attention[..3]);
    assert_eq!(leaks, !is_stable, "{text}");
    let losses: Vec<f64> = (folder.log("whole").iter())
        .filter(|row| row["kind"] == "train")
        .map(|row| row["loss"].as_f64().unwrap())
        .collect();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let (first, last) = (mean(&losses[..5]), mean(&losses[55..]));
    // From ln 256 on, and far below the 3.0 that the bytes' frequencies give.
    assert!(first > 4.5 && last < 2.0, "{first}, {last}");

    train(&folder, "parts", &flags);
    let has_indexers = ["dsa", "msa"].contains(&&attention[..3]);
    check_indexers(&folder.log("whole"), has_indexers);
    fs::remove_file(folder.checkpoint("parts", 60)).unwrap();
    folder.resume("parts", &[]);
    let whole = folder.checkpoint("whole", 60);
    assert_same_model(&folder.checkpoint("parts", 60), &whole);
    assert_eq!(folder.losses("parts"), folder.losses("whole"));

    let path = folder.path("whole");
    let text = succeed(&["eval", "--checkpoint", &path]);
    assert!(text.contains("bits per byte over"), "{text}");
    let sample = ["sample", "--checkpoint", &path, "--length", "50"];
    let cached = ["eval", "--checkpoint", &path, "--cache", "all"];
    match leaks {
        true => {
            let refusal = format!("the model was trained with --attention {attention}");
            for command in [&sample[..], &cached] {
                let message = fail(command, 1);
                assert!(message.contains(&refusal), "{message}");
            }
        }
        // The same numbers through a pool, and text from it.
        false => {
            let bits = |text: &str| {
                let line = text.lines().find(|line| line.contains("bits per byte"));
                let number = line
                    .and_then(|line| line.split_whitespace().find_map(|x| x.parse::<f64>().ok()));
                number.unwrap_or_else(|| panic!("{text}"))
            };
            let through = bits(&succeed(&cached));
            assert!((through - bits(&text)).abs() < 1e-3, "{through}, {text}");
            let written = succeed(&sample);
            assert!(written.len() > 50, "{written}");
            for options in [&["--speculate", "4", "--batch", "2"][..], &["--graph"]] {
                succeed(&[&sample[..], options].concat());
            }
        }
    }
    let other = format!("train --resume --run {path} --attention lsh:4,1");
    let other = words(&other);
    let message = fail(&other, 1);
    assert!(message.contains("--resume continues the run"), "{message}");
}

/// Their losses are logged from where they begin to learn, and fall; what the model has is that of dense attention until they choose, and does not move while
/// they learn alone.
fn check_indexers(log: &[Value], has_indexers: bool) {
    let of_indexers: Vec<(u64, f64)> = (log.iter())
        .filter_map(|row| Some((row["step"].as_u64()?, row["indexer_loss"].as_f64()?)))
        .collect();
    if !has_indexers {
        assert!(of_indexers.is_empty());
        return;
    }
    let steps: Vec<u64> = of_indexers.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, (27..=60).collect::<Vec<u64>>());
    let mean = |part: &[(u64, f64)]| part.iter().map(|(_, x)| x).sum::<f64>() / 5.0;
    let (first, last) = (mean(&of_indexers[..5]), mean(&of_indexers[5..10]));
    assert!(last < 0.8 * first, "{first}, {last}");
    let rates: Vec<f64> = log
        .iter()
        .filter_map(|row| row["learning_rate"].as_f64())
        .collect();
    assert!(rates[26..36].iter().all(|rate| *rate == 0.01));
    assert!(rates[36] < rates[25]);
}

#[test]
fn clusters_learn_and_resume_bit_for_bit() {
    let shown = "in 2, 1 local heads; keys of the others chosen by routing:16";
    learns_and_resumes("routing:16", shown, &["block", "--local-heads", "2,1"]);
}

#[test]
fn hashes_learn_and_resume_bit_for_bit() {
    let shown = "in 1 local heads; keys of the others chosen by lsh:8,2";
    learns_and_resumes("lsh:8,2", shown, &["none"]);
}

/// Two heads of one of keys, so that they choose together.
#[test]
fn compressed_blocks_learn_and_resume_bit_for_bit() {
    let shown = "keys of all heads chosen by nsa:8,4,16,3,16,mlp";
    learns_and_resumes("nsa:8,4,16,3,16,mlp", shown, &["block", "--kv-heads", "1"]);
}

/// Dense attention, the indexers alone, which is where the run is resumed, and the choice.
#[test]
fn indexers_learn_and_resume_bit_for_bit() {
    let shown =
        "dense attention for 26 steps, indexers alone learn for 10, and choose from step 36 on";
    let stages = ["block", "--indexer-from", "26", "--indexer-warmup", "10"];
    learns_and_resumes("dsa:16,4,2,16", shown, &stages);
}

/// The same of an index branch, which chooses blocks.
#[test]
fn index_branches_learn_and_resume_bit_for_bit() {
    let shown =
        "dense attention for 26 steps, indexers alone learn for 10, and choose from step 36 on";
    let stages = ["block", "--indexer-from", "26", "--indexer-warmup", "10"];
    learns_and_resumes("msa:16,3,16", shown, &stages);
}

/// A run begins with the weights of a dense model, whose loss it has while the indexers learn.
#[test]
fn indexers_are_added_to_a_dense_model() {
    let folder = Folder::new();
    let [dense, out, run] = ["dense", "exported", "run"].map(|name| folder.path(name));
    train(&folder, "dense", &["--attention", "dense", "--steps", "20"]);
    succeed(&["export", "--checkpoint", &dense, "--out", &out]);
    let (weights, data) = (folder.path("exported/model.bpk"), folder.path("text"));
    let import = format!("import --weights {weights} --run {run} --data {data}");
    let import = words(&import);
    let flags = "--attention dsa:12,4,2,8 --indexer-warmup 3 --indexer-lr 0.002 --steps 6";
    let flags: Vec<&str> = flags.split(' ').collect();
    succeed(&[&import[..], &micro(), &flags].concat());
    let measured = |run: &str| {
        let text = succeed(&["eval", "--checkpoint", run, "--windows", "4"]);
        let last = text.lines().last().unwrap();
        last.split(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert!((measured(&run) - measured(&dense)).abs() < 1e-3);
    let text = folder.resume("run", &[]);
    says(&text, "step 3/6  from here on layers attend to the keys");
    // Of another kind of attention nothing may be missing.
    let other = folder.path("other");
    let import = format!("import --weights {weights} --run {other} --data {data}");
    let import = words(&import);
    let message = fail(
        &[&import[..], &micro(), &["--attention", "nsa:8,4,16,3,16"]].concat(),
        1,
    );
    assert!(message.contains("content.nsa"), "{message}");
}

/// The flags of clusters change what is learned, and are stored.
#[test]
fn flags_of_clusters_arrive() {
    let folder = Folder::new();
    let flags = ["--attention", "routing:16", "--steps", "4"];
    train(&folder, "plain", &flags);
    let model = |run| model_of(&folder.checkpoint(run, 4));
    for (run, flag, value, field, stored) in [
        ("decay", "--means-decay", "0.5", "means_decay", 0.5),
        ("commitment", "--commitment", "10", "commitment", 10.0),
    ] {
        train(&folder, run, &[&flags[..], &[flag, value]].concat());
        assert!(model(run) != model("plain"), "{flag}");
        let config = fs::read_to_string(format!("{}/config.json", folder.path(run))).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["model"]["content"]["routing"][field], stored);
    }
}
