use serde_json::{Value, json};

use super::*;

fn ask(pattern: &str, [heads, length, block]: [usize; 3]) -> Value {
    let request = json!({"pattern": pattern, "heads": heads, "length": length, "block": block});
    serde_json::from_str(&answer(&request.to_string())).unwrap()
}

fn error(pattern: &str, sizes: [usize; 3]) -> String {
    let answer = ask(pattern, sizes);
    assert!(answer["view"].is_null());
    answer["error"].as_str().unwrap().to_owned()
}

#[test]
fn counts_are_those_of_the_layout() {
    for text in EXAMPLES {
        for sizes in [[4, 512, 32], [8, 333, 8], [4, 2048, 128]] {
            let view = &ask(text, sizes)["view"];
            let [heads, seq, block] = sizes;
            let layout = (text.parse::<Pattern>().unwrap())
                .layout(heads, seq, block)
                .unwrap();
            assert_eq!(view["pairs"], layout.allowed_pairs(), "{text}");
            assert_eq!(view["blocks"], layout.blocks(), "{text}");
            let number = |name: &str| view[name].as_f64().unwrap();
            let same = |name: &str, value: f64| (number(name) - value).abs() < 1e-12;
            assert!(same("density", layout.density()), "{text}");
            assert!(same("block_density", layout.block_density()), "{text}");
            assert!(number("speed_up") > 0.0, "{text}");
        }
    }
}

#[test]
fn pictures_show_the_masks() {
    for text in EXAMPLES {
        let (heads, seq) = (4, 250);
        let view = &ask(text, [heads, seq, 16])["view"];
        assert_eq!(view["cell"], 1);
        let pattern: Pattern = text.parse().unwrap();
        let layout = pattern.layout(heads, seq, 16).unwrap();
        for head in 0..heads {
            let picture = &view["pictures"][layout.pattern_of(0, head)];
            for (i, row) in picture["rows"].as_array().unwrap().iter().enumerate() {
                for (j, digit) in row.as_str().unwrap().chars().enumerate() {
                    let attends = pattern.attends(head, i as i64, j as i64);
                    assert_eq!(digit, if attends { 'f' } else { '0' }, "{text} {i} {j}");
                }
            }
        }
    }
    let picture = &ask("local:300", [1, 1000, 64])["view"];
    assert_eq!(picture["cell"], 4);
    let rows = picture["pictures"][0]["rows"].as_array().unwrap();
    // The first cell sees 4 + 3 + 2 + 1 of its 16 pairs.
    assert_eq!((rows.len(), &rows[0].as_str().unwrap()[..2]), (250, "a0"));
}

#[test]
fn every_form_has_an_example() {
    let named = |form: &str| form.split(':').next().unwrap().to_owned();
    for form in Pattern::NOTATION.iter().map(|form| named(form)) {
        let shows = |text: &&str| {
            let mut names = text.split(['/', '+', '&', '(', ')']).map(named);
            names.any(|name| name == form)
        };
        assert!(EXAMPLES.iter().any(shows), "{form}");
    }
}

#[test]
fn errors_are_those_of_the_crate() {
    for (pattern, sizes, expected) in [
        (
            "fixed:128",
            [1, 512, 32],
            "cannot read 'fixed:128' as a pattern: expected fixed:STRIDE,COLUMNS[,VERTS], got 1 number",
        ),
        (
            "causal",
            [1, 512, 12],
            "block_size must be 8, 16, 32, 64 or 128, got 12",
        ),
        (
            "fixed:128,32,4",
            [2, 512, 32],
            "fixed(128, 32, num_verts = 4): heads must be a multiple of num_verts = 4, got 2",
        ),
        (
            "causal",
            [1, 1 << 18, 128],
            "length must be at most 131072 on this page, got 262144",
        ),
        (
            "local:64",
            [128, 1 << 17, 16],
            "heads · (length / block size)² must be at most 2147483648 on this page, got 8589934592",
        ),
    ] {
        assert_eq!(error(pattern, sizes), expected);
    }
    assert!(answer("{").contains("\"view\":null"));
}

/// Forward passes of `docs/benchmarks.md`, the `hopper` tier, relative to those of dense causal attention of this library there.
#[test]
fn estimates_are_near_measurements() {
    for (text, [seq, block], measured) in [
        ("local:256", [16_384, 32], 16.5),
        ("fixed:128,32", [12_288, 32], 3.4),
        ("merged-strided:128", [16_384, 32], 11.6),
        ("streaming:4096,64", [65_536, 64], 7.8),
    ] {
        let pattern: Pattern = text.parse().unwrap();
        let layout = pattern.layout(1, seq, block).unwrap();
        let ratio = speed_up(&pattern, &layout).unwrap() / measured;
        assert!((0.9..1.45).contains(&ratio), "{text}: {ratio}");
    }
    let dense = Pattern::dense();
    let layout = dense.layout(2, 1024, 128).unwrap();
    assert_eq!(speed_up(&dense, &layout).unwrap(), 1.0);
}

#[test]
fn code_and_command_hold_the_request() {
    let view = &ask(" fixed:128,32,4 ", [4, 1024, 32])["view"];
    let page = include_str!("../../../docs/playground.md");
    assert!(page.contains(view["rust"].as_str().unwrap()));
    assert_eq!(
        view["command"],
        "cargo run -p enwik8 -- draw --pattern 'fixed:128,32,4' --heads 4 --seq 1024 --block 32"
    );
}
