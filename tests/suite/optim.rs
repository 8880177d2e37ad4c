//! AdamW over all parameters of a module.

use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Bytes;
use burn_fused_ops::optim::{FusedAdamWConfig, clip_gradients, concat, gradient_norm};

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(optim);

fn step(config: FusedAdamWConfig, rate: f64, gradient: [usize; 2]) -> Result<(), OpError> {
    let device = &devices()[0];
    let model = LinearConfig::new(3, 2).init(device);
    let mut gradients = GradientsParams::new();
    gradients.register(model.weight.id, Tensor::<2>::ones(gradient, device));
    config.init().step(rate, model, gradients).map(|_| ())
}

#[test]
fn bad_learning_rates_and_configurations() {
    let plain = FusedAdamWConfig::new;
    refused! {
        step(plain(), f64::NAN, [3, 2]) => "learning_rate must be a finite number, at least 0, got NaN";
        step(plain(), -0.1, [3, 2]) => "learning_rate must be a finite number, at least 0, got -0.1";
        step(plain().with_beta_1(1.0), 0.1, [3, 2]) => "beta_1 must be in [0, 1), got 1";
        step(plain().with_beta_2(-0.5), 0.1, [3, 2]) => "beta_2 must be in [0, 1), got -0.5";
        step(plain().with_epsilon(f64::INFINITY), 0.1, [3, 2]) => "epsilon must be a finite number, at least 0, got inf";
        step(plain().with_weight_decay(-1.0), 0.1, [3, 2]) => "weight_decay must be a finite number, at least 0, got -1";
        step(plain().with_max_grad_norm(Some(0.0)), 0.1, [3, 2]) => "max_grad_norm must be a finite number above 0, got 0";
    }
}

#[test]
fn gradients_of_another_shape() {
    let error = step(FusedAdamWConfig::new(), 0.1, [2, 3]).unwrap_err();
    let expected = "a gradient's shape must be [3, 2], that of parameter weight, got [2, 3]";
    assert_eq!(error.to_string(), expected);
    let device = &devices()[0];
    let model = LinearConfig::new(3, 2).init(device);
    let mut gradients = GradientsParams::new();
    gradients.register(model.weight.id, Tensor::<2>::ones([2, 3], device));
    refused! {
        gradient_norm(&model, &gradients) => expected;
        clip_gradients(&model, gradients, -1.0) => "max_norm must be a finite number above 0, got -1";
    }
}

#[test]
fn tensors_that_do_not_go_together() {
    let device = &devices()[0];
    let of = |dtype| Tensor::<1>::ones([3], (device, dtype));
    refused! {
        concat(Vec::new()) => "tensors must be one at least, got none";
        concat(vec![of(DType::F32), of(DType::F64)]) => "a tensor's dtype must be F32, the first one's, got F64";
    }
}

/// Returns the record of a step of Burn's AdamW with AMSGrad.
fn amsgrad_record(device: &Device) -> Bytes {
    // Burn's supports only autodiff devices.
    let autodiff = device.clone().autodiff();
    let model = LinearConfig::new(3, 2).with_bias(false).init(&autodiff);
    let mut gradients = GradientsParams::new();
    gradients.register(model.weight.id, Tensor::<2>::ones([3, 2], device));
    let mut optimizer = AdamWConfig::new().with_amsgrad(true).init();
    optimizer.step(0.1, model, gradients);
    optimizer.into_bytes().unwrap()
}

#[test]
fn records_that_are_none() {
    let device = &devices()[0];
    let read = |bytes: Bytes| {
        FusedAdamWConfig::new()
            .init()
            .from_bytes(bytes)
            .unwrap_err()
    };
    let error = read(Bytes::from_bytes_vec(vec![1; 40])).to_string();
    let is_right = error.starts_with("record must be the record of AdamW, got ");
    assert!(is_right, "{error}");
    let error = read(amsgrad_record(device)).to_string();
    let is_right = error.contains("without AMSGrad") && error.contains("max_moment_2");
    assert!(is_right, "{error}");
}

#[test]
fn records_of_another_model() {
    let device = &devices()[0];
    let model = LinearConfig::new(4, 2).with_bias(false).init(device);
    let id = model.weight.id.val();
    let text = |field: &str| format!("{id}.{field}");
    let tensor = |name: &str, shape: [usize; 2]| {
        let bytes = Bytes::from_bytes_vec(vec![0; 4 * shape[0] * shape[1]]);
        let dtype = burn::tensor::DType::F32;
        burn_pack::Tensor::new(text(name), dtype, shape.to_vec(), Some(id), bytes)
    };
    let [first, second] = ["momentum.moment_1", "momentum.moment_2"];
    let write = |tensors: Vec<burn_pack::Tensor>, time: bool| {
        let mut writer = burn_pack::Writer::new(tensors);
        if time {
            writer = writer.with_scalar(&text("momentum.time"), 3usize.into());
        }
        writer.into_bytes().unwrap()
    };
    let read = |bytes: Bytes| FusedAdamWConfig::new().init().from_bytes(bytes);
    let error = |bytes: Bytes| read(bytes).unwrap_err().to_string();
    let whole = |shape| vec![tensor(first, shape), tensor(second, shape)];
    let expected = |field: &str| {
        format!(
            "record must be the record of AdamW, got one without {}",
            text(field)
        )
    };
    assert_eq!(
        error(write(whole([4, 2]), false)),
        expected("momentum.time")
    );
    assert_eq!(
        error(write(vec![tensor(first, [4, 2])], true)),
        expected(second)
    );
    let uneven = vec![tensor(first, [4, 2]), tensor(second, [2, 4])];
    assert!(error(write(uneven, true)).contains("moments of one shape"));
    let mut optimizer = read(write(whole([3, 2]), true)).unwrap();
    let mut gradients = GradientsParams::new();
    gradients.register(model.weight.id, Tensor::<2>::ones([4, 2], device));
    refused! { optimizer.step(0.1, model, gradients) => "the record's shape must be [4, 2], that of parameter weight, got [3, 2]"; }
}
