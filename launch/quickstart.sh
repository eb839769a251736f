#!/usr/bin/env bash
# From nothing to a trained BERT: environment, vocabulary, pretraining, a look at what was learnt, export.
# Takes two to four minutes on two CPU cores. Flags go to `jaxlm pretrain`, e.g. --train.steps 2000.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$0")/environment.sh"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
# On Linux: huge pages for large buffers, which take a tenth off a step on a CPU.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

run="${JAXLM_QUICKSTART_RUN:-runs/quickstart}"
exported="$run-transformers"
marker="$run/exported-step" # is there if this script made $exported; holds the step that is in it

if [ -e "$exported" ] && [ ! -f "$marker" ]; then
    echo "$exported is there already and was not made by this script; move it away and run this again." >&2
    exit 2
fi

make_environment .venv ""
code=0
"$BIN/jaxlm" pretrain configs/bert_tiny.py --run-dir "$run" "$@" || code=$?
if [ "$code" -gt 128 ]; then
    echo "The run is not finished, so nothing is exported yet; run the same command again to go on."
fi
[ "$code" -eq 0 ] || exit "$code"
step="$(cd "$run/checkpoints" && printf '%s\n' * | grep -E '^[0-9]+$' | sort -n | tail -n 1)"

if [ ! -e "$exported" ] || [ "$(cat "$marker")" != "$step" ]; then
    echo
    echo "What it has learnt (its five best guesses for each [MASK]):"
    "$BIN/jaxlm" fill-mask "$run" \
        "Return True if all characters in the string [MASK] digits." \
        "Raises a [MASK] if the key is not found." \
        "The built-in [MASK] open() returns a file object."
    echo
    echo unfinished >"$marker"
    rm -rf "$exported"
    "$BIN/jaxlm" export "$run" "$exported"
    echo "$step" >"$marker"
fi

echo
echo "The run:                 $run   (metrics.jsonl, curves.png, checkpoints/)"
echo "The Transformers folder: $exported"
echo "Next: your own text, with  .venv/bin/jaxlm pretrain configs/bert_mini.py --run-dir runs/mine --data.source 'texts/*.txt'"
