use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Int, Tensor};

/// Mean of `−log softmax(logits)[target]` over all positions, in nats.
///
/// Half-precision logits are widened first: neither the sum of exponentials nor the mean over
/// thousands of positions fits eight or eleven bits.
///
/// # Shapes
/// - `logits`: `[batch, seq, vocab]`
/// - `targets`: `[batch, seq]`
pub(crate) fn cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    let [batch, seq, vocab] = logits.dims();
    let logits = match logits.dtype() {
        DType::F16 | DType::BF16 => logits.cast(DType::F32),
        _ => logits,
    };
    let positions = batch * seq;
    let log_probabilities = log_softmax(logits.reshape([positions, vocab]), 1);
    let chosen = log_probabilities.gather(1, targets.reshape([positions, 1]));
    // As a row: `mean()` may add with atomics on GPUs, and give other bits every time.
    let mean = chosen.reshape([1, positions]).mean_dim(1);
    mean.neg().reshape([1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    /// `[1, seq, 3]` logits; the loss in f64.
    fn expected(logits: &[[f64; 3]], targets: &[usize]) -> f64 {
        let nats = logits.iter().zip(targets).map(|(row, target)| {
            let max = row.iter().cloned().fold(f64::MIN, f64::max);
            let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
            max + sum.ln() - row[*target]
        });
        nats.sum::<f64>() / logits.len() as f64
    }

    fn computed(logits: &[[f64; 3]], targets: &[usize]) -> f64 {
        let device = Device::flex();
        let seq = logits.len();
        let data: Vec<f32> = logits.iter().flatten().map(|v| *v as f32).collect();
        let logits = Tensor::from_data(TensorData::new(data, [1, seq, 3]), &device);
        let targets: Vec<i32> = targets.iter().map(|t| *t as i32).collect();
        let targets = Tensor::from_data(TensorData::new(targets, [1, seq]), &device);
        cross_entropy(logits, targets).into_scalar::<f64>()
    }

    #[test]
    fn is_the_mean_in_nats() {
        let logits = [[0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [3.0, 3.0, -1.0]];
        let targets = [2, 1, 0];
        assert!((computed(&logits, &targets) - expected(&logits, &targets)).abs() < 1e-6);
    }

    #[test]
    fn large_logits_stay_finite() {
        let logits = [[1e4, -1e4, 0.0], [-3e4, 2e4, 2e4]];
        let targets = [1, 0];
        let loss = computed(&logits, &targets);
        assert!((loss / expected(&logits, &targets) - 1.0).abs() < 1e-6);
    }
}
