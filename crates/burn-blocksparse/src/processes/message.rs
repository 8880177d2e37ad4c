//! Messages between processes and their encoding.

use std::io::{self, Read};

use burn::tensor::{Bytes, DType, TensorData};

use crate::error::OpError;

/// Integers and tensors that a process sends to another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// Integers, with a meaning that both sides agree on.
    pub words: Vec<u64>,
    /// Tensors of floats or signed integers. Bytes have [`DType::U8`].
    pub tensors: Vec<TensorData>,
}

/// Supported dtypes; their index is sent.
const DTYPES: [DType; 10] = [
    DType::F64,
    DType::F32,
    DType::Flex32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U8,
];

impl Message {
    /// Encodes all lengths and shapes, then the bytes of all tensors.
    pub(super) fn encode(&self) -> Result<Vec<u8>, OpError> {
        let mut head = vec![self.words.len() as u64];
        head.extend(&self.words);
        head.push(self.tensors.len() as u64);
        for data in &self.tensors {
            let dtype = DTYPES.iter().position(|dtype| *dtype == data.dtype());
            let expected = "of floats, integers with a sign or bytes, between processes";
            let got = || format!("{:?}", data.dtype());
            let dtype = dtype.ok_or_else(|| OpError::argument("tensors", expected, got()))?;
            head.extend([dtype as u64, data.rank() as u64]);
            head.extend(data.shape().iter().map(|&size| size as u64));
        }
        let mut bytes: Vec<u8> = head.into_iter().flat_map(u64::to_le_bytes).collect();
        for data in &self.tensors {
            bytes.extend_from_slice(data.as_bytes());
        }
        Ok(bytes)
    }

    /// Inverts [`Self::encode`]. Returns `None` for invalid bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let words = counted(&mut rest)?;
        let count = word(&mut rest)?;
        let kinds: Vec<(DType, Vec<u64>)> = (0..count)
            .map(|_| {
                let dtype = *DTYPES.get(usize::try_from(word(&mut rest)?).ok()?)?;
                Some((dtype, counted(&mut rest)?))
            })
            .collect::<Option<_>>()?;
        let tensors = (kinds.into_iter())
            .map(|(dtype, shape)| {
                let shape: Vec<usize> = (shape.into_iter())
                    .map(|size| usize::try_from(size).ok())
                    .collect::<Option<_>>()?;
                let length = (shape.iter()).try_fold(dtype.size(), |n, &size| n.checked_mul(size));
                let (own, others) = rest.split_at_checked(length?)?;
                rest = others;
                let own = Bytes::from_bytes_vec(own.to_vec());
                TensorData::try_from_bytes(own, shape, dtype).ok()
            })
            .collect::<Option<_>>()?;
        rest.is_empty().then_some(Self { words, tensors })
    }
}

fn word(bytes: &mut &[u8]) -> Option<u64> {
    let (word, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*word))
}

fn counted(bytes: &mut &[u8]) -> Option<Vec<u64>> {
    let count = word(bytes)?;
    (0..count).map(|_| word(bytes)).collect()
}

/// Purpose of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A [`Message`] in a lane.
    Message,
    /// The sender has ended a lane, or all lanes.
    Left,
    /// The sender is alive.
    Alive,
    /// A process is lost. Its rank is stored as the lane, the reason as the content.
    Lost,
}

const KINDS: [Kind; 4] = [Kind::Message, Kind::Left, Kind::Alive, Kind::Lost];

/// Recipient that stands for all other processes.
pub(super) const ALL: u32 = u32::MAX;

/// Header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub kind: Kind,
    pub from: u32,
    pub to: u32,
    pub lane: u32,
}

/// Bytes of an encoded header: four integers and the length of the content.
const HEAD: usize = 4 * 4 + 8;

impl Head {
    pub fn bytes(&self, length: usize) -> [u8; HEAD] {
        let Self {
            kind,
            from,
            to,
            lane,
        } = *self;
        let mut bytes = [0; HEAD];
        for (place, number) in [kind as u32, from, to, lane].into_iter().enumerate() {
            bytes[4 * place..][..4].copy_from_slice(&number.to_le_bytes());
        }
        bytes[16..].copy_from_slice(&(length as u64).to_le_bytes());
        bytes
    }

    /// Reads the next frame of a connection.
    pub fn read(from: &mut impl Read) -> io::Result<(Self, Vec<u8>)> {
        let mut bytes = [0; HEAD];
        from.read_exact(&mut bytes)?;
        let number =
            |place: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[4 * place + byte]));
        let length = u64::from(number(4)) | u64::from(number(5)) << 32;
        let kind = KINDS.get(number(0) as usize).copied();
        let head = Self {
            kind: kind.ok_or_else(|| io::Error::other("it sent what cannot be read"))?,
            from: number(1),
            to: number(2),
            lane: number(3),
        };
        let mut content = Vec::new();
        // Grows as bytes arrive, since the length may be wrong.
        from.take(length).read_to_end(&mut content)?;
        match content.len() as u64 == length {
            true => Ok((head, content)),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let message = Message {
            words: vec![3, u64::MAX],
            tensors: vec![
                TensorData::new(vec![0.5f32, f32::NAN, -0.0], [3, 1]),
                TensorData::new(Vec::<i32>::new(), [0, 2]),
                TensorData::new(vec![7u8], [1]),
            ],
        };
        let bytes = message.encode().unwrap();
        let read = Message::decode(&bytes).unwrap();
        assert_eq!(read.words, message.words);
        for (read, data) in read.tensors.iter().zip(&message.tensors) {
            assert_eq!(read.dtype(), data.dtype());
            assert_eq!(read.shape(), data.shape());
            assert_eq!(read.as_bytes(), data.as_bytes());
        }
        for wrong in [&bytes[..bytes.len() - 1], &bytes[..17], &[0xff; 40]] {
            assert_eq!(Message::decode(wrong), None);
        }
        let bools = Message {
            tensors: vec![TensorData::from([true])],
            ..Default::default()
        };
        let error = bools.encode().unwrap_err().to_string();
        assert!(error.contains("between processes, got Bool"), "{error}");
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        let head = Head {
            kind: Kind::Lost,
            from: 2,
            to: ALL,
            lane: 7,
        };
        let bytes = [&head.bytes(3)[..], b"why"].concat();
        assert_eq!(
            Head::read(&mut &bytes[..]).unwrap(),
            (head, b"why".to_vec())
        );
        let kind = Head::read(&mut &bytes[..25]).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::UnexpectedEof);
        assert!(Head::read(&mut &[9; HEAD][..]).is_err());
    }
}
