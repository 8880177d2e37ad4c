//! Attention within clusters on CubeCL devices.

use blocksparse::kernels::clusters::{ClusterPlan, ClusterSizes};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

use super::cube::{empty, launched};
use super::listed::kernels::numbers;
use crate::ops::{ClusterOps, ClusterOutput};

/// The sizes of a call by its shapes.
pub(crate) fn sizes(x: [usize; 4], value: [usize; 4], tokens: [usize; 4]) -> ClusterSizes {
    let [batch, heads, length, head_dim] = x;
    let [_, _, clusters, width] = tokens;
    let dims = [head_dim, value[3]];
    ClusterSizes::new([batch * heads, length], [clusters, width], dims)
}

/// What a device runs for a call, if it does.
pub(crate) fn plan(client: &Client, sizes: ClusterSizes, dtype: DType) -> Option<ClusterPlan> {
    ClusterPlan::new(client, sizes, dtype_to_elem_type(dtype))
}

impl ClusterOps for CubeBackend {
    fn attention_in_clusters(
        x: CubeTensor,
        value: CubeTensor,
        tokens: CubeTensor,
        scale: f64,
    ) -> ClusterOutput<Self> {
        let (x, value) = (into_contiguous(x), into_contiguous(value));
        let tokens = numbers(tokens);
        let [x_shape, value_shape, shape] =
            [&x, &value, &tokens].map(|tensor| tensor.meta.shape().dims());
        let sizes = sizes(x_shape, value_shape, shape);
        let plan = plan(&x.client, sizes, x.dtype).expect("it was planned");
        let [batch, heads, clusters, width] = shape;
        let places = clusters * width;
        let out = empty(&x, [batch, heads, places, value_shape[3]], value.dtype);
        let lse = empty(&x, [batch, heads, places], DType::F32);
        launched(plan.launch(
            &x.client,
            [&x.handle, &value.handle, &tokens.handle],
            [&out.handle, &lse.handle],
            scale,
        ));
        ClusterOutput { out, lse }
    }
}
