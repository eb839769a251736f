#!/usr/bin/env bash
# Figures of one GPU within seven minutes, the most important first:
#   ./launch/gpu_figures.sh [FOLDER [PART ...]]
# PART is a name of the lines `part NAME` and `bench NAME` below; without one, all. Each part has a limit of its own,
# and none compiles while another does. FOLDER (figures) gets a log of each part and figures.jsonl, the objects of
# `bench --json`. Without a GPU tiny presets take the place of the others, and everything may take eight times as long.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out="${1:-figures}"
wanted=" ${*:2} "
mkdir -p "$out"
[ $# -gt 1 ] || : > "$out/figures.jsonl"
python="${PYTHON:-$PWD/.venv/bin/python}"
case "$python" in */*) python="$(cd "$(dirname "$python")" && pwd)/${python##*/}" ;; esac
"$python" -c 'import jaxlm' || exit 2
gpus="${CUDA_VISIBLE_DEVICES-0}"
export CUDA_VISIBLE_DEVICES="${gpus%%,*}" PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2
start=$SECONDS total="${GPU_FIGURES_SECONDS:-420}" slower=1 stop=50

if "$python" -c 'import sys, jax; sys.exit(jax.default_backend() != "gpu")' 2> /dev/null; then
    gpt=(gpt2 --train.batch-size 32) bert=(bert_base --train.batch-size 64 --data.length 512 --train.phases=)
    modern=(modernbert_base --train.phases=) t5=(t5_1_1_base --train.batch-size 32)
    plain=() electra=(electra_base --train.batch-size 64) short=1024x32 long=8192x8 steps=800
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
else
    gpt=(gpt2_tiny) bert=(bert_tiny --train.phases=) modern=(modernbert_tiny --train.phases=) t5=(t5_tiny)
    plain=(--rows 8 --length 128 --layers 2 --width 128 --vocabulary 8192) electra=(electra_tiny) short=64x4 long=128x2 steps=120
    slower=8 stop=8 total=$((total * 8))
    echo "No GPU: tiny presets on $("$python" -c 'import jax; print(jax.devices()[0].device_kind)')."
fi
bfloat16=(--objective.model.dtype bfloat16)
fused=(--objective.model.attention-dropout 0)

is_wanted() { [[ -z "${wanted// /}" || "$wanted" == *" $1 "* ]]; }

# part NAME SECONDS COMMAND …: runs one part, unless the time is over; prints its last lines.
part() {
    local name="$1" limit=$(($2 * slower)) begin=$SECONDS left=$((total - SECONDS + start)); shift 2
    is_wanted "$name" || return
    rm -f "$out/$name.out" "$out/$name.log"  # of an earlier time
    if [ "$left" -lt 20 ]; then echo "── $name: not reached"; return; fi
    timeout "$((limit < left ? limit : left))" "$@" > "$out/$name.out" 2> "$out/$name.log"
    echo "── $name: exit $?, $((SECONDS - begin)) s"
    grep -h '^Attention: ' "$out/$name.log" || true
    [ "$name" != check ] || cat "$out/check.out"
}

# bench NAME SECONDS PRESET …: `jaxlm bench --json` as a part, with its object in a line.
bench() {
    local name="$1" limit="$2"; shift 2
    is_wanted "$name" || return
    part "$name" "$limit" "$python" -m jaxlm.cli bench "$@" --json
    "$python" - "$name" "$out" << 'SUMMARY'
import json, pathlib, sys
name, out = sys.argv[1], pathlib.Path(sys.argv[2])
text = out.joinpath(f"{name}.out").read_text() if out.joinpath(f"{name}.out").exists() else ""
if text.strip():
    found = {"part": name, **json.loads(text)}
    out.joinpath("figures.jsonl").open("a").write(json.dumps(found) + "\n")
    peak, peer = (found.get("peak_memory_bytes") or 0) / 2**30, found.get("peer_step_seconds")
    print(f"   {found['step_seconds'] * 1e3:.2f} ms, {found['tokens_per_second']:,.0f} tokens/s, "
          f"MFU {found.get('mfu') or 0:.1%}, peak {peak:.1f} GiB, first {found['compile_and_first_step_seconds']:.0f} s"
          + (f"; {found['peer']}: {peer * 1e3:.2f} ms, ratio {found['ratio']:.3f}" if peer else ""))
SUMMARY
}

at() { printf -- '--data.length %s --train.batch-size %s' "${1%x*}" "${1#*x}"; }

part check 180 env -C "$out" "$python" -m jaxlm.cli check --minutes 2
bench gpt2_packed 60 "${gpt[@]}" "${bfloat16[@]}"
bench gpt2_plain 60 "${gpt[@]}" "${bfloat16[@]}" --objective.plain-stream True
part plain_gpt2 60 "$python" launch/plain_gpt2.py "${plain[@]}"
! is_wanted plain_gpt2 || cat "$out/plain_gpt2.out" 2> /dev/null || true
bench bert 60 "${bert[@]}" "${bfloat16[@]}" "${fused[@]}"
bench bert_dropout 60 "${bert[@]}" "${bfloat16[@]}"
# shellcheck disable=SC2046  # two flags with their values
bench modernbert_short 90 "${modern[@]}" "${bfloat16[@]}" $(at "$short")
# shellcheck disable=SC2046
bench modernbert_long 90 "${modern[@]}" "${bfloat16[@]}" $(at "$long")

# A real run, stopped by SIGTERM and resumed, and one that is not: the same bits.
flags=("${bert[@]}" "${bfloat16[@]}" "${fused[@]}" --data.source python-docs --train.steps "$steps" --train.eval-every 0
    --train.checkpoint-every 0 --train.deterministic True)
! is_wanted run_whole || rm -rf "$out/run_stopped" "$out/run_whole"
part tokenize 60 "$python" -m jaxlm.cli tokenize "${bert[0]}" --data.source python-docs
part run_stopped "$stop" "$python" -m jaxlm.cli pretrain "${flags[@]}" --run-dir "$out/run_stopped"
part run_resumed 90 "$python" -m jaxlm.cli pretrain "${flags[@]}" --run-dir "$out/run_stopped"
part run_whole 90 "$python" -m jaxlm.cli pretrain "${flags[@]}" --run-dir "$out/run_whole"
"$python" - "$out/run_stopped" "$out/run_whole" << 'COMPARE'
import json, pathlib, sys
files = [pathlib.Path(run, "metrics.jsonl") for run in sys.argv[1:]]
if all(file.exists() for file in files):
    one, other = ({line["step"]: line for line in map(json.loads, file.open())} for file in files)
    both = one.keys() & other.keys()
    same = len(both) > 1 and all(one[step]["loss"] == other[step]["loss"] for step in both)
    speeds = sorted(line["tokens_per_second"] for line in other.values() if "tokens_per_second" in line)
    speed = speeds[len(speeds) // 2]
    print(f"   stopped and resumed: {'the same bits' if same else 'OTHER BITS'} at {len(both)} logged steps; "
          f"{speed:,.0f} tokens/s")
COMPARE

bench bert_peer 150 "${bert[@]}" "${bfloat16[@]}" "${fused[@]}" --peer huggingface
# shellcheck disable=SC2046
bench modernbert_peer 150 "${modern[@]}" "${bfloat16[@]}" $(at "$short") --peer huggingface
bench t5_peer 150 "${t5[@]}" "${bfloat16[@]}" --peer huggingface
bench electra_peer 150 "${electra[@]}" "${bfloat16[@]}" "${fused[@]}" --peer huggingface
echo "$((SECONDS - start)) s; figures are in $out."
