//! Identities of devices.

use cubecl::device::DeviceId;
use cubecl::prelude::*;

/// A device of a runtime.
pub type DeviceKey = (&'static str, DeviceId);

/// Returns the key of a client's device.
pub fn device_key(client: &Client) -> DeviceKey {
    (client.name(), client.service_id().device)
}
