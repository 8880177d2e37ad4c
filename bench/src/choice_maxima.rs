//! The highest products of queries with the keys of each block: `bench-choice`.

use anyhow::{Result, ensure};
use blocksparse_bench::compare::{dot, same_twice};
use blocksparse_bench::device::{poisoned, read_floats};
use blocksparse_bench::numbers::{BF16, F32};
use blocksparse_bench::runner::Tally;
use burn_sparse_select::kernels::selection::{RowsView, RunMaxima};
use cubecl::client::Client;
use cubecl::server::Handle;
use rand_chacha::ChaCha8Rng;

use crate::choice_lists::Lists;

/// The last queries of lists, and all keys in whole blocks.
pub struct Maxima {
    of: RunMaxima,
    counts: [usize; 2],
    seq: [usize; 2],
    inputs: Lists,
    out: Handle,
}

impl Maxima {
    pub fn new(
        client: &Client,
        counts: [usize; 2],
        seq: [usize; 2],
        of: RunMaxima,
        rng: &mut ChaCha8Rng,
    ) -> Self {
        let [lists, rows] = of.rows;
        Self {
            inputs: Lists::new(client, counts, seq, of.width, rng),
            out: poisoned(client, lists * rows * of.columns / of.run, F32),
            counts,
            seq,
            of,
        }
    }

    pub fn is_served(&self, client: &Client) -> bool {
        self.of.is_served(client, BF16)
    }

    /// The first query.
    fn first(&self) -> usize {
        self.seq[0] - self.of.rows[1]
    }

    pub fn run(&self, client: &Client) -> Result<()> {
        let view = |which: usize, first: usize, rows: usize| {
            let shape = [self.counts[which], self.seq[which], self.of.width];
            RowsView::new(self.inputs.handles()[which], shape).rows(first, rows, BF16.size())
        };
        let [q, k] = [
            view(0, self.first(), self.of.rows[1]),
            view(1, 0, self.of.columns),
        ];
        self.of.launch(client, BF16, [&q, &k], &self.out)?;
        Ok(())
    }

    fn verify(&self, client: &Client) -> Result<()> {
        let got: Vec<f64> = same_twice(|| {
            self.run(client)?;
            read_floats(client, &self.out, F32)
        })?;
        let RunMaxima {
            rows: [_, rows],
            columns,
            width,
            run,
        } = self.of;
        for (at, got) in got.chunks(columns / run).enumerate() {
            let [q, k] = self.inputs.list(at / rows);
            let q = &q[(self.first() + at % rows) * width..][..width];
            for (block, (got, keys)) in got.iter().zip(k.chunks(run * width)).enumerate() {
                let products = keys.chunks(width).map(|key| dot(q, key));
                let highest = products.fold(f64::NEG_INFINITY, f64::max);
                // Sums of few sixteenths are the same numbers in f32.
                ensure!(
                    *got == highest,
                    "{:?}: row {at}, block {block}: {got}, {highest}",
                    self.of
                );
            }
        }
        Ok(())
    }
}

/// Runs of every length, rows and columns of no whole tile, and queries of which the first are left out.
pub fn verify(client: &Client, rng: &mut ChaCha8Rng, tally: &mut Tally) -> Result<()> {
    // Lists of queries and of keys, queries, those that are computed, keys, runs of them, width, and keys of a run.
    let calls: [[usize; 8]; 6] = [
        [4, 2, 300, 200, 700, 5, 128, 128],
        [4, 1, 129, 129, 400, 6, 64, 64],
        [2, 2, 40, 40, 1000, 31, 96, 32],
        [2, 1, 515, 3, 333, 20, 32, 16],
        [3, 1, 64, 64, 100, 12, 8, 8],
        [1, 1, 1, 1, 128, 1, 256, 128],
    ];
    for [lists, kv_lists, seq_q, rows, seq_kv, runs, width, run] in calls {
        if !tally.takes_next() {
            continue;
        }
        let of = RunMaxima {
            rows: [lists, rows],
            columns: runs * run,
            width,
            run,
        };
        let maxima = Maxima::new(client, [lists, kv_lists], [seq_q, seq_kv], of, rng);
        if maxima.is_served(client) {
            maxima.verify(client)?;
        }
    }
    Ok(())
}
