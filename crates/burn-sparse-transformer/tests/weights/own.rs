//! The library's own model in PyTorch, `examples/enwik8/pytorch/sparse_transformer.py`, in both directions.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_sparse_transformer::feed_forward::FeedForwardSparsity;
use burn_sparse_transformer::weights::{KeyMap, WeightsFile, save_safetensors};
use burn_sparse_transformer::{Factorization, Pattern, SparseTransformer, SparseTransformerConfig};

use crate::support::*;

#[test]
fn weights_of_pytorch_give_its_logits() {
    let golden = open("own.golden.safetensors");
    let tokens = ints(&golden, "tokens");
    let expected = floats(&golden, "logits");
    let nested = WeightsFile::open_pytorch(path("own.nested.pt"), "model").unwrap();
    for file in [open("own.safetensors"), open("own.pt"), nested] {
        let model = file.load(&own_model(16), &KeyMap::pytorch()).unwrap();
        let logits = model.forward(tokens.clone());
        assert_close(&numbers(logits), &expected);
    }
}

/// Saved weights equal PyTorch's file bit for bit, so PyTorch can read them.
#[test]
fn saved_weights_are_the_file_that_pytorch_wrote() {
    let written_by_pytorch = open("own.safetensors");
    let model = written_by_pytorch.load(&own_model(16), &KeyMap::pytorch());
    let file = Scratch::new("saved.safetensors");
    save_safetensors(&model.unwrap(), &file.0, &KeyMap::pytorch(), false).unwrap();
    let saved = WeightsFile::open(&file.0).unwrap();
    let names: Vec<&str> = saved.names().collect();
    assert_eq!(names, written_by_pytorch.names().collect::<Vec<_>>());
    assert_eq!(names.len(), 38);
    for name in names {
        let (saved, written) = (saved.tensor(name), written_by_pytorch.tensor(name));
        assert_eq!(saved.unwrap(), written.unwrap(), "{name}");
    }
}

/// Burn's own files are read by their own names.
#[test]
fn records_of_burn_are_weights_too() {
    let model = open("own.safetensors").load(&own_model(16), &KeyMap::pytorch());
    let model = model.unwrap();
    let file = Scratch::new("record.bpk");
    model.clone().into_record().save(&file.0).unwrap();
    let record = WeightsFile::open(&file.0).unwrap();
    let loaded = record.load(&own_model(16), &KeyMap::default()).unwrap();
    let tokens = ints(&open("own.golden.safetensors"), "tokens");
    let logits = |tokens| numbers(model.forward(tokens));
    let again = numbers(loaded.forward(tokens.clone()));
    assert!(again == logits(tokens));
}

/// The kept blocks are part of the file, and may differ from those of the model that loads it.
#[test]
fn block_sparse_weights_bring_their_blocks() {
    let model = |seed| {
        let sparsity = FeedForwardSparsity::new(0.5).with_block(16).with_seed(seed);
        SparseTransformerConfig::new(64, 2, Factorization::from(Pattern::local(8)))
            .with_vocab_size(16)
            .with_context(16)
            .with_n_layers(1)
            .with_d_ff(Some(128))
            .with_block_size(8)
            .with_feed_forward_sparsity(Some(sparsity))
            .init(&Device::flex())
    };
    let saved = model(1);
    let file = Scratch::new("blocks.safetensors");
    save_safetensors(&saved, &file.0, &KeyMap::pytorch(), false).unwrap();
    let other = model(2);
    let layouts = [&saved, &other].map(|model| {
        let layer = model.blocks[0].pwff.linear_inner.as_block_sparse();
        layer.unwrap().layout().unwrap()
    });
    assert!(layouts[0] != layouts[1]);
    let file = WeightsFile::open(&file.0).unwrap();
    let loaded = file.load(&other, &KeyMap::pytorch()).unwrap();
    let layer = loaded.blocks[0].pwff.linear_inner.as_block_sparse();
    assert!(layer.unwrap().layout().unwrap() == layouts[0]);
    let x = (0..16 * 64).map(|i| (i % 13) as f32 - 6.0).collect();
    let x = Tensor::<3>::from_data(TensorData::new(x, [1, 16, 64]), &Device::flex());
    let of = |model: &SparseTransformer| numbers(model.blocks[0].forward(x.clone()));
    assert!(of(&loaded) == of(&saved) && of(&loaded) != of(&other));
}

/// Loaded parameters of a model in training remain leaves with their ids, on its device.
#[test]
fn loaded_parameters_are_trained() {
    let model = own_model(16).train();
    let loaded = open("own.pt").load(&model, &KeyMap::pytorch()).unwrap();
    assert_eq!(loaded.output.weight.id, model.output.weight.id);
    let tokens = TensorData::new(vec![1, 2, 3], [1, 3]);
    let device = Device::flex().autodiff();
    let tokens = Tensor::<2, Int>::from_data(tokens, &device);
    let grads = loaded.forward(tokens).powi_scalar(2).sum().backward();
    let grad = loaded.blocks[0].mha.query.weight.val().grad(&grads);
    assert!(grad.unwrap().abs().max().into_scalar::<f32>() > 0.0);
}
