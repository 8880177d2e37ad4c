//! Tiles of the gradient of a bias.

use super::*;

/// Returns the lines of a plan about the gradient of a bias.
fn bias_lines(plan: &AttentionPlan) -> Vec<String> {
    let text = plan.to_string();
    let about = text.lines().filter(|line| line.contains("dbias"));
    about.map(|line| line.trim().to_string()).collect()
}

#[test]
fn gradients_of_biases() {
    let biased = |dim| {
        request(dim, BF16).with_score(ScoreKind {
            bias: true,
            ..ScoreKind::default()
        })
    };
    let device = Fake::sm90();
    let dense = Pattern::causal().layout(4, 1024, 128).unwrap();
    let of = |layout: &BlockLayout, dim, limit| {
        bias_lines(&device.plan(layout, biased(dim), limit).unwrap())
    };
    // A layout with blocks of 128 gets the widest tiles, at every width that the fused pass supports.
    for (dim, products, kib) in [(64, 6, 225), (72, 3, 225), (96, 3, 225), (128, 3, 225)] {
        let lines = of(&dense, dim, TierLimit::None);
        let pairs = format!(
            "dbias    hopper  128 × 128 tiles gathered from 128-wide blocks, summed over what shares the bias, 256 units, \
             {products} products in {kib} KiB shared"
        );
        assert_eq!(lines[0], pairs);
        assert!(
            lines[1].starts_with("or dbias hopper  128 × 64 tiles"),
            "{lines:?}"
        );
        assert!(lines[1].ends_with(", sums over queries"), "{lines:?}");
    }
    // In other cases, the plan has the reason.
    for (dim, limit, reason) in [
        (64, TierLimit::MmaBias, "BLOCKSPARSE_TIER says mma-bias"),
        (
            64,
            TierLimit::HopperForward,
            "BLOCKSPARSE_TIER says hopper-forward",
        ),
        (256, TierLimit::None, "head_dim is above 128"),
    ] {
        let lines = of(&dense, dim, limit);
        assert_eq!(
            lines[0],
            format!("dbias    not on the hopper tier: {reason}")
        );
        assert!(lines[1].starts_with("dbias    mma "), "{lines:?}");
        assert!(lines[2].starts_with("or dbias mma "), "{lines:?}");
    }
    // The lse and delta of eight queries are too few bytes for TMA.
    let narrow = Pattern::local(32).layout(4, 1024, 8).unwrap();
    let lines = of(&narrow, 64, TierLimit::None);
    assert!(lines[0].starts_with("dbias    hopper "), "{lines:?}");
    assert!(lines[1].starts_with("or dbias mma "), "{lines:?}");
    let reason = "(not on the hopper tier: blocks are narrower than 16)";
    assert!(lines[1].ends_with(reason), "{lines:?}");
    // Every part of a pattern has its own lines.
    let strided = Pattern::strided(32).layout(4, 1024, 32).unwrap();
    let lines = of(&strided, 64, TierLimit::None);
    assert_eq!(lines.len(), 2 * strided.parts().unwrap().len());
    assert!(
        lines.iter().all(|line| line.contains("hopper ")),
        "{lines:?}"
    );
    // Tiles fit a multiprocessor for all block sizes.
    for block in [8, 16, 32, 64, 128] {
        for dim in [40, 64, 96, 128] {
            let layout = Pattern::local(100).layout(4, 2048, block).unwrap();
            let lines = of(&layout, dim, TierLimit::None);
            assert!(
                lines[0].starts_with("dbias    hopper "),
                "{block}: {lines:?}"
            );
        }
    }
    // Without a bias there are no lines.
    let plain = device
        .plan(&dense, request(64, BF16), TierLimit::None)
        .unwrap();
    assert!(bias_lines(&plain).is_empty());
}

/// At width 64, tiles of two warpgroups with options need more registers than two cubes per multiprocessor allow.
#[test]
fn options_take_tiles_of_one_warpgroup() {
    let layout = Pattern::causal().layout(8, 8192, 128).unwrap();
    let with = |set: fn(&mut ScoreKind)| {
        let mut request = Request::new([2, 8], [64, 64], BF16);
        set(&mut request.score);
        let plan = Fake::sm90().plan(&layout, request, TierLimit::None);
        line(&plan.unwrap(), "  forward  hopper")
    };
    assert!(with(|_| ()).contains("256 units"));
    let options: [fn(&mut ScoreKind); 4] = [
        |score| score.softcap = true,
        |score| score.alibi = true,
        |score| score.bias = true,
        |score| score.dropout = true,
    ];
    for set in options {
        let line = with(set);
        assert!(
            line.contains("64 × 128") && line.contains("128 units"),
            "{line}"
        );
    }
}
