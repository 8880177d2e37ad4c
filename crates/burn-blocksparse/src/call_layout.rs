//! The layout of a call.

use blocksparse::BlockLayout;

use crate::device_layout::DeviceLayout;

/// The layout of a call: built on the host or on a device.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Layout<'a> {
    /// Built on the host.
    Host(&'a BlockLayout),
    /// Built on the device.
    Device(&'a DeviceLayout),
}

impl<'a> Layout<'a> {
    /// Returns a layout with the same sizes.
    #[doc(hidden)]
    pub fn sizes(self) -> &'a BlockLayout {
        match self {
            Layout::Host(layout) => layout,
            Layout::Device(layout) => layout.frame(),
        }
    }
}

impl<'a> From<&'a BlockLayout> for Layout<'a> {
    fn from(layout: &'a BlockLayout) -> Self {
        Layout::Host(layout)
    }
}

impl<'a> From<&'a DeviceLayout> for Layout<'a> {
    fn from(layout: &'a DeviceLayout) -> Self {
        Layout::Device(layout)
    }
}
