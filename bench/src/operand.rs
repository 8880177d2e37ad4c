//! Half-precision matrices on a device and on the host.

use std::sync::Arc;

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::server::Handle;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::device::upload;
use crate::numbers::{half, uniform};

#[derive(Clone)]
pub struct Operand {
    pub handle: Handle,
    /// `[batch, rows, cols]`
    pub shape: [usize; 3],
    pub strides: [usize; 3],
    pub element: ElemType,
    pub numbers: Arc<Vec<f32>>,
}

impl Operand {
    /// Creates a matrix of numbers between −1 and 1. With `transposed`, columns are contiguous.
    pub fn random(
        client: &Client,
        is_bf16: bool,
        shape: [usize; 3],
        transposed: bool,
        seed: u64,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let element = half(is_bf16);
        let numbers = uniform(shape.iter().product(), 1.0, element, &mut rng);
        let [_, rows, cols] = shape;
        let strides = match transposed {
            true => [rows * cols, 1, rows],
            false => [rows * cols, cols, 1],
        };
        Self {
            handle: upload(client, &numbers, element),
            shape,
            strides,
            element,
            numbers: numbers.into(),
        }
    }

    /// Creates a matrix like [`random`](Self::random) whose rows start at multiples of 16 bytes, whatever their length.
    pub fn padded(
        client: &Client,
        is_bf16: bool,
        shape: [usize; 3],
        transposed: bool,
        seed: u64,
    ) -> Self {
        let [batch, rows, cols] = shape;
        let [rows, cols] = [rows, cols].map(|length| length.next_multiple_of(8));
        let mut whole = Self::random(client, is_bf16, [batch, rows, cols], transposed, seed);
        whole.shape = shape;
        whole
    }

    /// Returns an element. An operand with one batch entry is broadcast.
    pub fn at(&self, place: [usize; 3]) -> f64 {
        let at = (0..3).map(|dim| place[dim].min(self.shape[dim] - 1) * self.strides[dim]);
        self.numbers[at.sum::<usize>()].into()
    }

    pub fn transposed(&self) -> Self {
        let mut turned = self.clone();
        turned.shape.swap(1, 2);
        turned.strides.swap(1, 2);
        turned
    }
}
