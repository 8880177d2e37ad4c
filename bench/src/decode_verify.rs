//! Attention over pages against loops in f64.

use anyhow::{Result, anyhow, ensure};
use blocksparse::Quantization;
use burn_paged_attention::internal::kernels::PagedPlan;
use burn_paged_attention::internal::kernels::PagedShape;
use cubecl::ir::{ElemType, FloatKind};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{BF16, Bench, Call, bytes_of, tables};

const F32: ElemType = ElemType::Float(FloatKind::F32);
const F16: ElemType = ElemType::Float(FloatKind::F16);

/// Keys of a query whose weights' roundings cancel by half at least.
const MANY_KEYS: usize = 64;

impl Bench {
    /// Results against loops in f64, NaN before every launch, and the same bits twice.
    pub(super) fn verify(&mut self) -> Result<()> {
        let properties = self.client.properties();
        let dtypes = [BF16, F16, F32]
            .into_iter()
            .filter(|dtype| properties.supports_type(*dtype));
        let dtypes: Vec<ElemType> = dtypes.collect();
        let (mut checked, mut failed) = (0, 0);
        let mut number = 0;
        for dtype in dtypes {
            for (index, (heads, kv_heads)) in
                [(8, 2), (4, 4), (8, 1), (4, 2)].into_iter().enumerate()
            {
                for (width, value_width) in [(128, 128), (64, 64), (96, 128), (256, 256), (16, 40)]
                {
                    for (rows, page) in
                        [(1, 32), (1, 64), (4, 32), (3, 16), (1, 4), (1, 1), (35, 32)]
                    {
                        let small = Small {
                            dtype,
                            heads,
                            kv_heads,
                            widths: [width, value_width],
                            rows,
                            page,
                            visibility: rows > 1 || index == 3,
                            softcap: (index == 1).then_some(2.0),
                            lengths: vec![
                                [1000, 0, 0],
                                [0, 0, 0],
                                [page - 1, 700, page / 2],
                                [page + 1, 0, 3],
                                [3000 / width, 2500, 0],
                            ],
                        };
                        number += 1;
                        let elsewhere = number % self.args.of as u64 != self.args.shard as u64;
                        if elsewhere || !small.name().contains(&self.args.only) {
                            continue;
                        }
                        checked += 1;
                        if let Err(error) = self.check(&small, number) {
                            failed += 1;
                            println!("{}: {error}", small.name());
                        }
                    }
                }
            }
        }
        println!("{checked} calls, {failed} failed");
        ensure!(failed == 0, "{failed} calls are wrong");
        self.verify_quest()
    }

    fn check(&self, small: &Small, seed: u64) -> Result<()> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let Small {
            dtype,
            heads,
            kv_heads,
            widths: [width, value_width],
            rows,
            page,
            ..
        } = *small;
        let batch = small.lengths.len();
        let (table, spans, entries, count) = tables(&small.lengths, page, seed);
        let pages = count * kv_heads;
        let mut numbers = |count: usize| -> Vec<f64> {
            (0..count)
                .map(|_| rounded(rng.random_range(-2.0..2.0), dtype))
                .collect()
        };
        let q = numbers(batch * heads * rows * width);
        let mut keys = numbers(pages * page * width);
        let mut values = numbers(pages * page * value_width);
        let walks: Vec<Vec<[usize; 2]>> = (0..batch)
            .map(|entry| small.walk(entry, &table[entry * entries..]))
            .collect();
        // What no walk reads is NaN; positions follow the walk.
        let mut used = vec![false; count * page];
        let (mut positions, mut last) = (vec![0i32; count * page], vec![0i32; count * page]);
        let mut queries = Vec::new();
        for walk in &walks {
            for (index, [id, slot]) in walk.iter().enumerate() {
                used[id * page + slot] = true;
                positions[id * page + slot] = index as i32;
                let ends = index % 7 == 3;
                last[id * page + slot] = if ends { index as i32 + 40 } else { i32::MAX };
            }
            queries.push(walk.len().saturating_sub(rows) as i32);
        }
        for slot in
            (0..pages * page).filter(|slot| !used[slot / page / kv_heads * page + slot % page])
        {
            keys[slot * width..][..width].fill(f64::NAN);
            values[slot * value_width..][..value_width].fill(f64::NAN);
        }
        let quantization = self.args.quantization();
        let stored = quantization.map(|quantization| {
            [
                quantised(&mut keys, width, quantization),
                quantised(&mut values, value_width, quantization),
            ]
        });
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
        let create = |bytes: &[u8]| self.client.create_from_slice(bytes);
        let out_len = batch * heads * rows * value_width;
        let call = Call {
            client: self.client.clone(),
            shape,
            plan: PagedPlan::new(&self.client, shape)?,
            q: create(&encoded(&q, dtype)),
            keys: match &stored {
                Some([(words, _), _]) => create(words),
                None => create(&encoded(&keys, dtype)),
            },
            values: match &stored {
                Some([_, (words, _)]) => create(words),
                None => create(&encoded(&values, dtype)),
            },
            scales: (stored.as_ref()).map(|[keys, values]| [create(&keys.1), create(&values.1)]),
            table: create(&bytes_of(&table)),
            spans: create(&bytes_of(&spans)),
            visibility: (small.visibility)
                .then(|| [&positions, &last, &queries].map(|numbers| create(&bytes_of(numbers)))),
            selected: None,
            counters: (shape.counters).then(|| self.zeros(batch * heads * rows)),
            // All bits set are NaN.
            out: create(&vec![0xff; out_len * dtype.size()]),
            lse: create(&vec![0xff; batch * heads * rows * 4]),
            scale: 1.0 / (width as f64).sqrt(),
            softcap: small.softcap,
        };
        call.run()?;
        if self.args.enqueue_only {
            return self.client.flush().map_err(|error| anyhow!("{error}"));
        }
        let first = call.read()?;
        call.run()?;
        ensure!(call.read()? == first, "other bits the second time");
        let out = decoded(&first[0], dtype);
        let lse = decoded(&first[1], F32);
        let rounding = match dtype {
            BF16 => 2f64.powi(-8),
            F16 => 2f64.powi(-11),
            _ => 0.0,
        };
        for row in 0..batch * heads * rows {
            let (entry, head) = (row / rows / heads, row / rows % heads);
            let kv_head = head / (heads / kv_heads);
            let query = queries[entry] + (row % rows) as i32;
            let (mut scores, mut places) = (Vec::new(), Vec::new());
            for [id, slot] in &walks[entry] {
                let at = id * page + slot;
                if small.visibility && !(positions[at] <= query && query <= last[at]) {
                    continue;
                }
                let place = (id * kv_heads + kv_head) * page + slot;
                let products = (0..width).map(|c| q[row * width + c] * keys[place * width + c]);
                let score = products.sum::<f64>() * call.scale;
                scores.push(match small.softcap {
                    Some(cap) => cap * (score / cap).tanh(),
                    None => score,
                });
                places.push(place);
            }
            let total: f64 = scores.iter().map(|score| score.exp()).sum();
            let log = total.ln();
            let got = lse[row];
            ensure!(
                got == log || (got - log).abs() <= 1e-5 * log.abs().max(1.0),
                "lse {row} is {got}, and {log} in f64"
            );
            for channel in 0..value_width {
                let (mut sum, mut size) = (0.0, 0.0);
                for (score, place) in scores.iter().zip(&places) {
                    let term = score.exp() / total * values[place * value_width + channel];
                    (sum, size) = (sum + term, size + term.abs());
                }
                let got = out[row * value_width + channel];
                // Tensor cores get the weights rounded, each by up to `rounding` of itself. Of many, not all are rounded the same way.
                let share = if scores.len() > MANY_KEYS { 0.5 } else { 1.0 };
                let bound = 1.01 * rounding * (sum.abs() + share * size) + 1e-5 * size + 1e-7;
                ensure!(
                    (got - sum).abs() <= bound,
                    "row {row}, channel {channel} is {got}, and {sum} in f64: {:.1} of the bound",
                    (got - sum).abs() / bound
                );
            }
        }
        Ok(())
    }
}

/// A call that is compared with loops.
struct Small {
    dtype: ElemType,
    heads: usize,
    kv_heads: usize,
    widths: [usize; 2],
    rows: usize,
    page: usize,
    visibility: bool,
    softcap: Option<f64>,
    lengths: Vec<[usize; 3]>,
}

impl Small {
    fn name(&self) -> String {
        format!(
            "{} {}/{} heads, {:?}, {} tokens, pages of {}",
            self.dtype, self.heads, self.kv_heads, self.widths, self.rows, self.page
        )
    }

    /// Numbers in the table and slots of pages.
    fn walk(&self, entry: usize, table: &[i32]) -> Vec<[usize; 2]> {
        let [permanent, timed, start] = self.lengths[entry];
        let second = permanent.div_ceil(self.page);
        let one = (0..permanent).map(|slot| (slot / self.page, slot % self.page));
        let two = (start..start + timed).map(|slot| (second + slot / self.page, slot % self.page));
        one.chain(two)
            .map(|(entry, slot)| [table[entry] as usize, slot])
            .collect()
    }
}

fn rounded(x: f64, dtype: ElemType) -> f64 {
    match dtype {
        BF16 => bf16::from_f64(x).to_f64(),
        F16 => f16::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    }
}

fn encoded(numbers: &[f64], dtype: ElemType) -> Vec<u8> {
    match dtype {
        BF16 => (numbers.iter())
            .flat_map(|x| bf16::from_f64(*x).to_le_bytes())
            .collect(),
        F16 => (numbers.iter())
            .flat_map(|x| f16::from_f64(*x).to_le_bytes())
            .collect(),
        _ => (numbers.iter())
            .flat_map(|x| (*x as f32).to_le_bytes())
            .collect(),
    }
}

fn decoded(bytes: &[u8], dtype: ElemType) -> Vec<f64> {
    match dtype {
        BF16 => (bytes.chunks(2))
            .map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f64())
            .collect(),
        F16 => (bytes.chunks(2))
            .map(|x| f16::from_le_bytes([x[0], x[1]]).to_f64())
            .collect(),
        _ => (bytes.chunks(4))
            .map(|x| f64::from(f32::from_le_bytes([x[0], x[1], x[2], x[3]])))
            .collect(),
    }
}

/// Bytes of rows in eight bits a number and of their scales. The rows become what is stored of them; those of NaN are NaN in every bit of that.
fn quantised(rows: &mut [f64], width: usize, quantization: Quantization) -> (Vec<u8>, Vec<u8>) {
    let (mut bytes, mut scales) = (Vec::new(), Vec::new());
    for row in rows.chunks_mut(width) {
        if row[0].is_nan() {
            bytes.extend(std::iter::repeat_n(0x7f, width));
            scales.extend(f32::NAN.to_le_bytes());
            continue;
        }
        let numbers: Vec<f32> = row.iter().map(|x| *x as f32).collect();
        let (words, scale) = quantization.quantize(&numbers);
        let codes = words.iter().flat_map(|word| word.to_le_bytes());
        for (x, code) in row.iter_mut().zip(codes.clone()) {
            *x = f64::from(quantization.decode(code)) * f64::from(scale);
        }
        bytes.extend(codes);
        scales.extend(scale.to_le_bytes());
    }
    (bytes, scales)
}
