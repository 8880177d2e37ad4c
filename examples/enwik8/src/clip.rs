//! Gradient clipping by the norm of all gradients together.
//!
//! Burn's `GradientClippingConfig::Norm` bounds the norm of each parameter's gradient by itself, which changes the
//! gradient's direction. The paper, like most, scales the whole gradient (§6).

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

/// Scales all gradients by `min(1, limit / norm)`.
///
/// Returns the gradients and their norm before: `[1]`, still on the device, so that nothing waits for it here.
/// Gradients that are not finite stay that way, and show in the norm.
pub fn clip_global_norm<M: Module>(
    model: &M,
    mut gradients: GradientsParams,
    limit: f64,
) -> (GradientsParams, Tensor<1>) {
    let mut squares = Squares {
        gradients: &gradients,
        sums: Vec::new(),
    };
    model.visit(&mut squares);
    let norm = row_sums(Tensor::cat(squares.sums, 0)).sqrt();
    let factor = (norm.clone().recip() * limit).clamp_max(1.0);
    model.visit(&mut Scale {
        gradients: &mut gradients,
        factor,
    });
    (gradients, norm)
}

struct Squares<'a> {
    gradients: &'a GradientsParams,
    sums: Vec<Tensor<1>>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.sums.push(row_sums(gradient.square()));
        }
    }
}

/// The sum of each row, `[rows]`. Of a vector that is one number.
///
/// Not `sum()`, which on GPUs may add with atomics: in another order, and with other bits, every time.
fn row_sums<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let width = x.dims()[D - 1];
    let rows = x.shape().num_elements() / width;
    x.reshape([rows, width]).sum_dim(1).reshape([rows])
}

struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    factor: Tensor<1>,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.gradients
                .register(param.id, gradient * self.factor.clone().unsqueeze());
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    fn gradients(model: &Linear, weight: f32, bias: f32) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        let device = Device::flex();
        gradients.register(model.weight.id, Tensor::<2>::full([2, 2], weight, &device));
        let id = model.bias.as_ref().unwrap().id;
        gradients.register(id, Tensor::<1>::full([2], bias, &device));
        gradients
    }

    fn values(model: &Linear, gradients: &GradientsParams) -> Vec<f32> {
        let weight = gradients.get::<2>(model.weight.id).unwrap();
        let bias = gradients.get::<1>(model.bias.as_ref().unwrap().id).unwrap();
        let mut values = weight.try_into_vec_as::<f32>().unwrap();
        values.extend(bias.try_into_vec_as::<f32>().unwrap());
        values
    }

    #[test]
    fn one_factor_for_all_parameters() {
        let model = LinearConfig::new(2, 2).init(&Device::flex());
        // 4 · 3² + 2 · 8² = 164
        let (clipped, norm) = clip_global_norm(&model, gradients(&model, 3.0, 8.0), 1.0);
        let expected = 164f32.sqrt();
        assert!((norm.into_scalar::<f32>() - expected).abs() < 1e-5);
        let values = values(&model, &clipped);
        assert!(
            (values[0] - 3.0 / expected).abs() < 1e-6 && (values[5] - 8.0 / expected).abs() < 1e-6
        );
        let squares: f32 = values.iter().map(|value| value * value).sum();
        assert!((squares.sqrt() - 1.0).abs() < 1e-5);
    }

    #[test]
    fn small_and_zero_gradients_are_left_alone() {
        let model = LinearConfig::new(2, 2).init(&Device::flex());
        for (weight, bias) in [(0.1, 0.2), (0.0, 0.0)] {
            let (clipped, _) = clip_global_norm(&model, gradients(&model, weight, bias), 1.0);
            assert_eq!(
                values(&model, &clipped),
                [weight, weight, weight, weight, bias, bias]
            );
        }
    }
}
