//! The step of keys that cross in Burn's autodiff graph.

use std::sync::Arc;

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{IndexingUpdateOp, Shape, Slice, TensorData, try_read_sync};

use crate::base::custom_gradient::{custom_gradients, nothing, own_dtype, there};
use crate::error::OpError;
use crate::sharded::ShardEnd;
use crate::sharded::links::Stage;
use crate::sharded::ops::{KeysAndValues, ShardOps};

impl<B: ShardOps, C: CheckpointStrategy> ShardOps for Autodiff<B, C> {
    fn with_received(
        own: KeysAndValues<Self>,
        all: KeysAndValues<Self>,
        end: Arc<ShardEnd>,
        call: u64,
    ) -> KeysAndValues<Self> {
        let lists = custom_gradients::<B, C, _, _, _>(own.into_list(), nothing, |own, _| {
            let lengths = there(own[0].as_ref()).shape()[2];
            let all = all.into_list().map(|x| x.map(|x| x.into_primitive()));
            let like = (all.each_ref()).map(|x| {
                let x = there(x.as_ref());
                (x.shape(), x.device(), own_dtype(x))
            });
            let backward = move |_, grads: [Option<FloatTensor<B>>; 2]| {
                let mut like = like.into_iter();
                let grads = grads.map(|grad| {
                    let (shape, device, dtype) = there(like.next());
                    grad.unwrap_or_else(|| B::float_zeros(shape, &device, dtype))
                });
                // A step of the graph returns no error.
                let own = returned::<B>(grads, lengths, &end, call);
                own.unwrap_or_else(|error| panic!("{error}")).map(Some)
            };
            (all, backward)
        });
        KeysAndValues::of_list(lists)
    }
}

/// Gradients by own keys and values, of which there are `seq`: this device's, then the other devices' in their order.
fn returned<B: Backend>(
    grads: [FloatTensor<B>; 2],
    seq: usize,
    end: &ShardEnd,
    call: u64,
) -> Result<[FloatTensor<B>; 2], OpError> {
    let (routes, stage) = (
        &end.routes,
        Stage {
            call,
            gradients: true,
        },
    );
    let b = end.plan.layout().block_size();
    let part = |x: &FloatTensor<B>, positions: std::ops::Range<usize>| {
        let [batch, heads, _, dim] = x.shape().dims();
        let blocks = heads * positions.len() / b;
        let slice = [
            Slice::full(),
            Slice::full(),
            positions.into(),
            Slice::full(),
        ];
        let part = B::float_slice(x.clone(), &slice);
        B::float_reshape(part, Shape::new([batch, blocks, b * dim]))
    };
    let index = |numbers: &[i32], x: &FloatTensor<B>| {
        let data = TensorData::new(numbers.to_vec(), [numbers.len()]);
        B::int_from_data(data, &x.device())
    };
    if routes.most > 0 {
        let received = grads.each_ref().map(|x| {
            let all = x.shape()[2];
            part(x, seq..all)
        });
        for (to, numbers) in end.others(&routes.receive) {
            let [k, v] = received.each_ref().map(|x| {
                let blocks = B::float_select(x.clone(), 1, index(numbers, x));
                let data = try_read_sync(B::float_into_data(blocks));
                let read =
                    data.map(|data| data.map_err(|error| OpError::Read(format!("{error:?}"))));
                read.unwrap_or_else(|| Err(OpError::Read("a device that is read later".into())))
            });
            end.links.send(to, stage, [k?, v?])?;
        }
    }
    let mut own = grads.each_ref().map(|x| part(x, 0..seq));
    for (from, numbers) in end.others(&routes.send) {
        let arrived = end.links.receive(from, stage)?;
        let mut arrived = arrived.into_iter();
        own = own.map(|x| {
            let device = x.device();
            let blocks = B::float_from_data(there(arrived.next()), &device);
            let index = index(numbers, &x);
            B::float_select_assign(x, 1, index, blocks, IndexingUpdateOp::Add)
        });
    }
    let mut whole = grads.into_iter();
    Ok(own.map(|x| {
        let [batch, heads, _, dim] = there(whole.next()).shape().dims();
        B::float_reshape(x, Shape::new([batch, heads, seq, dim]))
    }))
}
