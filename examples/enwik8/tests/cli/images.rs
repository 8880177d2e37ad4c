//! Pictures as bytes: a start token for the class, and no window across two pictures.

use std::fs;

use crate::support::*;

/// A model that trains on small pictures in seconds.
const NANO: &str = "--layers 1 --heads 2 --d-model 32 --d-key 16 --block 16 --batch 4 --lr 0.005 --warmup 5 --eval-windows 8";

fn train(folder: &Folder, run: &str, more: &str) -> String {
    let path = folder.path(run);
    succeed(format!("train --task images --run {path} {NANO} {more}"))
}

#[test]
fn shapes_are_learned_drawn_and_resumed_bit_for_bit() {
    let folder = Folder::new();
    let flags = "--picture-size 6 --steps 60 --checkpoint-every 30 --eval-every 30";
    let text = folder.assert_resumes(|run| train(&folder, run, flags), 60);
    let shown = [
        "a synthetic set",
        "pictures of 6 × 6 pixels, 6 classes",
        "1,800 / 100 / 100 pictures",
        "context 108",
        "attention union(local(18), strided(18)),",
        "bits/dim",
        "bits per dimension over 10,800 bytes",
        "sample-images --checkpoint",
    ];
    says_all(text, &shown);
    let log = folder.log("whole");
    let of_row = |row: &serde_json::Value| row["bits_per_byte"].as_f64().unwrap();
    let (first, last) = (of_row(&log[0]), of_row(log.last().unwrap()));
    // All bytes, and all classes, are equally likely at first.
    assert!((first - 262f64.log2()).abs() < 1e-3, "{first}");
    assert!(last < 4.5, "{last}");

    let run = folder.path("whole");
    let report = folder.text("whole/report.md");
    says_all(report, &["![samples](samples.png)", "bits per dimension"]);
    assert_png(&folder.path("whole/samples.png"));

    let out = folder.path("grid.png");
    let images = format!("sample-images --checkpoint {run} --out");
    let sample = format!("{images} {out} --class 2 --seed 3");
    says(succeed(&sample), "4 pictures of 108 bytes");
    assert_png(&out);
    let again = fs::read(&out).unwrap();
    succeed(&sample);
    assert!(fs::read(&out).unwrap() == again, "the seed decides");
    let eval = format!("eval --checkpoint {run}");
    for (line, message) in [
        (
            format!("{images} {out} --class 6"),
            "--class must be below 6",
        ),
        (format!("{images} x.jpg"), "must end in .png"),
        (format!("sample --checkpoint {run}"), "sample-images"),
        (
            format!("{eval} --min-context 5"),
            "each picture is a sequence of its own",
        ),
    ] {
        says(fail(line, 1), message);
    }
    let text = succeed(format!("{eval} --split test"));
    says(
        text,
        "bits per dimension over 10,800 bytes of the test split: 100 pictures",
    );
    let [plain, cached] = ["", "--cache all --chunk 27"]
        .map(|more| bits(&succeed(format!("{eval} --windows 4 {more}"))));
    assert!((plain - cached).abs() < 2e-4);
}

#[test]
fn files_of_pictures_are_read_and_others_refused() {
    let folder = Folder::new();
    // 40 pictures of 6 × 6 pixels, with classes 0 to 2.
    let record =
        |index: u8| std::iter::once(index % 3).chain((0..108).map(move |at| at % 9 + index));
    let pictures: Vec<u8> = (0..40).flat_map(record).collect();
    let file = folder.file("pictures.bin", &pictures);
    let flags = format!("--data {file} --classes 3 --picture-size");
    let text = train(&folder, "file", &format!("{flags} 6 --steps 2"));
    says(text, "36 / 2 / 2 pictures");
    says(folder.resume("file", "--steps 3"), "pictures.bin");
    // A quarter of the bytes.
    let text = train(&folder, "half", &format!("{flags} 3 --halve --steps 1"));
    says(text, "3 × 3 pixels, halved");

    let cut = folder.file("cut.bin", &pictures[1..]);
    let (path, missing) = (folder.path("none"), folder.path("missing"));
    for row in rows(
        "
        --picture-size 6 --data CUT | no whole number of pictures: one of 6 × 6 pixels takes 109
        --picture-size 6 --data FILE --classes 2 | --classes says how many
        --context 108 | leave out --context
        --preset tiny | --task contradicts the preset tiny
        --data MISSING | cannot read
        ",
    ) {
        let flags = row[0].replace("CUT", &cut).replace("FILE", &file);
        let flags = flags.replace("MISSING", &missing);
        let line = format!("train --task images --run {path} {flags}");
        says(fail(line, 1), row[1]);
    }
    assert!(!folder.exists("none"), "nothing is written");
    says(fail("train --picture-size 8", 1), "add --task images");
}
