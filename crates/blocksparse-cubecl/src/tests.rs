//! Which tier takes which call, on described devices.

use cubecl::ir::{ElemType, FloatKind};

use super::call::{Request, ScoreKind};
use super::choice::AttentionPlan;
use crate::described::Fake;
use crate::tuning::TierLimit;
use blocksparse::{BlockLayout, Pattern, ProductPrecision};
use cubecl::prelude::AddressType;

const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const F32: ElemType = ElemType::Float(FloatKind::F32);
const F64: ElemType = ElemType::Float(FloatKind::F64);

fn fixed() -> BlockLayout {
    Pattern::fixed(128, 32).layout(4, 1024, 32).unwrap()
}

fn request(dim: usize, dtype: ElemType) -> Request {
    Request::new([2, 4], [dim, dim], dtype)
}

/// Returns the lines of a plan as `forward: tier` or `forward: not tier, reason`, and so on.
fn lines(plan: &AttentionPlan) -> Vec<String> {
    let text = plan.to_string();
    let line = |line: &str| {
        if let Some((kernel, rest)) = line.split_once(" not on the ") {
            let (tier, reason) = rest.split_once(" tier: ").unwrap();
            return format!("{}: not {tier}, {reason}", kernel.trim());
        }
        let words = line.split(" tiles").next().unwrap_or(line);
        let known = ["hopper", "mma", "simt"];
        match known
            .iter()
            .find(|tier| words.contains(&format!(" {tier} ")))
        {
            Some(tier) => format!("{}: {tier}", words.split(tier).next().unwrap().trim()),
            None => line.trim().to_string(),
        }
    };
    let said = text.lines().skip(1);
    // Why the fused pass of the simt tier cannot run is an extra line: see `fused`.
    said.filter(|line| !line.contains(" two mainloops: "))
        .map(line)
        .collect()
}

/// Returns the line of a plan that begins with `begins`.
#[cfg(feature = "cuda-asm")]
fn line(plan: &AttentionPlan, begins: &str) -> String {
    let text = plan.to_string();
    let line = text.lines().find(|line| line.starts_with(begins));
    line.unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[test]
fn webgpu_has_the_scalar_tier() {
    let plan = |dim| Fake::webgpu().plan(&fixed(), request(dim, F32), TierLimit::None);
    let plan = plan(64).unwrap();
    let lines = lines(&plan);
    let runs = &lines[lines.len() - 3..];
    assert_eq!(runs, ["forward: simt", "dQ: simt", "dK, dV: simt"]);
    assert_eq!(plan.alignment(), 1);
    assert_eq!(plan.check_backward(), Ok(()));
}

#[test]
fn a_device_says_what_it_lacks() {
    let device = Fake::webgpu();
    let plan = |request| device.plan(&fixed(), request, TierLimit::None);
    let error = |request| plan(request).unwrap_err().to_string();
    for dtype in [BF16, F64] {
        assert!(error(request(64, dtype)).contains("dtype must be"));
    }
    let wide = error(request(4096, F32));
    assert!(wide.contains("shared memory, got 4096 and 4096"), "{wide}");
    // More tiles, heads or batch entries than a grid holds are launched in slices.
    assert!(plan(Request::new([65536, 4], [64, 64], F32)).is_ok());
    // With the buffer of the largest scores there are eight.
    let largest = request(64, F32).with_max_scores(true);
    assert!(plan(largest).is_ok());
    let alibi = ScoreKind {
        alibi: true,
        ..ScoreKind::default()
    };
    let one_more = error(largest.with_score(alibi));
    assert!(one_more.contains("the buffers of a kernel"), "{one_more}");
    // The backward pass binds ten buffers.
    let biased = request(64, F32).with_score(ScoreKind {
        bias: true,
        ..ScoreKind::default()
    });
    let backward = plan(biased).unwrap().check_backward().unwrap_err();
    let text = backward.to_string();
    assert!(
        text.contains("the buffers of a kernel must be at most 8"),
        "{text}"
    );
}

/// Whether launches can read a gradient in place is known before, so it is copied if not, and no backward pass fails because of its strides.
#[test]
fn tensors_that_no_launch_reads_as_they_lie_are_known_before() {
    let shape = [2, 4, 1024, 64];
    let contiguous = [4 * 1024 * 64, 1024 * 64, 64, 1];
    let layout = Pattern::causal().layout(4, 1024, 128).unwrap();
    let far = |elements: usize| [elements, 1024 * 64, 64, 1];
    let plain = [
        // The gradient of a sum, which repeats one element along some dimensions.
        ([0, 0, 0, 1], 0, true),
        ([0, 0, 0, 0], 0, false),
        (contiguous, 0, true),
        // Heads stored side by side within a row, and rows whose elements are not contiguous.
        ([1024 * 256, 64, 256, 1], 0, true),
        ([64, 1024 * 64, 1, 1024], 0, false),
    ];
    let check = |device: &Fake, dtype, limit, expected: &[([usize; 4], usize, bool)]| {
        let plan = device.plan(&layout, request(64, dtype), limit).unwrap();
        for &(strides, start, taken) in plain.iter().chain(expected) {
            let takes = plan.gradient().takes(shape, strides, start);
            assert_eq!(takes, taken, "{strides:?}, {start}, {plan}");
        }
        // A contiguous copy can always be read.
        assert!(plan.inputs().takes(shape, contiguous, 0));
        plan
    };
    let anywhere = [(far(1 << 40), 0, true), (far(4097), 3, true)];
    check(&Fake::sm80(), F32, TierLimit::Simt, &anywhere);
    let mut narrow = Fake::webgpu();
    let addresses = &mut narrow.properties.features.types.address;
    addresses.remove(&AddressType::U64);
    let last = 3 * 1024 * 64 + 1023 * 64 + 64;
    let most = u32::MAX as usize - last;
    let in_words = [(far(most), 0, true), (far(most + 1), 0, false)];
    let plan = check(&narrow, F32, TierLimit::None, &in_words);
    assert!(!plan.inputs().takes(shape, far(most + 1), 0));
    #[cfg(feature = "cuda-asm")]
    {
        let aligned = [(contiguous, 8, true), (contiguous, 4, false)];
        check(&Fake::sm80(), BF16, TierLimit::None, &aligned);
        let most = (u32::MAX as usize * 8 - last) / 8 * 8;
        let in_eights = [(far(most), 0, true), (far(most + 8), 0, false)];
        let plan = check(&Fake::sm90(), BF16, TierLimit::None, &in_eights);
        assert!(lines(&plan).contains(&"backward: hopper".to_string()));
        // TMA reads q, k and v at any distance, and two mainloops read all tensors so.
        assert!(plan.inputs().takes(shape, far(most + 8), 0));
        let mainloops = TierLimit::HopperUnfused;
        check(&Fake::sm90(), BF16, mainloops, &[(far(most + 8), 0, true)]);
    }
}

#[cfg(not(feature = "cuda-asm"))]
#[test]
fn a_build_without_tensor_cores_says_so_on_cuda() {
    let says = |device: Fake| {
        let plan = device.plan(&fixed(), request(64, F32), TierLimit::None);
        let text = plan.unwrap().to_string();
        text.contains("not on the mma tier: feature `cuda` is off\n")
    };
    assert!(says(Fake::sm90()));
    assert!(says(Fake::sm80()));
    assert!(!says(Fake::webgpu()));
}

#[cfg(feature = "cuda-asm")]
mod balance;
#[cfg(feature = "cuda-asm")]
mod biases;
mod fused;
#[cfg(feature = "cuda-asm")]
mod values;

#[cfg(feature = "cuda-asm")]
mod tensor_cores {
    use super::*;
    use crate::tensor::TOO_LARGE;
    use blocksparse::LayoutShape;

    const NOT_90: &str = "the device is not of compute capability 9.0";
    const NOT_80: &str = "the device is not of compute capability 8.0 or up";

    /// Refusals of a tier in both passes.
    fn refused(tier: &str, reason: &str) -> [String; 2] {
        ["forward", "backward"].map(|pass| format!("{pass}: not {tier}, {reason}"))
    }

    /// Lines of a plan for a call that both tensor-core tiers refuse.
    fn only_simt(hopper: &str, mma: &str) -> Vec<String> {
        let [h, m] = [refused("hopper", hopper), refused("mma", mma)];
        let refused = [0, 1]
            .into_iter()
            .flat_map(|pass| [h[pass].clone(), m[pass].clone()]);
        let simt = ["forward: simt", "dQ: simt", "dK, dV: simt"].map(str::to_string);
        refused.chain(simt).collect()
    }

    fn check<T: AsRef<str>>(device: &Fake, layout: &BlockLayout, request: Request, expected: &[T]) {
        check_within(TierLimit::None, device, layout, request, expected);
    }

    fn check_within<T: AsRef<str>>(
        limit: TierLimit,
        device: &Fake,
        layout: &BlockLayout,
        request: Request,
        expected: &[T],
    ) {
        let plan = device.plan(layout, request, limit).unwrap();
        let expected: Vec<&str> = expected.iter().map(T::as_ref).collect();
        assert_eq!(lines(&plan), expected, "{plan}");
        let tensor = |line: &&str| !line.contains("not ") && !line.ends_with("simt");
        let is_tensor = expected.iter().any(tensor);
        let alignment = if is_tensor {
            16 / request.dtype.size()
        } else {
            1
        };
        assert_eq!(plan.alignment(), alignment, "{plan}");
    }

    #[test]
    fn sm90() {
        let device = Fake::sm90();
        let both = ["forward: hopper", "backward: hopper"];
        let dense = Pattern::causal().layout(4, 1024, 128).unwrap();
        for dim in [40, 64, 72, 96, 104, 128] {
            check(&device, &dense, request(dim, BF16), &both);
        }
        // Two mainloops of smaller tiles are faster here than the fused pass, whose tiles would join more blocks.
        let mainloops = ["forward: hopper", "dQ: hopper", "dK, dV: hopper"];
        let wide = request(128, BF16);
        check(&device, &fixed(), wide, &mainloops);
        for dim in [136, 256] {
            check(&device, &fixed(), request(dim, BF16), &mainloops);
        }
        let reason = "head_dim is no multiple of 8 from 40 to 256";
        let [forward, backward] = refused("hopper", reason);
        let mma = [
            forward.as_str(),
            "forward: mma",
            &backward,
            "dQ: mma",
            "dK, dV: mma",
        ];
        check(&device, &fixed(), request(32, BF16), &mma);
    }

    #[test]
    fn every_width_is_multiplied_on_tensor_cores() {
        let dense = Pattern::causal().layout(4, 1024, 64).unwrap();
        for dim in (8..=256).step_by(8) {
            for (device, request) in [
                (Fake::sm90(), request(dim, BF16)),
                (Fake::sm80(), request(dim, BF16)),
                (
                    Fake::sm80(),
                    request(dim, F32).with_precision(ProductPrecision::Tf32),
                ),
                (Fake::sm80(), Request::new([2, 4], [dim, 264 - dim], BF16)),
            ] {
                let plan = device.plan(&dense, request, TierLimit::None).unwrap();
                let runs = lines(&plan);
                assert!(runs.iter().all(|line| !line.ends_with("simt")), "{plan}");
            }
        }
        // At other widths, rows do not begin at multiples of 16 bytes.
        let [m1, _] = refused("mma", "head_dim or value_dim is no multiple of 8 up to 256");
        let odd = Fake::sm80().plan(&dense, request(68, BF16), TierLimit::None);
        assert!(lines(&odd.unwrap()).contains(&m1));
    }

    #[test]
    fn what_no_tensor_core_takes() {
        let device = Fake::sm90();
        let of_dtypes = [
            "the dtype is neither bf16 nor f16",
            "the dtype is f32, and tf32 was not asked for",
        ];
        let stored = request(64, BF16).with_stored_weights(true);
        let negative = request(64, BF16).with_scale(-0.5);
        for (request, [hopper, mma]) in [
            (request(64, F32), of_dtypes),
            (stored, ["weights are stored"; 2]),
            (negative, ["the scale is not positive"; 2]),
        ] {
            check(&device, &fixed(), request, &only_simt(hopper, mma));
        }
        let capped = negative.with_score(ScoreKind {
            softcap: true,
            ..ScoreKind::default()
        });
        check(
            &device,
            &fixed(),
            capped,
            &["forward: hopper", "backward: hopper"],
        );
    }

    #[test]
    fn sm80() {
        let [h1, h2] = refused("hopper", NOT_90);
        let mma = [h1.as_str(), "forward: mma", &h2, "dQ: mma", "dK, dV: mma"];
        let device = Fake::sm80();
        check(&device, &fixed(), request(64, BF16), &mma);
        let tf32 = request(64, F32).with_precision(ProductPrecision::Tf32);
        check(&device, &fixed(), tf32, &mma);
    }

    #[test]
    fn webgpu() {
        let expected = only_simt(NOT_90, NOT_80);
        check(&Fake::webgpu(), &fixed(), request(64, F32), &expected);
    }

    #[test]
    fn limits() {
        let device = Fake::sm90();
        let dense = Pattern::causal().layout(4, 1024, 128).unwrap();
        let bf16 = request(64, BF16);
        let [h1, h2] = refused("hopper", "BLOCKSPARSE_TIER says mma");
        let mma = [h1.as_str(), "forward: mma", &h2, "dQ: mma", "dK, dV: mma"];
        let simt = only_simt("BLOCKSPARSE_TIER says simt", "BLOCKSPARSE_TIER says simt");
        let mut fused: Vec<&str> = simt[..5].iter().map(String::as_str).collect();
        fused.push("backward: simt");
        let simt: Vec<&str> = simt.iter().map(String::as_str).collect();
        let says = "backward: not hopper, BLOCKSPARSE_TIER says hopper-forward";
        for (limit, expected) in [
            (TierLimit::Mma, &mma[..]),
            (TierLimit::SimtUnfused, &simt),
            (TierLimit::SimtFused, &fused),
            (
                TierLimit::HopperUnfused,
                &["forward: hopper", "dQ: hopper", "dK, dV: hopper"],
            ),
            (
                TierLimit::HopperForward,
                &["forward: hopper", says, "dQ: mma", "dK, dV: mma"],
            ),
            (TierLimit::None, &["forward: hopper", "backward: hopper"]),
        ] {
            check_within(limit, &device, &dense, bf16, expected);
        }
    }

    /// Each class has 64 queries.
    #[test]
    fn classes_of_unequal_lengths() {
        let strided = |n| Pattern::strided(16).layout(4, n, 16).unwrap();
        let part = |plan: &AttentionPlan| lines(plan)[0].starts_with("part ");
        let device = Fake::sm90();
        let plan = |n| device.plan(&strided(n), request(64, BF16), TierLimit::None);
        let even = plan(1024).unwrap();
        assert!(
            part(&even) && !even.to_string().contains("not on"),
            "{even}"
        );
        let odd = plan(1025).unwrap().to_string();
        let reason = "not on the hopper tier: the sequence is no multiple of the pattern's stride";
        assert!(odd.contains(reason) && odd.contains(" mma "), "{odd}");
    }

    /// A layout with a single block row and column in all, so that large sequences cost nothing to plan.
    fn local(heads: usize, seq: usize) -> BlockLayout {
        let shape = LayoutShape::square(heads, seq, 128);
        BlockLayout::new(&Pattern::local(128), shape).unwrap()
    }

    /// The sums of dQ are read as pairs with a 32-bit index. With 2³³ elements the fused pass would read wrong ones.
    #[test]
    fn sums_of_dq_that_32_bits_do_not_count() {
        let device = Fake::sm90();
        // 64 heads × 2²⁰ queries × width 64 = 2³² elements per batch entry.
        let layout = local(64, 1 << 20);
        let grouped = |batch, dim| Request::new([batch, 8], [dim, dim], BF16);
        let fits = ["forward: hopper", "backward: hopper"];
        check(&device, &layout, grouped(1, 64), &fits);
        let mainloops = ["forward: hopper", "dQ: hopper", "dK, dV: hopper"];
        check(&device, &layout, grouped(2, 64), &mainloops);
        check(&device, &layout, grouped(2, 96), &mainloops);
        // The hopper tier counts the output in groups of eight elements, the mma tier in words.
        check(
            &device,
            &layout,
            grouped(2, 256),
            &only_simt(TOO_LARGE, TOO_LARGE),
        );
    }

    /// Inputs must be aligned for every kernel that reads them.
    #[test]
    fn alignment_is_of_all_kernels() {
        // The backward pass has a tile of 16 columns that fits, and the forward pass none.
        let request = Request::new([2, 4], [256, 256], BF16);
        let mixed = (20_000..100_000).step_by(1_000).find_map(|shared| {
            let mut device = Fake::sm80();
            device.properties.hardware.max_shared_memory_size = shared;
            let plan = device.plan(&fixed(), request, TierLimit::None).ok()?;
            let lines = lines(&plan);
            let has = |line: &str| lines.iter().any(|other| other == line);
            (has("forward: simt") != has("dQ: simt")).then_some(plan)
        });
        let plan = mixed.expect("one pass is on tensor cores, and the other is not");
        assert_eq!(plan.alignment(), 8, "{plan}");
    }
}
