//! Weights to other programs and back.

use std::fs;
use std::path::Path;

use burn::config::Config;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sparse_transformer::SparseTransformerConfig;
use burn_sparse_transformer::weights::{KeyMap, WeightsFile};

use crate::support::*;

#[test]
fn weights_go_out_and_come_back() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "30", "--lr", "0.01"]);
    let (run, out) = (folder.path("run"), folder.path("exported"));
    let export = ["export", "--run", &run, "--out", &out];
    let text = succeed(&[&export[..], &["--format", "safetensors"]].concat());
    assert!(text.contains("model.safetensors"), "{text}");
    let message = fail(&[&export[..], &["--format", "safetensors"]].concat(), 1);
    assert!(message.contains("model.safetensors exists"), "{message}");

    // In PyTorch's conventions, with the configuration beside it.
    let weights = Path::new(&out).join("model.safetensors");
    let file = WeightsFile::open(&weights).unwrap();
    let inner = file.shape("blocks.0.pwff.linear_inner.weight");
    assert_eq!(inner, Some(vec![64, 16]));
    let config = SparseTransformerConfig::load(Path::new(&out).join("model.json")).unwrap();
    let model = config.try_init(&Device::flex()).unwrap();
    let model = file.load(&model, &KeyMap::pytorch()).unwrap();
    let tokens = TensorData::new((0..20).collect::<Vec<i32>>(), [1, 20]);
    let logits = model.try_forward(Tensor::<2, Int>::from_data(tokens, &Device::flex()));
    assert_eq!(logits.unwrap().dims(), [1, 20, 256]);

    // The same bits come back, in whichever format.
    let weights = weights.to_str().unwrap();
    let record = folder.path("record");
    succeed(&["export", "--run", &run, "--out", &record]);
    let record = folder.path("record/model.bpk");
    let trained = Path::new(&run).join("best.ckpt");
    for (weights, name) in [(weights, "imported"), (&record, "again")] {
        let imported = folder.path(name);
        let import = ["import", "--weights", weights, "--run", &imported];
        let text = succeed(&[&import[..], &["--like", &run]].concat());
        assert!(text.contains("train --resume --run"), "{text}");
        // The number alone, which comes first.
        let measured = |run: &str| {
            let text = succeed(&["eval", "--checkpoint", run]);
            let last = text.lines().last().unwrap();
            last.split(' ').next().unwrap().parse::<f64>().unwrap()
        };
        let [got, expected] = [&imported, trained.to_str().unwrap()].map(measured);
        assert_eq!(got, expected);
        let message = fail(&[&import[..], &["--like", &run]].concat(), 1);
        assert!(message.contains("already holds a run"), "{message}");
    }
    // Trained further from step 0.
    let text = folder.resume("imported", &["--steps", "2"]);
    assert!(text.contains("step-00000000.ckpt"), "{text}");
    assert!(folder.checkpoint("imported", 2).exists());
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    let folder = Folder::new();
    folder.train("run", &["--steps", "2"]);
    let (run, out) = (folder.path("run"), folder.path("exported"));
    succeed(&words(&format!(
        "export --run {run} --out {out} --format safetensors"
    )));
    let (weights, imported) = (
        folder.path("exported/model.safetensors"),
        folder.path("new"),
    );
    // Of the preset's sizes, which are others.
    let import = ["import", "--weights", &weights, "--run", &imported];
    let message = fail(&import, 1);
    for part in [
        "does not fit the model, of which nothing was loaded",
        "missing: blocks.1.mha.key.bias",
        "blocks.0.mha.key.bias must be [128], got [16]",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let message = fail(&[&import[..], &["--key", "model"]].concat(), 1);
    says(&message, "--key is for files of PyTorch");
    let other = folder.file("weights.npz", b"");
    let message = fail(&["import", "--weights", &other, "--run", &imported], 1);
    assert!(message.contains(".safetensors, .pt, .pth"), "{message}");
    assert!(!fs::exists(&imported).unwrap());
}
