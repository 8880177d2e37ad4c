//! Gradients as a few long vectors: a sum over devices costs one call per tensor, whatever its length.

use std::collections::VecDeque;

use anyhow::Result;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_fused_ops::optim::concat;

/// Elements of a bucket, unless a single gradient has more: 64 MiB of f32.
const BUCKET: usize = 16 << 20;

/// Positions of gradients in buckets.
pub(super) struct Bundle {
    slots: VecDeque<Slot>,
}

/// Position of one gradient, in the order of the parameters.
struct Slot {
    id: ParamId,
    bucket: usize,
    first: usize,
    length: usize,
}

impl Bundle {
    /// Moves all gradients of a model out of their container and concatenates them in buckets `[elements]`, each of one dtype.
    pub fn pack<M: Module>(
        model: &M,
        gradients: GradientsParams,
    ) -> Result<(Self, Vec<Tensor<1>>)> {
        let mut pack = Pack {
            gradients,
            found: Vec::new(),
        };
        model.visit(&mut pack);
        let mut slots = VecDeque::new();
        let mut parts: Vec<Vec<Tensor<1>>> = Vec::new();
        let mut filled = 0;
        for (id, flat) in pack.found {
            let length = flat.dims()[0];
            let fits = (parts.last())
                .is_some_and(|last| filled + length <= BUCKET && last[0].dtype() == flat.dtype());
            if !fits {
                parts.push(Vec::new());
                filled = 0;
            }
            let bucket = parts.len() - 1;
            slots.push_back(Slot {
                id,
                bucket,
                first: filled,
                length,
            });
            parts[bucket].push(flat);
            filled += length;
        }
        let buckets = (parts.into_iter())
            .map(|mut part| match part.len() {
                1 => Ok(part.remove(0)),
                _ => Ok(concat(part)?),
            })
            .collect::<Result<_>>()?;
        Ok((Self { slots }, buckets))
    }

    /// Unpacks the gradients of the same model from buckets that were divided or added.
    pub fn unpack<M: Module>(self, model: &M, buckets: Vec<Tensor<1>>) -> GradientsParams {
        let mut unpack = Unpack {
            slots: self.slots,
            buckets,
            gradients: GradientsParams::new(),
        };
        model.visit(&mut unpack);
        unpack.gradients
    }
}

struct Pack {
    gradients: GradientsParams,
    found: Vec<(ParamId, Tensor<1>)>,
}

impl ModuleVisitor for Pack {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // A parameter shared by two places has one gradient, which the first visit takes.
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let gradient = gradient.inner();
            let length = gradient.shape().num_elements();
            self.found.push((param.id, gradient.reshape([length])));
        }
    }
}

struct Unpack {
    slots: VecDeque<Slot>,
    buckets: Vec<Tensor<1>>,
    gradients: GradientsParams,
}

impl ModuleVisitor for Unpack {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self.slots.pop_front_if(|slot| slot.id == param.id) else {
            return;
        };
        let bucket = self.buckets[slot.bucket].clone();
        let whole = slot.length == bucket.dims()[0];
        let flat = match whole {
            true => bucket,
            false => bucket.narrow(0, slot.first, slot.length),
        };
        self.gradients
            .register(param.id, flat.reshape(param.base().dims()));
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::tensor::{Device, Distribution, TensorData};

    use super::*;

    #[derive(Module, Debug)]
    struct Some3 {
        a: Param<Tensor<2>>,
        frozen: Param<Tensor<1>>,
        b: Param<Tensor<3>>,
        again: Param<Tensor<2>>,
    }

    #[test]
    fn gradients_come_out_as_they_went_in() {
        let device = Device::flex();
        let of = |shape: [usize; 2]| {
            Param::from_tensor(Tensor::random(shape, Distribution::Default, &device))
        };
        let a = of([3, 5]);
        let model = Some3 {
            again: a.clone(),
            a,
            frozen: Param::from_tensor(Tensor::zeros([4], &device)),
            b: Param::from_tensor(Tensor::zeros([2, 1, 7], &device)),
        };
        let mut gradients = GradientsParams::new();
        let numbers = |first: usize, count: usize| {
            let numbers: Vec<f32> = (first..first + count).map(|i| i as f32).collect();
            TensorData::new(numbers, [count])
        };
        let first = Tensor::<1>::from_data(numbers(0, 15), &device).reshape([3, 5]);
        let second = Tensor::<1>::from_data(numbers(15, 14), &device).reshape([2, 1, 7]);
        gradients.register::<2>(model.a.id, first.clone());
        gradients.register::<3>(model.b.id, second.clone());
        let (bundle, buckets) = Bundle::pack(&model, gradients).unwrap();
        assert_eq!(buckets.len(), 1);
        assert_eq!(buckets[0].to_data(), numbers(0, 29));
        let doubled = buckets.into_iter().map(|bucket| bucket * 2.0).collect();
        let back = bundle.unpack(&model, doubled);
        assert_eq!(back.len(), 2);
        let (a, b) = (back.get::<2>(model.a.id), back.get::<3>(model.b.id));
        assert_eq!(a.unwrap().into_data(), (first * 2.0).into_data());
        assert_eq!(b.unwrap().into_data(), (second * 2.0).into_data());
    }
}
