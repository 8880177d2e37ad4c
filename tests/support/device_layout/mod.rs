//! Layouts made on the device.

pub mod case;
pub mod chosen;
pub mod positions;
pub mod within;
