//! Recordings of decoding: steps of a model on a pool.

use burn_paged_attention::pool::{
    GraphDecoder, KvDtype, KvPool, KvPoolConfig, KvStep, PagedDecoder,
};
use burn_sparse_transformer::{
    BlockAttentionConfig, Factorization, Pattern, SparseTransformer, SparseTransformerConfig,
};

use crate::prelude::*;

const VOCAB: usize = 11;
const CONTEXT: usize = 96;

fn model(pattern: Pattern, device: &Device) -> SparseTransformer {
    model_with(pattern, &[], device)
}

/// With selections, by which there are no sinks.
fn model_with(pattern: Pattern, selections: &[&str], device: &Device) -> SparseTransformer {
    config(pattern, selections, device)
        .try_init(device)
        .unwrap()
}

fn config(pattern: Pattern, selections: &[&str], device: &Device) -> SparseTransformerConfig {
    device.seed(7);
    let chosen = selections.iter().map(|text| text.parse().unwrap());
    SparseTransformerConfig::new(32, 4, Factorization::from(pattern))
        .with_vocab_size(VOCAB)
        .with_context(CONTEXT)
        .with_n_layers(2)
        .with_block_size(8)
        .with_n_kv_heads(Some(2))
        .with_init_scale(1.0)
        .with_attention(Some(
            BlockAttentionConfig::new()
                .with_rope_theta(Some(1000.0))
                .with_sinks(selections.is_empty()),
        ))
        .with_selections((!selections.is_empty()).then(|| chosen.collect()))
}

/// The same bits as steps that run one by one: while a batch goes on, when it changes, behind a fork, a step back and several tokens at once.
pub fn replayed_decoding_equals_plain_decoding(devices: &[Device]) {
    for device in devices {
        // A number that is rounded up instead of down is half a hundredth.
        let rows = [
            (Pattern::fixed(16, 4), KvDtype::Model, 2e-5),
            (Pattern::local(20), KvDtype::Model, 2e-5),
            (Pattern::causal(), KvDtype::Model, 2e-5),
            (Pattern::fixed(16, 4), KvDtype::Int8, 1e-2),
        ];
        for (pattern, dtype, tolerance) in some_of(rows, 2) {
            let what = format!("{pattern}, {dtype:?} on {device:?}");
            let model = model(pattern, device);
            replayed_equals_plain(&what, model, dtype, tolerance, device);
        }
    }
}

/// The same where queries choose pages, of which 96 tokens have six.
pub fn replayed_decoding_chooses_pages(devices: &[Device]) {
    for device in devices {
        let model = model_with(Pattern::causal(), &["quest:16,48,1"], device);
        for (dtype, tolerance) in some_of([(KvDtype::Model, 2e-5), (KvDtype::Int8, 1e-2)], 2) {
            let what = format!("quest, {dtype:?} on {device:?}");
            replayed_equals_plain(&what, model.clone(), dtype, tolerance, device);
        }
    }
}

/// The same where an indexer chooses single keys, 12 of them, or three blocks of 16.
pub fn replayed_decoding_chooses_keys(devices: &[Device]) {
    for (text, device) in ["dsa:12,3,2,8", "msa:16,3,8"]
        .into_iter()
        .flat_map(|text| devices.iter().map(move |device| (text, device)))
    {
        let attention = BlockAttentionConfig::new().with_rope_theta(Some(1000.0));
        let model = config(Pattern::causal(), &[], device)
            .with_attention(Some(attention))
            .with_content(Some(text.parse().unwrap()))
            .try_init(device)
            .unwrap();
        for (dtype, tolerance) in some_of([(KvDtype::Model, 2e-5), (KvDtype::Int8, 1e-2)], 2) {
            let what = format!("{text}, {dtype:?} on {device:?}");
            replayed_equals_plain(&what, model.clone(), dtype, tolerance, device);
        }
    }
}

/// The same of three branches, where a block of 16 of six is chosen and a block of 8 ends every 4 tokens of each sequence.
pub fn replayed_decoding_sees_three_branches(devices: &[Device]) {
    for device in devices {
        let texts = ["nsa:8,4,16,3,20", "nsa:8,4,16,4,20,mlp,shared"];
        let rows = texts.into_iter().flat_map(|text| {
            [(KvDtype::Model, 2e-5), (KvDtype::Int8, 1e-2)].map(|of_pool| (text, of_pool))
        });
        for (text, (dtype, tolerance)) in some_of(rows, 4) {
            let content = Some(text.parse().unwrap());
            let model = config(Pattern::causal(), &[], device);
            let attention = BlockAttentionConfig::new().with_rope_theta(Some(1000.0));
            let model = model
                .with_attention(Some(attention))
                .with_content(content)
                .try_init(device)
                .unwrap();
            let what = format!("{text}, {dtype:?} on {device:?}");
            replayed_equals_plain(&what, model, dtype, tolerance, device);
        }
    }
}

fn replayed_equals_plain(
    what: &str,
    model: SparseTransformer,
    dtype: KvDtype,
    tolerance: f32,
    device: &Device,
) {
    let config = KvPoolConfig::new(3, CONTEXT)
        .with_page_size(16)
        .with_dtype(dtype);
    let mut plain = model.new_pool(&config).unwrap();
    let pool = model.new_pool(&config).unwrap();
    let mut decoder = GraphDecoder::new(model.clone(), pool).unwrap();
    let mut recorded = 0;
    let mut step = |decoder: &mut GraphDecoder<SparseTransformer>,
                    plain: &mut KvPool,
                    steps: &[KvStep],
                    seed: usize| {
        let count: usize = steps[0].tokens;
        let tokens: Vec<u32> = (0..count * steps.len())
            .map(|i| ((i * 5 + seed * 3) % VOCAB) as u32)
            .collect();
        let data: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let data = TensorData::new(data, [steps.len(), count]);
        let data = Tensor::<2, Int>::from_data(data, device);
        let expected = model.next_logits(data, steps, plain).unwrap().into_data();
        let got = decoder.next_logits(&tokens, steps).unwrap().into_data();
        got.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::absolute(tolerance));
        recorded += usize::from(decoder.is_recorded());
        assert!(!decoder.is_recorded() || decoder.fallback_reason().is_none());
    };
    // Both pools name sequences alike.
    let join = |decoder: &mut GraphDecoder<SparseTransformer>, plain: &mut KvPool| {
        let id = plain.join().unwrap();
        assert_eq!(decoder.pool_mut().join().unwrap(), id);
        id
    };
    let a = join(&mut decoder, &mut plain);
    let b = join(&mut decoder, &mut plain);
    step(&mut decoder, &mut plain, &[KvStep::new(a, 5)], 0);
    step(&mut decoder, &mut plain, &[KvStep::new(b, 19)], 1);
    // Over the ends of pages, with lengths that differ.
    for seed in 0..20 {
        step(
            &mut decoder,
            &mut plain,
            &[KvStep::new(a, 1), KvStep::new(b, 1)],
            seed,
        );
    }
    let c = plain.fork(a).unwrap();
    assert_eq!(decoder.pool_mut().fork(a).unwrap(), c);
    for seed in 0..6 {
        let steps = [c, b, a].map(|id| KvStep::new(id, 1));
        step(&mut decoder, &mut plain, &steps, seed);
    }
    decoder.pool_mut().leave(b).unwrap();
    plain.leave(b).unwrap();
    step(&mut decoder, &mut plain, &[KvStep::new(a, 3)], 4);
    for seed in 0..8 {
        step(&mut decoder, &mut plain, &[KvStep::new(c, 1)], seed);
    }
    decoder.pool().verify().unwrap();
    assert_eq!(decoder.pool().len(c), plain.len(c), "{what}");
    eprintln!("{what}: {recorded} steps of a recording");
}

/// A step that fails changes nothing, and the next one goes on.
pub fn replayed_decoding_survives_errors(devices: &[Device]) {
    for device in devices {
        let model = model(Pattern::causal(), device);
        let pool = model.new_pool(&KvPoolConfig::new(1, CONTEXT)).unwrap();
        let mut decoder = GraphDecoder::new(model, pool).unwrap();
        let id = decoder.pool_mut().join().unwrap();
        let one = [KvStep::new(id, 1)];
        for token in 0..CONTEXT as u32 {
            refused! { decoder.next_logits(&[1, 2, 3], &[one[0]; 2]) => "tokens must be rows for 2 sequences, got 3"; }
            decoder.next_logits(&[token % 11], &one).unwrap();
        }
        let full = decoder.next_logits(&[1], &one).unwrap_err().to_string();
        assert!(full.contains("context"), "{full}");
        assert_eq!(decoder.pool().len(id).unwrap(), CONTEXT);
        decoder.pool_mut().truncate(id, CONTEXT - 1).unwrap();
        decoder.next_logits(&[1], &one).unwrap();
    }
}

/// Sequences take no more memory of a device that says how much it has reserved than those before them did, at any of their lengths: buffers come back,
/// whether a step has one token, or three of which two are taken back. Longer sequences gather more, in larger buffers, so lengths are compared with lengths.
pub fn decoding_reserves_nothing_more(devices: &[Device]) {
    const STEPS: usize = CONTEXT / 2;
    for device in devices {
        let reserved = || {
            let usage = device.memory_pool_usage();
            usage.map_or(0, |usage| usage.bytes_reserved)
        };
        let model = model(Pattern::fixed(16, 4), device);
        let config = KvPoolConfig::new(2, CONTEXT)
            .with_page_size(16)
            .with_chunk(3)
            .with_rollback(2);
        let mut pool = model.new_pool(&config).unwrap();
        let mut most = [0; 2];
        for most in &mut most {
            let ids = [(); 2].map(|()| pool.join().unwrap());
            for seed in 0..STEPS {
                let count = if seed % 3 == 2 { 3 } else { 1 };
                let tokens = (0..2 * count).map(|i| ((i * 5 + seed * 3) % VOCAB) as i32);
                let tokens = TensorData::new(tokens.collect::<Vec<i32>>(), [2, count]);
                let tokens = Tensor::<2, Int>::from_data(tokens, device);
                let steps = ids.map(|id| KvStep::new(id, count));
                let logits = model.try_forward_pool(tokens, &steps, &mut pool).unwrap();
                assert!(!logits.sum().into_scalar::<f32>().is_nan());
                for id in ids {
                    let len = pool.len(id).unwrap();
                    pool.truncate(id, len - (count - 1)).unwrap();
                }
                *most = reserved().max(*most);
            }
            for id in ids {
                assert_eq!(pool.len(id).unwrap(), STEPS);
                pool.leave(id).unwrap();
            }
        }
        assert!(most[1] <= most[0], "{device:?}: {most:?} bytes");
    }
}
