//! Attention within clusters on CubeCL devices.

use crate::kernels::clusters::{ClusterPlan, ClusterSizes};
use crate::kernels::rows;
use crate::kernels::rows::highest::words_of_flags;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

use crate::clusters::ops::ClusterOps;
use crate::order::backend::{Compared, compared};
use burn_blocksparse::internal::cube::{empty, launched};

/// The sizes of a call by its shapes.
pub(crate) fn sizes(
    x: [usize; 4],
    value: [usize; 4],
    means: [usize; 3],
    window: usize,
) -> ClusterSizes {
    let [batch, heads, length, head_dim] = x;
    let [_, clusters, _] = means;
    let dims = [head_dim, value[3]];
    ClusterSizes::new([batch * heads, length], [clusters, window], dims)
}

/// What a device runs for a call, if it does.
pub(crate) fn plan(client: &Client, sizes: ClusterSizes, dtype: DType) -> Option<ClusterPlan> {
    ClusterPlan::new(client, sizes, dtype_to_elem_type(dtype))
}

impl ClusterOps for CubeBackend {
    fn routed_attention(
        x: CubeTensor,
        value: CubeTensor,
        means: CubeTensor,
        window: usize,
        scale: f64,
    ) -> CubeTensor {
        let (x, value) = (into_contiguous(x), into_contiguous(value));
        let [x_shape, value_shape] = [&x, &value].map(|tensor| tensor.meta.shape().dims());
        let of = sizes(x_shape, value_shape, means.meta.shape().dims(), window);
        let client = &x.client;
        let plan = plan(client, of, x.dtype).expect("it was planned");
        let Compared { similarities, .. } = compared(&x, means);
        let [lists, count, length] = [of.lists, of.clusters, of.length];
        let tokens = empty(&x, [lists, count, window], DType::I32);
        let flags = empty(&x, [lists, count, words_of_flags(length), 2], DType::I32);
        launched(rows::highest_flags_of_rows(
            client,
            [lists, count, length],
            window,
            &similarities.handle,
            [&tokens.handle, &flags.handle],
        ));
        let by_place = empty(&x, [lists, count * window, value_shape[3]], value.dtype);
        let lse = empty(&x, [lists, count * window], DType::F32);
        launched(plan.attend(
            client,
            [&x.handle, &value.handle, &tokens.handle],
            [&by_place.handle, &lse.handle],
            scale,
        ));
        let out = empty(&x, value_shape, value.dtype);
        launched(plan.mean(client, [&by_place.handle, &flags.handle], &out.handle));
        out
    }
}
