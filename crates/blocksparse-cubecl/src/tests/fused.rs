//! Which calls get the fused backward pass of the `simt` tier, and the reasons of the others.

use super::*;

/// Returns a plan's line about its backward pass on the `simt` tier.
fn backward_line(
    device: &Fake,
    layout: &BlockLayout,
    request: Request,
    limit: TierLimit,
) -> String {
    let text = device.plan(layout, request, limit).unwrap().to_string();
    let about = text
        .lines()
        .find(|line| line.starts_with("  backward simt ") || line.contains(" two mainloops: "));
    about.unwrap_or_else(|| panic!("{text}")).trim().to_string()
}

fn dense(heads: usize, length: usize) -> BlockLayout {
    Pattern::causal().layout(heads, length, 128).unwrap()
}

#[test]
fn dense_attention_is_fused() {
    let device = Fake::sm90();
    let of = |request, limit| backward_line(&device, &dense(16, 8192), request, limit);
    let plain = |dim| Request::new([4, 16], [dim, dim], F32);
    for dim in [64, 128] {
        let line = of(plain(dim), TierLimit::None);
        assert!(line.starts_with("backward simt  "), "{line}");
        // Each group has a dQ in f32.
        let groups: usize = line
            .split(" units, ")
            .nth(1)
            .and_then(|rest| rest.split(" groups").next())
            .and_then(|words| words.rsplit(' ').next())
            .and_then(|number| number.parse().ok())
            .unwrap_or_else(|| panic!("{line}"));
        let mib = (groups * 4 * 16 * 8192 * dim * 4) >> 20;
        assert!(
            line.ends_with(&format!("{groups} groups with {mib} MiB of sums of dQ")),
            "{line}"
        );
        assert!(mib <= 1024, "{line}");
        // Nearly all of 132 multiprocessors have work until the end.
        let cubes = groups * 64;
        assert!(cubes.next_multiple_of(132) * 9 <= cubes * 10, "{line}");
    }
    // Heads that share keys have common cubes, but separate sums.
    let grouped = of(Request::new([4, 4], [64, 64], F32), TierLimit::None);
    assert!(grouped.starts_with("backward simt  "), "{grouped}");
    let mainloops = of(plain(64), TierLimit::SimtUnfused);
    assert_eq!(
        mainloops,
        "backward two mainloops: BLOCKSPARSE_TIER says simt-unfused"
    );
}

#[test]
fn what_is_not_fused_says_why() {
    let request = request(64, F32);
    let two = |reason: &str| format!("backward two mainloops: {reason}");
    let of =
        |device: &Fake, layout: &BlockLayout, limit| backward_line(device, layout, request, limit);
    let buffers = "a kernel of the fused pass has more buffers than the device binds";
    for limit in [TierLimit::None, TierLimit::SimtFused] {
        let line = of(&Fake::webgpu(), &dense(4, 1024), limit);
        assert_eq!(line, two(buffers));
    }
    let local = Pattern::local(16).layout(4, 4096, 16).unwrap();
    let device = Fake::sm90();
    let few = "too few keys of a query are kept to pay for sums of dQ";
    assert_eq!(of(&device, &local, TierLimit::None), two(few));
    let forced = of(&device, &local, TierLimit::SimtFused);
    assert!(forced.starts_with("backward simt  "), "{forced}");
    // One group takes 2 GiB.
    let long = dense(4, 1 << 20);
    let large = "the sums of dQ are more than BLOCKSPARSE_SIMT_SUMS or the device allows";
    assert_eq!(of(&device, &long, TierLimit::None), two(large));
    let mut small = Fake::sm90();
    small.properties.memory.max_page_size = 1 << 20;
    assert_eq!(of(&small, &dense(4, 1024), TierLimit::None), two(large));
    // Software devices end loops early, so even a forced fused pass is refused.
    let mut software = Fake::sm90();
    software.properties.features.plane = Default::default();
    let early = "a device without plane operations may end so long a mainloop early";
    for limit in [TierLimit::None, TierLimit::SimtFused] {
        assert_eq!(of(&software, &dense(4, 1 << 15), limit), two(early));
    }
    let forced = of(&software, &dense(4, 512), TierLimit::SimtFused);
    assert!(forced.starts_with("backward simt  "), "{forced}");
}
