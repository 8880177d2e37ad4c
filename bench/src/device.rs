//! The device of a bench program, with uploads and reads.

use anyhow::{Result, anyhow};
use blocksparse_cubecl::TensorView;
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::ir::ElemType;
use cubecl::server::Handle;

use crate::numbers::{decoded, encoded};

/// Returns the device for which the program is built.
pub fn client() -> Result<Client> {
    #[cfg(feature = "cuda")]
    return Ok(cubecl::Device::Cuda(Default::default()).client());
    #[cfg(all(feature = "wgpu", not(feature = "cuda")))]
    return Ok(cubecl::Device::Wgpu(Default::default()).client());
    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    anyhow::bail!("built without a device: use --features cuda or --features wgpu");
}

pub fn upload(client: &Client, numbers: &[f32], element: ElemType) -> Handle {
    client.create_from_slice(&encoded(numbers, element))
}

/// Uploads integers, padded to at least one: a buffer cannot be empty.
pub fn upload_ints(client: &Client, numbers: &[i32]) -> Handle {
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    bytes.resize(bytes.len().max(4), 0);
    client.create_from_slice(&bytes)
}

/// Allocates a buffer for results with all bits set, which is NaN in every type.
pub fn poisoned(client: &Client, numbers: usize, element: ElemType) -> Handle {
    client.create_from_slice(&vec![0xff; (numbers * element.size()).max(4)])
}

/// Returns a contiguous tensor.
pub fn contiguous(handle: Handle, shape: [usize; 4]) -> TensorView {
    let [_, heads, rows, width] = shape;
    TensorView {
        handle,
        shape,
        strides: [heads * rows * width, rows * width, width, 1],
    }
}

pub fn empty(client: &Client, numbers: usize, element: ElemType) -> Handle {
    client.empty(numbers * element.size())
}

pub fn read(client: &Client, handle: &Handle) -> Result<Vec<u8>> {
    let bytes = client.read_one(handle.clone());
    Ok(bytes.map_err(|error| anyhow!("{error:?}"))?.to_vec())
}

pub fn read_floats<T: From<f32>>(
    client: &Client,
    handle: &Handle,
    element: ElemType,
) -> Result<Vec<T>> {
    Ok(decoded(&read(client, handle)?, element))
}

pub fn read_ints(client: &Client, handle: &Handle) -> Result<Vec<i32>> {
    let bytes = read(client, handle)?;
    let (numbers, _) = bytes.as_chunks();
    Ok(numbers.iter().map(|x| i32::from_le_bytes(*x)).collect())
}

pub fn flush(client: &Client) -> Result<()> {
    client.flush().map_err(|error| anyhow!("{error}"))
}

pub fn sync(client: &Client) -> Result<()> {
    block_on(client.sync()).map_err(|error| anyhow!("{error:?}"))
}
