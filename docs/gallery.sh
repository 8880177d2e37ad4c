#!/bin/sh
# Draws every picture of docs/gallery.md into docs/pictures/. Run it from anywhere in the repository.
#
# Uses the program named by ENWIK8 if that is set, `cargo run -p enwik8` otherwise.
set -eu
cd "$(dirname "$0")/.."

draw() {
    file=docs/pictures/$1.png
    shift
    if [ -n "${ENWIK8:-}" ]; then
        "$ENWIK8" draw "$@" --out "$file"
    else
        cargo run --quiet -p enwik8 -- draw "$@" --out "$file"
    fi
}

draw dense          --pattern dense             --seq 128 --block 16
draw causal         --pattern causal            --seq 128 --block 16
draw local          --pattern local:24          --seq 128 --block 16
draw strided        --pattern strided:32        --seq 128 --block 8
draw merged-strided --pattern merged-strided:32 --seq 128 --block 8
draw fixed          --pattern fixed:32,8        --seq 128 --block 8
draw fixed-heads    --pattern fixed:32,8,4      --seq 128 --block 8 --heads 4
draw prefix-lm      --pattern prefix:32         --seq 128 --block 16
draw streaming      --pattern streaming:24,8    --seq 128 --block 8
draw longformer      --pattern window:12+global:0,1,2,3      --seq 128 --block 8
draw dilated-window  --pattern window:12,3                   --seq 128 --block 8
draw bigbird         --pattern bigbird:8,16,2                --seq 128 --block 8
draw chunked         --pattern chunked:32                    --seq 128 --block 8
draw chunked-window  --pattern 'chunked:16,1,0&causal'       --seq 128 --block 8
draw deepspeed-fixed --pattern deepspeed-fixed:32,8,1        --seq 128 --block 8
draw deepspeed-variable --pattern deepspeed-variable:128,16,24,40+global-keys:5,70 --seq 128 --block 8
draw vertical-slash  --pattern vertical:0,1,37,70+slash:0,1,2,3,4,5,6,7,40 --seq 128 --block 8
draw documents       --pattern 'documents:0,50,83&local:24'  --seq 128 --block 8
draw packed          --pattern 'packed:0,50,83(fixed:16,4)'   --seq 128 --block 8
draw tree            --pattern tree:2                        --seq 128 --block 8
