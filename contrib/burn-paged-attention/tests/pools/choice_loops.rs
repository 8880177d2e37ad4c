//! Block selection in a pool, shared among heads that share keys, against f64 loops.

use std::ops::Range;

use crate::prelude::*;

const HEADS: usize = 4;
const WIDTH: usize = 32;
const HEAD: usize = WIDTH / HEADS;
const SEQ: usize = 103;

/// Selection parameters: block size, number of kept blocks, forced first blocks and nearest ones.
#[derive(Clone, Copy, Debug)]
struct Choice {
    block: usize,
    keep: usize,
    first: usize,
    local: usize,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns the heads' outputs, `[1, heads, seq, width]`, of a layer without rotations.
fn loops(mha: &SparseMultiHeadAttention, x: &Tensor<3>, choice: Choice) -> Tensor<4> {
    let kv_heads = mha.n_kv_heads();
    let group = HEADS / kv_heads;
    let project = |linear: &Linear| -> Vec<f64> {
        let rows = linear.forward(x.clone().reshape([SEQ, WIDTH])).into_data();
        rows.iter::<f32>().map(f64::from).collect()
    };
    let [q, k, v] = [&mha.query, &mha.key, &mha.value].map(project);
    let query = |head: usize, i: usize| &q[(i * HEADS + head) * HEAD..][..HEAD];
    let of = |x: &[f64], head: usize, j: usize| -> Vec<f64> {
        x[(j * kv_heads + head) * HEAD..][..HEAD].to_vec()
    };
    let keys_of =
        |block: usize| -> Range<usize> { block * choice.block..(block + 1) * choice.block };
    let mut out = vec![0.0; HEADS * SEQ * HEAD];
    for head in 0..kv_heads {
        let heads = head * group..(head + 1) * group;
        for i in 0..SEQ {
            let own = i / choice.block;
            let score = |block: usize| -> f64 {
                let of_keys = |h| keys_of(block).map(move |j| (h, j));
                let pairs = heads.clone().flat_map(of_keys);
                let sum: f64 = pairs.map(|(h, j)| dot(query(h, i), &of(&k, head, j))).sum();
                sum / (group * choice.block) as f64
            };
            let is_forced = |block: &usize| *block < choice.first || own - *block < choice.local;
            let (mut kept, mut rest): (Vec<usize>, Vec<usize>) = (0..=own).partition(is_forced);
            rest.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
            rest.truncate(choice.keep.saturating_sub(kept.len()));
            kept.extend(rest);
            let seen: Vec<usize> = kept
                .into_iter()
                .flat_map(keys_of)
                .filter(|&j| j <= i)
                .collect();
            for h in heads.clone() {
                let weight = |j| (dot(query(h, i), &of(&k, head, j)) / (HEAD as f64).sqrt()).exp();
                let total: f64 = seen.iter().map(|&j| weight(j)).sum();
                let row = &mut out[(h * SEQ + i) * HEAD..][..HEAD];
                for &j in &seen {
                    let share = weight(j) / total;
                    (row.iter_mut().zip(of(&v, head, j))).for_each(|(out, v)| *out += share * v);
                }
            }
        }
    }
    let out: Vec<f32> = out.into_iter().map(|x| x as f32).collect();
    Tensor::<1>::from_floats(out.as_slice(), &x.device()).reshape([1, HEADS, SEQ, HEAD])
}

fn read(mha: &SparseMultiHeadAttention, x: &Tensor<3>, calls: &[usize], page: usize) -> Tensor<3> {
    let config = KvPoolConfig::new(1, SEQ).with_page_size(page);
    let mut pool = KvPool::for_attention(mha, &config.with_chunk(40)).unwrap();
    let id = pool.join().unwrap();
    let rows = calls.iter().map(|&count| {
        let rows = x.clone().narrow(1, pool.len(id).unwrap(), count);
        let steps = [KvStep::new(id, count)];
        pool.try_forward_attention(mha, rows, &steps).unwrap()
    });
    Tensor::cat(rows.collect(), 1)
}

#[rstest]
#[case::moba("moba:16,3,share=mean", Choice { block: 16, keep: 3, first: 0, local: 1 })]
#[case::blocks_of_pages("moba:32,2,share=mean", Choice { block: 32, keep: 2, first: 0, local: 1 })]
#[case::forced("moba:16,4,first=1,local=2,share=mean", Choice { block: 16, keep: 4, first: 1, local: 2 })]
#[case::sums("moba:32,2,share=sum", Choice { block: 32, keep: 2, first: 0, local: 1 })]
fn shared_blocks_are_those_of_loops(
    #[case] selection: &str,
    #[case] choice: Choice,
    #[values(1, 2, 4)] kv_heads: usize,
) {
    for device in devices() {
        let _guard = seed(&device, 40);
        let mha = SparseMultiHeadAttentionConfig::new(WIDTH, HEADS, Pattern::causal())
            .with_block_size(16)
            .with_n_kv_heads(Some(kv_heads))
            .with_selection(Some(selection.parse().unwrap()));
        let mha = randomise(mha.try_init(&device).unwrap());
        let x = random([1, SEQ, WIDTH], &device);
        let expected = mha.output_projection(loops(&mha, &x, choice)).unwrap();
        assert_close(attend(&mha, x.clone()).unwrap(), expected.clone(), 2e-4);
        let single = vec![1; SEQ];
        let prompt: Vec<usize> = [40, 13, 2].into_iter().chain(vec![1; SEQ - 55]).collect();
        for calls in [single, prompt] {
            assert_close(read(&mha, &x, &calls, 16), expected.clone(), 2e-4);
        }
    }
}
