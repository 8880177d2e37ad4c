//! Attention over pages against loops in f64.

use anyhow::Result;
use blocksparse::Quantization;
use blocksparse_bench::compare::{dot, ensure_within, same_twice, softmax};
use blocksparse_bench::device::{upload, upload_ints};
use blocksparse_bench::numbers::{BF16, F16, F32, decoded, rounding_of, uniform};
use blocksparse_bench::runner::Tally;
use burn_paged_attention::internal::kernels::PagedShape;
use cubecl::ir::ElemType;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::{Bench, Call, tables};

/// Keys of a query whose weights' roundings cancel by half at least.
const MANY_KEYS: usize = 64;

impl Bench {
    /// Results against loops in f64, NaN before every launch, and the same bits twice.
    pub(super) fn verify(&mut self) -> Result<()> {
        let mut tally = Tally::new(self.args.shard)?;
        for dtype in [BF16, F16, F32] {
            if !self.client.properties().supports_type(dtype) {
                continue;
            }
            for (index, heads) in [[8, 2], [4, 4], [8, 1], [4, 2]].into_iter().enumerate() {
                for widths in [[128, 128], [64, 64], [96, 128], [256, 256], [16, 40]] {
                    for [rows, page] in
                        [[1, 32], [1, 64], [4, 32], [3, 16], [1, 4], [1, 1], [35, 32]]
                    {
                        let small = Small {
                            dtype,
                            heads,
                            widths,
                            rows,
                            page,
                            visibility: rows > 1 || index == 3,
                            softcap: (index == 1).then_some(2.0),
                            lengths: vec![
                                [1000, 0, 0],
                                [0, 0, 0],
                                [page - 1, 700, page / 2],
                                [page + 1, 0, 3],
                                [3000 / widths[0], 2500, 0],
                            ],
                        };
                        if tally.has_next() && small.name().contains(&self.args.only) {
                            let found = self.check(&small, tally.number as u64);
                            tally.count(small.name(), found);
                        }
                    }
                }
            }
        }
        tally.finish("calls")?;
        self.verify_quest()
    }

    fn check(&self, small: &Small, seed: u64) -> Result<()> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let ([heads, kv_heads], [width, value_width]) = (small.heads, small.widths);
        let (dtype, rows, page) = (small.dtype, small.rows, small.page);
        let batch = small.lengths.len();
        let (table, spans, entries, count) = tables(&small.lengths, page, seed);
        let pages = count * kv_heads;
        let mut numbers = |count: usize| uniform(count, 2.0, dtype, &mut rng);
        let q = numbers(batch * heads * rows * width);
        let mut keys = numbers(pages * page * width);
        let mut values = numbers(pages * page * value_width);
        let page_lists: Vec<Vec<[usize; 2]>> = (0..batch)
            .map(|entry| small.page_list(entry, &table[entry * entries..]))
            .collect();
        // What no page list names is NaN; positions follow the page list.
        let mut used = vec![false; count * page];
        let (mut positions, mut last) = (vec![0i32; count * page], vec![0i32; count * page]);
        let mut queries = Vec::new();
        for page_list in &page_lists {
            for (index, [id, slot]) in page_list.iter().enumerate() {
                used[id * page + slot] = true;
                positions[id * page + slot] = index as i32;
                let ends = index % 7 == 3;
                last[id * page + slot] = if ends { index as i32 + 40 } else { i32::MAX };
            }
            queries.push(page_list.len().saturating_sub(rows) as i32);
        }
        for slot in
            (0..pages * page).filter(|slot| !used[slot / page / kv_heads * page + slot % page])
        {
            keys[slot * width..][..width].fill(f32::NAN);
            values[slot * value_width..][..value_width].fill(f32::NAN);
        }
        let quantization = self.args.quantization();
        let client = &self.client;
        let stored = |rows: &mut [f32], width: usize| match quantization {
            None => (upload(client, rows, dtype), None),
            Some(quantization) => {
                let (codes, scales) = quantised(rows, width, quantization);
                let codes = client.create_from_slice(&codes);
                (codes, Some(upload(client, &scales, F32)))
            }
        };
        let (stored_keys, key_scales) = stored(&mut keys, width);
        let (stored_values, value_scales) = stored(&mut values, value_width);
        let mut shape = PagedShape::new(
            [batch, heads, kv_heads, rows],
            [1, entries],
            [pages, page],
            [width, value_width],
            dtype,
        );
        shape.quantization = quantization;
        shape.visibility = small.visibility;
        shape.softcap = small.softcap.is_some();
        shape.counters = !self.args.two_launches;
        let stored = [stored_keys, stored_values];
        let scales = key_scales.zip(value_scales).map(<[_; 2]>::from);
        let q_handle = upload(client, &q, dtype);
        let tables = [&table[..], &spans];
        let mut call = Call::new(client, shape, q_handle, (stored, scales), tables)?;
        call.softcap = small.softcap;
        if small.visibility {
            let of = [&positions, &last, &queries];
            call.visibility = Some(of.map(|ints| upload_ints(client, ints)));
        }
        if self.args.timing.launched(client, || call.run())? {
            return Ok(());
        }
        let [out, lse] = same_twice(|| {
            call.run()?;
            call.read()
        })?;
        let out: Vec<f64> = decoded(&out, dtype);
        let lse: Vec<f64> = decoded(&lse, F32);
        let rounding = rounding_of(dtype);
        for row in 0..batch * heads * rows {
            let (entry, head) = (row / rows / heads, row / rows % heads);
            let kv_head = head / (heads / kv_heads);
            let query = queries[entry] + (row % rows) as i32;
            let (mut scores, mut places) = (Vec::new(), Vec::new());
            for [id, slot] in &page_lists[entry] {
                let at = id * page + slot;
                if small.visibility && !(positions[at] <= query && query <= last[at]) {
                    continue;
                }
                let place = (id * kv_heads + kv_head) * page + slot;
                let (q, k) = (&q[row * width..][..width], &keys[place * width..][..width]);
                let score = dot(q, k) * call.scale;
                scores.push(match small.softcap {
                    Some(cap) => cap * (score / cap).tanh(),
                    None => score,
                });
                places.push(place);
            }
            let (weights, log) = softmax(&scores);
            let got = lse[row];
            if got != log {
                let bound = 1e-5 * log.abs().max(1.0);
                ensure_within(format_args!("lse {row}"), got, log, bound)?;
            }
            for channel in 0..value_width {
                let (mut sum, mut size) = (0.0, 0.0);
                for (weight, place) in weights.iter().zip(&places) {
                    let term = weight * f64::from(values[place * value_width + channel]);
                    (sum, size) = (sum + term, size + term.abs());
                }
                // Tensor cores get the weights rounded, each by up to `rounding` of itself. Of many, not all are rounded the same way.
                let share = if scores.len() > MANY_KEYS { 0.5 } else { 1.0 };
                let bound = 1.01 * rounding * (sum.abs() + share * size) + 1e-5 * size + 1e-7;
                let got = out[row * value_width + channel];
                let what = format_args!("row {row}, channel {channel}");
                ensure_within(what, got, sum, bound)?;
            }
        }
        Ok(())
    }
}

/// A call that is compared with loops.
struct Small {
    dtype: ElemType,
    /// Of queries, and of keys.
    heads: [usize; 2],
    widths: [usize; 2],
    rows: usize,
    page: usize,
    visibility: bool,
    softcap: Option<f64>,
    lengths: Vec<[usize; 3]>,
}

impl Small {
    fn name(&self) -> String {
        let [heads, kv_heads] = self.heads;
        format!(
            "{} {heads}/{kv_heads} heads, {:?}, {} tokens, pages of {}",
            self.dtype, self.widths, self.rows, self.page
        )
    }

    /// Numbers in the table and slots of pages.
    fn page_list(&self, entry: usize, table: &[i32]) -> Vec<[usize; 2]> {
        let [permanent, timed, start] = self.lengths[entry];
        let second = permanent.div_ceil(self.page);
        let one = (0..permanent).map(|slot| (slot / self.page, slot % self.page));
        let two = (start..start + timed).map(|slot| (second + slot / self.page, slot % self.page));
        one.chain(two)
            .map(|(entry, slot)| [table[entry] as usize, slot])
            .collect()
    }
}

/// Codes of rows in eight bits a number, and the rows' scales. The rows become what is stored of them; those of NaN are NaN in every bit of that.
fn quantised(rows: &mut [f32], width: usize, quantization: Quantization) -> (Vec<u8>, Vec<f32>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for row in rows.chunks_mut(width) {
        if row[0].is_nan() {
            codes.extend(std::iter::repeat_n(0x7f, width));
            scales.push(f32::NAN);
            continue;
        }
        let (words, scale) = quantization.quantize(row);
        let own = words.iter().flat_map(|word| word.to_le_bytes());
        for (x, code) in row.iter_mut().zip(own.clone()) {
            *x = quantization.decode(code) * scale;
        }
        codes.extend(own);
        scales.push(scale);
    }
    (codes, scales)
}
