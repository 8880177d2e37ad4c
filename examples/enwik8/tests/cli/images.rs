//! Pictures as bytes: a start token for the class, and no window over two pictures.

use std::fs;
use std::path::Path;

use crate::support::*;

/// A model that trains on small pictures in seconds.
fn nano_images() -> Vec<&'static str> {
    words(
        "--picture-size 6 --layers 1 --heads 2 --d-model 32 --d-key 16 --block 16 --batch 4 \
         --lr 0.005 --warmup 5 --eval-windows 8",
    )
}

fn train(folder: &Folder, run: &str, more: &[&str]) -> String {
    let path = folder.path(run);
    let first = ["train", "--task", "images", "--run", &path];
    succeed(&[&first[..], &nano_images(), more].concat())
}

fn assert_png(path: &str) {
    assert!(fs::read(path).unwrap().starts_with(b"\x89PNG"), "{path}");
}

#[test]
fn shapes_are_learned_drawn_and_resumed_bit_for_bit() {
    let folder = Folder::new();
    let flags = words("--steps 60 --checkpoint-every 30 --eval-every 30");
    let text = train(&folder, "whole", &flags);
    for shown in [
        "a synthetic set",
        "pictures of 6 × 6 pixels, 6 classes",
        "1,800 / 100 / 100 pictures",
        "context 108",
        "attention union(local(18), strided(18)),",
        "bits/dim",
        "bits per dimension over 10,800 bytes",
        "sample-images --checkpoint",
    ] {
        assert!(text.contains(shown), "{shown}: {text}");
    }
    let log = folder.log("whole");
    let bits = |row: &serde_json::Value| row["bits_per_byte"].as_f64().unwrap();
    let (first, last) = (bits(&log[0]), bits(log.last().unwrap()));
    // All bytes, and all classes, are equally likely at first.
    assert!((first - 262f64.log2()).abs() < 1e-3, "{first}");
    assert!(last < 4.5, "{last}");

    train(&folder, "parts", &flags);
    fs::remove_file(folder.checkpoint("parts", 60)).unwrap();
    folder.resume("parts", &[]);
    folder.assert_same_model(["parts", "whole"], 60);
    assert_eq!(folder.losses("parts"), folder.losses("whole"));

    let run = folder.path("whole");
    let report = fs::read_to_string(Path::new(&run).join("report.md")).unwrap();
    assert!(report.contains("![samples](samples.png)"), "{report}");
    assert!(report.contains("bits per dimension"), "{report}");
    assert_png(&folder.path("whole/samples.png"));

    let out = folder.path("grid.png");
    let sample = ["sample-images", "--checkpoint", &run, "--out", &out];
    let text = succeed(&[&sample[..], &["--class", "2", "--seed", "3"]].concat());
    assert!(text.contains("4 pictures of 108 bytes"), "{text}");
    assert_png(&out);
    let again = fs::read(&out).unwrap();
    succeed(&[&sample[..], &["--class", "2", "--seed", "3"]].concat());
    assert!(fs::read(&out).unwrap() == again, "the seed decides");
    let message = fail(&[&sample[..], &["--class", "6"]].concat(), 1);
    assert!(message.contains("--class must be below 6"), "{message}");
    let message = fail(
        &["sample-images", "--checkpoint", &run, "--out", "x.jpg"],
        1,
    );
    assert!(message.contains("must end in .png"), "{message}");
    let message = fail(&["sample", "--checkpoint", &run], 1);
    assert!(message.contains("sample-images"), "{message}");

    let text = succeed(&["eval", "--checkpoint", &run, "--split", "test"]);
    says(
        &text,
        "bits per dimension over 10,800 bytes of the test split: 100 pictures",
    );
    let cached = format!("eval --checkpoint {run} --windows 4 --cache all --chunk 27");
    let cached = words(&cached);
    let plain = succeed(&cached[..5]);
    let bits = |text: &str| -> f64 {
        let line = text
            .lines()
            .find(|line| line.contains("bits per dimension"))
            .unwrap();
        line.split(' ').next().unwrap().parse().unwrap()
    };
    assert!((bits(&plain) - bits(&succeed(&cached))).abs() < 2e-4);
    let message = fail(&["eval", "--checkpoint", &run, "--min-context", "5"], 1);
    says(&message, "each picture is a sequence of its own");
}

#[test]
fn files_of_pictures_are_read_and_others_refused() {
    let folder = Folder::new();
    // 40 pictures of 6 × 6 pixels, whose classes are 0 to 2.
    let record =
        |index: u8| std::iter::once(index % 3).chain((0..108).map(move |at| at % 9 + index));
    let pictures: Vec<u8> = (0..40).flat_map(record).collect();
    let file = folder.file("pictures.bin", &pictures);
    let text = train(
        &folder,
        "file",
        &["--data", &file, "--classes", "3", "--steps", "2"],
    );
    assert!(text.contains("36 / 2 / 2 pictures"), "{text}");
    let text = folder.resume("file", &["--steps", "3"]);
    assert!(text.contains("pictures.bin"), "{text}");
    // A quarter of the bytes.
    let half = folder.path("half");
    let flags = format!("train --task images --run {half} --data {file} --halve --steps 1");
    let flags = words(&flags);
    let size = ["--picture-size", "3", "--classes", "3"];
    let text = succeed(&[&flags[..], &size, &nano_images()[2..]].concat());
    assert!(text.contains("3 × 3 pixels, halved"), "{text}");

    let cut = folder.file("cut.bin", &pictures[1..]);
    let path = folder.path("none");
    let images = ["train", "--task", "images", "--run", &path];
    for (flags, message) in [
        (
            &["--picture-size", "6", "--data", &cut][..],
            "no whole number of pictures: one of 6 × 6 pixels takes 109",
        ),
        (
            &["--picture-size", "6", "--data", &file, "--classes", "2"],
            "--classes says how many",
        ),
        (&["--context", "108"], "leave out --context"),
        (&["--preset", "tiny"], "--task contradicts the preset tiny"),
        (&["--data", &folder.path("missing")], "cannot read"),
    ] {
        let found = fail(&[&images[..], flags].concat(), 1);
        assert!(found.contains(message), "{message}: {found}");
    }
    assert!(!Path::new(&path).exists(), "nothing is written");
    let message = fail(&["train", "--picture-size", "8"], 1);
    assert!(message.contains("add --task images"), "{message}");
}
