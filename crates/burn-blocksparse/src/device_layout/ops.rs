//! The backend trait of device layouts.

use crate::base::prelude::*;
use crate::base::values::LayoutTensors;

/// Reads of device layouts.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait DeviceLayoutOps: Backend {
    /// Counts the blocks of each row of a device layout: i32 `[batch or 1, patterns, q_blocks]`. Called only where kernels run.
    #[fusion(dtype = DType::I32, shape = counts_shape(&layout.host).into())]
    fn count_blocks(#[extension_type] layout: LayoutTensors<Self>) -> IntTensor<Self> {
        let _ = layout;
        unimplemented!("where no kernels run the host knows the blocks")
    }
}

reference_backends!(DeviceLayoutOps);

#[cfg(any(feature = "cube", feature = "fusion"))]
fn counts_shape(layout: &blocksparse::BlockLayout) -> [usize; 3] {
    let [batch, patterns] = (layout.device_choice()).map_or([1, 1], |choice| choice.patterns);
    [batch, patterns, layout.q_blocks()]
}

#[cfg(feature = "cube")]
mod kernels {
    use super::{DType, DeviceLayoutOps, counts_shape};
    use crate::base::cube::*;
    use crate::base::values::LayoutTensors;

    impl DeviceLayoutOps for CubeBackend {
        fn count_blocks(layout: LayoutTensors<Self>) -> CubeTensor {
            let client = layout.blocked.client.clone();
            let counts = empty(&layout.blocked, counts_shape(&layout.host), DType::I32);
            choose_blocks(&client, &layout.host, layout.choice);
            blocksparse_cubecl::count_blocks(&client, &layout.host, &counts.handle);
            counts
        }
    }
}
