//! One sequence over several devices, against f64 over the whole sequence.

use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use burn::module::Module;
use burn::nn::Linear;
use burn::optim::GradientsParams;
use burn_blocksparse::{Exchange, Processes, SequenceShard, ShardPlan, alibi_slopes};
use burn_sparse_transformer::{
    BlockAttentionConfig, Factorization, Recompute, SparseTransformer, SparseTransformerConfig,
    TransformerShard,
};

use burn_blocksparse_tests::prelude::*;

const SEQ: usize = 192;

/// Returns patterns with block size, heads and KV heads.
fn layouts() -> Vec<(BlockLayout, usize)> {
    [
        (Pattern::local(40), 16, 2, 2),
        (Pattern::streaming(30, 10), 8, 4, 2),
        (Pattern::fixed(32, 8), 8, 4, 4),
        // Heads that receive different blocks, and different numbers of them.
        (Pattern::fixed_heads(32, 8, 4), 8, 4, 4),
        (
            Pattern::per_head([Pattern::local(20), Pattern::strided(24)]),
            8,
            4,
            4,
        ),
        (
            Pattern::per_head([Pattern::local(20), Pattern::fixed(48, 8)]),
            8,
            6,
            3,
        ),
        (Pattern::merged_strided(24), 16, 2, 1),
        // To both sides.
        (Pattern::longformer(20, 1, [0, 1, 100]), 8, 2, 2),
        // Some devices receive nothing.
        (Pattern::documents([0, 96, 100]).and_causal(), 16, 2, 2),
        (Pattern::causal(), 32, 2, 1),
        (Pattern::dense(), 32, 2, 2),
    ]
    .into_iter()
    .map(|(pattern, block_size, heads, kv_heads)| {
        (pattern.layout(heads, SEQ, block_size).unwrap(), kv_heads)
    })
    .collect()
}

fn problem(layout: &BlockLayout, kv_heads: usize, seed: u64) -> Problem {
    let heads = layout.heads();
    let sizes = Sizes::new([2, heads, kv_heads], [SEQ, SEQ], [8, 12]);
    Problem::random(sizes, seed, pairs_of(layout))
}

/// Returns the output and gradients of each device's rows.
fn parts(
    problem: &Problem,
    shards: Vec<SequenceShard>,
    devices: &[Device],
    dtype: DType,
) -> Vec<Results> {
    let own = shards.into_iter().zip(devices).map(|(shard, device)| {
        let device = device.clone().autodiff();
        let rows = inputs(problem, &device, dtype).map(|x| shard.rows(x, 2));
        (shard, rows)
    });
    in_threads(own, |(shard, [q, k, v, grad_out])| {
        let [q, k, v] = [q, k, v].map(|x| x.detach().require_grad());
        let leaves = [q.clone(), k.clone(), v.clone()];
        let options = AttentionOptions::default().softcap(5.0);
        let out = shard.attention(q, k, v, options).unwrap().out;
        with_gradients(out, grad_out, leaves)
    })
}

/// Runs a function on each item in its own thread.
fn in_threads<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    run: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let run = &run;
        let running = items.into_iter().map(|item| scope.spawn(move || run(item)));
        let running: Vec<_> = running.collect();
        let joined = running.into_iter().map(|part| part.join().unwrap());
        joined.collect()
    })
}

/// Concatenates the rows of all devices in the order of the sequence.
fn whole(plan: &ShardPlan, parts: &[Results]) -> Results {
    let one = |at: usize| {
        let (name, first) = &parts[0][at];
        let [outer, width] = [first.shape()[0] * first.shape()[1], first.shape()[3]];
        let mut all = vec![f64::NAN; outer * SEQ * width];
        for (device, part) in parts.iter().enumerate() {
            let data = part[at].1.clone().convert::<f64>();
            let mut rows = data.as_slice::<f64>().unwrap().chunks(width);
            for head in 0..outer {
                for position in plan.positions(device).into_iter().flatten() {
                    let place = (head * SEQ + position) * width;
                    all[place..place + width].copy_from_slice(rows.next().unwrap());
                }
            }
        }
        let [batch, heads, _, _] = first.shape().dims();
        (*name, TensorData::new(all, [batch, heads, SEQ, width]))
    };
    (0..parts[0].len()).map(one).collect()
}

#[test]
fn attention_over_shards_equals_f64() {
    for (index, (layout, kv_heads)) in layouts().into_iter().enumerate() {
        let problem = problem(&layout, kv_heads, index as u64).options(None, Some(5.0));
        let answer = problem.solve();
        for (device, dtype, tolerance) in exact(&devices()) {
            for devices in [2, 3] {
                for plan in [
                    ShardPlan::new(&layout, kv_heads, devices).unwrap(),
                    ShardPlan::with_pieces(&layout, kv_heads, devices, 2).unwrap(),
                ] {
                    let devices = vec![device.clone(); devices];
                    let shards = SequenceShard::group(&plan);
                    let parts = parts(&problem, shards, &devices, dtype);
                    let what = format!("{}, {device:?}, {dtype:?}, {plan}", layout.name());
                    let bounds = [Near::Tensor(tolerance), Near::Rows(dtype)];
                    answer.assert(&what, whole(&plan, &parts), &bounds);
                }
            }
        }
    }
}

#[test]
fn the_same_shards_give_the_same_bits() {
    let layout = Pattern::fixed_heads(32, 8, 2).layout(2, SEQ, 8).unwrap();
    let problem = problem(&layout, 2, 77);
    for device in devices() {
        let devices = vec![device; 3];
        let plan = ShardPlan::new(&layout, 2, 3).unwrap();
        let run = || {
            let shards = SequenceShard::group(&plan);
            parts(&problem, shards, &devices, DType::F32)
        };
        let first = run();
        for _ in 0..3 {
            assert_eq!(run(), first);
        }
    }
}

#[test]
fn devices_of_two_kinds_share_a_sequence() {
    let Some(devices) = two_devices() else {
        return;
    };
    let layout = Pattern::streaming(40, 10).layout(2, SEQ, 16).unwrap();
    let problem = problem(&layout, 2, 78).options(None, Some(5.0));
    let plan = ShardPlan::new(&layout, 2, 2).unwrap();
    let shards = SequenceShard::group(&plan);
    let parts = parts(&problem, shards, &devices, DType::F32);
    let answer = problem.solve();
    answer.assert("two kinds", whole(&plan, &parts), &[Near::Tensor(1e-5)]);
}

/// Returns the keys, `[2, kv_heads, SEQ, 8]`, that each device gathers, as bytes.
fn gathered(shards: Vec<SequenceShard>, devices: &[Device], keys: &TensorData) -> Vec<Vec<u8>> {
    in_threads(shards.into_iter().zip(devices), |(shard, device)| {
        let whole = Tensor::<4>::from_data(keys.clone(), (device, keys.dtype()));
        let own = shard.rows(whole, 2);
        let [k, v] = shard.gather(own.clone(), own).unwrap();
        let bytes = [k, v].map(|x| x.into_data().as_bytes().to_vec());
        bytes.concat()
    })
}

/// Needs several CUDA devices (`BURN_SPARSE_DEVICE=cuda`) and NCCL.
#[test]
fn keys_cross_by_nccl_as_by_the_host() {
    let Some(devices) = cuda_devices() else {
        return;
    };
    let exchange = Exchange::nccl(&devices).unwrap();
    for (index, (layout, kv_heads)) in layouts().into_iter().enumerate() {
        let plan = ShardPlan::new(&layout, kv_heads, devices.len()).unwrap();
        let shards = || SequenceShard::group_by(&plan, &exchange).unwrap();
        let name = layout.name();
        // All bits, including −0 and NaN.
        let bits = (0..2 * kv_heads * SEQ * 8).map(|x| (x as u32).wrapping_mul(0x9E37_79B9));
        let bytes: Vec<u8> = bits
            .flat_map(|bits| [bits, 1 << 31].map(u32::to_le_bytes)[(bits % 7 == 0) as usize])
            .collect();
        for dtype in [DType::F32, DType::BF16] {
            let size = bytes.len() * dtype.size() / 4;
            let shape = [2, kv_heads, SEQ, 8];
            let keys = TensorData::from_bytes_vec(bytes[..size].to_vec(), shape, dtype);
            let expected = gathered(SequenceShard::group(&plan), &devices, &keys);
            let is_same = gathered(shards(), &devices, &keys) == expected;
            assert!(is_same, "{name}, {dtype:?}: other bits");
        }
        let problem = problem(&layout, kv_heads, index as u64).options(None, Some(5.0));
        let answer = problem.solve();
        let run = || parts(&problem, shards(), &devices, DType::F32);
        let first = run();
        let bounds = [Near::Tensor(1e-5), Near::Rows(DType::F32)];
        answer.assert(name, whole(&plan, &first), &bounds);
        for _ in 0..10 {
            assert_eq!(run(), first, "{name}");
        }
    }
}

/// Uses threads instead of processes; one group does not begin with rank 0.
#[test]
fn keys_cross_between_processes_as_by_the_host() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let join = |rank| Arc::new(Processes::join(rank, 3, "127.0.0.1", port).unwrap());
    let processes = in_threads(0..3, join);
    for ranks in [0..3, 1..3] {
        let count = ranks.len();
        let devices = vec![devices().remove(0); count];
        for (index, (layout, kv_heads)) in layouts().into_iter().take(4).enumerate() {
            let plan = ShardPlan::new(&layout, kv_heads, count).unwrap();
            let shards = processes[ranks.clone()].iter().flat_map(|one| {
                let exchange = Exchange::processes(one, ranks.clone()).unwrap();
                SequenceShard::group_by(&plan, &exchange).unwrap()
            });
            let shards: Vec<_> = shards.collect();
            assert_eq!(shards.len(), count);
            let problem = problem(&layout, kv_heads, index as u64);
            let expected = parts(&problem, SequenceShard::group(&plan), &devices, DType::F32);
            let found = parts(&problem, shards, &devices, DType::F32);
            assert_eq!(found, expected, "{}", layout.name());
        }
    }
    refused! { Exchange::processes(&processes[0], 1..3) => "ranks must be some of 0..3 with 0, this process, got 1..3"; }
    let [sent, received] = processes[0].traffic();
    assert!(sent > 0 && received > sent / 2, "{sent}, {received}");
}

#[test]
fn an_exchange_of_devices_that_have_none_is_refused() {
    let device = devices().remove(0);
    if format!("{device:?}").contains("Cuda") {
        return;
    }
    let found = Exchange::best(&[device.clone(), device.clone()]);
    assert_eq!(found, Exchange::default());
    assert_eq!(found.to_string(), "the host");
    refused! { Exchange::nccl(&[device.clone(), device]) => "device must be a CUDA device…"; }
}

#[test]
fn nobody_waits_for_a_device_that_has_left() {
    let layout = Pattern::local(40).layout(2, SEQ, 16).unwrap();
    let plan = ShardPlan::with_pieces(&layout, 2, 2, 1).unwrap();
    let device = devices().remove(0).autodiff();
    let x = || Tensor::<4>::ones([1, 2, SEQ / 2, 8], &device).require_grad();
    let attend =
        |shard: &SequenceShard| shard.attention(x(), x(), x(), AttentionOptions::default());
    let text = "which shares the sequence, must go on until all have finished, but it has left";

    let mut shards = SequenceShard::group(&plan);
    drop(shards.remove(0));
    refused! { attend(&shards[0]).map(|output| output.out) => format!("device 0, {text}"); }

    // Device 0 needs only gradients from device 1.
    let mut shards = SequenceShard::group(&plan);
    let out = attend(&shards[0]).unwrap().out;
    drop(shards.remove(1));
    let backward = catch_unwind(AssertUnwindSafe(|| out.sum().backward()));
    let panic = backward.err().unwrap();
    assert_eq!(panic.downcast_ref(), Some(&format!("device 1, {text}")));
}

#[test]
fn devices_that_make_other_calls_are_found() {
    let layout = Pattern::dense().layout(1, SEQ, 16).unwrap();
    let plan = ShardPlan::new(&layout, 1, 2).unwrap();
    let device = devices().remove(0).autodiff();
    let x = || Tensor::<4>::ones([1, 1, SEQ / 2, 8], &device).require_grad();
    let [first, second] = SequenceShard::group(&plan).try_into().unwrap();
    let expected = "must make the same calls in the same order";
    thread::scope(|scope| {
        scope.spawn(|| {
            second.gather(x(), x()).unwrap();
            refused! { second.gather(x(), x()) => format!("…{expected}…"); }
        });
        let [k, _] = first.gather(x(), x()).unwrap();
        let backward = catch_unwind(AssertUnwindSafe(|| k.sum().backward()));
        let panic = backward.err().unwrap();
        let text: &String = panic.downcast_ref().unwrap();
        assert!(text.contains(expected), "{text}");
    });
}

#[test]
fn errors() {
    let layout = Pattern::local(40).layout(4, SEQ, 16).unwrap();
    let plan = ShardPlan::with_pieces(&layout, 2, 2, 1).unwrap();
    let shards = SequenceShard::group(&plan);
    let device = devices().remove(0);
    let x =
        |batch: usize, heads: usize, seq: usize| Tensor::<4>::ones([batch, heads, seq, 8], &device);
    let (q, k) = (x(1, 4, 96), x(1, 2, 96));
    let attend = |q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>, options: AttentionOptions| {
        shards[0].attention(q.clone(), k.clone(), v.clone(), options)
    };
    let plain = AttentionOptions::default;
    let alibi = plain().alibi(alibi_slopes(4));
    let all = x(1, 2, SEQ);
    let expected = "must be none over a shard, whose rows have other positions, got some";
    refused! {
        attend(&q, &k, &k, alibi).map(|output| output.out) => format!("options.alibi {expected}");
        attend(&q, &all, &all, plain()).map(|output| output.out)
            => "k's rows must be [1, 2, 96], the shard's, got [1, 2, 192]";
        attend(&x(1, 4, 80), &k, &k, plain()).map(|output| output.out)
            => "q's heads and rows must be [4, 96], the shard's, got [4, 80]";
        shards[0].gather(x(1, 4, 96), k.clone()) => "k's rows must be [1, 2, 96], the shard's, got [1, 4, 96]";
    }
    // Another batch size, and another number of calls.
    shards[0].gather(k.clone(), k.clone()).unwrap();
    shards[0].gather(k.clone(), k.clone()).unwrap();
    let two = || x(2, 2, 96);
    refused! {
        shards[1].gather(two(), two())
            => "another device's blocks must be [2, 6, 128], of this device's batch and width, got [1, 6, 128]";
    }
}

/// Makes a model with random output, which is initialized to 0.
fn model(config: &SparseTransformerConfig, device: &Device) -> SparseTransformer {
    let mut model = config.init(device);
    let [d_model, vocab] = [config.d_model, config.vocab_size];
    let weight = Tensor::random([d_model, vocab], Distribution::Normal(0.0, 0.2), device);
    model.output = Linear {
        weight: burn::module::Param::from_tensor(weight),
        bias: None,
    };
    model
}

fn config(factorization: Factorization) -> SparseTransformerConfig {
    SparseTransformerConfig::new(32, 4, factorization)
        .with_vocab_size(20)
        .with_context(SEQ)
        .with_n_layers(3)
        .with_block_size(16)
}

/// Returns a loss, and the gradients with respect to some parameters.
fn measured(
    model: &SparseTransformer,
    (loss, grads): (Tensor<1>, GradientsParams),
) -> Vec<Vec<f64>> {
    let by = |id| to_f64(grads.get::<2>(id).unwrap().into_data());
    let first = &model.blocks[0];
    vec![
        to_f64(loss.into_data()),
        by(model.token_embedding.weight.id),
        by(first.mha.query.weight.id),
        by(first.mha.key.weight.id),
        by(first.mha.value.weight.id),
        by(model.blocks[2].mha.key.weight.id),
        by(model.blocks[1].mha.value.weight.id),
        by(first.pwff.linear_inner.as_dense().unwrap().weight.id),
        by(model.output.weight.id),
    ]
}

#[test]
fn a_model_over_shards_has_the_loss_and_gradients_of_one_device() {
    let attention = BlockAttentionConfig::new()
        .with_rope_theta(Some(10_000.0))
        .with_sinks(true);
    let two = vec![Pattern::local(40), Pattern::fixed(32, 8)];
    let configs = [
        config(Factorization::from(Pattern::fixed(32, 8))),
        config(Factorization::Interleaved(two))
            .with_n_kv_heads(Some(2))
            .with_attention(Some(attention)),
    ];
    for config in configs {
        for device in devices() {
            let device = device.autodiff();
            let model = model(&config, &device);
            let draw = || {
                let tokens = Distribution::Uniform(0.0, 20.0);
                Tensor::<2, Int>::random([2, SEQ], tokens, &device)
            };
            let [tokens, targets] = [draw(), draw()];
            // A copy with its own leaves: graphs of several threads must not be connected.
            let own = || model.clone().fork(&device);
            let alone = own();
            let loss = alone.loss(tokens.clone(), targets.clone());
            let grads = GradientsParams::from_grads(loss.backward(), &alone);
            let expected = measured(&alone, (loss, grads));
            // 12 blocks, evenly over 2 or unevenly over 5 devices.
            let ways = [
                (2, None),
                (5, None),
                (2, Some("none")),
                (3, Some("segment:1")),
                (5, Some("segment:2+attention")),
            ];
            // Each thread compiles its own kernels on a device.
            for (devices, recompute) in some_of(ways, 2) {
                let shards = TransformerShard::group(&model, SEQ, devices).unwrap();
                let items = shards.into_iter().map(|shard| {
                    let of_shard = [&tokens, &targets].map(|x| shard.tokens(x.clone()));
                    (shard, own(), of_shard)
                });
                let parts = in_threads(items, |(shard, model, [tokens, targets])| {
                    let Some(text) = recompute else {
                        let loss = model.try_loss_of_shard(tokens, targets, &shard).unwrap();
                        let grads = GradientsParams::from_grads(loss.backward(), &model);
                        return measured(&model, (loss, grads));
                    };
                    let how: Recompute = text.parse().unwrap();
                    let step = model.losses_and_gradients_of_shard(tokens, targets, &shard, how);
                    let (losses, grads) = step.unwrap();
                    measured(&model, (losses.loss, grads))
                });
                for (at, expected) in expected.iter().enumerate() {
                    let mut mean = vec![0.0; expected.len()];
                    parts
                        .iter()
                        .for_each(|part| add(&mut mean, 1.0 / devices as f64, &part[at]));
                    let what = format!("{devices} devices, {recompute:?}, {at}");
                    assert_near(&what, &mean, expected, 2e-5 * largest(expected));
                }
            }
        }
    }
}

#[test]
fn models_that_cannot_be_shared_are_refused() {
    let device = devices().remove(0);
    let plain = || config(Factorization::from(Pattern::local(40)));
    let alibi = BlockAttentionConfig::new().with_alibi(true);
    let none = "none, where devices share a sequence, got some";
    refused! {
        TransformerShard::group(&plain().with_dropout(0.1).init(&device), SEQ, 2)
            => format!("dropout must be {none}");
        TransformerShard::group(&plain().with_attention(Some(alibi)).init(&device), SEQ, 2)
            => format!("alibi must be {none}");
        TransformerShard::group(&plain().init(&device), SEQ + 1, 2)
            => "seq must be at most 192, the context, got 193";
        TransformerShard::group(&plain().init(&device), SEQ, 13)
            => "devices must be between 1 and 12, with 12 blocks, got 13";
    }
    let model = plain().init(&device);
    let shards = TransformerShard::group(&model, SEQ, 2).unwrap();
    let tokens = Tensor::<2, Int>::zeros([1, SEQ], &device);
    refused! {
        model.try_loss_of_shard(tokens.clone(), tokens, &shards[0])
            => "tokens must be 96 positions, the shard's, got 192";
    }
}
