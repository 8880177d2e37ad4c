//! llama.cpp's files: tensor types, models and damaged files. `tests/data/gguf/make.py` made the golden one.

use std::fs;
use std::path::PathBuf;

use burn::tensor::{Device, Int, Tensor};
use burn_sparse_transformer::llama::{Llama, LlamaConfig};
use burn_sparse_transformer::weights::{Gguf, GgufValue, KeyMap, WeightsError, WeightsFile};
use burn_sparse_transformer::{Pattern, RopeScaling};

use crate::gguf_writer::{F32, Q8_0, Writer, interleaved, q8_0};
use crate::llama::{largest_difference, tiny_llama};
use crate::support::{Scratch, floats};

/// Types with their type ids, and their block sizes in bytes and elements.
const BLOCKS: [(&str, u32, usize, usize); 8] = [
    ("Q4_0", 2, 18, 32),
    ("Q4_1", 3, 20, 32),
    ("Q5_0", 6, 22, 32),
    ("Q5_1", 7, 24, 32),
    ("Q8_0", 8, 34, 32),
    ("Q4_K", 12, 144, 256),
    ("Q5_K", 13, 176, 256),
    ("Q6_K", 14, 210, 256),
];

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf/golden.gguf")
}

#[test]
fn metadata_has_all_types() {
    let gguf = Gguf::open(golden()).unwrap();
    let get = |key: &str| gguf.get(&format!("of.{key}")).unwrap();
    assert_eq!(gguf.metadata().len(), 17);
    assert_eq!(get("uint8").as_u64(), Some(200));
    assert_eq!(get("uint16").as_u64(), Some(60_000));
    assert_eq!(get("uint32").as_u64(), Some(4_000_000_000));
    assert_eq!(get("uint64").as_u64(), Some(u64::MAX));
    for (key, expected) in [
        ("int8", -100),
        ("int16", -30_000),
        ("int32", -2_000_000_000),
        ("int64", i64::MIN),
    ] {
        assert_eq!(get(key), &GgufValue::Signed(expected));
        assert_eq!(get(key).as_u64(), None);
        assert_eq!(get(key).as_f64(), Some(expected as f64));
    }
    assert_eq!(get("float32").as_f64(), Some(f64::from(0.1_f32)));
    assert_eq!(get("float64").as_f64(), Some(0.1));
    assert_eq!(get("bool").as_bool(), Some(true));
    assert_eq!(get("string").as_str(), Some("Grüße"));
    assert_eq!(get("strings").as_strings().unwrap(), ["", "Ġt he", "日本"]);
    assert_eq!(get("integers").as_floats().unwrap(), [3.0, -1.0, 4.0]);
    assert_eq!(get("floats").as_floats().unwrap(), [0.5, -2.0]);
    assert_eq!(get("bools"), &GgufValue::BoolArray(vec![true, false]));
    assert_eq!(get("strings").to_string(), "an array of 3");
    assert_eq!(get("strings").as_str(), None);
}

#[test]
fn blocks_are_the_numbers_of_the_package_gguf() {
    let file = WeightsFile::open(golden()).unwrap();
    for (name, _, _, elements) in BLOCKS {
        let expected = floats(&file, &format!("{name}.numbers"));
        assert_eq!(floats(&file, name), expected, "{name}");
        let shape = if elements == 32 { [2, 64] } else { [1, 256] };
        assert_eq!(file.shape(name), Some(shape.to_vec()), "{name}");
    }
    let numbers = floats(&file, "F32");
    for (name, precision) in [("F16", 1e-3), ("BF16", 1e-2)] {
        let data = file.tensor(name).unwrap().unwrap();
        assert_eq!(format!("{:?}", data.dtype()), name);
        for (got, expected) in data.iter::<f32>().zip(&numbers) {
            let is_near = (got - expected).abs() <= precision * expected.abs();
            assert!(is_near, "{name}");
        }
    }
}

/// Rows of several consecutive blocks.
#[test]
fn blocks_are_what_they_are_alone() {
    let mut random = Random(1);
    for (name, kind, size, elements) in BLOCKS {
        let bytes: Vec<u8> = (0..20 * size).map(|_| random.byte()).collect();
        let mut file = Writer::new("none").tensor("x", &[4, 5 * elements], kind, &bytes);
        for (at, block) in bytes.chunks_exact(size).enumerate() {
            file = file.tensor(&format!("block {at}"), &[1, elements], kind, block);
        }
        let file = file.file(name);
        let file = WeightsFile::open(&file.0).unwrap();
        let bits = |name: &str| -> Vec<u32> {
            let numbers = floats(&file, name).into_iter();
            numbers.map(f32::to_bits).collect()
        };
        let alone = (0..20).flat_map(|at| bits(&format!("block {at}")));
        assert_eq!(bits("x"), alone.collect::<Vec<_>>(), "{name}");
    }
}

/// Pseudorandom numbers: a linear congruential generator (Knuth's MMIX).
struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 = (self.0.wrapping_mul(6_364_136_223_846_793_005))
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 56) as u8
    }

    /// Returns numbers from about −1 to 1.
    fn numbers(&mut self, count: usize) -> Vec<f32> {
        let mut number = |_| (f32::from(self.byte()) - 127.5) / 128.0;
        (0..count).map(&mut number).collect()
    }
}

/// Writes the sizes of `tests/data/tiny-llama`.
fn sizes(architecture: &str) -> Writer {
    let key = |name: &str| format!("{architecture}.{name}");
    Writer::new(architecture)
        .u32(&key("embedding_length"), 32)
        .u32(&key("block_count"), 2)
        .u32(&key("feed_forward_length"), 56)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .u32(&key("context_length"), 64)
        .u32(&key("rope.dimension_count"), 8)
}

/// Writes its tensors under llama.cpp's names, with its row order of queries and keys.
fn with_tiny_llama(put: impl Fn(Writer, &str, &[usize], &[f32]) -> Writer) -> Writer {
    let mut writer = sizes("llama");
    let file = tiny_llama();
    for name in file.names() {
        let shape = file.shape(name).unwrap();
        let numbers = match name {
            _ if name.contains("q_proj") => interleaved(&floats(&file, name), 4, shape[0]),
            _ if name.contains("k_proj") => interleaved(&floats(&file, name), 2, shape[0]),
            _ => floats(&file, name),
        };
        let name = [
            ("model.", ""),
            ("embed_tokens", "token_embd"),
            ("lm_head", "output"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.", "attn_"),
            ("mlp.", "ffn_"),
            ("_proj", ""),
            ("layers.", "blk."),
        ]
        .iter()
        .fold(name.to_owned(), |name, (from, to)| name.replace(from, to));
        let name = match name.as_str() {
            "norm.weight" => "output_norm.weight",
            name => name,
        };
        writer = put(writer, name, &shape, &numbers);
    }
    writer
}

fn load(file: &Scratch, config: impl FnOnce(LlamaConfig) -> LlamaConfig) -> Llama {
    let gguf = Gguf::open(&file.0).unwrap();
    let model = config(LlamaConfig::from_gguf(&gguf).unwrap());
    let model = model.with_block_size(8).init(&Device::flex());
    let map = KeyMap::llama_gguf(&gguf).unwrap();
    let weights = WeightsFile::open(&file.0).unwrap();
    weights.load(&model, &map).unwrap()
}

#[test]
fn a_llama_gives_the_logits_of_transformers() {
    let file = with_tiny_llama(Writer::numbers).file("llama");
    let difference = largest_difference(&load(&file, |config| config));
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn a_quantised_llama_is_the_one_of_its_numbers() {
    let load_with = |put: fn(Writer, &str, &[usize], &[f32]) -> Writer| {
        let put = |writer: Writer, name: &str, shape: &[usize], numbers: &[f32]| match shape {
            [.., 32, 32] => put(writer, name, shape, numbers),
            _ => writer.numbers(name, shape, numbers),
        };
        load(&with_tiny_llama(put).file("quantised"), |config| config)
    };
    let quantised = load_with(|writer, name, shape, numbers| {
        writer.tensor(name, shape, Q8_0, &q8_0(numbers).0)
    });
    let rounded =
        load_with(|writer, name, shape, numbers| writer.numbers(name, shape, &q8_0(numbers).1));
    assert_eq!(logits(&quantised), logits(&rounded));
    assert!(difference(&quantised, &load_with(Writer::numbers)) > 1e-4);
}

fn logits(model: &Llama) -> Vec<f32> {
    let ids: Vec<i32> = (0..40).map(|i| i * 7 % 48).collect();
    let ids = Tensor::<1, Int>::from_ints(ids.as_slice(), &Device::flex());
    let logits = model.forward(ids.reshape([1, 40]));
    logits.try_into_vec_as().unwrap()
}

fn difference(a: &Llama, b: &Llama) -> f32 {
    let pairs = logits(a).into_iter().zip(logits(b));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Llama 3.1's scaling is a tensor of factors, which llama.cpp's converter computes.
#[test]
fn factors_of_frequencies_are_llama_3s_scaling() {
    let (factor, low, high, original) = (8.0, 1.0, 4.0, 120.0);
    let factors: Vec<f32> = (0..4)
        .map(|pair| {
            let wavelength = std::f64::consts::TAU * 1e4_f64.powf(f64::from(pair) / 4.0);
            let smooth = (original / wavelength - low) / (high - low);
            let kept = smooth.clamp(0.0, 1.0);
            (1.0 / ((1.0 - kept) / factor + kept)) as f32
        })
        .collect();
    let is_right = factors[0] == 1.0 && factors[1] > 1.0 && factors[1] < 8.0 && factors[3] == 8.0;
    assert!(is_right, "{factors:?}");
    let plain = with_tiny_llama(Writer::numbers);
    let scaled = plain.clone().numbers("rope_freqs.weight", &[4], &factors);
    let scaled = load(&scaled.file("factors"), |config| config);
    let plain = plain.file("plain");
    let expected = load(&plain, |config| {
        config.with_rope_scaling(Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: original as usize,
        }))
    });
    assert!(difference(&scaled, &expected) < 1e-4);
    assert!(difference(&load(&plain, |config| config), &expected) > 1e-2);
}

/// Writes random weights of `architecture`, with Qwen's biases and norms; `rows` permutes the rows of queries and keys.
fn random_model(
    architecture: &str,
    (biases, norms): (bool, bool),
    rows: impl Fn(&[f32], usize, usize) -> Vec<f32>,
) -> Scratch {
    let mut random = Random(2);
    let mut writer = sizes(architecture);
    let mut add = |name: &str, shape: &[usize], heads: usize| {
        let mut numbers = random.numbers(shape.iter().product());
        if shape.len() == 2 {
            // Scales products to a usual size.
            numbers.iter_mut().for_each(|x| *x *= 0.3);
        }
        if heads > 0 {
            numbers = rows(&numbers, heads, shape[0]);
        }
        writer = writer.clone().numbers(name, shape, &numbers);
    };
    add("token_embd.weight", &[48, 32], 0);
    add("output_norm.weight", &[32], 0);
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize], heads: usize| {
            add(&format!("blk.{layer}.{name}"), shape, heads);
        };
        add("attn_norm.weight", &[32], 0);
        add("attn_q.weight", &[32, 32], 4);
        add("attn_k.weight", &[16, 32], 2);
        add("attn_v.weight", &[16, 32], 0);
        if biases {
            add("attn_q.bias", &[32], 4);
            add("attn_k.bias", &[16], 2);
            add("attn_v.bias", &[16], 0);
        }
        if norms {
            add("attn_q_norm.weight", &[8], 1);
            add("attn_k_norm.weight", &[8], 1);
        }
        add("attn_output.weight", &[32, 32], 0);
        add("ffn_norm.weight", &[32], 0);
        add("ffn_gate.weight", &[56, 32], 0);
        add("ffn_up.weight", &[56, 32], 0);
        add("ffn_down.weight", &[32, 56], 0);
    }
    writer.file(&format!("{architecture}-{biases}-{norms}"))
}

/// Qwen's files pair rotated channels by halves; the same weights with adjacent pairs, in a file that claims to be Llama's, give the same model.
#[test]
fn halves_become_neighbours() {
    for (architecture, has) in [("qwen2", (true, false)), ("qwen3", (false, true))] {
        let file = random_model(architecture, has, |x, _, _| x.to_vec());
        let of_gguf = load(&file, |config| {
            assert_eq!((config.qkv_bias, config.qk_norm), has);
            assert!(config.tied_embedding);
            config
        });
        let as_llama = |rows: fn(&[f32], usize, usize) -> Vec<f32>| {
            load(&random_model("llama", has, rows), |config| {
                config.with_qk_norm(has.1)
            })
        };
        let expected = logits(&as_llama(interleaved));
        assert_eq!(logits(&of_gguf), expected, "{architecture}");
        let wrong = as_llama(|x, _, _| x.to_vec());
        assert!(difference(&of_gguf, &wrong) > 1e-2, "{architecture}");
    }
}

#[test]
fn configurations_are_read() {
    let read = |writer: Writer| LlamaConfig::from_gguf(&writer.open("config"));
    let llama = read(sizes("llama").texts("tokenizer.ggml.tokens", &["a", "b", "c"])).unwrap();
    let expected = (32, 4, Some(2));
    assert_eq!((llama.d_model, llama.n_heads, llama.n_kv_heads), expected);
    let expected = (3, 2, Some(56));
    assert_eq!((llama.vocab_size, llama.n_layers, llama.d_ff), expected);
    let expected = (64, 1e4, None);
    assert_eq!((llama.context, llama.rope_theta, llama.head_dim), expected);
    assert_eq!(llama.rms_norm_eps, f64::from(1e-5_f32));
    assert!(llama.tied_embedding && !llama.qkv_bias && !llama.qk_norm);
    let expected = (Pattern::causal(), None);
    assert_eq!((llama.pattern, llama.rope_scaling), expected);

    let qwen3 = sizes("qwen3")
        .u32("qwen3.attention.key_length", 8)
        .u32("qwen3.attention.value_length", 8)
        .f32("qwen3.rope.freq_base", 1e6)
        .u32("qwen3.attention.sliding_window", 16)
        .text("qwen3.rope.scaling.type", "yarn")
        .f32("qwen3.rope.scaling.factor", 4.0)
        .u32("qwen3.rope.scaling.original_context_length", 16)
        .info("token_embd.weight", &[0, 0], F32, 0);
    assert!(Gguf::open(&qwen3.file("empty").0).is_err());
    let mut qwen3 = qwen3;
    (qwen3.n_tensors, qwen3.infos) = (0, Vec::new());
    let qwen3 = qwen3.numbers("token_embd.weight", &[5, 32], &[0.0; 160]);
    let qwen3 = read(qwen3.numbers("output.weight", &[5, 32], &[0.0; 160])).unwrap();
    assert_eq!((qwen3.vocab_size, qwen3.head_dim), (5, Some(8)));
    assert!(!qwen3.tied_embedding && qwen3.qk_norm && qwen3.rope_theta == 1e6);
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: 16,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
    };
    let expected = (Pattern::local(16), Some(yarn));
    assert_eq!((qwen3.pattern, qwen3.rope_scaling), expected);

    let plain = || sizes("llama").u32("llama.vocab_size", 9);
    let linear = read(plain().f32("llama.rope.scaling.factor", 2.0)).unwrap();
    let expected = Some(RopeScaling::Linear { factor: 2.0 });
    assert_eq!(linear.rope_scaling, expected);
    assert_eq!(linear.vocab_size, 9);
    let heads = [4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7];
    let attention = |key: &str| format!("llama.attention.{key}");
    let embedded = |writer: Writer| writer.u32("llama.embedding_length", 32);
    let scaled = || plain().f32("llama.rope.scaling.factor", 2.0);
    refused! {
        read(Writer::new("gemma3")) => "general.architecture must be llama, qwen2 or qwen3, got gemma3";
        read(Writer::new("llama")) => "embedding_length must be a whole number, got nothing";
        read(Writer::new("llama").f32("llama.embedding_length", 0.5)) => "embedding_length must be a whole number, got 0.5";
        read(plain().u32("llama.expert_count", 8)) => "expert_count must be 0, got 8";
        read(plain().key(&attention("causal"), 7, &[0])) => "attention.causal must be true, got false";
        read(plain().u32(&attention("value_length"), 16)) => "attention.value_length must be 8, a head's width, got 16";
        read(plain().u32(&attention("key_length"), 16)) => "rope.dimension_count must be 16, a head's width, got 8";
        read(embedded(Writer::new("llama")).key(&attention("head_count"), 9, &heads)) => "attention.head_count must be a whole number, got an array of 1";
        read(plain().text("llama.rope.scaling.type", "longrope")) => "rope.scaling.type must be none, linear or yarn, got longrope";
        read(scaled().numbers("rope_freqs.weight", &[4], &[1.0; 4])) => "rope_freqs.weight must be a vector, where there is no other scaling, got Linear { factor: 2.0 }";
    }
    let wrong = read(plain().numbers("rope_freqs.weight", &[3], &[1.0; 3])).unwrap();
    refused! { wrong.try_init(&Device::flex()) => "…rope_scaling.factors must be 4…"; }
}

/// Returns the error of opening invalid bytes.
fn open(bytes: &[u8]) -> Result<(), String> {
    let file = Scratch::new("damaged.gguf");
    fs::write(&file.0, bytes).unwrap();
    match WeightsFile::open(&file.0).map(drop) {
        Err(WeightsError::Read { reason, .. }) => Err(reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn damaged_files_are_refused() {
    let sound = || {
        Writer::new("llama")
            .u32("a.key", 7)
            .texts("tokenizer.ggml.tokens", &["one", "two"])
            .numbers("x", &[2, 3], &[0.5; 6])
    };
    let bytes = sound().bytes();
    for length in (0..bytes.len()).step_by(7).chain([bytes.len() - 1]) {
        assert!(!open(&bytes[..length]).unwrap_err().is_empty());
    }
    let huge = (u64::MAX / 2).to_le_bytes();
    let array = |kind: u32| [kind.to_le_bytes().as_slice(), &huge].concat();
    let edited = |edit: &dyn Fn(&mut Writer)| {
        let mut writer = sound();
        edit(&mut writer);
        open(&writer.bytes())
    };
    let key = |key, kind, value: &[u8]| open(&sound().key(key, kind, value).bytes());
    let number = |key, number| open(&sound().u32(key, number).bytes());
    let info = |name, shape: &[usize], kind, offset| {
        open(&sound().info(name, shape, kind, offset).bytes())
    };
    refused! {
        open(&[b"GGML", &bytes[4..]].concat()) => "…it must begin with GGUF…";
        edited(&|file| file.version = 1) => "…version must be 2 or 3, got 1…";
        edited(&|file| file.version = 4) => "…version must be 2 or 3, got 4…";
        edited(&|file| file.version = 3 << 24) => "…it is big endian…";
        edited(&|file| file.n_keys = u64::MAX) => "…of 18446744073709551615: the file ends too early…";
        edited(&|file| file.n_tensors = u64::MAX) => "…tensor : it must have 1 to 4 axes, got 0…";
        key("long", 8, &huge) => "…long: the file ends too early…";
        key("many", 9, &array(8)) => "…many: the file ends too early…";
        key("many", 9, &array(4)) => "…many: the file ends too early…";
        key("odd", 13, &[]) => "…odd: no value is of type 13…";
        key("nested", 9, &[9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) => "…nested: no array is of type 9…";
        key("b", 7, &[2]) => "…b: a bool must be 0 or 1, got 2…";
        key("s", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 255]) => "…s: a string must be UTF-8…";
        number("a.key", 7) => "…a.key is there twice…";
        number("general.alignment", 24) => "…general.alignment must be a power of two…";
        number("split.count", 3) => "…split.count must be 1: one file, got 3…";
        info("x", &[1], F32, 0) => "…x is there twice…";
        info("y", &[], F32, 0) => "…tensor y: it must have 1 to 4 axes, got 0…";
        info("y", &[1; 5], F32, 0) => "…tensor y: it must have 1 to 4 axes, got 5…";
        info("y", &[0], F32, 0) => "…tensor y: an axis must be of 1 or more, got 0…";
        info("y", &[1], F32, 4) => "…tensor y: its offset must be a multiple of 32, got 4…";
        info("y", &[1], F32, 32) => "…tensor y must end within the file of…";
        info("y", &[1], F32, u64::MAX - 31) => "…tensor y must end within the file of…";
        info("y", &[usize::MAX, 2], F32, 0) => "…tensor y must have fewer elements…";
        info("y", &[usize::MAX], F32, 0) => "…tensor y must end within the file of…";
        info("y", &[8, 40], Q8_0, 0) => "…tensor y of type Q8_0 must have rows of a multiple of 32, got 40…";
        info("y", &[1, 256], 10, 0) => "…tensor y is of type Q2_K (10), and those that are read are F32, F16, BF16, F64, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K…";
        info("y", &[1, 256], 99, 0) => "…tensor y is of type 99, and those…";
    }
}

/// Any changed byte of a header gives an error or tensors, and no panic.
#[test]
fn bytes_may_be_wrong() {
    let file = Scratch::new("flipped.gguf");
    let golden = fs::read(golden()).unwrap();
    // The metadata and the tensors' offsets.
    for at in 0..1_472 {
        let mut bytes = golden.clone();
        bytes[at] ^= if at % 2 == 0 { 0xff } else { 0x20 };
        fs::write(&file.0, bytes).unwrap();
        let Ok(weights) = WeightsFile::open(&file.0) else {
            continue;
        };
        for name in weights.names() {
            weights.tensor(name).unwrap();
        }
    }
}

/// Data that a file loses after it was opened is an error when it is read.
#[test]
fn tensors_are_read_when_they_are_asked_for() {
    let file = Writer::new("none").numbers("x", &[6], &[0.5; 6]);
    let file = file.file("lazy");
    let weights = WeightsFile::open(&file.0).unwrap();
    assert_eq!(floats(&weights, "x"), [0.5; 6]);
    let open = fs::OpenOptions::new().write(true).open(&file.0).unwrap();
    open.set_len(40).unwrap();
    refused! { weights.tensor("x") => "…tensor x…"; }
}
