//! The backend trait of layouts that are made on the device.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};

use crate::base::values::LayoutTensors;

/// What is read of layouts that are made on the device.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait DeviceLayoutOps: Backend {
    /// How many blocks each row of a layout that is made on the device has: i32 `[batch or 1, patterns, q_blocks]`. Asked for only where kernels run.
    #[fusion(meta = meta::counts)]
    fn count_blocks(#[extension_type] layout: LayoutTensors<Self>) -> IntTensor<Self> {
        let _ = layout;
        unimplemented!("where no kernels run the host knows the blocks")
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    use crate::base::values::LayoutTensorsMetadata;

    pub fn counts(layout: &LayoutTensorsMetadata) -> TensorSpec {
        let choice = layout.host.device_choice();
        let [batch, patterns] = choice.map_or([1, 1], |choice| choice.patterns);
        TensorSpec::new([batch, patterns, layout.host.q_blocks()].into(), DType::I32)
    }
}

#[cfg(feature = "flex")]
impl DeviceLayoutOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl DeviceLayoutOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
mod kernels {
    use burn::tensor::DType;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::tensor::CubeTensor;

    use super::DeviceLayoutOps;
    use crate::base::cube::{choose_blocks, empty};
    use crate::base::values::LayoutTensors;

    impl DeviceLayoutOps for CubeBackend {
        fn count_blocks(layout: LayoutTensors<Self>) -> CubeTensor {
            let choice = layout.host.device_choice();
            let [batch, patterns] = choice.map_or([1, 1], |choice| choice.patterns);
            let client = layout.blocked.client.clone();
            let dims = [batch, patterns, layout.host.q_blocks()];
            let counts = empty(&layout.blocked, dims, DType::I32);
            choose_blocks(&client, &layout.host, layout.choice);
            blocksparse_cubecl::count_blocks(&client, &layout.host, &counts.handle);
            counts
        }
    }
}
