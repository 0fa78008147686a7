#!/bin/sh
# Makes .venv: the CPU engine, the tools for tests and documentation, and this package, exactly as locked in
# requirements/.
#
# Prints one line per stage. A later call repeats only what is missing or out of date. Where it cannot go on,
# it prints one line that says what to do, and exits 1.
set -eu
unset CDPATH
cd "$(dirname "$0")/.."
here=$(pwd -P)

DISK_NEEDED_KB=9000000
STAMP=.venv/.setup-stamp  # digest of what the finished environment was made from
INSTALLING=.venv/.setup-installing  # there while packages are being installed
LOG=.venv/setup.log  # output of the stage that ran last
python=.venv/bin/python

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# --- What the caller's environment may not change ---

clean_environment() {
    unset VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
    unset UV_CONSTRAINT UV_OVERRIDE UV_EXCLUDE_NEWER UV_TARGET UV_PREFIX UV_NO_BINARY UV_NO_BUILD
    # Of pip's variables, keep those that say how to reach an index.
    for name in $(env | sed -n 's/^\(PIP_[A-Z_]*\)=.*/\1/p'); do
        case $name in
            PIP_CONFIG_FILE | PIP_INDEX_URL | PIP_EXTRA_INDEX_URL | PIP_FIND_LINKS | PIP_NO_INDEX) ;;
            PIP_TRUSTED_HOST | PIP_CERT | PIP_CLIENT_CERT | PIP_PROXY | PIP_*TIMEOUT | PIP_RETRIES | PIP_*CACHE_DIR) ;;
            *) unset "$name" ;;
        esac
    done
    export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
}

# --- A Python that works ---

# Prints where a Python is. 0: it fits; 3: it fits but cannot make environments; other: it does not fit.
check_python() {
    "$1" -c '
import importlib.util, sys
if sys.version_info[:2] not in ((3, 12), (3, 13)) or "t" in sys.abiflags: sys.exit(4)
if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))): sys.exit(3)
print(sys.executable)
' 2>/dev/null
}

# Prints the first Python that fits. A name on PATH may be a shim that answers "command not found", so each
# candidate is run.
find_python() {
    without_venv=
    for candidate in python3.12 python3.13 python3 python \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23].*/bin/python; do
        status=0
        found=$(check_python "$candidate") || status=$?
        case $status in
            0) printf '%s\n' "$found"; return ;;
            3) without_venv=$candidate ;;
        esac
    done
    if command -v uv >/dev/null 2>&1; then
        uv python find --system '>=3.12,<3.14' 2>/dev/null && return
        uv python install 3.12 >/dev/null 2>&1 && uv python find --system 3.12 2>/dev/null && return
    fi
    [ -z "$without_venv" ] || fail "$without_venv has no venv module: install it (Debian and Ubuntu:" \
        "apt install python3.12-venv) and run this again"
    fail "no working Python 3.12 or 3.13 on PATH or under pyenv: install one (for example:" \
        "uv python install 3.12, or pyenv install 3.12) and run this again"
}

# --- Stages ---

digest() {
    cat scripts/bootstrap.sh pyproject.toml requirements/cpu.txt requirements/dev.txt requirements/docs.txt | sha256sum
}

# Runs a command with its output in the log; says why it failed in one line.
run() {
    "$@" >"$LOG" 2>&1 && return
    no_disk='no space left\|quota exceeded'
    no_network='dns error\|name resolution\|sending request\|connection\|timed out\|unreachable'
    if grep -qi "$no_disk" "$LOG"; then
        fail "the disk is full: free 9 GB for $here and for the cache of uv, and run this again" \
            "(details: $LOG)"
    elif grep -qi "$no_network" "$LOG"; then
        fail "cannot reach the package index: check the network, or name a mirror in UV_DEFAULT_INDEX and" \
            "PIP_INDEX_URL, and run this again (details: $LOG)"
    fi
    fail "failed: $(sed '/^ *$/d' "$LOG" | tail -n 1); mend that and run this again (details: $LOG)"
}

check_existing() {
    [ -e .venv ] || return 0
    [ -d .venv ] || fail ".venv is not a folder: move it away and run this again"
    [ -e $python ] || [ -L $python ] || return 0
    check_python $python >/dev/null ||
        fail ".venv holds $($python -V 2>/dev/null || echo 'a Python that is gone'), not Python 3.12 or 3.13:" \
            "remove .venv and run this again"
    made=$(sed -n 's/^command = //p' .venv/pyvenv.cfg 2>/dev/null || :)
    case $made in
        '' | *" $here/.venv") ;;
        *) fail "the checkout was moved, and the commands in .venv still point to its old place:" \
            "remove .venv and run this again" ;;
    esac
}

check_disk() {
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    have_kb=0
    [ ! -d .venv ] || have_kb=$(du -sk .venv | cut -f 1)
    [ $((free_kb + have_kb)) -ge $DISK_NEEDED_KB ] ||
        fail "$((free_kb / 1000000)) GB free in $here, about $((DISK_NEEDED_KB / 1000000)) GB are needed:" \
            "free some and run this again"
}

make_venv() {
    $python -m pip --version >/dev/null 2>&1 && return
    base=$(find_python) || exit 1
    say "making .venv with $base"
    mkdir -p .venv
    run "$base" -m venv "$here/.venv"
}

# The pinned uv, from its own lines of the lock.
install_uv() {
    awk '/^[^ ]/ { wanted = /^uv==/ } wanted' requirements/dev.txt >.venv/uv.txt
    want=$(sed -n 's/^\(uv==[^ ]*\).*/\1/p' .venv/uv.txt)
    case $(.venv/bin/uv --version 2>/dev/null || :) in "uv ${want#uv==}"*) return ;; esac
    say "installing $want"
    run $python -m pip install --no-deps --require-hashes -r .venv/uv.txt
}

install_packages() {
    say "installing the locked packages (about 2.5 GB to download, 7 GB on disk: this takes minutes)"
    # What an interrupted installation left may be half of a package, so everything is installed afresh.
    afresh=
    [ ! -e $INSTALLING ] || afresh=--reinstall
    : >$INSTALLING
    run .venv/bin/uv pip install --python $python --no-deps --require-hashes --compile-bytecode $afresh \
        -r requirements/cpu.txt -r requirements/dev.txt -r requirements/docs.txt
    rm $INSTALLING
    say "installing this package"
    # The build tool is in the lock: nothing is fetched for it.
    run .venv/bin/uv pip install --python $python --no-deps --no-build-isolation --editable .
}

main() {
    clean_environment
    [ "$(uname -s) $(uname -m)" = 'Linux x86_64' ] ||
        fail "the locked packages are for Linux on x86_64, this is $(uname -s) on $(uname -m)"
    check_existing
    [ ! -x $python ] || [ "$(cat $STAMP 2>/dev/null)" != "$(digest)" ] || return 0
    check_disk
    make_venv
    install_uv
    install_packages
    digest >$STAMP.part
    mv $STAMP.part $STAMP
    say "done: .venv is ready"
}

main
