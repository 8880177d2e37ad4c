//! One sequence over several devices: exchange of keys and values, and attention over them.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod backend;
mod cross;
mod exchange;
mod lane;
mod links;
pub mod ops;
mod routes;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blocksparse::{BlockLayout, ShardPlan};
use burn::tensor::kind::Basic;

use crate::base::prelude::*;
use crate::check;
use crate::options::AttentionOptions;
use crate::{SparseAttentionCall, SparseAttentionOutput};
use cross::{Blocks, Way};
pub use exchange::Exchange;
use links::Stage;
use ops::{KeysAndValues, ShardOps};
use routes::Routes;

/// One device's part of a sequence that several devices share.
///
/// Each device has its own thread, and all threads make the same calls in the same order, forward and backward: a device waits for the messages of the
/// others. [`Self::gather`] collects the keys and values that the device's queries attend to, and [`Self::layout`] is the layout over them.
/// Gradients are sent back to the owners of keys and values and are added in the order of the devices, so results are bit-deterministic.
///
/// Blocks are exchanged through the host (any devices), by NCCL, or between processes ([`Self::group_by`]). A device whose shard is dropped has left: others
/// that wait for it get [`OpError::Left`], and panic with its text in a backward pass.
///
/// ```
/// use burn_blocksparse::ShardPlan;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{AttentionOptions, Pattern, SequenceShard, sparse_attention};
///
/// let device = Device::flex();
/// let [q, k, v] = [(); 3].map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &device));
/// let layout = Pattern::fixed(32, 8).layout(2, 256, 16)?;
/// let whole = sparse_attention(q.clone(), k.clone(), v.clone(), &layout)?;
///
/// let plan = ShardPlan::new(&layout, 2, 2)?;
/// std::thread::scope(|scope| {
///     for shard in SequenceShard::group(&plan) {
///         let x = [&q, &k, &v, &whole].map(|x| shard.rows(x.clone(), 2));
///         scope.spawn(move || {
///             let [q, k, v, expected] = x;
///             let out = shard.attention(q, k, v, AttentionOptions::default()).unwrap().out;
///             assert!((out - expected).abs().max().into_scalar::<f32>() < 1e-6);
///         });
///     }
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SequenceShard {
    end: Arc<ShardEnd>,
    exchange: Exchange,
    layout: BlockLayout,
    calls: AtomicU64,
}

/// Part of a shard that autodiff steps hold.
#[doc(hidden)]
pub struct ShardEnd {
    rank: usize,
    plan: Arc<ShardPlan>,
    routes: Routes,
    way: Way,
    /// Bytes sent so far.
    bytes: AtomicU64,
}

impl fmt::Debug for ShardEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} of {}", self.rank, self.plan.devices())
    }
}

impl fmt::Debug for SequenceShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SequenceShard({:?})", self.end)
    }
}

/// Others must not wait for a dropped shard, even though a graph may still hold its end.
impl Drop for SequenceShard {
    fn drop(&mut self) {
        self.leave();
    }
}

impl SequenceShard {
    /// Creates the shards of all devices of a plan, in order. Blocks are exchanged through the host.
    pub fn group(plan: &ShardPlan) -> Vec<Self> {
        Self::made(plan, &Exchange::default())
    }

    /// Creates shards like [`Self::group`] with another exchange. Between processes it returns only the shard of this process, and all processes of the group
    /// must create their groups in the same order.
    ///
    /// # Errors
    /// [`OpError::Argument`] if the exchange and the plan have different numbers of devices.
    pub fn group_by(plan: &ShardPlan, exchange: &Exchange) -> Result<Vec<Self>, OpError> {
        if let Some(got) = exchange.devices() {
            let expected = plan.devices();
            OpError::expect_same("exchange's devices", expected, "the plan's", got)?;
        }
        Ok(Self::made(plan, exchange))
    }

    fn made(plan: &ShardPlan, exchange: &Exchange) -> Vec<Self> {
        let plan = Arc::new(plan.clone());
        let ways = Way::group(exchange, plan.devices());
        (ways.into_iter())
            .map(|(rank, way)| Self {
                layout: plan.local_layout(rank),
                exchange: exchange.clone(),
                calls: AtomicU64::new(0),
                end: Arc::new(ShardEnd {
                    rank,
                    routes: Routes::new(&plan, rank),
                    plan: plan.clone(),
                    way,
                    bytes: AtomicU64::new(0),
                }),
            })
            .collect()
    }

    /// Returns the rank: the index of the device in the plan.
    pub fn rank(&self) -> usize {
        self.end.rank
    }

    /// Returns the plan of all devices.
    pub fn plan(&self) -> &ShardPlan {
        &self.end.plan
    }

    /// Leaves the group: devices that wait for this one get [`OpError::Left`]. Dropping the shard has the same effect.
    pub fn leave(&self) {
        self.end.way.leave();
    }

    /// Returns the exchange.
    pub fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    /// Returns the bytes that this device has sent so far, forward and backward. Through the host they are those of the plan. By NCCL each of two devices sends
    /// as much as the larger of the two amounts.
    pub fn bytes_sent(&self) -> u64 {
        self.end.bytes.load(Ordering::Relaxed)
    }

    /// Returns the layout of this device's queries over the keys that [`Self::gather`] returns. Its rows are not at their positions in the sequence.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// Returns this device's part of a tensor whose dimension `dim` is the sequence.
    ///
    /// # Panics
    /// If the dimension is not as long as the sequence.
    pub fn rows<const D: usize, K: Basic>(&self, whole: Tensor<D, K>, dim: usize) -> Tensor<D, K> {
        assert_eq!(
            whole.dims()[dim],
            self.plan().layout().seq_q(),
            "the sequence"
        );
        let own = self.plan().positions(self.rank()).into_iter();
        let parts = own.map(|range| whole.clone().narrow(dim, range.start, range.len()));
        Tensor::cat(parts.collect(), dim)
    }

    /// Returns own keys and values, followed by those of other devices that own queries attend to, separately for each head and padded with zeros.
    /// All devices must call it.
    ///
    /// # Shapes
    /// - `k`: `[batch, kv_heads, seq, head_dim]`, `v`: `[batch, kv_heads, seq, value_dim]`, with the `seq` positions of this device
    /// - returns both with the `seq_kv` positions of [`Self::layout`]
    ///
    /// # Errors
    /// [`OpError`] if the tensors do not fit the plan, another device's batch or calls differ from this one's, or a device has left.
    pub fn gather(&self, k: Tensor<4>, v: Tensor<4>) -> Result<[Tensor<4>; 2], OpError> {
        let end = &self.end;
        let kv_heads = end.plan.kv_heads();
        check::same_device("v's device", &k.device(), "k's", &v.device())?;
        OpError::expect_same("v's dtype", k.dtype(), "k's", v.dtype())?;
        if let Exchange::Nccl { devices } = &self.exchange {
            let expected = &devices[self.rank()];
            check::same_device("k's device", expected, "the exchange's", &k.device())?;
        }
        let [batch, _, _, head_dim] = k.dims();
        let [_, _, _, value_dim] = v.dims();
        for (argument, size) in [
            ("k's batch", batch),
            ("k's head_dim", head_dim),
            ("v's value_dim", value_dim),
        ] {
            OpError::ensure_positive(argument, size)?;
        }
        let rows = [batch, kv_heads, self.layout.seq_q()];
        for (argument, x) in [("k's rows", &k), ("v's rows", &v)] {
            let [batch, heads, seq, _] = x.dims();
            OpError::expect_same(argument, rows, "the shard's", [batch, heads, seq])?;
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let stage = Stage {
            call,
            gradients: false,
        };
        let own = [k, v];
        let constants = own.each_ref().map(|x| x.clone().without_autodiff());
        let all = self.with_others(constants, stage)?;
        let [own, all] = [own, all].map(|tensors| {
            KeysAndValues::<Dispatch>::of_list(tensors.map(|x| Some(x.into_dispatch())))
        });
        let made = <Dispatch as ShardOps>::with_received(own, all, end.clone(), call);
        Ok([made.k, made.v].map(Tensor::from_dispatch))
    }

    /// Returns own keys and values with those of other devices.
    fn with_others(&self, own: [Tensor<4>; 2], stage: Stage) -> Result<[Tensor<4>; 2], OpError> {
        let routes = &self.end.routes;
        if !routes.cross() {
            return Ok(own);
        }
        let b = self.layout.block_size();
        let all = own.map(|x| self.with_room(x));
        let blocks: Blocks<Dispatch> = all.each_ref().map(|x| {
            let [batch, heads, seq, dim] = x.dims();
            let blocks = x.clone().reshape([batch, heads * seq / b, b * dim]);
            blocks.into_dispatch()
        });
        let (give, get) = (&routes.send, &routes.receive);
        let arrived = self.end.cross::<Dispatch>(&blocks, give, get, stage)?;
        // Dropped so that the tensors are written in place.
        drop(blocks);
        let arrived = arrived.into_iter();
        let (of_k, of_v): (Vec<_>, Vec<_>) = arrived
            .map(|blocks| <(_, _)>::from(blocks.map(Tensor::from_dispatch)))
            .unzip();
        let [k, v] = all;
        Ok([self.placed(k, of_k), self.placed(v, of_v)])
    }

    /// Returns own rows with uninitialized space for those of other devices.
    fn with_room(&self, own: Tensor<4>) -> Tensor<4> {
        let [batch, heads, seq, dim] = own.dims();
        let all = self.layout.seq_kv();
        if all == seq {
            return own;
        }
        let kind = (&own.device(), own.dtype());
        let room = Tensor::empty([batch, heads, all, dim], kind);
        room.slice_assign([0..batch, 0..heads, 0..seq, 0..dim], own)
    }

    /// Writes received blocks to their positions, with zeros where a head has fewer.
    fn placed(&self, all: Tensor<4>, mut parts: Vec<Tensor<3>>) -> Tensor<4> {
        let routes = &self.end.routes;
        if routes.most == 0 {
            return all;
        }
        let [batch, heads, seq, dim] = all.dims();
        let (own, width) = (self.layout.seq_q(), self.layout.block_size() * dim);
        if routes.has_gaps {
            let kind = (&all.device(), all.dtype());
            parts.push(Tensor::zeros([batch, 1, width], kind));
        }
        let placed = Tensor::cat(parts, 1).select(1, index(&routes.places, &all.device()));
        let placed = placed.reshape([batch, heads, seq - own, dim]);
        all.slice_assign([0..batch, 0..heads, own..seq, 0..dim], placed)
    }

    /// Computes attention of this device's queries over the whole sequence: [`Self::gather`] followed by [`SparseAttentionCall`]. All devices must call it.
    ///
    /// # Shapes
    /// As [`sparse_attention`](crate::sparse_attention), with this device's positions.
    ///
    /// # Errors
    /// As [`Self::gather`] and [`SparseAttentionCall::run`]; also for ALiBi and dropout, which depend on positions in the sequence. Arguments are checked
    /// before anything is sent.
    pub fn attention(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        options: AttentionOptions,
    ) -> Result<SparseAttentionOutput, OpError> {
        check::tensors(&q, &k, &v)?;
        let [_, heads, seq_q, _] = q.dims();
        let (own, got) = ([self.layout.heads(), self.layout.seq_q()], [heads, seq_q]);
        OpError::expect_same("q's heads and rows", own, "the shard's", got)?;
        options.validate(self.layout.heads(), q.dtype())?;
        for (argument, is_set) in [
            ("options.alibi", options.alibi.is_some()),
            ("options.dropout", options.active_dropout().is_some()),
        ] {
            if is_set {
                let expected = "none over a shard, whose rows have other positions";
                return Err(OpError::argument(argument, expected, "some"));
            }
        }
        let [k, v] = self.gather(k, v)?;
        let call = SparseAttentionCall::new(q, k, v, &self.layout).options(options);
        call.run()
    }
}

fn index(numbers: &[i32], device: &Device) -> Tensor<1, Int> {
    let data = TensorData::new(numbers.to_vec(), [numbers.len()]);
    let device = device.clone().without_autodiff();
    Tensor::from_data(data, (&device, DType::I32))
}
