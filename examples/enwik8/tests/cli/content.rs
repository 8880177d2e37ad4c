//! Models with content-based attention.

use serde_json::Value;

use crate::support::*;

/// A model that trains some ten steps a second.
const MICRO: &str = "--layers 2 --heads 2 --d-model 32 --context 64 --block 8 --position-width 8 --batch 2 --warmup 5 --lr 0.01 --eval-windows 2";

fn train(folder: &Folder, run: &str, more: &str) -> String {
    let text = "the quick brown fox jumps over the lazy dog; ".repeat(90);
    let (path, data) = (folder.path(run), folder.file("text", text));
    succeed(format!("train --run {path} --data {data} {MICRO} {more}"))
}

fn mean(part: &[f64]) -> f64 {
    part.iter().sum::<f64>() / part.len() as f64
}

/// A run in one go and one in two parts give equal bytes, including means and state that follows from seeds, and the model learns.
fn learns_and_resumes(attention: &str, shown: &str, more: &str) {
    let folder = Folder::new();
    let flags =
        format!("--attention {attention} --steps 60 --checkpoint-every 30 --recompute {more}");
    let text = folder.assert_resumes(|run| train(&folder, run, &flags), 60);
    says(&text, shown);
    let leaks = text.contains("later bytes influence the choice");
    let is_stable = ["nsa", "dsa", "msa"].contains(&&attention[..3]);
    assert_eq!(leaks, !is_stable, "{text}");
    let losses: Vec<f64> = (folder.log_of("whole", "train").iter())
        .map(|row| row["loss"].as_f64().unwrap())
        .collect();
    let (first, last) = (mean(&losses[..5]), mean(&losses[55..]));
    // From ln 256 down to far below 3.0, the entropy of the bytes' frequencies.
    assert!(first > 4.5 && last < 2.0, "{first}, {last}");

    let has_indexers = ["dsa", "msa"].contains(&&attention[..3]);
    check_indexers(&folder.log("whole"), has_indexers);

    let path = folder.path("whole");
    let text = succeed(format!("eval --checkpoint {path}"));
    says(&text, "bits per byte over");
    let sample = format!("sample --checkpoint {path} --length 50");
    let cached = format!("eval --checkpoint {path} --cache all");
    if leaks {
        let refusal = format!("the model was trained with --attention {attention}");
        for command in [&sample, &cached] {
            says(fail(command, 1), &refusal);
        }
    } else {
        // A pool gives the same numbers, and generates text.
        let through = bits(&succeed(cached));
        assert!((through - bits(&text)).abs() < 1e-3, "{through}, {text}");
        let written = succeed(&sample);
        assert!(written.len() > 50, "{written}");
        for options in ["--speculate 4 --batch 2", "--graph"] {
            succeed(format!("{sample} {options}"));
        }
    }
    let other = format!("train --resume --run {path} --attention lsh:4,1");
    says(fail(other, 1), "--resume continues the run");
}

/// Checks that indexer losses are logged from the step at which indexers begin to learn, and fall. The model's loss is that of dense attention until
/// they select, and is constant while they learn alone.
fn check_indexers(log: &[Value], has_indexers: bool) {
    let of_indexers: (Vec<u64>, Vec<f64>) = (log.iter())
        .filter_map(|row| Some((row["step"].as_u64()?, row["indexer_loss"].as_f64()?)))
        .unzip();
    let (steps, losses) = of_indexers;
    if !has_indexers {
        assert!(steps.is_empty());
        return;
    }
    assert_eq!(steps, (27..=60).collect::<Vec<u64>>());
    let (first, last) = (mean(&losses[..5]), mean(&losses[5..10]));
    assert!(last < 0.8 * first, "{first}, {last}");
    let rates = log.iter().filter_map(|row| row["learning_rate"].as_f64());
    let rates: Vec<f64> = rates.collect();
    assert!(rates[26..36].iter().all(|rate| *rate == 0.01));
    assert!(rates[36] < rates[25]);
}

#[test]
fn clusters_learn_and_resume_bit_for_bit() {
    let shown = "in 2, 1 local heads; keys of the others chosen by routing:16";
    learns_and_resumes("routing:16", shown, "block --local-heads 2,1");
}

#[test]
fn hashes_learn_and_resume_bit_for_bit() {
    let shown = "in 1 local heads; keys of the others chosen by lsh:8,2";
    learns_and_resumes("lsh:8,2", shown, "none");
}

/// Two heads on one KV head, so that they select together.
#[test]
fn compressed_blocks_learn_and_resume_bit_for_bit() {
    let shown = "keys of all heads chosen by nsa:8,4,16,3,16,mlp";
    learns_and_resumes("nsa:8,4,16,3,16,mlp", shown, "block --kv-heads 1");
}

/// Dense attention, then the indexers alone, where the run is resumed, then selection.
fn indexers_learn_and_resume(attention: &str) {
    let shown =
        "dense attention for 26 steps, indexers alone learn for 10, and choose from step 36 on";
    let stages = "block --indexer-from 26 --indexer-warmup 10";
    learns_and_resumes(attention, shown, stages);
}

#[test]
fn indexers_learn_and_resume_bit_for_bit() {
    indexers_learn_and_resume("dsa:16,4,2,16");
}

#[test]
fn index_branches_learn_and_resume_bit_for_bit() {
    indexers_learn_and_resume("msa:16,3,16");
}

/// One layer selects for two, also through a pool.
#[test]
fn layers_share_a_choice() {
    let length = "--share-every 2 --steps 20 --checkpoint-every 10 --recompute block";
    let [_, indexers] = ["--selection moba:8,3", "--attention dsa:16,4,2,8"].map(|attention| {
        let (folder, flags) = (Folder::new(), format!("{attention} {length}"));
        folder.assert_resumes(|run| train(&folder, run, &flags), 20);
        let config = json(folder.path("whole/config.json"));
        assert_eq!(config["model"]["share_every"], 2);
        folder
    });
    let path = indexers.path("whole");
    let [whole, through] = ["", "--cache all"]
        .map(|flags| bits(&succeed(format!("eval --checkpoint {path} {flags}"))));
    assert!((through - whole).abs() < 1e-3, "{through}, {whole}");
    succeed(format!("sample --checkpoint {path} --length 50"));
}

/// A run begins with the weights of a dense model, and has its loss while the indexers learn.
#[test]
fn indexers_are_added_to_a_dense_model() {
    let folder = Folder::new();
    let [dense, out, run] = ["dense", "exported", "run"].map(|name| folder.path(name));
    train(&folder, "dense", "--attention dense --steps 20");
    succeed(format!("export --checkpoint {dense} --out {out}"));
    let (weights, data) = (folder.path("exported/model.bpk"), folder.path("text"));
    let import = format!("import --weights {weights} --data {data} {MICRO}");
    let flags = "--attention dsa:12,4,2,8 --indexer-warmup 3 --indexer-lr 0.002 --steps 6";
    succeed(format!("{import} --run {run} {flags}"));
    let measured = |run| bits(&succeed(format!("eval --checkpoint {run} --windows 4")));
    assert!((measured(&run) - measured(&dense)).abs() < 1e-3);
    let text = folder.resume("run", "");
    says(text, "step 3/6  from here on layers attend to the keys");
    // With another kind of attention no weight may be missing.
    let other = folder.path("other");
    let other = format!("{import} --run {other} --attention nsa:8,4,16,3,16");
    says(fail(other, 1), "content.nsa");
}
