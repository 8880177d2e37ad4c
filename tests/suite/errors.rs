//! Bad input is a typed error that names the argument, the expected value and the actual one.

use burn_blocksparse::layout::{DeviceLayoutOptions, TopKOptions};
use burn_blocksparse::{
    AccumulatedAttentionOptions, accumulated_attention, merge_attention, sparse_attention,
};
use burn_sparse_select::{top_k_blocks, top_k_blocks_on_device, vertical_slash_layout};
use proptest::prelude::*;
use proptest::{collection, option, sample};

use burn_blocksparse_tests::fuzz::attention::number;
use burn_blocksparse_tests::prelude::*;

mod ops;

fn layout() -> BlockLayout {
    Pattern::causal().layout(4, 32, 8).unwrap()
}

#[test]
fn shapes() {
    for device in &devices() {
        let call = |q, k, v| {
            let [q, k, v] = [q, k, v].map(|shape| zeros(shape, device));
            sparse_attention(q, k, v, &layout())
        };
        refused! {
            call([1, 3, 32, 8], [1, 4, 32, 8], [1, 4, 32, 8]) => "q's heads must be 4, the layout's, got 3";
            call([1, 4, 31, 8], [1, 4, 32, 8], [1, 4, 32, 8]) => "q's seq_q must be 32, the layout's, got 31";
            call([1, 4, 32, 8], [1, 4, 40, 8], [1, 4, 40, 8]) => "k's seq_kv must be 32, the layout's, got 40";
            call([1, 4, 32, 8], [2, 4, 32, 8], [1, 4, 32, 8]) => "k's batch must be 1, q's, got 2";
            call([1, 4, 32, 8], [1, 4, 32, 16], [1, 4, 32, 8]) => "k's head_dim must be 8, q's, got 16";
            call([1, 4, 32, 8], [1, 3, 32, 8], [1, 3, 32, 8]) => "k's kv_heads must be a divisor of the 4 heads of q, got 3";
            call([1, 4, 32, 8], [1, 2, 32, 8], [1, 4, 32, 8]) => "v's kv_heads must be 2, k's, got 4";
            call([1, 4, 32, 8], [1, 4, 32, 8], [1, 4, 16, 8]) => "v's seq_kv must be 32, k's, got 16";
            call([1, 4, 32, 8], [1, 4, 32, 8], [3, 4, 32, 8]) => "v's batch must be 1, q's, got 3";
        }
    }
}

#[test]
fn option_values() {
    for device in &devices() {
        let plain = AttentionOptions::default;
        let call = |options| {
            let x = zeros([1, 4, 32, 8], device);
            let layout = layout();
            let call = SparseAttentionCall::new(x.clone(), x.clone(), x, &layout);
            call.options(options).run()
        };
        refused! {
            call(plain().scale(f64::NAN)) => "options.scale must be finite in f32, got NaN";
            call(plain().scale(-1e39)) => "options.scale must be finite in f32, got -1000000000000000000000000000000000000000";
            call(plain().softcap(0.0)) => "options.softcap must be positive and finite in f32, got 0";
            call(plain().alibi([0.5])) => "options.alibi's slopes must be 4, the layout's heads, got 1";
            call(plain().alibi([0.5, 0.5, f64::NAN, 0.5])) => "options.alibi's slopes must be finite in f32, got NaN";
            call(plain().dropout(Dropout::new(1.0, 0))) => "options.dropout's probability must be at least 0 and less than 1, got 1";
            call(plain().dropout(Dropout::new(-0.1, 0))) => "options.dropout's probability must be at least 0 and less than 1, got -0.1";
            call(plain().softcap(-1.0)) => "options.softcap must be positive and finite in f32, got -1";
            call(plain().softmax_threshold(0.0)) => "options.softmax_threshold must be positive and finite in f32, got 0";
            call(plain().softmax_threshold(-1.0)) => "options.softmax_threshold must be positive and finite in f32, got -1";
            call(plain().softmax_threshold(f64::INFINITY)) => "options.softmax_threshold must be positive and finite in f32, got inf";
            call(plain().softmax_threshold(f64::NAN)) => "options.softmax_threshold must be positive and finite in f32, got NaN";
        }
    }
}

#[test]
fn dtypes() {
    for device in devices() {
        // F64, or another dtype of the device than F32.
        let mut others = [DType::F64, DType::F16, DType::BF16].into_iter();
        let other = others.find(|&dtype| device.supports_dtype(dtype));
        let other = other.unwrap_or_else(|| panic!("{device:?} has a second float dtype"));
        let x = zeros([1, 4, 32, 8], &device);
        let k = x.clone().cast(other);
        refused! { sparse_attention(x.clone(), k, x, &layout()) => format!("k's dtype must be F32, q's, got {other:?}"); }
    }
}

#[test]
fn batches() {
    let layout = BlockLayout::stack_batch(&[layout(), layout()]).unwrap();
    for device in devices() {
        let x = zeros([3, 4, 32, 8], &device);
        refused! { SparseAttentionCall::new(x.clone(), x.clone(), x, &layout).run() => "q's batch must be 2, the layout's, got 3"; }
    }
}

#[test]
fn different_devices() {
    let Some([device, other]) = two_devices() else {
        return;
    };
    let x = zeros([1, 4, 32, 8], &device);
    let k = zeros([1, 4, 32, 8], &other);
    refused! { sparse_attention(x.clone(), k, x, &layout()) => "k's device must be…"; }
}

#[test]
fn sinks_and_biases() {
    for device in &devices() {
        let of = AttentionTensors::default;
        let call = |tensors| {
            let x = zeros([1, 4, 32, 8], device);
            let layout = layout();
            let call = SparseAttentionCall::new(x.clone(), x.clone(), x, &layout);
            call.tensors(tensors).run_with_lse()
        };
        refused! {
            call(of().sinks(Tensor::zeros([3], device))) => "sinks' heads must be 4, the layout's, got 3";
            call(of().bias(zeros([3, 4, 32, 32], device))) => "bias's batch must be 1 or 1, got 3";
            call(of().bias(zeros([1, 3, 32, 32], device))) => "bias's heads must be 4 or 1, got 3";
            call(of().bias(zeros([1, 4, 31, 32], device))) => "bias's seq_q must be 32 or 1, got 31";
            call(of().bias(zeros([1, 4, 32, 1], device))) => "bias's seq_kv must be 32, the layout's, got 1";
            call(of().relative_bias(Tensor::zeros([3, 5], device))) => "relative_bias's heads must be 4 or 1, got 3";
            call(of().relative_bias(Tensor::zeros([4, 6], device))) => "relative_bias's distances must be an odd number, 2 · reach + 1, got 6";
            call(of().relative_bias(Tensor::zeros([1, 0], device))) => "relative_bias's distances must be an odd number, 2 · reach + 1, got 0";
        }
    }
}

#[test]
fn merged_parts() {
    for device in devices() {
        let out = |rows| zeros([1, 4, rows, 8], &device);
        let lse = |rows| Tensor::<3>::zeros([1, 4, rows], &device);
        refused! {
            merge_attention(out(32), lse(32), out(31), lse(32)) => "out_b's shape must be [1, 4, 32, 8], out_a's, got [1, 4, 31, 8]";
            merge_attention(out(32), lse(32), out(32), lse(31)) => "lse_b's shape must be [1, 4, 32], out_a's rows, got [1, 4, 31]";
        }
    }
    // Sums in f64 do not silently become f32, nor vice versa.
    let device = devices().remove(0);
    let out = |dtype| Tensor::<4>::zeros([1, 4, 32, 8], (&device, dtype));
    let lse = |dtype| Tensor::<3>::zeros([1, 4, 32], (&device, dtype));
    let dtypes = |o: DType, a, b| merge_attention(out(o), lse(a), out(o), lse(b)).map(drop);
    use DType::{BF16, F32, F64};
    for (of_out, of_lse_a, of_lse_b, which, sums, got) in [
        (F64, F32, F32, "lse_a", F64, F32),
        (F32, F64, F64, "lse_a", F32, F64),
        (BF16, BF16, BF16, "lse_a", F32, BF16),
        (F32, F32, F64, "lse_b", F32, F64),
    ] {
        let message =
            format!("{which}'s dtype must be {sums:?}, that of out_a's sums, got {got:?}");
        let mut all = [of_out, of_lse_a, of_lse_b].into_iter();
        if all.all(|dtype| supports(&device, dtype)) {
            refused! { dtypes(of_out, of_lse_a, of_lse_b) => message; }
        }
    }
    for (dtype, sums) in [(BF16, F32), (F32, F32), (F64, F64)] {
        if supports(&device, dtype) {
            assert!(dtypes(dtype, sums, sums).is_ok());
        }
    }
}

#[test]
fn merged_parts_of_other_devices() {
    let Some([device, other]) = two_devices() else {
        return;
    };
    let (device, other) = (&device, &other);
    let expected = format!("must be {device:?}, out_a's, got {other:?}");
    let out = |device: &Device| zeros([1, 4, 32, 8], device);
    let lse = |device: &Device| Tensor::<3>::zeros([1, 4, 32], device);
    for (name, place) in [("lse_a", 0), ("out_b", 1), ("lse_b", 2)] {
        let of = |at: usize| if at == place { other } else { device };
        refused! { merge_attention(out(device), lse(of(0)), out(of(1)), lse(of(2))) => format!("{name}'s device {expected}"); }
    }
}

/// Keys must match although there are no values.
#[test]
fn attention_sums_of_keys_that_do_not_fit() {
    for device in devices() {
        let call = |k| {
            let lse = Tensor::<3>::zeros([1, 4, 32], &device);
            let options = AccumulatedAttentionOptions::default();
            let (q, k) = (zeros([1, 4, 32, 8], &device), zeros(k, &device));
            accumulated_attention(q, k, lse, &layout(), options)
        };
        refused! {
            call([1, 4, 32, 0]) => "k's head_dim must be 8, q's, got 0";
            call([1, 4, 32, 4]) => "k's head_dim must be 8, q's, got 4";
            call([1, 4, 31, 8]) => "k's seq_kv must be 32, the layout's, got 31";
            call([1, 3, 32, 8]) => "k's kv_heads must be a divisor of the 4 heads of q, got 3";
        }
    }
}

/// Plans name the tier before a call runs.
#[test]
fn plans_print_the_tier() {
    for device in devices() {
        let (x, layout) = (zeros([1, 4, 32, 8], &device), layout());
        let call = call_of([&x, &x, &x], &layout, &AttentionOptions::default());
        let plan = call.explain().unwrap();
        let kernels = is_cube(&device);
        assert_eq!(plan.is_kernels(), kernels, "{plan}");
        let tier = ["reference", "simt"][usize::from(kernels)];
        assert!(plan.to_string().contains(tier), "{plan}");
    }
}

/// A call that the device cannot run is refused before anything is launched.
#[test]
fn limits_of_a_device() {
    for device in devices() {
        let wide = zeros([1, 4, 32, 4096], &device);
        let result = SparseAttentionCall::new(wide.clone(), wide.clone(), wide, &layout()).run();
        // The reference supports any width, and so may kernels on a device with large shared memory.
        let wgpu = format!("{device:?}").contains("Wgpu");
        match result.map_err(|error| error.to_string()) {
            Ok(output) => {
                assert!(!wgpu, "{device:?} has no memory for such tiles");
                assert_eq!(output.out.dims(), [1, 4, 32, 4096]);
            }
            Err(message) => {
                let expected = "head_dim and value_dim must fit tiles in";
                assert!(message.starts_with(expected), "{message}");
                assert!(message.ends_with("got 4096 and 4096"), "{message}");
                assert!(is_cube(&device), "{device:?}");
            }
        }
        if wgpu && device.supports_dtype(DType::F64) {
            let x = zeros([1, 4, 32, 8], &device).cast(DType::F64);
            refused! { SparseAttentionCall::new(x.clone(), x.clone(), x, &layout()).run() => "dtype must be a float type of the device, got f64"; }
        }
    }
}

/// Returns the number of cases of each property: `PROPTEST_CASES`, for devices that compile kernels for every shape.
fn property_cases() -> u32 {
    let cases = number("PROPTEST_CASES", 500);
    assert!(cases > 0, "PROPTEST_CASES must be a positive number");
    cases as u32
}

/// Returns a tensor filled with the numbers, repeated.
fn filled(numbers: &[i32], dims: &[usize]) -> TensorData {
    let numbers = numbers.iter().copied().cycle();
    TensorData::new(numbers.take(dims.iter().product()).collect(), dims.to_vec())
}

/// Checks that an error says what was expected.
fn says_what(error: &impl std::error::Error) -> Result<(), TestCaseError> {
    prop_assert!(error.to_string().contains(" must "), "{}", error);
    Ok(())
}

/// Checks that a layout can be used in attention, whatever selected its blocks.
fn works(layout: Result<DeviceLayout, OpError>, device: &Device) -> Result<(), TestCaseError> {
    let layout = match layout {
        Ok(layout) => layout,
        Err(error) => return says_what(&error),
    };
    let shape = *layout.shape();
    let batch = layout.batch().unwrap_or(1);
    let x = |seq| zeros([batch, shape.heads, seq, 8], device);
    let (q, k) = (x(shape.seq_q), x(shape.seq_kv));
    let out = sparse_attention(q.clone(), k.clone(), k, &layout).unwrap();
    prop_assert_eq!(out.dims(), q.dims());
    layout.to_host().unwrap();
    Ok(())
}

proptest::proptest! {
    #![proptest_config(ProptestConfig { cases: property_cases(), failure_persistence: None, ..ProptestConfig::default() })]

    /// Any shapes, dtypes and options give an output of the right shape, or an error that says what was expected.
    #[test]
    fn arguments_of_any_shape(
        shapes in collection::vec(collection::vec(0usize..5, 4), 3),
        agree in any::<bool>(),
        (heads, seq_q, seq_kv) in (1usize..5, 1usize..5, 1usize..5),
        batch in option::of(1usize..3),
        dtypes in collection::vec(sample::select(vec![DType::F32, DType::F32, DType::F32, DType::F64, DType::F16]), 3),
        scale in option::of(any::<f64>()),
        softcap in option::of(any::<f64>()),
        store in any::<bool>(),
    ) {
        let layout = Pattern::causal();
        let shape = LayoutShape::new(heads, [seq_q, seq_kv], 8);
        let layout = BlockLayout::new(&layout, shape).unwrap();
        let layout = match batch {
            Some(batch) => BlockLayout::stack_batch(&vec![layout; batch]).unwrap(),
            None => layout,
        };
        let mut shapes: Vec<[usize; 4]> = shapes.iter().map(|s| [s[0], s[1], s[2], s[3]]).collect();
        if agree {
            let [b, kv, _, d] = shapes[0];
            shapes = vec![[b, heads, seq_q, d], [b, kv, seq_kv, d], [b, kv, seq_kv, shapes[2][3]]];
        }
        let [[q_batch, q_heads, q_seq, q_dim], [k_batch, kv_heads, k_seq, k_dim], [v_batch, v_heads, v_seq, v_dim]] = shapes[..] else { unreachable!() };
        let (largest, least) = match dtypes[0] {
            DType::F64 => (f64::MAX, f64::MIN_POSITIVE),
            _ => (f64::from(f32::MAX), f64::from(f32::MIN_POSITIVE)),
        };
        let fits = q_batch > 0 && q_dim > 0 && v_dim > 0 && kv_heads > 0
            && batch.is_none_or(|batch| batch == q_batch)
            && (q_heads, q_seq, k_seq, v_seq) == (heads, seq_q, seq_kv, seq_kv)
            && (k_batch, v_batch, k_dim, v_heads) == (q_batch, q_batch, q_dim, kv_heads)
            && heads.is_multiple_of(kv_heads)
            && dtypes.iter().all(|dtype| *dtype == dtypes[0])
            && scale.is_none_or(|scale| scale.abs() <= largest)
            && softcap.is_none_or(|cap| cap <= largest && cap >= least);
        let mut options = AttentionOptions::default();
        (options.scale, options.softcap) = (scale, softcap);
        if store {
            options = options.weights(WeightsMode::Store);
        }
        for device in devices() {
            if dtypes.iter().any(|dtype| !supports(&device, *dtype)) {
                continue;
            }
            let tensor = |k: usize| Tensor::<4>::zeros(shapes[k], (&device, dtypes[k]));
            match SparseAttentionCall::new(tensor(0), tensor(1), tensor(2), &layout).options(options.clone()).run() {
                Ok(output) => {
                    prop_assert!(fits, "{:?} was taken", shapes);
                    prop_assert_eq!(output.out.dims(), [q_batch, heads, seq_q, v_dim]);
                }
                Err(error) => {
                    prop_assert!(!fits, "{:?} was refused: {}", shapes, error);
                    prop_assert!(error.to_string().contains(" must be "), "{}", error);
                }
            }
        }
    }

    /// Any selection of blocks on the device gives attention over it, or an error that says what was expected.
    #[test]
    fn choices_of_any_shape(
        dims in collection::vec(0usize..4, 4),
        counts in collection::vec(0usize..4, 3),
        agree in any::<bool>(),
        (heads, seq_q, seq_kv) in (0usize..4, 0usize..30, 0usize..30),
        block_size in sample::select(vec![0, 7, 8, 16]),
        numbers in collection::vec(prop_oneof![-2i32..5, any::<i32>()], 1..40),
        (k, first) in (sample::select(vec![0, 1, 2, usize::MAX]), sample::select(vec![0, 1, usize::MAX])),
        causal in any::<bool>(),
    ) {
        let shape = LayoutShape::new(heads, [seq_q, seq_kv], block_size);
        let options = DeviceLayoutOptions::new(shape).causal(causal);
        let blocks = |seq: usize| seq.div_ceil(block_size.max(1));
        let (mut dims, mut counts) = ([dims[0], dims[1], dims[2], dims[3]], [counts[0], counts[1], counts[2]]);
        if agree {
            (dims[1], dims[2], dims[3]) = (heads, blocks(seq_q), blocks(seq_kv));
            counts = [dims[0], dims[1], dims[2]];
        }
        let top_k = TopKOptions::new(block_size, k).causal(causal).first(first);
        for device in devices() {
            let integers = Tensor::<4, Int>::from_data(filled(&numbers, &dims), &device);
            let mask: Tensor<4, Bool> = integers.clone().greater_elem(0);
            works(DeviceLayout::from_block_mask(mask, options.clone()), &device)?;
            let counted = Tensor::<3, Int>::from_data(filled(&numbers, &counts), &device);
            works(DeviceLayout::from_block_indices(integers.clone(), counted, options.clone()), &device)?;
            works(DeviceLayout::from_block_scores(integers.float(), shape, top_k.clone()), &device)?;
        }
    }

    /// Content-based layouts from queries and keys of any shape; the host's and the device's are equal.
    #[test]
    fn top_k_of_any_shape(
        (q, k) in (collection::vec(0usize..4, 4), collection::vec(0usize..4, 4)),
        agree in any::<bool>(),
        (seq_q, seq_kv) in (0usize..30, 0usize..30),
        block_size in sample::select(vec![0, 7, 8, 16]),
        (most, first) in (sample::select(vec![0, 1, 2, usize::MAX]), sample::select(vec![0, 1, usize::MAX])),
        (causal, local) in (any::<bool>(), prop_oneof![0usize..6, Just(usize::MAX)]),
    ) {
        let (mut q, mut k) = ([q[0], q[1], seq_q, q[3]], [k[0], k[1], seq_kv, k[3]]);
        if agree {
            (k[0], k[3]) = (q[0], q[3]);
            q[1] *= k[1];
        }
        let options = TopKOptions::new(block_size, most).causal(causal).local(local).first(first);
        for device in devices() {
            let [queries, keys] = [q, k].map(|shape| zeros(shape, &device));
            let host = top_k_blocks(queries.clone(), keys.clone(), options.clone());
            let made = top_k_blocks_on_device(queries, keys, options.clone());
            match (host, made) {
                (Ok(host), Ok(made)) => {
                    let made = made.to_host().unwrap();
                    let rows = |layout: &BlockLayout| -> Vec<Vec<u32>> {
                        let places = (0..q[0]).flat_map(|entry| (0..q[1]).map(move |head| (entry, head)));
                        let patterns = places.map(|(entry, head)| layout.pattern_of(entry, head));
                        let rows = patterns.flat_map(|pattern| (0..layout.q_blocks()).map(move |row| layout.row(pattern, row)));
                        rows.map(|row| row.iter().map(|entry| entry.block).collect()).collect()
                    };
                    prop_assert_eq!(rows(&host), rows(&made));
                }
                (Err(host), Err(made)) => {
                    prop_assert_eq!(host.to_string(), made.to_string());
                    says_what(&host)?;
                }
                (host, made) => prop_assert!(false, "{:?} on the host, {:?} on the device", host.is_ok(), made.is_ok()),
            }
        }
    }

    /// Columns and diagonals with arbitrary numbers.
    #[test]
    fn columns_and_diagonals_of_any_shape(
        (vertical, slash) in ((0usize..4, 0usize..4), (0usize..4, 0usize..4)),
        (heads, seq_q, seq_kv) in (0usize..4, 0usize..30, 0usize..30),
        block_size in sample::select(vec![0, 7, 8, 16]),
        numbers in collection::vec(prop_oneof![4 => 0i32..30, 1 => any::<i32>()], 1..20),
    ) {
        let shape = LayoutShape::new(heads, [seq_q, seq_kv], block_size);
        for device in devices() {
            let [vertical, slash] = [vertical, slash]
                .map(|(heads, count)| Tensor::<2, Int>::from_data(filled(&numbers, &[heads, count]), &device));
            if let Err(error) = vertical_slash_layout(vertical, slash, shape) {
                says_what(&error)?;
            }
        }
    }

    /// Sums of weights, and tables of relative biases, of any shape.
    #[test]
    fn sums_and_tables_of_any_shape(
        shapes in collection::vec(collection::vec(0usize..5, 4), 3),
        agree in any::<bool>(),
        (heads, seq_q, seq_kv) in (1usize..5, 1usize..5, 1usize..5),
        queries in option::of((0usize..6, 0usize..6)),
        table in option::of((0usize..5, 0usize..8)),
    ) {
        let shape = LayoutShape::new(heads, [seq_q, seq_kv], 8);
        let layout = BlockLayout::new(&Pattern::causal(), shape).unwrap();
        let mut shapes: Vec<[usize; 4]> = shapes.iter().map(|s| [s[0], s[1], s[2], s[3]]).collect();
        if agree {
            let [b, kv, _, d] = shapes[0];
            shapes = vec![[b, heads, seq_q, d], [b, kv, seq_kv, d], [b, heads, seq_q, d]];
        }
        for device in devices() {
            let tensor = |shape: [usize; 4]| zeros(shape, &device);
            let [batch, rows, length, _] = shapes[2];
            let lse = Tensor::<3>::zeros([batch, rows, length], (&device, DType::F32));
            let mut tensors = AttentionTensors::default();
            if let Some((rows, width)) = table {
                tensors = tensors.relative_bias(Tensor::<2>::zeros([rows, width], (&device, DType::F32)));
            }
            let mut options = AccumulatedAttentionOptions::default().tensors(tensors.clone());
            if let Some((start, end)) = queries {
                options = options.queries(start..end);
            }
            let (q, k) = (tensor(shapes[0]), tensor(shapes[1]));
            match accumulated_attention(q.clone(), k.clone(), lse, &layout, options) {
                Ok(attention_sums) => {
                    let [batch, heads, ..] = q.dims();
                    prop_assert_eq!(attention_sums.columns.dims(), [batch, heads, seq_kv]);
                    prop_assert_eq!(attention_sums.diagonals.dims(), [batch, heads, seq_q + seq_kv - 1]);
                }
                Err(error) => {
                    says_what(&error)?;
                    prop_assert!(!error.to_string().starts_with("v's"), "{error}");
                }
            }
            match SparseAttentionCall::new(q.clone(), k.clone(), k, &layout).tensors(tensors).run_with_lse() {
                Ok((out, _)) => prop_assert_eq!(out.dims(), q.dims()),
                Err(error) => says_what(&error)?,
            }
        }
    }
}
