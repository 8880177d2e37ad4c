//! Orders and reports as messages between processes.

use anyhow::{Context, Result, anyhow};
use burn::tensor::{Device, Tensor, TensorData};
use burn_blocksparse::Message;
use burn_sparse_transformer::dsa::DsaStage;

use super::reduce::read;
use super::worker::{Order, Part, Report};
use crate::step::{Change, Measured};

const STAGES: [DsaStage; 3] = [DsaStage::Dense, DsaStage::WarmUp, DsaStage::Sparse];

impl Order {
    pub fn message(self) -> Result<Message> {
        let (words, tensors) = match self {
            Self::Gradients(Part {
                data,
                first_entry,
                dropout_seed,
            }) => (vec![0, first_entry as u64, dropout_seed], data.into()),
            Self::Update {
                learning_rate,
                sums,
            } => {
                let words = vec![1, learning_rate.to_bits(), sums.is_some().into()];
                (words, read_all(&sums.unwrap_or_default())?)
            }
            Self::Change(Change::Prune(density)) => (vec![2, density.to_bits()], Vec::new()),
            Self::Change(Change::SeeEverything) => (vec![3], Vec::new()),
            Self::Change(Change::Stage(stage)) => {
                let stage = STAGES.iter().position(|known| *known == stage);
                let stage = stage.context("a stage that no other process knows")?;
                (vec![4, stage as u64], Vec::new())
            }
        };
        Ok(Message { words, tensors })
    }

    pub fn of_message(Message { words, tensors }: Message, device: &Device) -> Result<Self> {
        Ok(match words[..] {
            [0, first_entry, dropout_seed] => Self::Gradients(Part {
                data: tensors.try_into().map_err(|_| unknown())?,
                first_entry: first_entry as usize,
                dropout_seed,
            }),
            [1, learning_rate, has_sums] => Self::Update {
                learning_rate: f64::from_bits(learning_rate),
                sums: (has_sums == 1).then(|| on_device(tensors, device)),
            },
            [2, density] => Self::Change(Change::Prune(f64::from_bits(density))),
            [3] => Self::Change(Change::SeeEverything),
            [4, stage] => {
                let stage = STAGES.get(stage as usize).ok_or_else(unknown)?;
                Self::Change(Change::Stage(*stage))
            }
            _ => return Err(unknown()),
        })
    }
}

impl Report {
    pub fn message(self) -> Result<Message> {
        let (words, tensors) = match self {
            Self::Done => (vec![0], Vec::new()),
            Self::Gradients(buckets) => (vec![1], read_all(&buckets)?),
            Self::Measured(Measured {
                loss,
                grad_norm,
                aux_loss,
            }) => {
                let numbers = [loss, grad_norm].into_iter().chain(aux_loss);
                let bits = numbers.map(f64::to_bits);
                ([2].into_iter().chain(bits).collect(), Vec::new())
            }
            Self::Lengths(lengths) => {
                let lengths = lengths.into_iter().map(|length| length as u64);
                ([3].into_iter().chain(lengths).collect(), Vec::new())
            }
        };
        Ok(Message { words, tensors })
    }

    pub fn of_message(Message { words, tensors }: Message, device: &Device) -> Result<Self> {
        let number = |bits: &u64| f64::from_bits(*bits);
        Ok(match &words[..] {
            [0] => Self::Done,
            [1] => Self::Gradients(on_device(tensors, device)),
            [2, loss, grad_norm, aux_loss @ ..] => Self::Measured(Measured {
                loss: number(loss),
                grad_norm: number(grad_norm),
                aux_loss: aux_loss.first().map(number),
            }),
            [3, lengths @ ..] => {
                Self::Lengths(lengths.iter().map(|&length| length as usize).collect())
            }
            _ => return Err(unknown()),
        })
    }
}

/// Returns the error for an unknown message.
pub(super) fn unknown() -> anyhow::Error {
    anyhow!("a message that this program does not send: start the same program in all processes")
}

fn read_all(tensors: &[Tensor<1>]) -> Result<Vec<TensorData>> {
    tensors.iter().map(read).collect()
}

fn on_device(all: Vec<TensorData>, device: &Device) -> Vec<Tensor<1>> {
    let device = device.clone().without_autodiff();
    let tensor = |data: TensorData| {
        let dtype = data.dtype();
        Tensor::from_data(data, (&device, dtype))
    };
    all.into_iter().map(tensor).collect()
}
