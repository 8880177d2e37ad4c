#!/usr/bin/env bash
# run-all.sh WORKTREE: parts A, B and C on a clean tree, a commit each. See README.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$1"
[[ -z $(git status --porcelain) ]] || { echo "the tree is not clean"; exit 1; }
names() { # The checked-in list, without building Burn: the test needs only std.
    local bin; bin=$(mktemp -d)
    rustc --edition 2024 --test tests/suite/public_names.rs -o "$bin/names" 2>/dev/null
    mkdir -p docs/dev
    (cd tests && CARGO_MANIFEST_DIR=$PWD BURN_SPARSE_WRITE_NAMES=1 "$bin/names" -q && CARGO_MANIFEST_DIR=$PWD "$bin/names" -q)
}
python3 "$here/a_modules.py" .
python3 "$here/check_paths.py" .
git add -A
git commit -qm "Public names stand in topic modules: of 299 at the root of burn-blocksparse at most 40 stay, of 101 of burn-sparse-transformer 45"
if [[ ! -e tests/suite/public_names.rs ]]; then cp "$here/public_names.rs" tests/suite/; fi
grep -q '^mod public_names;' tests/suite/main.rs || sed -i 's/^mod sampling;/mod public_names;\nmod sampling;/' tests/suite/main.rs
names
cargo fmt --all
git add -A
git commit -qm "A list of the public names, which a test compares with the sources"
python3 "$here/c_names.py" .
python3 "$here/c_docs.py" .
python3 "$here/check_paths.py" .
cargo fmt --all
names
git add -A
git commit -qm "Public names in the field's words, and first lines of docs; the change log has the table"
python3 "$here/banned.py" .
