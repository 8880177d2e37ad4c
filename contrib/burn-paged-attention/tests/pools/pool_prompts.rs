//! Pools whose selections apply to prompts only: prompts give the results of `forward`, and later tokens see all keys.

use burn_sparse_transformer::HeadSelections;

use crate::prelude::*;
use crate::texts::{VOCAB, config, part};

/// Lengths of two prompts.
const READ: [usize; 2] = [75, 58];
/// Number of tokens after each.
const MORE: usize = 3;

fn model(n_layers: usize, pattern: Pattern, kv_heads: usize, device: &Device) -> SparseTransformer {
    let config = config(pattern, n_layers, kv_heads);
    randomise(config.try_init(device).unwrap())
}

/// Adds a selection for all heads, or one per head.
fn choosing(model: &SparseTransformer, text: &str) -> SparseTransformer {
    let (model, layers) = (model.clone(), model.blocks.len());
    match text.contains('/') {
        true => {
            let heads: HeadSelections = text.parse().unwrap();
            let layers = vec![Some(heads); layers];
            model.with_head_selections(layers).unwrap()
        }
        false => (model.with_selections(&[text.parse().unwrap()], 0)).unwrap(),
    }
}

fn last_row(model: &SparseTransformer, tokens: Tensor<2, Int>) -> Tensor<3> {
    let seq = tokens.dims()[1];
    model.try_forward(tokens).unwrap().narrow(1, seq - 1, 1)
}

const BY_HEAD: &str = "topk:8,3 / moba:16,2 / pattern / minference:8,4,3,9,sinks=2,window=3";

#[rstest]
#[case::means("topk:8,3", Pattern::causal(), 4)]
#[case::last_queries("minference:8,4,3,9,sinks=2,window=3", Pattern::causal(), 2)]
#[case::within_a_window("topk:8,2", Pattern::local(40), 4)]
#[case::bounds("quest:16,48", Pattern::causal(), 2)]
#[case::by_head(BY_HEAD, Pattern::causal(), 2)]
#[case::by_head_within_a_window("topk:8,2 / pattern", Pattern::local(40), 4)]
fn prompts_choose_and_what_follows_sees_all_keys(
    #[case] text: &str,
    #[case] pattern: Pattern,
    #[case] kv_heads: usize,
    #[values(true, false)] even: bool,
) {
    let (device, _guard) = seeded(Device::flex(), 5);
    let read = if even { [READ[0]; 2] } else { READ };
    for layers in [1, 2] {
        let plain = model(layers, pattern.clone(), kv_heads, &device);
        let model = choosing(&plain, text);
        let tokens = tokens(2, READ[0] + MORE, VOCAB, &device);
        let of = |entry: usize, to: usize| part(&tokens, entry, 0..to);
        let config = KvPoolConfig::new(2, 128).with_choosing_prompts();
        let mut pool = model.new_pool(&config).unwrap();
        let ids = [(); 2].map(|_| pool.join().unwrap());
        let steps = [0, 1].map(|entry| KvStep::new(ids[entry], read[entry]));
        let prompts = tokens.clone().narrow(1, 0, READ[0]);
        let logits = model.try_forward_pool(prompts, &steps, &mut pool).unwrap();
        for (entry, &count) in read.iter().enumerate() {
            let prompt = of(entry, count);
            let got = logits.clone().narrow(0, entry, 1).narrow(1, 0, count);
            let whole = model.try_forward(prompt.clone()).unwrap();
            assert_close(got.clone(), whole, 2e-4);
            let difference = (got - plain.try_forward(prompt).unwrap()).abs().max();
            assert!(difference.into_scalar::<f32>() > 1e-3, "nothing was chosen");
        }
        for more in 0..MORE {
            let next = [0, 1].map(|entry| {
                let at = read[entry] + more;
                part(&tokens, entry, at..at + 1)
            });
            let steps = ids.map(|id| KvStep::new(id, 1));
            let logits = model.try_forward_pool(Tensor::cat(next.to_vec(), 0), &steps, &mut pool);
            let logits = logits.unwrap();
            // Keys of the first layer do not depend on what a prompt attended to.
            for entry in (0..2).filter(|_| layers == 1) {
                let expected = last_row(&plain, of(entry, read[entry] + more + 1));
                assert_close(logits.clone().narrow(0, entry, 1), expected, 2e-4);
            }
        }
        pool.verify().unwrap();
    }
}

#[test]
fn what_cannot_be_read_by_a_choice_is_refused() {
    let (device, _guard) = seeded(Device::flex(), 6);
    let plain = model(1, Pattern::causal(), 4, &device);
    let [alike, by_head] = ["topk:8,3", "topk:8,3 / pattern"].map(|text| choosing(&plain, text));
    let pool = KvPoolConfig::new(2, 64);
    let choosing = || pool.clone().with_choosing_prompts();
    let window = window(8, 2);
    refused! {
        alike.new_pool(&pool) => "selection must be prefix stable with a cache…";
        by_head.new_pool(&pool) => "head_selections must be none here…";
        by_head.new_pool(&choosing().with_prefix_reuse()) => "prefix_reuse must be none where prompts choose…";
        by_head.new_pool(&choosing().with_residency(window)) => "residency must be All, Reachable or by eviction where prompts choose…";
        alike.new_pool(&choosing().with_eviction(EvictionConfig::tova(16))) => "eviction must be none that goes by attention to all keys…";
    }
    // A prompt in a call with a continued text would be read without its selection.
    let mut pool = by_head.new_pool(&pool.with_choosing_prompts()).unwrap();
    let ids = [(); 2].map(|_| pool.join().unwrap());
    let tokens = tokens(2, 20, VOCAB, &device);
    let first = [KvStep::new(ids[0], 20)];
    let prompt = tokens.clone().narrow(0, 0, 1);
    by_head.try_forward_pool(prompt, &first, &mut pool).unwrap();
    let both = ids.map(|id| KvStep::new(id, 20));
    refused! { by_head.try_forward_pool(tokens.clone(), &both, &mut pool) => "steps must be prompts alone, or none of more than one token…"; }
    // Nothing was written, and the two continue in separate calls.
    assert_eq!(ids.map(|id| pool.len(id).unwrap()), [20, 0]);
    let second = tokens.narrow(0, 1, 1);
    let logits = by_head.try_forward_pool(second.clone(), &[KvStep::new(ids[1], 20)], &mut pool);
    assert_close(logits.unwrap(), by_head.try_forward(second).unwrap(), 2e-4);
}
