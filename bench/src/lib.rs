//! What the bench programs share: a device and its clock, numbers on it, how calls are run, and what their results are compared with.

pub mod compare;
pub mod device;
pub mod device_time;
pub mod numbers;
pub mod operand;
pub mod runner;
