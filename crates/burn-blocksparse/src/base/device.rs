//! Devices that this crate serves, and checks whether they can be used on this machine.

#[cfg(feature = "cube")]
use blocksparse_cubecl::Tuning;
use burn::backend::DispatchDevice;
use burn::tensor::Device;

use crate::error::OpError;

/// Checks whether this crate can compute on `device`: a feature of this crate enables its backend, the device exists on this machine, and
/// software that its kernels need can be loaded. Burn creates a device without a check and panics at its first use. A program that
/// lets its users choose a device should call this first.
///
/// A CUDA device needs NVIDIA's driver (`libcuda`) and, with this crate's `cuda` feature, the CUDA toolkit: NVRTC and its headers.
/// The check takes milliseconds. For a WGPU device it starts the graphics API.
///
/// ```
/// use burn::tensor::Device;
/// use burn_blocksparse::check_device;
///
/// check_device(&Device::flex())?;
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Errors
/// [`OpError::Backend`] names the disabled feature of this crate, [`OpError::Device`] the missing part and how to install it, [`OpError::Kernel`] the
/// environment variable of the kernels that is invalid.
pub fn check_device(device: &Device) -> Result<(), OpError> {
    served(device)?;
    #[cfg(feature = "cube")]
    if let Some(inner) = &cube::of(device) {
        cube::present(inner)?;
        return cube::toolkit(inner);
    }
    Ok(())
}

/// Checks whether the device's backend has collectives, which `burn::tensor::distributed::all_reduce` needs: NCCL, on CUDA devices. On other devices
/// that function panics, and Burn cannot be asked.
///
/// ```
/// use burn::tensor::Device;
/// use burn_blocksparse::check_collectives;
///
/// assert!(check_collectives(&Device::flex()).is_err());
/// ```
///
/// # Errors
/// [`OpError::Argument`] if it is not a CUDA device, [`OpError::Device`] if NCCL's library cannot be loaded, with installation instructions.
pub fn check_collectives(device: &Device) -> Result<(), OpError> {
    served(device)?;
    #[cfg(feature = "cuda")]
    if let Some(inner @ burn_cubecl::CubeDevice::Cuda(_)) = &cube::of(device) {
        return cube::nccl(inner);
    }
    let device = format!("{device:?}");
    Err(OpError::argument("device", "a CUDA device", device))
}

/// Checks that a feature of this crate serves the device's backend (otherwise Burn's dispatch would panic) and, if the backend has kernels, that their
/// environment variables are valid. Every op calls this first.
pub fn served(device: &Device) -> Result<(), OpError> {
    if device.is_autodiff() && !cfg!(feature = "autodiff") {
        return Err(OpError::Backend {
            device: format!("{device:?}"),
            feature: Some("autodiff"),
        });
    }
    // The variants depend on the features of `burn`, so only those that our features enable can be named.
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => Ok(()),
        #[cfg(feature = "ndarray")]
        DispatchDevice::NdArray(_) => Ok(()),
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => Ok(Tuning::of_process().map(|_| ())?),
        #[allow(unreachable_patterns)] // `burn` may have no other backend.
        other => Err(not_served(other)),
    }
}

/// Returns the index that the driver gives a device with kernels.
pub fn index(device: &Device) -> Option<u16> {
    #[cfg(feature = "cube")]
    let inner = cube::of(device).map(|inner| inner.to_id().index_id);
    #[cfg(not(feature = "cube"))]
    let inner = {
        let _ = device;
        None
    };
    inner
}

/// Returns whether kernels of this crate run on a device rather than the reference: on GPUs that a feature of the crate serves, unless the environment selects
/// the reference.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub fn runs_kernels(device: &Device) -> bool {
    #[cfg(feature = "cube")]
    if cube::of(device).is_some() {
        return !crate::base::cube::uses_reference();
    }
    false
}

fn not_served(device: &DispatchDevice) -> OpError {
    // The variants cannot be named here, but they print their names.
    let device = format!("{device:?}");
    let features = [
        ("Flex", "flex"),
        ("NdArray", "ndarray"),
        ("Cube(Cuda", "cuda"),
        ("Cube(Wgpu", "wgpu"),
        ("Cube", "cube"),
    ];
    let known = features.iter().find(|(name, _)| device.starts_with(name));
    OpError::Backend {
        feature: known.map(|(_, feature)| *feature),
        device,
    }
}

#[cfg(feature = "cube")]
/// Checks of CubeCL devices.
pub mod cube {
    use burn::backend::DispatchDevice;
    use burn::tensor::Device;
    use burn_cubecl::CubeDevice;

    use crate::error::OpError;

    /// Returns the CubeCL device of a device, if it is one.
    pub fn of(device: &Device) -> Option<CubeDevice> {
        match device.clone().without_autodiff().as_dispatch() {
            DispatchDevice::Cube(inner) => Some(inner.clone()),
            #[allow(unreachable_patterns)] // `burn` may have no other backend.
            _ => None,
        }
    }

    /// Checks whether the device exists on this machine.
    pub fn present(device: &CubeDevice) -> Result<(), OpError> {
        // A device that the application registered is not enumerated.
        let is_registered = format!("{device:?}").contains("Existing");
        let found = CubeDevice::enumerate(device.to_id());
        if is_registered || found.contains(&device.to_id()) {
            return Ok(());
        }
        let others = format!("{} other devices of its kind", found.len());
        let (missing, install) = match (device, found.len()) {
            (CubeDevice::Cuda(_), 0) => (
                "no CUDA device, or no driver".to_string(),
                "install NVIDIA's driver, so that libcuda can be loaded and nvidia-smi lists a GPU",
            ),
            (CubeDevice::Wgpu(_), 0) => (
                "no adapter of its kind".to_string(),
                "install a driver of the graphics API (Vulkan on Linux, where vulkaninfo lists adapters)",
            ),
            (_, 0) => (
                "no device of its kind".to_string(),
                "install the device's driver",
            ),
            _ => (others, "choose one that there is"),
        };
        Err(OpError::Device {
            device: format!("{device:?}"),
            missing,
            install,
        })
    }

    /// Checks whether the compiler of a device's kernels is installed.
    #[cfg(not(feature = "cuda"))]
    pub fn toolkit(_device: &CubeDevice) -> Result<(), OpError> {
        Ok(())
    }

    /// Checks whether the compiler of a device's kernels is installed: without it CubeCL panics at the first kernel. The result is cached.
    #[cfg(feature = "cuda")]
    pub fn toolkit(device: &CubeDevice) -> Result<(), OpError> {
        use std::sync::LazyLock;

        static MISSING: LazyLock<Option<String>> = LazyLock::new(missing_from_toolkit);
        // Other devices do not need it, and the check loads a library.
        if !matches!(device, CubeDevice::Cuda(_)) {
            return Ok(());
        }
        match &*MISSING {
            None => Ok(()),
            Some(missing) => Err(OpError::Device {
                device: format!("{device:?}"),
                missing: missing.clone(),
                install: "install the CUDA toolkit, set CUDA_PATH to its folder, and have the folder of NVRTC's library in LD_LIBRARY_PATH",
            }),
        }
    }

    /// Checks whether NCCL can be loaded. CubeCL looks for the same library names when it creates the device's server; without NCCL it panics at the first sum.
    #[cfg(feature = "cuda")]
    pub fn nccl(device: &CubeDevice) -> Result<(), OpError> {
        use std::sync::LazyLock;

        // SAFETY: this loads libraries with NCCL's names, as CubeCL does. Their initializers are trusted as much there.
        static PRESENT: LazyLock<bool> =
            LazyLock::new(|| unsafe { cudarc::nccl::sys::is_culib_present() });
        match *PRESENT {
            true => Ok(()),
            false => Err(OpError::Device {
                device: format!("{device:?}"),
                missing: "no library of NCCL that can be loaded".to_string(),
                // cudarc 0.19 does not look for libnccl.so.2, the only name that libnccl2 installs.
                install: "install libnccl2 and libnccl-dev (the latter for the name libnccl.so; a link of that name to libnccl.so.2 does as well), and have \
                          their folder in LD_LIBRARY_PATH",
            }),
        }
    }

    #[cfg(feature = "cuda")]
    fn missing_from_toolkit() -> Option<String> {
        // SAFETY: this loads libraries with NVRTC's names, as CubeCL does at its first kernel. Their initializers are trusted as much there.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            return Some("no library of NVRTC that can be loaded".to_string());
        }
        let Some(path) = cubecl_cuda::install::cuda_path() else {
            return Some("no CUDA_PATH, and no toolkit in /usr/local/cuda".to_string());
        };
        let headers = path.join("include").join("cuda_fp16.h");
        match headers.is_file() {
            true => None,
            false => Some(format!("no file {}", headers.display())),
        }
    }
}
