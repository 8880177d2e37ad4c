//! Queries, keys and weights of the indexer.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, RotaryEncoding};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fused_ops::{AddNormOptions, norm};
use burn_sparse_select::dsa::DsaIndex;

use super::DsaHeadsConfig;
use super::indexed::rotated;
use crate::error::Result;
use crate::heads::{Positions, rotate_first};
use crate::stream::layer_norm_params;
use crate::{Precision, SparseMultiHeadAttentionConfig};

const EPSILON: f64 = 1e-5;

/// Lightning indexer. Queries and keys have their own precision ([`DsaHeadsConfig::index_precision`]), weights the dtype of the layer's parameters. Tokens
/// are detached: the indexer learns by its own loss only, and the model by its own.
#[derive(Module, Debug)]
pub struct DsaIndexer {
    /// Projection from `d_model` to `index_heads · index_dim`, without bias.
    pub query: Linear,
    /// Projection from `d_model` to `index_dim`, without bias.
    pub key: Linear,
    /// Norm of keys.
    pub norm: LayerNorm,
    /// Projection from `d_model` to `index_heads`, without bias.
    pub weights: Linear,
    /// Rotation of the first channels of queries and keys; no parameters.
    pub rope: Option<RotaryEncoding>,
    heads: usize,
    #[module(skip)]
    precision: Precision,
}

impl DsaIndexer {
    pub(super) fn new(
        config: &DsaHeadsConfig,
        mha: &SparseMultiHeadAttentionConfig,
        device: &Device,
    ) -> Result<Self> {
        let (heads, width) = (config.index_heads, config.index_dim);
        let rotated = rotated(config.rope_dim, width)?;
        Ok(Self {
            query: mha.index_linear(heads * width, device),
            key: mha.index_linear(width, device),
            norm: LayerNormConfig::new(width)
                .with_epsilon(EPSILON)
                .init(device),
            weights: mha.index_linear(heads, device),
            rope: mha.index_rope(rotated, device)?,
            heads,
            precision: config.precision(mha.precision),
        })
    }

    /// Returns the dtype of its queries and keys.
    pub fn dtype(&self) -> FloatDType {
        self.precision.dtype(self.query.weight.val().dtype())
    }

    pub(crate) fn layers(&self) -> [&Linear; 3] {
        [&self.query, &self.key, &self.weights]
    }

    pub(crate) fn layers_mut(&mut self) -> [&mut Linear; 3] {
        [&mut self.query, &mut self.key, &mut self.weights]
    }

    /// Computes queries, keys and weights of tokens `[batch, seq, d_model]` at these positions.
    pub(super) fn index(&self, x: Tensor<3>, positions: &Positions) -> Result<DsaIndex> {
        let own = self.query.weight.val().dtype();
        let dtype = DType::from(self.dtype());
        let tokens = x.detach();
        let x = tokens.clone().cast(own);
        let [batch, seq, _] = x.dims();
        let rotated = |x: Tensor<4>| rotate_first(&self.rope, x, positions);
        let [_, outputs] = self.query.weight.val().dims();
        let width = outputs / self.heads;
        let (q, k) = match dtype == own {
            true => {
                let q = self.query.forward(x.clone());
                let q = q.reshape([batch, seq, self.heads, width]).swap_dims(1, 2);
                (q, self.key.forward(x.clone()))
            }
            // Rounded like the attention's products; keys are normalised in the parameters' dtype.
            false => {
                let parts = [(self.heads, width)];
                let q = (self.precision).by_heads(&[&self.query], None, &parts, tokens.clone())?;
                let q = q.into_iter().next().expect("there is a part");
                (q, self.precision.product(&self.key, tokens)?.cast(own))
            }
        };
        // Our kernels distribute the sums over rows; Burn's use a single cube for so few columns.
        let options = AddNormOptions::default().epsilon(EPSILON).dtype(own.into());
        let k = norm(k, layer_norm_params(&self.norm), &options)?;
        let k = rotated(k.reshape([batch, 1, seq, width]))?;
        let weights = self.weights.forward(x).swap_dims(1, 2);
        Ok(DsaIndex::new(rotated(q)?, k.cast(dtype), weights)?)
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::RotaryEncodingConfig;
    use burn::tensor::Distribution;
    use burn_sparse_select::dsa::Dsa;

    use super::*;
    use crate::content::ContentAttention;
    use crate::{Pattern, SparseMultiHeadAttention};
    #[cfg(feature = "autodiff")]
    use crate::{SparseMhaInput, dsa::DsaStage};

    const SEQ: usize = 400;

    /// Returns one layer in each precision of the attention and of the index, with the same parameters.
    fn layers(device: &Device) -> [SparseMultiHeadAttention; 3] {
        let layer = |precision, index| {
            let heads = DsaHeadsConfig::new()
                .with_keep(48)
                .with_index_heads(8)
                .with_index_dim(32)
                .with_index_precision(index);
            SparseMultiHeadAttentionConfig::new(64, 4, Pattern::causal())
                .with_content(Some(ContentAttention::Dsa(heads)))
                .with_rope(Some(RotaryEncodingConfig::new(SEQ, 16)))
                .with_precision(precision)
                .init(device)
        };
        let full = layer(Precision::F32, None);
        let record = full.clone().into_record();
        [
            full,
            layer(Precision::Bf16, None).load_record(record.clone()),
            layer(Precision::Bf16, Some(Precision::F32)).load_record(record),
        ]
    }

    fn indexer(layer: &SparseMultiHeadAttention) -> &DsaIndexer {
        &layer.dsa().unwrap().indexer
    }

    fn index(layer: &SparseMultiHeadAttention, x: &Tensor<3>) -> DsaIndex {
        (indexer(layer).index(x.clone(), &Positions::From(0))).unwrap()
    }

    #[test]
    fn an_index_has_the_attentions_precision_or_its_own() {
        let device = Device::flex();
        let x = Tensor::random([2, SEQ, 64], Distribution::Normal(0.0, 1.0), &device);
        let [full, half, kept] = layers(&device);
        let dtypes = [DType::F32, DType::BF16, DType::F32];
        for (layer, dtype) in [&full, &half, &kept].into_iter().zip(dtypes) {
            let index = index(layer, &x);
            assert_eq!([index.q.dtype(), index.k.dtype()], [dtype; 2]);
            assert_eq!(index.weights.dtype(), DType::F32);
            assert_eq!(DType::from(indexer(layer).dtype()), dtype);
        }
        // Bit for bit the result of its layers, whatever the attention's precision.
        let indexer = indexer(&full);
        let turned = |x: Tensor<4>| {
            let rope = indexer.rope.as_ref().unwrap();
            let first = rope.forward(x.clone().narrow(3, 0, 16));
            Tensor::cat(vec![first, x.narrow(3, 16, 16)], 3).into_data()
        };
        let q = indexer.query.forward(x.clone());
        let k = indexer.norm.forward(indexer.key.forward(x.clone()));
        let q = turned(q.reshape([2, SEQ, 8, 32]).swap_dims(1, 2));
        let k = turned(k.reshape([2, 1, SEQ, 32]));
        let weights = indexer.weights.forward(x.clone()).swap_dims(1, 2);
        let [full, kept] = [&full, &kept].map(|layer| index(layer, &x));
        for (part, of_kept) in [(&full.q, &kept.q), (&full.k, &kept.k)] {
            assert_eq!(part.to_data(), of_kept.to_data());
        }
        full.q
            .into_data()
            .assert_approx_eq::<f32>(&q, burn::tensor::Tolerance::absolute(1e-5));
        full.k
            .into_data()
            .assert_approx_eq::<f32>(&k, burn::tensor::Tolerance::absolute(1e-5));
        assert_eq!(full.weights.into_data(), weights.into_data());
    }

    /// A rounded index chooses other keys near the threshold, but few of them.
    #[test]
    fn a_rounded_index_chooses_nearly_the_same() {
        let device = Device::flex();
        let x = Tensor::random([2, SEQ, 64], Distribution::Normal(0.0, 1.0), &device);
        let [full, half, _] = layers(&device);
        let keys = |index: DsaIndex| -> Vec<i32> {
            let lists = Dsa::new(48).unwrap().choose(&index).unwrap();
            lists.keys().clone().into_data().iter().collect()
        };
        let exact = keys(index(&full, &x));
        let in_fp8 = index(&full, &x).in_fp8().unwrap();
        for (other, least) in [(index(&half, &x), 0.97), (in_fp8, 0.9)] {
            let (mut same, mut all) = (0, 0);
            for (own, other) in exact.chunks(48).zip(keys(other).chunks(48)) {
                let own: Vec<i32> = own.iter().copied().filter(|&key| key >= 0).collect();
                all += own.len();
                same += own.iter().filter(|key| other.contains(key)).count();
            }
            let share = same as f64 / all as f64;
            println!("{share:.4} of the keys");
            assert!(share > least && share < 1.0, "{share}");
        }
    }

    /// Loss and gradients of an index in bf16, compared with those in f32.
    #[cfg(feature = "autodiff")]
    #[test]
    fn an_index_in_bf16_learns_the_same() {
        let device = Device::flex().autodiff();
        let x = Tensor::random([1, 120, 64], Distribution::Normal(0.0, 1.0), &device);
        let [_, half, kept] = layers(&device);
        let run = |layer: &SparseMultiHeadAttention| {
            let warming = layer.clone().with_dsa_stage(DsaStage::WarmUp).unwrap();
            let output = warming.try_forward(SparseMhaInput::self_attn(x.clone()));
            let loss = output.unwrap().aux_loss.unwrap();
            let grads = loss.backward();
            let indexer = indexer(layer);
            let parts = [&indexer.query, &indexer.key, &indexer.weights];
            let grads = parts.map(|part| part.weight.val().grad(&grads).unwrap());
            assert!(grads.iter().all(|grad| grad.dtype() == DType::F32));
            (loss.into_scalar::<f32>(), grads)
        };
        let ((loss, grads), (expected, others)) = (run(&half), run(&kept));
        assert!(
            (loss - expected).abs() < 2e-3 * expected,
            "{loss}, {expected}"
        );
        for (grad, other) in grads.into_iter().zip(others) {
            let norm = |x: Tensor<2>| x.square().sum().sqrt().into_scalar::<f32>();
            let (error, size) = (norm(grad - other.clone()), norm(other));
            // The error of scores is large relative to the difference of two nearly uniform softmaxes, and a score near zero loses its gradient: of 3,000
            // random layers half are within .03, and all within .23.
            assert!(error < 0.4 * size, "{error} of {size}");
        }
    }
}
