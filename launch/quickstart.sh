#!/usr/bin/env bash
# From nothing to a trained BERT: environment, vocabulary, pretraining, a look at what was learnt, export.
# Takes about four minutes on two CPU cores. Flags go to `jaxlm pretrain`, e.g. --train.steps 2000.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"

run="${JAXLM_QUICKSTART_RUN:-runs/quickstart}"
exported="$run-transformers"

make_environment ""
"$BIN/jaxlm" pretrain configs/bert_tiny.py --run-dir "$run" "$@"

if [ ! -d "$exported" ]; then
    echo
    echo "What it has learnt (its five best guesses for each [MASK]):"
    "$BIN/jaxlm" fill-mask "$run" \
        "Return True if all characters in the string [MASK] digits." \
        "Raises a [MASK] if the key is not found." \
        "The built-in [MASK] open() returns a file object."
    echo
    "$BIN/jaxlm" export "$run" "$exported"
fi

echo
echo "The run:                 $run   (metrics.jsonl, curves.png, checkpoints/)"
echo "The Transformers folder: $exported"
echo "Next: your own text, with  .venv/bin/jaxlm pretrain configs/bert_mini.py --run-dir runs/mine --data.source 'texts/*.txt'"
