//! Random tensors, in f32 already rounded to a half type when they are read.

use blocksparse::kernels::TensorView;
use blocksparse::kernels::hopper::Half;
use cubecl::prelude::*;
use half::{bf16, f16};

/// In which order the dimensions of a tensor lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// `[batch, heads, seq, dim]`
    Heads,
    /// `[batch, seq, heads, dim]`
    Sequence,
}

pub struct Tensor {
    pub shape: [usize; 4],
    pub data: Vec<f32>,
}

impl Tensor {
    pub fn view(&self, client: &Client, half: Half, order: Order) -> TensorView {
        let [_, heads, seq, dim] = self.shape;
        let at: Box<dyn Fn(usize) -> usize> = match order {
            Order::Heads => Box::new(|i| i),
            Order::Sequence => Box::new(move |i| {
                let (d, h) = (i % dim, i / dim % heads);
                let (s, b) = (i / dim / heads % seq, i / dim / heads / seq);
                ((b * heads + h) * seq + s) * dim + d
            }),
        };
        let bits: Vec<u16> = (0..self.data.len())
            .map(|i| match half {
                Half::Bf16 => bf16::from_f32(self.data[at(i)]).to_bits(),
                Half::F16 => f16::from_f32(self.data[at(i)]).to_bits(),
            })
            .collect();
        TensorView {
            handle: client.create_from_slice(bytemuck::cast_slice(&bits)),
            shape: self.shape,
            strides: match order {
                Order::Heads => [heads * seq * dim, seq * dim, dim, 1],
                Order::Sequence => [seq * heads * dim, dim, heads * dim, 1],
            },
        }
    }

    /// A number as the device sees it.
    pub fn at(&self, half: Half, batch: usize, head: usize, row: usize, col: usize) -> f64 {
        let [_, heads, seq, dim] = self.shape;
        let x = self.data[((batch * heads + head) * seq + row) * dim + col];
        match half {
            Half::Bf16 => bf16::from_f32(x).to_f64(),
            Half::F16 => f16::from_f32(x).to_f64(),
        }
    }
}

pub fn widen(bytes: &[u8], half: Half) -> Vec<f64> {
    let bits = bytes
        .chunks_exact(2)
        .map(|two| u16::from_le_bytes([two[0], two[1]]));
    match half {
        Half::Bf16 => bits.map(|b| bf16::from_bits(b).to_f64()).collect(),
        Half::F16 => bits.map(|b| f16::from_bits(b).to_f64()).collect(),
    }
}

pub struct Inputs {
    pub batch: usize,
    pub kv_heads: usize,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

/// xorshift64.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Nearly normal.
    fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.uniform()).sum();
        (sum - 2.0) * 1.732_050_8
    }
}

impl Inputs {
    pub fn new(
        batch: usize,
        heads: usize,
        kv_heads: usize,
        seq_q: usize,
        seq_kv: usize,
        dim: usize,
    ) -> Self {
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        let mut tensor = |heads, seq| Tensor {
            shape: [batch, heads, seq, dim],
            data: (0..batch * heads * seq * dim)
                .map(|_| random.normal())
                .collect(),
        };
        Self {
            batch,
            kv_heads,
            q: tensor(heads, seq_q),
            k: tensor(kv_heads, seq_kv),
            v: tensor(kv_heads, seq_kv),
        }
    }

    pub fn views(&self, client: &Client, half: Half, order: Order) -> [TensorView; 3] {
        [&self.q, &self.k, &self.v].map(|tensor| tensor.view(client, half, order))
    }
}

/// Large bf16 tensors from slices of a short random one, for timings.
pub fn tiled(client: &Client, shape: [usize; 4]) -> [TensorView; 3] {
    const PIECE: usize = 1 << 19;
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let base: Vec<u16> = (0..2 * PIECE)
        .map(|_| bf16::from_f32(random.normal()).to_bits())
        .collect();
    let [_, heads, seq, dim] = shape;
    let len = shape.iter().product();
    [(); 3].map(|()| {
        let mut bits = Vec::with_capacity(len + PIECE);
        while bits.len() < len {
            let start = random.bits() as usize % PIECE;
            bits.extend_from_slice(&base[start..start + PIECE]);
        }
        TensorView {
            handle: client.create_from_slice(bytemuck::cast_slice(&bits[..len])),
            shape,
            strides: [heads * seq * dim, seq * dim, dim, 1],
        }
    })
}
