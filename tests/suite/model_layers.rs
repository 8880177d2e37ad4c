//! Models whose layers select keys by an indexer, on each device against themselves; CPU tests cover the rest.

use burn::module::Module;
use burn_blocksparse_tests::prelude::*;
use burn_fused_ops::optim::FusedAdamWConfig;
use burn_paged_attention::pool::{KvPoolConfig, KvStep, PagedDecoder};
use burn_sparse_transformer::dsa::DsaStage;
use burn_sparse_transformer::{
    Factorization, Pattern, Recompute, SparseTransformer, SparseTransformerConfig,
};

burn_blocksparse_tests::tests!(model_layers);

const SEQ: usize = 48;

fn model(device: &Device) -> SparseTransformer {
    device.seed(41);
    SparseTransformerConfig::new(32, 2, Factorization::from(Pattern::causal()))
        .with_vocab_size(11)
        .with_context(SEQ)
        .with_n_layers(1)
        .with_n_kv_heads(Some(1))
        .with_block_size(16)
        .with_init_scale(1.0)
        .with_content(Some("dsa:12,3,2,8".parse().unwrap()))
        .try_init(device)
        .unwrap()
        .materialize()
}

fn tokens(batch: usize, device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = (0..batch * SEQ).map(|i| (i * i * 7 % 11) as i32).collect();
    Tensor::<1, Int>::from_ints(ids.as_slice(), device).reshape([batch, SEQ])
}

/// Ties the output to the embedding, since an output of zeros would hide the residual stream.
fn with_output(mut model: SparseTransformer) -> SparseTransformer {
    let weight = model.token_embedding.weight.val().transpose();
    model.output.weight = model.output.weight.map(|_| weight.detach());
    model
}

/// Prompts of two lengths, then single tokens, from pages whose keys are gathered.
#[test]
fn indexers_choose_from_pages_what_they_choose_in_the_whole() {
    for device in devices() {
        let model = with_output(model(&device));
        let tokens = tokens(2, &device);
        let whole = model.try_forward(tokens.clone()).unwrap();
        let mut pool = model.new_pool(&KvPoolConfig::new(2, SEQ)).unwrap();
        let ids = [(); 2].map(|_| pool.join().unwrap());
        let mut lengths = [0, 0];
        for counts in [[30, 21], [1, 1], [3, 2]] {
            let most = counts[0].max(counts[1]);
            let part = |entry: usize| {
                let from = lengths[entry].min(SEQ - most);
                assert_eq!(from, lengths[entry]);
                tokens.clone().slice([entry..entry + 1, from..from + most])
            };
            let rows = Tensor::cat(vec![part(0), part(1)], 0);
            let steps = [0, 1].map(|entry| KvStep::new(ids[entry], counts[entry]));
            let logits = model.try_forward_pool(rows, &steps, &mut pool).unwrap();
            for entry in [0, 1] {
                let rows = |x: &Tensor<3>, first: usize| {
                    let x = x.clone().narrow(0, entry, 1);
                    x.narrow(1, first, counts[entry]).into_data()
                };
                let (got, expected) = (rows(&logits, 0), to_f64(rows(&whole, lengths[entry])));
                assert_close(&format!("{device:?}"), got, &expected, 2e-3);
                lengths[entry] += counts[entry];
            }
        }
    }
}

/// A warm-up lowers the indexers' loss and changes nothing else; steps with the selection then lower the model's loss.
#[test]
fn indexers_learn_on_each_device() {
    for device in devices() {
        let autodiff = device.clone().autodiff();
        let tokens = tokens(2, &autodiff);
        let mut model = with_output(model(&autodiff));
        let mut optimizer = FusedAdamWConfig::new().init();
        let mut found = Vec::new();
        for step in 0..7 {
            let (stage, rate) = match step {
                0..5 => (DsaStage::WarmUp, 1e-2),
                _ => (DsaStage::Sparse, 1e-3),
            };
            model = model.with_dsa_stage(stage).unwrap();
            let (losses, gradients) = model
                .losses_and_gradients(tokens.clone(), tokens.clone(), 0, 1u64, Recompute::BLOCK)
                .unwrap();
            let numbers = [losses.loss, losses.aux_loss.unwrap()];
            found.push(numbers.map(|x| to_f64(x.into_data())[0]));
            (model, _) = optimizer.step(rate, model, gradients).unwrap();
        }
        let what = format!("{device:?}: {found:?}");
        assert!(found[4][1] < 0.98 * found[0][1], "{what}");
        let mut warm_up = found[..5].iter();
        let is_same = warm_up.all(|[loss, _]| (loss - found[0][0]).abs() < 1e-5);
        assert!(is_same, "{what}");
        assert!(found[6][0] < found[5][0], "{what}");
        assert!(found.iter().flatten().all(|x| x.is_finite()), "{what}");
    }
}
