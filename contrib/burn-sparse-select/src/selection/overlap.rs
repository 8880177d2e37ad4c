//! What the lists of adjacent queries have in common.

use burn::tensor::{Int, Tensor};

use burn_blocksparse::OpError;

/// Adjacent queries that are compared.
const NEIGHBOURS: usize = 8;

/// What is expected to be in common, if it is a share.
pub(crate) fn checked_overlap(overlap: f64) -> Result<f64, OpError> {
    blocksparse::ensure! { OpError; (0.0..=1.0).contains(&overlap) => "overlap", "from 0 to 1", overlap; }
    Ok(overlap)
}

/// `(8 − u) / 7`, where `u` is how much the union of the lists of eight adjacent queries has for one of a list; 1 without any lists. `[batch, lists,
/// queries, most]`, where negative numbers are on no list. Groups of eight count whose queries all choose, which `chooses` says of a query and the length of
/// its list.
///
/// Reads all lists back, and counts on the host.
pub(crate) fn measure(lists: &Tensor<4, Int>, chooses: impl Fn(usize, usize) -> bool) -> f64 {
    let [.., queries, most] = lists.dims();
    let numbers = lists.clone().into_data().convert::<i64>();
    let numbers = numbers.into_vec::<i64>().expect("converted so");
    let (mut in_unions, mut in_lists) = (0, 0);
    for of_head in numbers.chunks(queries * most) {
        for (group, lists) in of_head.chunks_exact(NEIGHBOURS * most).enumerate() {
            let own = lists
                .chunks(most)
                .map(|list| list.iter().filter(|&&key| key >= 0));
            let mut queries = own.clone().zip(group * NEIGHBOURS..);
            if queries.all(|(list, query)| chooses(query, list.count())) {
                let mut all: Vec<i64> = own.flatten().copied().collect();
                in_lists += all.len();
                all.sort_unstable();
                all.dedup();
                in_unions += all.len();
            }
        }
    }
    if in_lists == 0 {
        return 1.0;
    }
    let count = NEIGHBOURS as f64;
    (count - count * in_unions as f64 / in_lists as f64) / (count - 1.0)
}
