//! Distributes a sequence over several devices: which device computes which pairs, and which keys are transferred.

mod choose;
mod display;
mod pieces;
mod reach;

use std::collections::HashMap;
use std::ops::Range;

use crate::layout::NOWHERE;
use crate::{BlockLayout, LayoutError};
use choose::Candidate;
use pieces::Pieces;
use reach::{count, ranges, reached};

/// Division of a sequence over several devices: the positions of each, and the keys and values that each receives from the others.
///
/// A device computes the rows of its own queries, so each pair is computed once, by one device. Only the key blocks that its rows attend to and that another
/// device owns are transferred. They are known from the layout before anything runs. Gradients of keys and values take the reverse path.
///
/// A device's keys lie in one tensor: its own in order, then those it receives, ascending, separately for each head.
/// [`Self::local_layout`] is the layout over them.
///
/// ```
/// use blocksparse::{Pattern, ShardPlan};
///
/// let layout = Pattern::local(64).layout(4, 1024, 16)?;
/// let plan = ShardPlan::new(&layout, 4, 2)?;
/// // Half of the sequence each, and the four blocks before it.
/// assert_eq!(plan.positions(1), [512..1024]);
/// assert_eq!(plan.crossing(0, 1, 0), [28..32]);
/// assert_eq!(plan.bytes(1, 64, 2), 4 * 64 * (64 + 64) * 2);
/// println!("{plan}");
/// # Ok::<(), blocksparse::LayoutError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ShardPlan {
    layout: BlockLayout,
    kv_heads: usize,
    dealt: Pieces,
    /// Index into `sets` of each key head.
    head_sets: Vec<usize>,
    sets: Vec<Set>,
    /// Number of allowed pairs of each device.
    pairs: Vec<u64>,
    /// Number of keys that each device sends.
    sent: Vec<usize>,
    /// Cost of other numbers of pieces, if the plan chose the number itself.
    candidates: Vec<Candidate>,
}

/// The key blocks that heads with equal needs receive.
#[derive(Clone, Debug)]
struct Set {
    /// Remote blocks that each device needs, ascending.
    needs: Vec<Vec<Range<usize>>>,
}

impl ShardPlan {
    /// Creates the plan for `devices` devices and `kv_heads` key heads. Each key head serves an equal number of adjacent query heads
    /// of the layout (GQA).
    ///
    /// The devices' numbers of blocks differ by at most one. Each device has 1, 2, 4, … or 64 pieces, whichever costs least. The cost is that of the busiest
    /// device: its pairs, plus 512 pairs for each transferred key, as on GPUs with NVLink.
    ///
    /// A layout that reaches everything also has a plan: check [`Self::reach`].
    ///
    /// # Errors
    /// [`LayoutError`] if the layout is per batch, its numbers of queries and keys differ or are not whole blocks, or a device chooses its
    /// blocks; if `kv_heads` does not divide the heads; if there are no devices, or more devices than blocks.
    pub fn new(layout: &BlockLayout, kv_heads: usize, devices: usize) -> Result<Self, LayoutError> {
        check(layout, kv_heads, devices, 1)?;
        Ok(choose::cheapest(layout, kv_heads, devices))
    }

    /// Creates a plan like [`Self::new`] with a given number of pieces per device: 1 for contiguous shards, 2 for zigzag, more for stripes.
    ///
    /// # Errors
    /// As [`Self::new`], and if there are more pieces than blocks.
    pub fn with_pieces(
        layout: &BlockLayout,
        kv_heads: usize,
        devices: usize,
        pieces: usize,
    ) -> Result<Self, LayoutError> {
        check(layout, kv_heads, devices, pieces)?;
        let pairs = choose::pairs_before(layout);
        Ok(Self::dealt(layout, kv_heads, &pairs, devices, pieces))
    }

    fn dealt(
        layout: &BlockLayout,
        kv_heads: usize,
        pairs_before: &[u64],
        devices: usize,
        pieces: usize,
    ) -> Self {
        let dealt = Pieces {
            blocks: layout.q_blocks(),
            devices,
            pieces,
        };
        let group = layout.heads() / kv_heads;
        let mut sets: Vec<Set> = Vec::new();
        let mut known: HashMap<Vec<usize>, usize> = HashMap::new();
        let head_sets = (0..kv_heads).map(|head| {
            let heads = head * group..(head + 1) * group;
            let mut patterns: Vec<usize> = heads.map(|head| layout.pattern_of(0, head)).collect();
            patterns.sort_unstable();
            patterns.dedup();
            *known.entry(patterns).or_insert_with_key(|patterns| {
                let needs = (0..devices).map(|device| {
                    let own = dealt.of(device);
                    let mut reached = reached(layout, patterns, &own);
                    own.into_iter().for_each(|own| reached[own].fill(false));
                    ranges(&reached)
                });
                sets.push(Set {
                    needs: needs.collect(),
                });
                sets.len() - 1
            })
        });
        let head_sets: Vec<usize> = head_sets.collect();
        let mut sent = vec![0; devices];
        for (index, set) in sets.iter().enumerate() {
            let heads = head_sets.iter().filter(|&&of| of == index).count();
            for block in set.needs.iter().flatten().cloned().flatten() {
                sent[dealt.owner(block)] += heads * layout.block_size();
            }
        }
        let of_rows = |rows: Range<usize>| pairs_before[rows.end] - pairs_before[rows.start];
        let pairs = (0..devices).map(|device| dealt.of(device).into_iter().map(of_rows).sum());
        Self {
            layout: layout.clone(),
            kv_heads,
            dealt,
            head_sets,
            sets,
            pairs: pairs.collect(),
            sent,
            candidates: Vec::new(),
        }
    }

    /// Returns the layout of the whole sequence.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// Returns the number of devices that share the sequence.
    pub fn devices(&self) -> usize {
        self.dealt.devices
    }

    /// Returns the number of KV heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Returns the number of pieces of the sequence per device.
    pub fn pieces(&self) -> usize {
        self.dealt.pieces
    }

    /// Returns the positions of a device, in the order of its rows.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn positions(&self, device: usize) -> Vec<Range<usize>> {
        let b = self.layout.block_size();
        let own = self.own(device).into_iter();
        own.map(|blocks| blocks.start * b..blocks.end * b).collect()
    }

    /// Returns the blocks of a key head that one device sends to another, ascending, as indices in the whole sequence.
    ///
    /// # Panics
    /// If there is no such device or head.
    pub fn crossing(&self, from: usize, to: usize, kv_head: usize) -> Vec<Range<usize>> {
        let own = self.own(from);
        let needs = &self.sets[self.head_sets[kv_head]].needs[to];
        let mut crossing = Vec::new();
        for need in needs {
            let first = own.partition_point(|own| own.end <= need.start);
            let inside = own[first..]
                .iter()
                .take_while(|own| own.start < need.end)
                .map(|own| need.start.max(own.start)..need.end.min(own.end));
            crossing.extend(inside);
        }
        crossing
    }

    /// Returns the number of keys that a device receives, over all heads.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn keys_received(&self, device: usize) -> usize {
        let blocks = |set: &usize| count(&self.sets[*set].needs[device]);
        self.layout.block_size() * self.head_sets.iter().map(blocks).sum::<usize>()
    }

    /// Returns the number of keys that a device sends, over all heads. A key is counted once per receiver.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn keys_sent(&self, device: usize) -> usize {
        self.sent[device]
    }

    /// Returns the bytes of keys and values that a device receives before it computes, for one sequence of a batch. The same number of bytes of gradients is
    /// sent back.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn bytes(&self, device: usize, head_dim: usize, element_bytes: usize) -> u64 {
        2 * (self.keys_received(device) * head_dim * element_bytes) as u64
    }

    /// Returns the number of allowed pairs that a device computes, over all heads.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn pairs(&self, device: usize) -> u64 {
        self.pairs[device]
    }

    /// Returns the largest share of other devices' keys that a device receives, in `[0, 1]`. At 1, a ring that sends all keys and values transfers no more.
    pub fn reach(&self) -> f64 {
        let share = |device| {
            let others = self.layout.seq_kv() - count(&self.positions(device));
            let all = (others * self.kv_heads).max(1);
            self.keys_received(device) as f64 / all as f64
        };
        (0..self.devices()).map(share).fold(0.0, f64::max)
    }

    /// Returns the maximum number of blocks of a head that a device receives, which is the length of the remote part of its keys.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn blocks_received(&self, device: usize) -> usize {
        let of_set = self.sets.iter().map(|set| count(&set.needs[device]));
        of_set.max().unwrap_or_default()
    }

    /// Returns the layout of a device's queries over its keys: its own in order, then those each head receives, ascending, padded to the
    /// maximum over heads.
    ///
    /// It has no [`parts`](BlockLayout::parts), so strided patterns compute many masked pairs.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn local_layout(&self, device: usize) -> BlockLayout {
        let own = self.own(device);
        let places: Vec<Vec<u32>> = (self.sets.iter())
            .map(|set| {
                let mut places = vec![NOWHERE; self.layout.kv_blocks()];
                let blocks = own.iter().chain(&set.needs[device]).cloned().flatten();
                for (place, block) in blocks.enumerate() {
                    places[block] = place as u32;
                }
                places
            })
            .collect();
        let group = self.layout.heads() / self.kv_heads;
        let devices = self.devices();
        self.layout.at_places(
            format!("{}, shard {device} of {devices}", self.layout.name()),
            &own,
            count(&own) + self.blocks_received(device),
            &places,
            |head| self.head_sets[head / group],
        )
    }

    /// Returns the blocks of a device, ascending.
    fn own(&self, device: usize) -> Vec<Range<usize>> {
        assert!(
            device < self.devices(),
            "device {device} of {}",
            self.devices()
        );
        self.dealt.of(device)
    }
}

fn check(
    layout: &BlockLayout,
    kv_heads: usize,
    devices: usize,
    pieces: usize,
) -> Result<(), LayoutError> {
    let (b, blocks) = (layout.block_size(), layout.q_blocks());
    let (seq_q, seq_kv) = (layout.seq_q(), layout.seq_kv());
    crate::ensure! {
        LayoutError;
        layout.device_choice().is_none() => "layout", "built on the host", layout.name();
        layout.batch().is_none() => "layout", "one for any batch", format!("a batch of {}", layout.batch().unwrap_or(1));
        seq_q == seq_kv => "seq_q", format!("{seq_kv}, seq_kv"), seq_q;
        seq_q.is_multiple_of(b) => "seq_q", format!("a multiple of {b}, block_size"), seq_q;
        kv_heads != 0 && layout.heads().is_multiple_of(kv_heads)
            => "kv_heads", format!("a divisor of {}, the layout's heads", layout.heads()), kv_heads;
    }
    for (name, number, most) in [
        ("devices", devices, blocks),
        ("pieces", pieces, blocks / devices.max(1)),
    ] {
        crate::ensure! { LayoutError; number != 0 && number <= most => name, format!("between 1 and {most}, with {blocks} blocks"), number; }
    }
    Ok(())
}
