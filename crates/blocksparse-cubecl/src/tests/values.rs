//! Values whose width differs from that of keys.

use super::*;

/// Returns the plan for widths of keys and values, over a causal layout.
fn plan_of(widths: [usize; 2]) -> AttentionPlan {
    let dense = Pattern::causal().layout(16, 4096, 128).unwrap();
    let request = Request::new([2, 4], widths, BF16);
    let plan = Fake::sm90().plan(&dense, request, TierLimit::None);
    plan.unwrap()
}

/// On wgmma, with a backward pass of two mainloops.
#[test]
fn narrower_values() {
    let expected = ["forward: hopper", "dQ: hopper", "dK, dV: hopper"];
    for (widths, tile) in [
        ([192, 128], "128 × 128"),
        ([136, 40], "128 × 128"),
        // Two steps of 128 keys would not fit along with queries.
        ([256, 128], "128 × 64"),
        ([256, 192], "128 × 64"),
        ([128, 64], "128 × 128"),
        ([96, 72], "128 × 128"),
        ([64, 40], "128 × 128"),
    ] {
        let plan = plan_of(widths);
        assert_eq!(lines(&plan), expected, "{plan}");
        let forward = line(&plan, "  forward  hopper");
        assert!(forward.contains(tile), "{widths:?}: {plan}");
    }
}

#[test]
fn values_that_another_tier_takes() {
    for (widths, reason) in [
        ([128, 192], "values are wider than keys"),
        ([128, 32], "value_dim is no multiple of 8 from 40 to 256"),
        ([32, 32], "head_dim is no multiple of 8 from 40 to 256"),
    ] {
        let [forward, backward] =
            ["forward", "backward"].map(|pass| format!("{pass}: not hopper, {reason}"));
        let expected = [
            &forward,
            "forward: mma",
            &backward,
            "dQ: mma",
            "dK, dV: mma",
        ];
        let plan = plan_of(widths);
        assert_eq!(lines(&plan), expected, "{plan}");
    }
}
