//! Random layers with grouped heads, rotary positions, packed documents and padding, against plain f64 loops.

use burn::nn::{Linear, LinearConfig, RotaryEncodingConfig};
use burn_sparse_transformer::linear::MixedPrecisionLinearConfig;
use burn_sparse_transformer::{
    Pattern, Precision, SparseMhaInput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
    TransformerError,
};

use burn_blocksparse_tests::fuzz::attention::{number, pattern};
use burn_blocksparse_tests::prelude::*;
use burn_blocksparse_tests::training::case::{Case, Tensors};

/// A dense layer.
struct Dense {
    /// `[inputs, outputs]`
    weight: Vec<f64>,
    bias: Vec<f64>,
}

impl Dense {
    fn new(layer: &Linear) -> Self {
        Self {
            weight: to_f64(layer.weight.val().into_data()),
            bias: to_f64(layer.bias.as_ref().unwrap().val().into_data()),
        }
    }

    fn apply(&self, row: &[f64]) -> Vec<f64> {
        let mut out = self.bias.clone();
        let weights = self.weight.chunks(out.len());
        for (x, weights) in row.iter().zip(weights) {
            add(&mut out, *x, weights);
        }
        out
    }

    /// Returns the gradient with respect to a row from that with respect to its result.
    fn back(&self, grad: &[f64]) -> Vec<f64> {
        let weights = self.weight.chunks(grad.len());
        weights.map(|row| dot(row, grad)).collect()
    }
}

/// Rotates pairs of channels by `position · 10000^(−2 pair / width)`; `sign` −1 rotates back, and 0 does nothing.
fn rotate(head: &mut [f64], position: usize, sign: f64) {
    let width = head.len() as f64;
    for (pair, values) in head.chunks_mut(2).enumerate() {
        let angle = sign * position as f64 * 10_000f64.powf(-2.0 * pair as f64 / width);
        let (sin, cos) = angle.sin_cos();
        let (a, b) = (values[0], values[1]);
        (values[0], values[1]) = (a * cos - b * sin, a * sin + b * cos);
    }
}

/// A row's document and position in it, or padding.
type Place = Option<(usize, usize)>;

struct Layer {
    mha: SparseMultiHeadAttention,
    pattern: Pattern,
    heads: usize,
    kv_heads: usize,
    width: usize,
    softcap: Option<f64>,
}

impl Layer {
    fn random(rng: &mut ChaCha8Rng, seq: usize, device: &Device) -> Self {
        let kv_heads = rng.random_range(1..3);
        let heads = kv_heads * rng.random_range(1..4);
        let width = [4, 8][rng.random_range(0..2)];
        let pattern = pattern(rng, heads, seq, 1);
        let softcap = (rng.random_range(0..3) == 0).then_some(2.0);
        let config = SparseMultiHeadAttentionConfig::new(heads * width, heads, pattern.clone())
            .with_block_size([8, 16, 32][rng.random_range(0..3)])
            .with_n_kv_heads(Some(kv_heads))
            .with_rope(Some(RotaryEncodingConfig::new(seq, width)))
            .with_softcap(softcap);
        Self {
            mha: config.try_init(device).unwrap(),
            pattern,
            heads,
            kv_heads,
            width,
            softcap,
        }
    }

    /// Returns the context, and the gradient of `sum(context · grad)` with respect to `x`, `[batch, seq, d_model]`.
    fn expected(&self, x: &[f64], grad: &[f64], places: &[Vec<Place>]) -> [Vec<f64>; 2] {
        let (batch, seq, model) = (places.len(), places[0].len(), self.heads * self.width);
        let mha = &self.mha;
        let [query, key, value, output] =
            [&mha.query, &mha.key, &mha.value, &mha.output].map(Dense::new);
        let heads = [batch, self.heads, self.kv_heads];
        let sizes = Sizes::new(heads, [seq; 2], [self.width; 2]);
        let (pattern, of_rows) = (self.pattern.clone(), places.to_vec());
        let mut problem = Problem::random(sizes, 0, move |entry, head, i, j| {
            match (of_rows[entry][i], of_rows[entry][j]) {
                (Some((document, i)), Some((other, j))) => {
                    document == other && pattern.attends(head, i as i64, j as i64)
                }
                _ => false,
            }
        })
        .options(None, self.softcap);
        let rows = || (0..batch).flat_map(|entry| (0..seq).map(move |i| (entry, i)));
        let at = |entry: usize, i: usize| (entry * seq + i) * model..(entry * seq + i + 1) * model;
        // Range of a head's row in `[batch, heads, seq, width]`.
        let of_head = |heads: usize, entry: usize, head: usize, i: usize| {
            let row = (entry * heads + head) * seq + i;
            row * self.width..(row + 1) * self.width
        };
        let turned = |head: &[f64], place: Place, sign: f64| {
            let mut head = head.to_vec();
            rotate(&mut head, place.map_or(0, |(_, position)| position), sign);
            head
        };
        for (entry, i) in rows() {
            let (row, place) = (&x[at(entry, i)], places[entry][i]);
            // Padding has no output, and so contributes no gradient.
            let by_out = match place {
                Some(_) => output.back(&grad[at(entry, i)]),
                None => vec![0.0; model],
            };
            for (heads, values, into, turns) in [
                (self.heads, query.apply(row), &mut problem.q, 1.0),
                (self.kv_heads, key.apply(row), &mut problem.k, 1.0),
                (self.kv_heads, value.apply(row), &mut problem.v, 0.0),
                (self.heads, by_out, &mut problem.grad_out, 0.0),
            ] {
                for (head, values) in values.chunks(self.width).enumerate() {
                    let values = turned(values, place, turns);
                    into[of_head(heads, entry, head, i)].copy_from_slice(&values);
                }
            }
        }
        let answer = problem.solve();
        let (mut context, mut by_x) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        for (entry, i) in rows() {
            let place = places[entry][i];
            let gather = |from: &[f64], heads: usize, turns: f64| -> Vec<f64> {
                let of = |head| turned(&from[of_head(heads, entry, head, i)], place, turns);
                (0..heads).flat_map(of).collect()
            };
            if place.is_some() {
                let row = output.apply(&gather(&answer.out, self.heads, 0.0));
                context[at(entry, i)].copy_from_slice(&row);
            }
            for part in [
                query.back(&gather(&answer.dq, self.heads, -1.0)),
                key.back(&gather(&answer.dk, self.kv_heads, -1.0)),
                value.back(&gather(&answer.dv, self.kv_heads, 0.0)),
            ] {
                add(&mut by_x[at(entry, i)], 1.0, &part);
            }
        }
        [context, by_x]
    }

    fn check(
        &self,
        rng: &mut ChaCha8Rng,
        what: &str,
        device: &Device,
        places: &[Vec<Place>],
        run: impl Fn(Tensor<3>) -> Tensor<3>,
    ) {
        let shape = [places.len(), places[0].len(), self.heads * self.width];
        let mut random = || -> Vec<f64> {
            let numbers = drawn(rng, shape.iter().product(), -1.0f32..1.0);
            numbers.into_iter().map(f64::from).collect()
        };
        let (x, grad) = (random(), random());
        let call = |x: &mut Tensors| vec![run(x.take()).into()];
        let judge =
            |x: &[Vec<f64>], grads: &[Vec<f64>]| self.expected(&x[0], &grads[0], places).to_vec();
        Case::new(what, call, judge)
            .input("x", 0, &shape, x)
            .result("context", 0, &shape, grad)
            .check_in(device, DType::F32, 1e-5);
    }
}

fn check_seed(seed: u64, device: &Device) {
    let rng = &mut seeded(seed);
    let seq = rng.random_range(1..90);
    let tracked = device.clone().autodiff();
    let layer = Layer::random(rng, seq, &tracked);
    let what = format!("seed {seed}, {device:?}, {}", layer.pattern);
    if seed.is_multiple_of(2) {
        // Documents, some of them empty.
        let mut ends: Vec<usize> = (0..rng.random_range(0..5))
            .map(|_| rng.random_range(0..=seq))
            .chain([0, seq])
            .collect();
        ends.sort();
        let documents = ends.windows(2).enumerate();
        let places: Vec<Place> = documents
            .flat_map(|(document, pair)| (0..pair[1] - pair[0]).map(move |i| Some((document, i))))
            .collect();
        let packed = |x| layer.mha.try_forward_packed(x, &ends).unwrap().context;
        layer.check(rng, &format!("packed, {what}"), device, &[places], packed);
    } else {
        let lengths: Vec<usize> = (0..rng.random_range(1..4))
            .map(|_| rng.random_range(0..=seq))
            .collect();
        let places: Vec<Vec<Place>> = (lengths.iter())
            .map(|&length| (0..seq).map(|i| (i < length).then_some((0, i))).collect())
            .collect();
        let padded = |x| {
            let input = SparseMhaInput::self_attn(x).lengths(lengths.clone());
            layer.mha.try_forward(input).unwrap().context
        };
        layer.check(rng, &format!("padded, {what}"), device, &places, padded);
    }
}

/// `BURN_SPARSE_FUZZ_LAYERS` seeds, by default 60.
#[test]
fn random_layers_equal_f64() {
    for device in devices() {
        for seed in 0..number("BURN_SPARSE_FUZZ_LAYERS", 60) {
            check_seed(seed, &device);
        }
    }
}

/// A layer in bf16 is an error on devices without bf16.
#[test]
fn a_precision_needs_its_dtype() {
    for device in devices() {
        let layer = |precision| {
            let config = MixedPrecisionLinearConfig::new(LinearConfig::new(64, 16));
            config.with_precision(precision).try_init(&device)
        };
        assert!(layer(Precision::F32).is_ok() && layer(Precision::Tf32).is_ok());
        match layer(Precision::Bf16) {
            Ok(_) => assert!(supports(&device, DType::BF16), "{device:?}"),
            Err(error) => {
                assert!(!supports(&device, DType::BF16), "{device:?}: {error}");
                let is_right = matches!(error, TransformerError::Precision { .. });
                assert!(is_right, "{error}");
                let text = error.to_string();
                assert!(text.starts_with("precision must be f32 on "), "{text}");
            }
        }
    }
}
