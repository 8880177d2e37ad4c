//! How devices are told apart.

use cubecl::device::DeviceId;
use cubecl::prelude::*;

/// A device of a runtime.
pub type DeviceKey = (&'static str, DeviceId);

/// A client's device.
pub fn device_key(client: &Client) -> DeviceKey {
    (client.name(), client.service_id().device)
}
