#!/usr/bin/env bash
# What tpu_pod.py and sky.yaml call on a worker (one host of a TPU slice), in the unpacked archive of a commit:
#   worker.sh install      makes the environment of this commit, once
#   worker.sh start ARG …  starts `jaxlm ARG …` in the background, unless a run is going on
#   worker.sh follow       prints the log until the run ends
#   worker.sh status       prints `running`, the exit code of the last run, or `none`
#   worker.sh stop         sends SIGTERM to the run and waits until it has saved
set -euo pipefail
cd "$(dirname "$0")/.."
state="$HOME/jaxlm-run" # of the one run on this worker, whichever commit it is from
mkdir -p "$state"

case "$1" in
install)
    [ -e .venv/installed ] && exit
    # Ubuntu 22.04, which TPU VMs run, has Python 3.10: uv brings a newer one. pip must not mind that it is the system's.
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --clear --python 3.12 .venv
    python3 -m uv pip install --quiet --python .venv/bin/python --editable '.[tpu,buckets]'
    touch .venv/installed
    ;;
start)
    shift
    exec 9>"$state/lock" # held by every process of the run until the last has ended
    if ! flock --nonblock 9; then
        echo "started before"
        exit
    fi
    rm -f "$state/exit-code"
    # The trap makes bash outlive the signals that stop jaxlm, to write the code. JAXLM_CLUSTER=1 has jax ask the
    # metadata server for the other workers.
    # shellcheck disable=SC2016
    JAXLM_CLUSTER=1 JAXLM_JOIN_SECONDS="${JAXLM_JOIN_SECONDS:-1800}" nohup setsid bash -c 'trap : INT TERM; .venv/bin/jaxlm "$@"; echo $? >"$0/exit-code"' \
        "$state" "$@" >>"$state/log" 2>&1 </dev/null &
    echo $! >"$state/pid"
    echo "started"
    ;;
follow)
    exec tail --lines=100 --follow=name --retry --sleep-interval=0.2 --pid="$(cat "$state/pid")" "$state/log"
    ;;
status)
    if ! flock --nonblock "$state/lock" true; then
        echo running
    else
        cat "$state/exit-code" 2>/dev/null || echo none
    fi
    ;;
stop)
    pkill -TERM --parent "$(cat "$state/pid")" || true
    flock --timeout 600 "$state/lock" true
    ;;
esac
