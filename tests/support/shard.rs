//! Selection of a part of the cases, for devices that compile slowly.

/// Returns K and N of `BURN_SPARSE_SHARD`, or 0 and 1.
pub fn shard() -> (usize, usize) {
    let shard = std::env::var("BURN_SPARSE_SHARD").ok();
    shard.map_or((0, 1), |text| {
        parse_shard(&text).unwrap_or_else(|error| panic!("{error}"))
    })
}

/// Selects among rows that each compile their own kernels: all, or with `BURN_SPARSE_SHARD` one in `one_in`, others for each K. There must be at
/// least `one_in` rows.
pub fn some_of<T>(rows: impl IntoIterator<Item = T>, one_in: usize) -> impl Iterator<Item = T> {
    let (part, parts) = shard();
    let one_in = if parts == 1 { 1 } else { one_in };
    rows.into_iter().skip(part % one_in).step_by(one_in)
}

/// Parses `K/N`; K = N counts as 0.
pub fn parse_shard(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once('/').map(|(k, n)| (k.parse(), n.parse()));
    match numbers {
        Some((Ok::<usize, _>(k), Ok(n))) if k <= n && n > 0 => Ok((k % n, n)),
        _ => Err(format!(
            "BURN_SPARSE_SHARD must be K/N with K at most N, got {text}"
        )),
    }
}
