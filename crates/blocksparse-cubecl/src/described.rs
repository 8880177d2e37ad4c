//! Described devices for tests of plans.

use cubecl::ir::features::{Features, Plane, Tma, TypeUsage};
use cubecl::ir::{
    DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties,
};
use cubecl::prelude::AddressType;

use crate::call::{DeviceFacts, Request};
use crate::choice::AttentionPlan;
use crate::error::KernelError;
use crate::tuning::TierLimit;
use blocksparse::BlockLayout;

const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F32: ElemType = ElemType::Float(FloatKind::F32);
const F64: ElemType = ElemType::Float(FloatKind::F64);

/// A device as a runtime describes it.
pub struct Fake {
    runtime: &'static str,
    pub properties: DeviceProperties,
}

impl Fake {
    pub fn new(
        runtime: &'static str,
        fingerprint: &str,
        shared: usize,
        dtypes: &[ElemType],
    ) -> Self {
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: shared,
            max_cube_count: (i32::MAX as u32, 65535, 65535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(132),
            num_cpu_cores: None,
            last_level_cache_size: None,
            num_tensor_cores: None,
            min_tensor_cores_dim: None,
            max_vector_size: 4,
            cube_mma_reserved_shared_memory: 0,
        };
        let mut properties = DeviceProperties::new(
            Features::default(),
            MemoryDeviceProperties::new(1 << 40, 256),
            hardware,
            cubecl::profile::TimingMethod::System,
            DeviceIdentity {
                name: "described".into(),
                fingerprint: fingerprint.into(),
                physical: None,
            },
        );
        for &dtype in dtypes {
            properties.register_type_usage(dtype, TypeUsage::Buffer | TypeUsage::Arithmetic);
        }
        properties.register_address_type(AddressType::U32);
        properties.register_address_type(AddressType::U64);
        Self {
            runtime,
            properties,
        }
    }

    /// An H200.
    pub fn sm90() -> Self {
        let mut fake = Self::new("cuda", "ptx_sm90", 232_448, &[BF16, F32, F64]);
        let features = &mut fake.properties.features;
        features.tma.insert(Tma::Base);
        features.plane.insert(Plane::Ops);
        features.plane.insert(Plane::Sync);
        fake
    }

    /// An A100.
    pub fn sm80() -> Self {
        let mut fake = Self::new("cuda", "ptx_sm80", 166_912, &[BF16, F32, F64]);
        fake.properties.features.plane.insert(Plane::Ops);
        fake.properties.features.plane.insert(Plane::Sync);
        fake
    }

    /// A device with the guaranteed limits of WebGPU.
    pub fn webgpu() -> Self {
        let mut fake = Self::new("wgpu<wgsl>", "spirv_1_2", 32_768, &[F32]);
        let hardware = &mut fake.properties.hardware;
        hardware.max_bindings = 8;
        hardware.max_cube_count = (65535, 65535, 65535);
        hardware.max_units_per_cube = 256;
        hardware.max_cube_dim = (256, 256, 64);
        fake
    }

    /// Returns the plan of a call.
    pub fn plan(
        &self,
        layout: &BlockLayout,
        request: Request,
        limit: TierLimit,
    ) -> Result<AttentionPlan, KernelError> {
        let device = DeviceFacts {
            runtime: self.runtime,
            properties: &self.properties,
        };
        AttentionPlan::choose(layout, request, limit, device)
    }
}
