//! Files that do not match the model, and damaged files.

use burn_sparse_transformer::weights::{Form, KeyMap, WeightsError, WeightsFile, save_safetensors};

use crate::support::*;

#[test]
fn all_that_does_not_fit_is_named() {
    // Another vocabulary, another name of the last norm, and a tensor that is not a parameter's.
    let map = KeyMap::pytorch()
        .rule("norm.gamma", "last.weight", Form::Same)
        .ignore("norm.bias");
    let error = open("own.safetensors")
        .load(&own_model(17), &map)
        .unwrap_err();
    let message = error.to_string();
    let WeightsError::Mismatch {
        missing,
        unexpected,
        wrong,
        ..
    } = error
    else {
        panic!("{message}");
    };
    assert_eq!(missing, ["norm.bias"]);
    assert!(unexpected.is_empty(), "{unexpected:?}");
    let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
    let expected = [
        "output.weight must be [17, 8], got [16, 8]",
        "token_embedding.weight must be [17, 8], got [16, 8]",
    ];
    assert_eq!(wrong, expected);
    for part in [
        "own.safetensors does not fit the model, of which nothing was loaded",
        "missing: norm.bias",
        expected[0],
    ] {
        assert!(message.contains(part), "{message}");
    }

    // A file of another model: all of its tensors are unexpected, and all of ours are missing.
    let error = open("gpt2.safetensors").load(&own_model(16), &KeyMap::pytorch());
    let WeightsError::Mismatch {
        missing,
        unexpected,
        ..
    } = error.unwrap_err()
    else {
        panic!("GPT-2 fitted");
    };
    assert_eq!((missing.len(), unexpected.len()), (38, 30));
    assert!(unexpected.contains(&"transformer.wte.weight".to_owned()));
}

#[test]
fn tensors_of_another_kind_are_named() {
    let load = |map| open("own.golden.safetensors").load(&own_model(16), &map);
    // Integers as an embedding table.
    let table = KeyMap::default().rule("token_embedding.weight", "tokens", Form::Same);
    let turned = KeyMap::default().rule("norm.gamma", "logits", Form::Transposed);
    refused! {
        load(table) => "…tokens must be [16, 8], got [2, 20]…";
        load(turned) => "…logits must be one for a parameter [8], got a transposed tensor…";
    }
}

#[test]
fn files_that_are_none_are_refused() {
    let error = WeightsFile::open("weights.npz").unwrap_err();
    assert!(matches!(&error, WeightsError::Format { .. }), "{error}");
    assert!(error.to_string().contains(".safetensors"), "{error}");
    let read_error = |file: Result<WeightsFile, WeightsError>| {
        let error = file.unwrap_err();
        assert!(matches!(&error, WeightsError::Read { .. }), "{error}");
    };
    read_error(WeightsFile::open(path("none.safetensors")));
    read_error(WeightsFile::open_pytorch(
        path("own.nested.pt"),
        "optimizer",
    ));
    for name in ["own.safetensors", "own.pt"] {
        let whole = std::fs::read(path(name)).unwrap();
        let file = Scratch::new(name);
        for length in [0, 7, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&file.0, &whole[..length]).unwrap();
            let loaded = WeightsFile::open(&file.0)
                .and_then(|file| file.load(&own_model(16), &KeyMap::pytorch()));
            let error = loaded.map(drop).unwrap_err();
            let is_right = matches!(&error, WeightsError::Read { .. });
            assert!(is_right, "{name}: {error}");
        }
    }
}

/// The format's writer would make files that only their owner may read.
#[cfg(unix)]
#[test]
fn files_have_the_mode_that_the_umask_gives() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |file: &Scratch| std::fs::metadata(&file.0).unwrap().permissions().mode();
    let (usual, file) = (Scratch::new("usual"), Scratch::new("mode.safetensors"));
    std::fs::write(&usual.0, "").unwrap();
    let model = own_model(16);
    save_safetensors(&model, &file.0, &KeyMap::pytorch(), false).unwrap();
    assert_eq!(mode(&file), mode(&usual));
    // A replaced file keeps its mode.
    std::fs::set_permissions(&file.0, std::fs::Permissions::from_mode(0o640)).unwrap();
    save_safetensors(&model, &file.0, &KeyMap::pytorch(), true).unwrap();
    assert_eq!(mode(&file) & 0o777, 0o640);
}

#[test]
fn what_cannot_be_saved_is_refused() {
    let model = own_model(16);
    let file = Scratch::new("there.safetensors");
    std::fs::write(&file.0, "mine").unwrap();
    let error = save_safetensors(&model, &file.0, &KeyMap::pytorch(), false).unwrap_err();
    assert!(matches!(&error, WeightsError::Write { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&file.0).unwrap(), "mine");
    save_safetensors(&model, &file.0, &KeyMap::pytorch(), true).unwrap();

    let saved = save_safetensors(&model, &file.0, &KeyMap::gpt2(), true);
    refused! { saved => "…position_embedding.row is in no tensor…"; }
}
