//! One sequence over several devices: keys and values that cross, and attention over them.

#[cfg(feature = "autodiff")]
mod autodiff;
mod links;
pub mod ops;
mod routes;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blocksparse::{BlockLayout, ShardPlan};
use burn::backend::Dispatch;
use burn::tensor::kind::Basic;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::check;
use crate::error::OpError;
use crate::options::AttentionOptions;
use crate::{SparseAttentionCall, SparseAttentionOutput};
use links::{Links, Stage};
use ops::{KeysAndValues, ShardOps};
use routes::Routes;

/// One device's part of a sequence that several devices share.
///
/// Each device has a thread of its own, and all of them make the same calls in the same order, forward and backward: a device waits for what others
/// send. [`Self::gather`] brings the keys and values that the device's queries attend to, and [`Self::layout`] is what they attend to among those.
/// Gradients go back to where keys came from, and are added in the order of the devices: the same bits each time.
///
/// Blocks cross by way of the host, on any devices. A device whose shard is dropped has left: others that wait for it get [`OpError::Left`], and panic
/// with its text in a backward pass.
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
    layout: BlockLayout,
    calls: AtomicU64,
}

/// What steps of a graph keep of a shard.
#[doc(hidden)]
pub struct ShardEnd {
    rank: usize,
    plan: Arc<ShardPlan>,
    routes: Routes,
    links: Links,
}

impl ShardEnd {
    /// The other devices for which there are numbers, in order.
    fn others<'a>(&self, numbers: &'a [Vec<i32>]) -> impl Iterator<Item = (usize, &'a [i32])> {
        (numbers.iter().enumerate())
            .filter(|(_, numbers)| !numbers.is_empty())
            .map(|(other, numbers)| (other, &numbers[..]))
    }
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

/// Others do not wait for a shard that is gone, though a graph may still hold its end.
impl Drop for SequenceShard {
    fn drop(&mut self) {
        self.leave();
    }
}

impl SequenceShard {
    /// The shards of all devices of a plan, in order.
    pub fn group(plan: &ShardPlan) -> Vec<Self> {
        let plan = Arc::new(plan.clone());
        let links = Links::group(plan.devices()).into_iter().enumerate();
        links
            .map(|(rank, links)| Self {
                layout: plan.local_layout(rank),
                calls: AtomicU64::new(0),
                end: Arc::new(ShardEnd {
                    rank,
                    routes: Routes::new(&plan, rank),
                    plan: plan.clone(),
                    links,
                }),
            })
            .collect()
    }

    /// Which device of the plan it is.
    pub fn rank(&self) -> usize {
        self.end.rank
    }

    /// What all devices do.
    pub fn plan(&self) -> &ShardPlan {
        &self.end.plan
    }

    /// Ends this device's part: others that wait for it get [`OpError::Left`], as when it is dropped.
    pub fn leave(&self) {
        self.end.links.leave();
    }

    /// The layout of this device's queries over the keys that [`Self::gather`] returns. Positions of rows are not those of the sequence.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// This device's part of a tensor whose dimension `dim` is the sequence.
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

    /// Own keys and values, followed by those of other devices that own queries attend to, for each head its own; zeros where a head has fewer.
    /// All devices must call it.
    ///
    /// # Shapes
    /// - `k`: `[batch, kv_heads, seq, head_dim]`, `v`: `[batch, kv_heads, seq, value_dim]`, `seq` positions of this device
    /// - returns both with [`Self::layout`]'s `seq_kv` positions
    ///
    /// # Errors
    /// [`OpError`] if the tensors do not fit the plan, another device's batch or calls are others than this one's, or a device has left.
    pub fn gather(&self, k: Tensor<4>, v: Tensor<4>) -> Result<[Tensor<4>; 2], OpError> {
        let end = &self.end;
        let kv_heads = end.plan.kv_heads();
        check::same_device("v's device", &k.device(), "k's", &v.device())?;
        OpError::expect_same("v's dtype", k.dtype(), "k's", v.dtype())?;
        let [batch, _, _, head_dim] = k.dims();
        let [_, _, _, value_dim] = v.dims();
        for (argument, size) in [
            ("k's batch", batch),
            ("k's head_dim", head_dim),
            ("v's value_dim", value_dim),
        ] {
            if size == 0 {
                return Err(OpError::argument(argument, "at least 1", 0));
            }
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
        self.send(&constants, stage)?;
        let all = self.received(constants, stage)?;
        let [own, all] = [own, all].map(|[k, v]| KeysAndValues {
            k: k.into_dispatch(),
            v: v.into_dispatch(),
        });
        let KeysAndValues { k, v } =
            <Dispatch as ShardOps>::with_received(own, all, end.clone(), call);
        Ok([k, v].map(Tensor::from_dispatch))
    }

    /// Sends blocks of own keys and values to who needs them.
    fn send(&self, own: &[Tensor<4>; 2], stage: Stage) -> Result<(), OpError> {
        let b = self.layout.block_size();
        for (to, numbers) in self.end.others(&self.end.routes.send) {
            let [k, v] = own.each_ref().map(|x| {
                let [batch, heads, seq, dim] = x.dims();
                let blocks = x.clone().reshape([batch, heads * seq / b, b * dim]);
                let blocks = blocks.select(1, index(numbers, &x.device()));
                blocks.try_into_data().map_err(OpError::read)
            });
            self.end.links.send(to, stage, [k?, v?])?;
        }
        Ok(())
    }

    /// Own keys and values with those of others.
    fn received(&self, own: [Tensor<4>; 2], stage: Stage) -> Result<[Tensor<4>; 2], OpError> {
        let ShardEnd { routes, links, .. } = &*self.end;
        if routes.most == 0 {
            return Ok(own);
        }
        let mut parts = [Vec::new(), Vec::new()];
        for (from, numbers) in self.end.others(&routes.receive) {
            let arrived = links.receive(from, stage)?;
            for ((x, data), parts) in own.iter().zip(arrived).zip(&mut parts) {
                parts.push(self.blocks(x, data, numbers.len())?);
            }
        }
        let mut parts = parts.into_iter();
        Ok(own.map(|x| {
            let mut parts: Vec<Tensor<3>> = parts.next().unwrap_or_default();
            let [batch, heads, _, dim] = x.dims();
            let width = self.layout.block_size() * dim;
            if routes.has_gaps {
                parts.push(Tensor::zeros([batch, 1, width], (&x.device(), x.dtype())));
            }
            let placed = Tensor::cat(parts, 1).select(1, index(&routes.places, &x.device()));
            let placed = placed.reshape([batch, heads, routes.most * width / dim, dim]);
            Tensor::cat(vec![x, placed], 2)
        }))
    }

    /// `count` blocks of another device on the device of `x`.
    fn blocks(&self, x: &Tensor<4>, data: TensorData, count: usize) -> Result<Tensor<3>, OpError> {
        let [batch, _, _, dim] = x.dims();
        let shape = [batch, count, self.layout.block_size() * dim];
        let got: [usize; 3] = data.shape().dims();
        let whose = "of this device's batch and width";
        OpError::expect_same("another device's blocks", shape, whose, got)?;
        let dtype = x.dtype();
        OpError::expect_same(
            "another device's dtype",
            dtype,
            "this device's",
            data.dtype(),
        )?;
        Ok(Tensor::from_data(data, (&x.device(), dtype)))
    }

    /// Attention of this device's queries over the whole sequence: [`Self::gather`] and [`SparseAttentionCall`]. All devices must call it.
    ///
    /// # Shapes
    /// As [`sparse_attention`](crate::sparse_attention), with this device's positions.
    ///
    /// # Errors
    /// As [`Self::gather`] and [`SparseAttentionCall::run`], and for ALiBi and dropout, which follow positions of the sequence. Arguments are checked
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
        let expected = [self.layout.heads(), self.layout.seq_q()];
        OpError::expect_same(
            "q's heads and rows",
            expected,
            "the shard's",
            [heads, seq_q],
        )?;
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
    Tensor::from_data(data, (&device, burn::tensor::DType::I32))
}
