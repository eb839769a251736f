# shellcheck shell=bash
# Sourced by the other scripts: makes virtual environments in the project's folder with the project in them, each once.

project="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$project" || exit

# find_python: sets $python to $PYTHON or else the newest supported Python that runs, and $version to its version (3.12).
# shellcheck disable=SC2034  # read by test.sh
find_python() {
    local candidate candidates=(python3.13 python3.12 python3.11 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if command -v "$candidate" >/dev/null &&
            version="$("$candidate" -c 'import sys; v = sys.version_info; print(f"{v[0]}.{v[1]}")
sys.exit(not (3, 11) <= v < (3, 14))' 2>/dev/null)"; then
            python="$candidate"
            return
        fi
    done
    echo "jaxlm needs Python 3.11, 3.12 or 3.13; install one and run this again." >&2
    exit 2
}

# make_environment FOLDER EXTRAS [PACKAGE ...]: the packages are installed before the project.
# Afterwards $PYTHON is its interpreter and $BIN the folder of its commands.
make_environment() {
    local folder="$1" extras="$2"; shift 2
    local stamp="$project/$folder/installed-${extras:-base}"
    BIN="$project/$folder/bin"
    if [ -f "$stamp" ] && [ "$stamp" -nt setup.cfg ] && [ "$stamp" -nt pyproject.toml ] && [ -x "$BIN/python" ]; then
        PYTHON="$BIN/python"
        return
    fi
    # Without pip it is half made: stopped by Ctrl-C, or by a Python without ensurepip (Debian's lacks python3-venv).
    if ! "$BIN/python" -m pip --version >/dev/null 2>&1; then
        find_python
        echo "Making a virtual environment in $folder with $("$python" --version)"
        "$python" -m venv --clear "$project/$folder"
    fi
    PYTHON="$BIN/python"
    # One line for each package that arrives: a slow connection takes ten minutes, and silence looks like a stop.
    echo "Installing jaxlm and what it needs, once: a minute or more, by the connection"
    if [ $# -gt 0 ]; then
        "$PYTHON" -m pip install --disable-pip-version-check "$@"
    fi
    "$PYTHON" -m pip install --disable-pip-version-check --editable ".${extras:+[$extras]}"
    touch "$stamp"
}
