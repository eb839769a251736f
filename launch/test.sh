#!/usr/bin/env bash
# Makes the environment with everything that the tests need, then runs them. Arguments go to pytest:
#   ./launch/test.sh                     the suite
#   ./launch/test.sh -m slow             the long checks
#   ./launch/test.sh -m fuzz             1,690 odd inputs
#   ./launch/test.sh -m chaos            two hundred faults
#   ./launch/test.sh tests/data -k gz    a part
#   PYTHON=python3.11 ./launch/test.sh   with another Python than the newest; each has an environment of its own
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$0")/environment.sh"

# An environment of its own: with libtpu and PyTorch in .venv, commands there would search for a TPU and warn.
# One version of PyTorch, installed first, so that nothing that depends on it chooses another build.
find_python
make_environment ".venv-test-$version" test,tpu torch==2.13.0

export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1
unset PYTHONDONTWRITEBYTECODE  # images set it; each process that a test starts would compile jaxlm anew
"$BIN/ruff" check .
# Neighbours share what they have compiled, so they stay with one worker until the other has nothing left.
exec "$PYTHON" -m pytest -n "${JAXLM_TEST_WORKERS:-2}" --dist worksteal -m "not slow and not fuzz and not chaos" "$@"
