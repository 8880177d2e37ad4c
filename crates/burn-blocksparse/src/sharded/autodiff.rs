//! The autodiff step of keys and values received from other devices.

use std::sync::Arc;

use crate::base::custom_gradient::*;
use crate::base::prelude::*;
use crate::sharded::ShardEnd;
use crate::sharded::cross::some;
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
                // A step of the graph cannot return an error.
                let own = returned::<B>(grads, lengths, &end, call);
                own.unwrap_or_else(|error| panic!("{error}")).map(Some)
            };
            (all, backward)
        });
        KeysAndValues::of_list(lists)
    }
}

/// Returns the gradients with respect to own keys and values, of which there are `seq`: adds this device's part, then those of the other devices in order.
fn returned<B: ShardOps>(
    grads: [FloatTensor<B>; 2],
    seq: usize,
    end: &ShardEnd,
    call: u64,
) -> Result<[FloatTensor<B>; 2], OpError> {
    let routes = &end.routes;
    if !routes.cross() {
        return Ok(grads);
    }
    let stage = Stage {
        call,
        gradients: true,
    };
    let b = end.plan.layout().block_size();
    let shapes = grads.each_ref().map(|x| x.shape());
    let mut blocks = grads.map(|x| {
        let [batch, heads, all, dim] = x.shape().dims();
        Array::<B>(x).reshape([batch, heads * all / b, b * dim]).0
    });
    let arrived = end.cross::<B>(&blocks, &routes.receive, &routes.send, stage)?;
    for ((_, numbers), arrived) in some(&routes.send).zip(arrived) {
        let mut arrived = arrived.into_iter();
        blocks = blocks.map(|x| B::with_added(x, there(arrived.next()), numbers.to_vec()));
    }
    let mut shapes = shapes.into_iter();
    Ok(blocks.map(|x| {
        let x = Array::<B>(x).reshape(there(shapes.next()));
        match routes.most {
            0 => x.0,
            _ => x.narrow(2, 0..seq).0,
        }
    }))
}
