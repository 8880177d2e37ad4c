//! State of parameters, and the record of Burn's `AdamW`: a burnpack with the tensors `{id}.momentum.moment_1` and `.moment_2`, the scalars
//! `{id}.momentum.time` and `{id}.__rank`, and the parameters' paths by id as metadata.

use std::collections::BTreeMap;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{Bytes, Int, Tensor, TensorData};
use burn_pack::{Reader, Scalar, Writer};

use burn_blocksparse::OpError;

const MOMENTS: [&str; 2] = ["momentum.moment_1", "momentum.moment_2"];
const LARGEST: &str = "momentum.max_moment_2";
const TIME: &str = "momentum.time";
const RANK: &str = "__rank";

/// State of one parameter.
#[derive(Clone, Debug)]
pub(crate) struct ParameterState {
    /// Number of steps taken.
    pub time: usize,
    /// Steps taken before a control began to count, if one does.
    pub counted: Option<usize>,
    /// Path in the module, if known.
    pub path: Option<String>,
    /// Shape of the moments.
    pub shape: Vec<usize>,
    pub moments: Moments,
}

#[derive(Clone, Debug)]
pub(crate) enum Moments {
    /// On the parameter's device.
    Device(Box<[DispatchTensor; 2]>),
    /// On the host, as read from a record.
    Host(Box<[TensorData; 2]>),
}

impl ParameterState {
    /// Keeps the rows with these indices of both moments.
    pub fn keep_rows(&mut self, rows: &[usize]) -> Result<(), OpError> {
        let all = self.shape.first().copied().unwrap_or(0);
        if let Some(row) = rows.iter().find(|&&row| row >= all) {
            let expected = format!("below the {all} rows of the parameter's moments");
            return Err(OpError::argument("rows", expected, row));
        }
        self.moments = match self.moments.clone() {
            Moments::Host(data) => Moments::Host(Box::new((*data).map(|data| rows_of(data, rows)))),
            Moments::Device(tensors) => Moments::Device(Box::new((*tensors).map(|tensor| {
                let indices = rows.iter().map(|&row| row as i32).collect();
                let indices = TensorData::new::<i32, _>(indices, [rows.len()]);
                let device = Tensor::<1>::from_dispatch(tensor.clone()).device();
                let indices = Tensor::<1, Int>::from_data(indices, &device);
                Dispatch::float_select(tensor, 0, indices.into_dispatch())
            }))),
        };
        self.shape[0] = rows.len();
        Ok(())
    }
}

fn rows_of(data: TensorData, rows: &[usize]) -> TensorData {
    let mut shape = data.shape().to_vec();
    let dtype = data.dtype();
    let bytes = data.as_bytes();
    let width = bytes.len() / shape[0].max(1);
    let kept = rows
        .iter()
        .flat_map(|row| bytes[row * width..][..width].iter().copied());
    let kept = kept.collect();
    shape[0] = rows.len();
    TensorData::from_bytes_vec(kept, shape, dtype)
}

pub(crate) fn write(states: &BTreeMap<u64, ParameterState>) -> Result<Bytes, OpError> {
    let mut tensors = Vec::new();
    for (id, state) in states {
        let data = match state.moments.clone() {
            Moments::Host(data) => *data,
            Moments::Device(tensors) => {
                let [first, second] = (*tensors).map(data_of);
                [first?, second?]
            }
        };
        for (name, data) in MOMENTS.iter().zip(data) {
            let (bytes, shape, dtype) = data.into_parts();
            let name = format!("{id}.{name}");
            tensors.push(burn_pack::Tensor::new(name, dtype, shape, Some(*id), bytes));
        }
    }
    let mut writer = Writer::new(tensors);
    for (id, state) in states {
        writer = writer
            .with_scalar(&format!("{id}.{TIME}"), Scalar::from(state.time))
            .with_scalar(&format!("{id}.{RANK}"), Scalar::from(state.shape.len()));
        if let Some(path) = &state.path {
            writer = writer.with_metadata(&id.to_string(), path);
        }
    }
    writer.into_bytes().map_err(OpError::read)
}

/// Reads the tensor's data. Rank 1 in the type does not affect the data.
fn data_of(tensor: DispatchTensor) -> Result<TensorData, OpError> {
    let tensor = Tensor::<1>::from_dispatch(tensor);
    tensor
        .try_into_data()
        .map_err(|error| OpError::read(format!("{error:?}")))
}

pub(crate) fn read(bytes: Bytes) -> Result<BTreeMap<u64, ParameterState>, OpError> {
    let expected = "the record of AdamW";
    let unreadable = |error: burn_pack::Error| OpError::argument("record", expected, error);
    let reader = Reader::from_bytes(bytes).map_err(unreadable)?;
    let scalars = reader.scalars().clone();
    let paths = reader.metadata().clone();
    let mut data = BTreeMap::new();
    for tensor in reader.into_tensors().map_err(unreadable)? {
        let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(unreadable)?;
        data.insert(name, TensorData::from_bytes(bytes, shape, dtype));
    }
    if let Some(name) = data.keys().find(|name| name.ends_with(LARGEST)) {
        let expected = "the record of AdamW without AMSGrad";
        let got = format!("one with {name}");
        return Err(OpError::argument("record", expected, got));
    }
    // Any field declares a parameter.
    let ids = (scalars.keys().chain(data.keys()))
        .filter_map(|name| name.split('.').next()?.parse().ok())
        .collect::<std::collections::BTreeSet<u64>>();
    let mut states = BTreeMap::new();
    for id in ids {
        let missing = |field: &str| {
            OpError::argument("record", expected, format!("one without {id}.{field}"))
        };
        let time = scalars.get(&format!("{id}.{TIME}"));
        let time = time.and_then(|time| usize::try_from(*time).ok());
        let time = time.ok_or_else(|| missing(TIME))?;
        let mut moment = |name: &str| {
            data.remove(&format!("{id}.{name}"))
                .ok_or_else(|| missing(name))
        };
        let moments = [moment(MOMENTS[0])?, moment(MOMENTS[1])?];
        let [shape, other] = [&moments[0], &moments[1]].map(|data| data.shape().to_vec());
        if shape != other {
            let expected =
                format!("the record of AdamW, with moments of one shape for parameter {id}");
            let got = format!("{shape:?} and {other:?}");
            return Err(OpError::argument("record", expected, got));
        }
        let state = ParameterState {
            time,
            counted: None,
            path: paths.get(&id.to_string()).cloned(),
            shape,
            moments: Moments::Host(Box::new(moments)),
        };
        states.insert(id, state);
    }
    Ok(states)
}
