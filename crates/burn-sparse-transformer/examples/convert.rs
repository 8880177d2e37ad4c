//! Makes a trained encoder of burn-nn sparse: loads its record, shows that nothing changed with the dense pattern, then swaps the
//! pattern.
//!
//! ```sh
//! cargo run -p burn-sparse-transformer --example convert                       # an encoder with random weights
//! cargo run -p burn-sparse-transformer --example convert -- encoder.bpk 64 256 4 2   # RECORD D_MODEL D_FF N_HEADS N_LAYERS
//! ```

use std::error::Error;

use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Distribution, Tensor};
use burn_sparse_transformer::{
    Pattern, SparseTransformerEncoder, SparseTransformerEncoderConfig,
    SparseTransformerEncoderInput,
};

const USAGE: &str = "usage: convert [RECORD D_MODEL D_FF N_HEADS N_LAYERS]";
const BLOCK_SIZE: usize = 16;
const SEQ: usize = 256;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    convert(&arguments)
}

fn convert(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let (config, record) = match arguments {
        [] => (TransformerEncoderConfig::new(64, 256, 4, 2), None),
        [record, sizes @ ..] => {
            let sizes: Vec<usize> = sizes.iter().map(|n| n.parse()).collect::<Result<_, _>>()?;
            let [d_model, d_ff, n_heads, n_layers] = sizes[..] else {
                return Err(USAGE.into());
            };
            let config = TransformerEncoderConfig::new(d_model, d_ff, n_heads, n_layers);
            (config, Some(ModuleRecord::load(record)?))
        }
    };
    let device = Device::flex();
    let dense = config.init(&device);
    let dense = match record {
        Some(record) => dense.try_load_record(record)?,
        None => dense,
    };
    let x = Tensor::<3>::random(
        [1, SEQ, config.d_model],
        Distribution::Normal(0.0, 1.0),
        &device,
    );

    // 1. From the module: the parameters are shared, nothing is copied.
    let same = SparseTransformerEncoder::from_dense(&dense, Pattern::dense(), BLOCK_SIZE)?;
    println!(
        "from the module, dense:     {:.1e}",
        difference(&dense, &same, &x)?
    );

    // 2. From its record: the paths of the parameters are the same.
    let loaded = SparseTransformerEncoderConfig::new(config, Pattern::dense())
        .with_block_size(BLOCK_SIZE)
        .try_init(&device)?
        .try_load_record(dense.clone().into_record())?;
    println!(
        "from the record, dense:     {:.1e}",
        difference(&dense, &loaded, &x)?
    );

    // 3. Another pattern, the same weights. How far the output moves says how much there is to fine-tune.
    for pattern in [Pattern::window(64), Pattern::longformer(16, 1, [0])] {
        let name = pattern.to_string();
        let sparse = same.clone().with_pattern(pattern, BLOCK_SIZE)?;
        let layout = sparse.layers[0].mha.layout(SEQ, SEQ)?;
        println!(
            "{name}, {:.0}% of the pairs: {:.1e}",
            100.0 * layout.density(),
            difference(&dense, &sparse, &x)?
        );
    }
    Ok(())
}

/// Largest difference of the outputs.
fn difference(
    dense: &TransformerEncoder,
    sparse: &SparseTransformerEncoder,
    x: &Tensor<3>,
) -> Result<f32, Box<dyn Error>> {
    let expected = dense.forward(TransformerEncoderInput::new(x.clone()));
    let got = sparse.try_forward(SparseTransformerEncoderInput::new(x.clone()))?;
    Ok((got - expected).abs().max().into_scalar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs() {
        convert(&[]).unwrap();
    }

    #[test]
    fn a_record_on_disk_becomes_sparse() {
        let device = Device::flex();
        let config = TransformerEncoderConfig::new(32, 64, 2, 2).with_norm_first(true);
        let dense = config.init(&device);
        let path = std::env::temp_dir().join(format!("convert-{}.bpk", std::process::id()));
        dense.clone().into_record().save(&path).unwrap();
        let record = ModuleRecord::load(&path).unwrap();
        let sparse = SparseTransformerEncoderConfig::new(config, Pattern::dense())
            .try_init(&device)
            .unwrap()
            .try_load_record(record)
            .unwrap();
        let x = Tensor::<3>::random([2, 50, 32], Distribution::Default, &device);
        assert!(difference(&dense, &sparse, &x).unwrap() < 1e-5);
        // Parameters are read from the file when they are first used.
        std::fs::remove_file(&path).unwrap();
    }
}
