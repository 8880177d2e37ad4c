//! Shared code of the bench programs: the device and its clock, number formats, running calls, and reference results.

pub mod compare;
pub mod device;
pub mod device_time;
pub mod numbers;
pub mod operand;
pub mod runner;
