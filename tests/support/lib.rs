//! What the tests share: the table of cases, the f64 reference, the comparator and the devices.
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

pub mod cases;
pub mod compare;
pub mod devices;
pub mod reference;
