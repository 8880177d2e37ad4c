//! Runs kernels written in PTX whose results are known.

use super::Module;
use super::grid::run;
use super::launch::{Launch, Settings};
use super::memory::Regions;
use super::tensor_map::{Swizzle, TensorMap};
use crate::error::{Fault, Stopped};

/// Returns a kernel with `body` after the common prologue, which defines `%out`, the output, and `%mine`, the address
/// of a thread's four bytes.
fn text(body: &str) -> String {
    format!(
        ".version 9.0
        .target sm_90a
        .address_size 64
        .extern .shared .align 1024 .b8 dynamic[];
        .visible .entry kernel(.param .u64 kernel_param_0, .param .align 128 .b8 kernel_param_1[128])
        {{
            .reg .pred %p<8>;
            .reg .b32 %r<32>;
            .reg .f32 %f<32>;
            .reg .b64 %rd<16>;
            .reg .b64 %out, %mine;
            .reg .b32 %tid;
            ld.param.u64 %out, [kernel_param_0];
            mov.u32 %tid, %tid.x;
            mul.wide.u32 %mine, %tid, 4;
            add.s64 %mine, %out, %mine;
            {body}
            ret;
        }}"
    )
}

fn launched(
    body: &str,
    threads: u32,
    held: &mut [u32],
    map: &[u8],
    settings: Settings,
) -> Result<(), Stopped> {
    let module = Module::parse(&text(body)).unwrap_or_else(|unread| panic!("{unread}"));
    let start = held.as_mut_ptr() as u64;
    let mut parameters = vec![0; 256];
    parameters[..8].copy_from_slice(&start.to_le_bytes());
    parameters[128..128 + map.len()].copy_from_slice(map);
    let launch = Launch {
        kernel: &module.kernels[0],
        cubes: [1, 1, 1],
        threads: [threads, 1, 1],
        dynamic_shared: 4096,
        parameters,
        regions: &Regions::new(vec![(start, start + 4 * held.len() as u64)]),
    };
    run(&launch, settings)
}

fn settings(seed: u64) -> Settings {
    Settings {
        seed,
        patience: 100_000,
        ..Settings::default()
    }
}

fn output(body: &str, threads: u32) -> Vec<u32> {
    let mut held = vec![0; threads as usize];
    launched(body, threads, &mut held, &[], settings(1))
        .unwrap_or_else(|stopped| panic!("{stopped}"));
    held
}

fn fault(body: &str, threads: u32) -> Fault {
    let mut held = vec![0; threads as usize];
    launched(body, threads, &mut held, &[], settings(1))
        .expect_err("the kernel goes wrong")
        .fault
}

#[test]
fn threads_that_part_meet_again() {
    // Every thread counts up to its index. Then all threads of a warp add up their counts.
    let counts = output(
        "mov.u32 %r1, 0;
        $again: setp.ge.u32 %p1, %r1, %tid;
        @%p1 bra $done;
        add.s32 %r1, %r1, 1;
        bra.uni $again;
        $done: activemask.b32 %r3;
        redux.sync.add.u32 %r2, %r1, 0xffffffff;
        setp.ne.s32 %p2, %r3, -1;
        @%p2 trap;
        st.global.u32 [%mine], %r2;",
        64,
    );
    let sums = [(0..32).sum(), (32..64).sum()];
    assert_eq!(
        counts,
        (0..64)
            .map(|thread| sums[thread / 32])
            .collect::<Vec<u32>>()
    );
}

#[test]
fn a_scope_has_registers_and_labels_of_its_own() {
    let found = output(
        "mov.u32 %r1, 7;
        { .reg .b32 %r1; mov.u32 %r1, 1; AGAIN: sub.s32 %r1, %r1, 1; }
        { .reg .pred over; mov.u32 %r2, 0;
          AGAIN: add.s32 %r2, %r2, 1; setp.ge.u32 over, %r2, 3; @over bra OVER; bra AGAIN; OVER: }
        add.s32 %r1, %r1, %r2;
        st.global.u32 [%mine], %r1;",
        1,
    );
    assert_eq!(found, [10]);
}

/// Returns a body in which each thread writes its index to shared memory and reads that of its neighbour in the other warp.
fn exchange(between: &str) -> String {
    format!(
        "mov.u32 %r1, dynamic;
        shl.b32 %r2, %tid, 2;
        add.s32 %r3, %r1, %r2;
        st.shared.u32 [%r3], %tid;
        {between}
        xor.b32 %r4, %r2, 128;
        add.s32 %r4, %r1, %r4;
        ld.shared.u32 %r5, [%r4];
        st.global.u32 [%mine], %r5;"
    )
}

#[test]
fn a_barrier_is_waited_at_and_a_missing_one_shows() {
    let neighbours: Vec<u32> = (0..64).map(|thread| thread ^ 32).collect();
    assert_eq!(output(&exchange("bar.sync 0;"), 64), neighbours);
    assert_eq!(output(&exchange("bar.sync 1, 64;"), 64), neighbours);
    // Memory that was not written is NaN.
    let found = output(&exchange(""), 64);
    assert!(found.contains(&u32::MAX), "{found:?}");
}

#[test]
fn threads_at_a_barrier_know_whether_any_says_so() {
    let vote = |who: u32| {
        let text = format!(
            "{{ .reg .pred p, q; setp.eq.u32 p, %tid, {who}; bar.red.or.pred q, 1, 64, p; selp.u32 %r5, 1, 0, q; \
             setp.eq.u32 p, %tid, 99; bar.red.or.pred q, 1, 64, p; selp.u32 %r6, 2, 0, q; }} \
             add.u32 %r5, %r5, %r6; st.global.u32 [%mine], %r5;"
        );
        output(&text, 64)
    };
    assert_eq!(vote(40), [1; 64]);
    assert_eq!(vote(64), [0; 64]);
}

#[test]
fn what_a_device_would_not_do_stops_a_kernel() {
    assert!(matches!(
        fault("st.global.u32 [%mine+4], %tid;", 8),
        Fault::OutOfBounds {
            space: "global",
            ..
        }
    ));
    assert!(matches!(
        fault("st.global.v2.u32 [%mine+-2], {%tid, %tid};", 1),
        Fault::Misaligned { .. }
    ));
    assert!(matches!(
        fault("st.shared.u32 [dynamic+4096], %tid;", 1),
        Fault::OutOfBounds { .. }
    ));
    // Only one of two warps arrives.
    let alone = "setp.lt.u32 %p1, %tid, 32; @%p1 bar.sync 1, 64; bar.sync 0;";
    assert!(
        matches!(fault(alone, 64), Fault::Deadlock(_)),
        "{}",
        fault(alone, 64)
    );
    let endless =
        "$again: ld.relaxed.gpu.global.u32 %r1, [%out]; setp.eq.s32 %p1, %r1, 0; @%p1 bra $again;";
    assert!(matches!(fault(endless, 32), Fault::Livelock(_)));
    let never = "mbarrier.init.shared::cta.b64 [dynamic], 0;";
    assert!(matches!(fault(never, 1), Fault::Barrier(_)));
}

#[test]
fn what_is_not_known_is_told_with_its_line() {
    let unread = Module::parse(&text("tcgen05.alloc.sync.aligned.b32 [%r1], 32;"))
        .err()
        .unwrap();
    assert!(
        unread.to_string().contains("line 17") && unread.to_string().contains("tcgen05"),
        "{unread}"
    );
    assert!(Module::parse(&text("add.s32 %r1, %r2, %nothing;")).is_err());
}

/// Returns a body in which a warp copies a box of 8 rows and 16 columns of f32 (rows of 64 bytes, swizzled). Each lane reads an element of
/// the second row, or of the first if it does not wait.
fn boxed(wait: &str) -> String {
    format!(
        "setp.ne.u32 %p1, %tid, 0;
        mov.b64 %rd1, kernel_param_1;
        cvta.param.u64 %rd1, %rd1;
        mov.u32 %r1, dynamic;
        add.s32 %r2, %r1, 2048;
        @%p1 bra $asked;
        mbarrier.init.shared::cta.b64 [%r2], 1;
        fence.proxy.async.shared::cta;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;
        mov.u32 %r3, -1;
        cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {{%r3, 1}}], [%r2];
        $asked: bar.sync 0;
        {wait}
        and.b32 %r4, %tid, 15;
        shl.b32 %r4, %r4, 2;
        add.s32 %r4, %r4, 128;
        xor.b32 %r4, %r4, 16;
        add.s32 %r4, %r1, %r4;
        ld.shared.u32 %r5, [%r4];
        st.global.u32 [%mine], %r5;"
    )
}

#[test]
fn a_box_arrives_where_swizzling_puts_it_and_late() {
    let wait = "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%r2], 0; @done bra DONE; \
                bra AGAIN; DONE: }";
    // The tensor follows the output: 8 rows of 20 elements.
    let brought = |body: &str, seed: u64| {
        let mut held: Vec<u32> = (0..32 + 160).collect();
        // Rows of 20 elements have 80 bytes; boxes require multiples of 16.
        let map = TensorMap {
            address: held[32..].as_ptr() as u64,
            element_bytes: 4,
            sizes: vec![20, 8],
            strides: vec![4, 80],
            window: vec![16, 8],
            swizzle: Swizzle::Rows(64),
            nan_outside: false,
        };
        launched(body, 32, &mut held, &map.bytes(), settings(seed))
            .unwrap_or_else(|stopped| panic!("{stopped}"));
        held[..16].to_vec()
    };
    // Row 2 of the box is row 3 of the tensor, shifted left by a column. Its units of 16 bytes are exchanged in pairs.
    let expected: Vec<u32> = (0..16)
        .map(|at| if at == 0 { 0 } else { 32 + 3 * 20 + at - 1 })
        .collect();
    for seed in 0..10 {
        assert_eq!(brought(&boxed(wait), seed), expected);
    }
    let early = (0..10).map(|seed| brought(&boxed(""), seed));
    assert!(
        early
            .into_iter()
            .any(|found| found.iter().all(|&number| number == u32::MAX))
    );
}

#[test]
fn copies_arrive_when_they_are_waited_for() {
    let copied = |wait: &str| {
        output(
            &format!(
                "shl.b32 %r1, %tid, 4;
                mov.u32 %r2, dynamic;
                add.s32 %r1, %r1, %r2;
                st.global.u32 [%mine], %tid;
                bar.warp.sync 0xffffffff;
                cvt.u64.u32 %rd1, %tid;
                and.b64 %rd1, %rd1, 7;
                shl.b64 %rd1, %rd1, 4;
                add.s64 %rd1, %out, %rd1;
                cp.async.cg.shared.global [%r1], [%rd1], 16;
                cp.async.commit_group;
                {wait}
                ld.shared.u32 %r3, [%r1+4];
                st.global.u32 [%mine], %r3;"
            ),
            32,
        )
    };
    let expected: Vec<u32> = (0..32).map(|thread| thread % 8 * 4 + 1).collect();
    assert_eq!(copied("cp.async.wait_group 0;"), expected);
    assert_eq!(copied("cp.async.wait_all;"), expected);
    assert_eq!(copied("cp.async.wait_group 1;"), [u32::MAX; 32]);
}

#[test]
fn a_product_of_tensor_cores_is_that_of_loops() {
    // All elements are small integers or halves, so sums are exact.
    let body = "shr.u32 %r1, %tid, 2;
        and.b32 %r2, %tid, 3;
        shl.b32 %r2, %r2, 1;
        cvt.rn.f32.u32 %f1, %r1;
        cvt.rn.f32.u32 %f2, %r2;
        add.f32 %f3, %f2, 0f3F800000;
        cvt.rn.bf16x2.f32 %r3, %f3, %f2;
        cvt.rn.bf16x2.f32 %r4, %f1, %f1;
        mov.f32 %f4, 0f3F000000;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f5, %f6, %f7, %f8}, {%r4, %r4, %r3, %r3}, {%r3, %r4},
            {%f4, %f4, %f4, %f4};
        cvt.rzi.u32.f32 %r5, %f6;
        st.global.u32 [%mine], %r5;";
    // left[row][k] = row (k < 8), k - 8 (k >= 8), where row is taken modulo 8; right[k][column] = k (k < 8),
    // column (k >= 8).
    let expected: Vec<u32> = (0..32)
        .map(|lane| {
            let (row, column) = (lane / 4, lane % 4 * 2 + 1);
            let low: u32 = (0..8).map(|k| row * k).sum();
            let high: u32 = (0..8).map(|k| k * column).sum();
            low + high
        })
        .collect();
    assert_eq!(output(body, 32), expected);
}

/// Returns the message of a kernel's race, if it has one.
fn race(body: &str, threads: u32) -> Option<String> {
    let mut held: Vec<u32> = vec![0; 1024];
    let settings = Settings {
        watches_races: true,
        ..settings(1)
    };
    match launched(body, threads, &mut held, &[], settings) {
        Ok(()) => None,
        Err(Stopped {
            fault: Fault::Race(text),
            ..
        }) => Some(text),
        Err(stopped) => panic!("{stopped}"),
    }
}

#[test]
fn accesses_that_nothing_orders_are_races() {
    assert_eq!(race(&exchange("bar.sync 0;"), 64), None);
    assert_eq!(race(&exchange("bar.sync 1, 64;"), 64), None);
    let found = race(&exchange(""), 64).expect("a barrier is missing");
    // Either order is possible.
    assert!(
        found.contains(" at line") && found.contains("by warp"),
        "{found}"
    );
    // A barrier before the reads and none after them.
    let again = exchange("bar.sync 0;") + "st.shared.u32 [%r3], %r5;";
    assert!(race(&again, 64).is_some());
    let again = exchange("bar.sync 0;") + "bar.sync 0; st.shared.u32 [%r3], %r5;";
    assert_eq!(race(&again, 64), None);
    // Atomic additions to one location.
    let added = "red.shared.add.u32 [dynamic], %tid;";
    assert_eq!(race(added, 64), None);
    assert!(race("st.shared.u32 [dynamic], %tid;", 64).is_some());
}

/// Returns a body in which a warp writes 512 bytes, its first lane sends them, and then the warp writes there again.
fn sent(fence: &str, wait: &str) -> String {
    format!(
        "shl.b32 %r1, %tid, 2;
        mov.u32 %r2, dynamic;
        add.s32 %r3, %r2, %r1;
        st.shared.u32 [%r3], %tid;
        {fence}
        bar.warp.sync 0xffffffff;
        add.s64 %rd1, %out, 256;
        setp.ne.u32 %p1, %tid, 0;
        @%p1 bra $sent;
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 128;
        cp.async.bulk.commit_group;
        {wait}
        $sent: bar.warp.sync 0xffffffff;
        st.shared.u32 [%r3], %r2;"
    )
}

#[test]
fn what_the_copy_engine_reads_is_fenced_and_left_alone() {
    let (fence, wait) = (
        "fence.proxy.async.shared::cta;",
        "cp.async.bulk.wait_group 0;",
    );
    assert_eq!(race(&sent(fence, wait), 32), None);
    for fence in ["", "fence.proxy.async.global;"] {
        let found = race(&sent(fence, wait), 32);
        assert!(found.is_some_and(|found| found.contains("without a fence")));
    }
    assert!(race(&sent(fence, ""), 32).is_some_and(|found| found.contains("bulk copy out")));
}
