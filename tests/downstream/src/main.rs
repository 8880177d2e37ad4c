//! A training step of attention, as an application writes it.

use burn::tensor::{Device, Distribution, Tensor};
use burn_blocksparse::{OpError, Pattern, SparseAttentionCall, check_device};

fn main() -> Result<(), OpError> {
    #[cfg(feature = "wgpu")]
    let device = Device::wgpu(burn::tensor::DeviceKind::default());
    #[cfg(not(feature = "wgpu"))]
    let device = Device::flex();
    check_device(&device)?;
    let device = device.autodiff();
    let [q, k, v] = [(); 3].map(|_| {
        Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &device).require_grad()
    });
    let layout = Pattern::fixed(128, 32).layout(2, 256, 32)?;
    let call = SparseAttentionCall::new(q.clone(), k, v, &layout);
    println!("{}", call.explain()?);
    let out = call.run()?.out;
    let gradients = out.sum().backward();
    println!("{:?}", q.grad(&gradients).map(|grad| grad.dims()));
    Ok(())
}
