//! Helpers for the sister crates and tests. Nothing here is stable.

#[cfg(feature = "cube")]
pub use crate::base::cube;
#[cfg(feature = "autodiff")]
pub use crate::base::custom_gradient;
#[cfg(all(feature = "cube", feature = "fusion"))]
pub use crate::base::taken;
pub use crate::base::{device, dtype, host, op_plan, sums, values};

#[cfg(feature = "autodiff")]
pub use crate::attention::autodiff::inner_layout;
pub use crate::attention::kept::AttentionResiduals;
pub use crate::attention::plan::Chosen;
pub use crate::base::arange::arange;
pub use crate::base::device::runs_kernels;
pub use crate::base::op_plan::NO_KERNELS;
pub use crate::base::sums::sum_all;
pub use crate::choice::{allowed_blocks, checked, choose_rows, mask};
pub use crate::graph::seeds::prepare_seed;
pub use crate::merge::merge_parts;
pub use crate::options::DispatchMode;
pub use crate::rows::{gather_rows, segment_sum};
#[cfg(feature = "draw")]
pub use blocksparse::font;
pub use blocksparse::philox;

/// Checks of a call's arguments.
pub mod check {
    pub use crate::check::*;
}

/// Common imports of ops in sister crates.
pub mod prelude {
    pub use crate::base::prelude::*;
    pub use crate::check::same_device;
}

/// Layouts on devices.
pub mod upload {
    pub use crate::upload::{indices, layout_tensors};
}

/// Returns the plan of a call on a device. The text of kernels is evaluated if the calling crate is built with them.
#[doc(hidden)]
#[macro_export]
macro_rules! op_plan {
    ($device:expr, |$inner:ident| $text:expr) => {
        $crate::internal::op_plan::OpPlan::new($device, |$inner| {
            #[cfg(feature = "cube")]
            let text = $text;
            #[cfg(not(feature = "cube"))]
            let text = Err::<String, _>($crate::internal::NO_KERNELS);
            text
        })
    };
}
