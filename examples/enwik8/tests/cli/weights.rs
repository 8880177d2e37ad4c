//! Export of weights to other programs, and import.

use std::path::Path;

use burn::config::Config;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sparse_transformer::SparseTransformerConfig;
use burn_sparse_transformer::weights::{KeyMap, WeightsFile};

use crate::support::*;

#[test]
fn weights_go_out_and_come_back() {
    let folder = Folder::new();
    folder.train("run", "--steps 30 --lr 0.01");
    let (run, out) = (folder.path("run"), folder.path("exported"));
    let export = format!("export --run {run} --out {out} --format safetensors");
    says(succeed(&export), "model.safetensors");
    says(fail(&export, 1), "model.safetensors exists");

    // In PyTorch's conventions, with the configuration next to it.
    let weights = folder.path("exported/model.safetensors");
    let file = WeightsFile::open(&weights).unwrap();
    let inner = file.shape("blocks.0.pwff.linear_inner.weight");
    assert_eq!(inner, Some(vec![64, 16]));
    let config = SparseTransformerConfig::load(Path::new(&out).join("model.json")).unwrap();
    let model = config.init(&Device::flex());
    let model = file.load(&model, &KeyMap::pytorch()).unwrap();
    let tokens = TensorData::new((0..20).collect::<Vec<i32>>(), [1, 20]);
    let logits = model.try_forward(Tensor::<2, Int>::from_data(tokens, &Device::flex()));
    assert_eq!(logits.unwrap().dims(), [1, 20, 256]);

    // Import restores the same bytes, in either format.
    let record = folder.path("record");
    succeed(format!("export --run {run} --out {record}"));
    let record = folder.path("record/model.bpk");
    for (weights, name) in [(weights, "imported"), (record, "again")] {
        let imported = folder.path(name);
        let import = format!("import --weights {weights} --run {imported} --like {run}");
        says(succeed(&import), "train --resume --run");
        let [got, expected] = [imported, folder.path("run/best.ckpt")]
            .map(|of| bits(&succeed(format!("eval --checkpoint {of}"))));
        assert_eq!(got, expected);
        says(fail(&import, 1), "already holds a run");
    }
    // Trained further from step 0.
    says(folder.resume("imported", "--steps 2"), "step-00000000.ckpt");
    assert!(folder.checkpoint("imported", 2).exists());
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    let folder = Folder::new();
    folder.train("run", "--steps 2");
    let (run, out) = (folder.path("run"), folder.path("exported"));
    let line = format!("export --run {run} --out {out} --format safetensors");
    succeed(line);
    let imported = folder.path("new");
    // The preset has other sizes.
    let import = format!("import --weights {out}/model.safetensors --run {imported}");
    let parts = [
        "does not fit the model, of which nothing was loaded",
        "missing: blocks.1.mha.key.bias",
        "blocks.0.mha.key.bias must be [128], got [16]",
    ];
    says_all(fail(&import, 1), &parts);
    let message = fail(format!("{import} --key model"), 1);
    says(message, "--key is for files of PyTorch");
    let other = folder.file("weights.npz", "");
    let message = fail(format!("import --weights {other} --run {imported}"), 1);
    says(message, ".safetensors, .pt, .pth");
    assert!(!folder.exists("new"));
}
