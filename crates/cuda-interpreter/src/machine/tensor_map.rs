//! Tensor maps, which describe bulk copies of boxes. Kernels only pass on what the driver writes, so the 128
//! bytes have our own format.

use crate::error::Fault;

pub const BYTES: usize = 128;
const RANKS: usize = 5;
const MAGIC: u64 = 0x7061_6d5f_736e_6574;

/// Bits of a shared memory address that are exchanged so that rows fall into different banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    None,
    /// Rows of this many bytes, swizzled in units of 16 bytes.
    Rows(u64),
}

impl Swizzle {
    pub fn of_bytes(bytes: u64) -> Self {
        if bytes <= 16 {
            Self::None
        } else {
            Self::Rows(bytes)
        }
    }

    /// Returns the swizzled address of a byte.
    pub fn place(self, address: u64) -> u64 {
        match self {
            Self::None => address,
            // Units of 16 bytes within rows of 128 bytes are exchanged according to the row's index.
            Self::Rows(bytes) => address ^ (address >> 7 & (bytes / 16 - 1)) << 4,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    pub address: u64,
    pub element_bytes: usize,
    /// Number of elements per dimension, the fastest first.
    pub sizes: Vec<u64>,
    /// Distance between elements in bytes, per dimension.
    pub strides: Vec<u64>,
    pub window: Vec<u64>,
    pub swizzle: Swizzle,
    /// True if elements out of bounds are NaN instead of 0.
    pub nan_outside: bool,
}

impl TensorMap {
    pub fn bytes(&self) -> [u8; BYTES] {
        let mut words = [0_u64; BYTES / 8];
        words[0] = MAGIC;
        let swizzle = match self.swizzle {
            Swizzle::None => 16,
            Swizzle::Rows(bytes) => bytes,
        };
        words[1] = self.sizes.len() as u64
            | (self.element_bytes as u64) << 8
            | swizzle << 16
            | u64::from(self.nan_outside) << 32;
        words[2] = self.address;
        for dim in 0..self.sizes.len() {
            // Boxes have at most 256 elements per dimension.
            words[3 + dim] = self.sizes[dim] | self.window[dim] << 40;
            words[8 + dim] = self.strides[dim];
        }
        let mut bytes = [0; BYTES];
        for (part, word) in bytes.chunks_mut(8).zip(words) {
            part.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// # Errors
    ///
    /// [`Fault::TensorMap`] for bytes that are not a map.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Fault> {
        let word = |at: usize| {
            let part = bytes[8 * at..8 * at + 8]
                .try_into()
                .expect("a map has 16 words");
            u64::from_le_bytes(part)
        };
        let rank = (word(1) & 255) as usize;
        if word(0) != MAGIC || !(1..=RANKS).contains(&rank) {
            return Err(Fault::TensorMap("the driver made none here".to_owned()));
        }
        Ok(Self {
            address: word(2),
            element_bytes: (word(1) >> 8 & 255) as usize,
            sizes: (0..rank)
                .map(|dim| word(3 + dim) & ((1 << 40) - 1))
                .collect(),
            strides: (0..rank).map(|dim| word(8 + dim)).collect(),
            window: (0..rank).map(|dim| word(3 + dim) >> 40).collect(),
            swizzle: Swizzle::of_bytes(word(1) >> 16 & 255),
            nan_outside: word(1) >> 32 & 1 == 1,
        })
    }

    pub fn box_bytes(&self) -> usize {
        self.window.iter().product::<u64>() as usize * self.element_bytes
    }

    /// Calls `each` for every element of the box at `coordinates` with its offset within the box, and its address if it
    /// lies inside the tensor.
    ///
    /// # Errors
    ///
    /// The first error of `each`.
    pub fn each<E>(
        &self,
        coordinates: &[i32],
        mut each: impl FnMut(usize, Option<u64>) -> Result<(), E>,
    ) -> Result<(), E> {
        let count = self.window.iter().product::<u64>();
        for index in 0..count {
            let (mut left, mut address, mut inside) = (index, self.address, true);
            for (dim, &coordinate) in coordinates.iter().enumerate() {
                let at = i64::from(coordinate) + (left % self.window[dim]) as i64;
                left /= self.window[dim];
                inside &= (0..self.sizes[dim] as i64).contains(&at);
                address = address.wrapping_add((at as u64).wrapping_mul(self.strides[dim]));
            }
            each(
                index as usize * self.element_bytes,
                inside.then_some(address),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> TensorMap {
        TensorMap {
            address: 4096,
            element_bytes: 2,
            sizes: vec![6, 3],
            strides: vec![2, 16],
            window: vec![4, 2],
            swizzle: Swizzle::Rows(64),
            nan_outside: true,
        }
    }

    #[test]
    fn a_map_is_what_its_bytes_say() {
        assert_eq!(TensorMap::from_bytes(&map().bytes()).unwrap(), map());
        assert!(TensorMap::from_bytes(&[0; BYTES]).is_err());
    }

    #[test]
    fn a_box_may_lie_beyond_the_tensor() {
        let mut found = Vec::new();
        let each = map().each(&[4, -1], |at, address| {
            found.push((at, address));
            Ok::<(), Fault>(())
        });
        each.unwrap();
        let row = 4096 + 8;
        let expected = [None, None, None, None, Some(row), Some(row + 2), None, None];
        assert_eq!(
            found,
            (0..8).map(|at| (2 * at, expected[at])).collect::<Vec<_>>()
        );
    }

    #[test]
    fn units_of_rows_are_exchanged() {
        let places = |swizzle: Swizzle| [0, 128, 256, 384 + 32].map(|at| swizzle.place(at));
        assert_eq!(places(Swizzle::None), [0, 128, 256, 416]);
        assert_eq!(places(Swizzle::Rows(32)), [0, 128 + 16, 256, 384 + 48]);
        assert_eq!(
            places(Swizzle::Rows(128)),
            [0, 128 + 16, 256 + 32, 384 + 16]
        );
    }
}
