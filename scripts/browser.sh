#!/bin/sh
# Sees to a Chromium for the tests of the report page: takes one that is there, else installs Debian's.
#
# Prints one line that says where it is, or what to do, and then exits 1.
set -eu

found() {
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        command -v "$name" && return
    done
    return 1
}

say() { printf 'browser: %s\n' "$*"; }
fail() { printf 'browser: %s\n' "$*" >&2; exit 1; }

if path=$(found); then say "$path"; exit 0; fi
command -v apt-get >/dev/null 2>&1 || fail "no chromium on PATH: install one with this system's packages"
[ "$(id -u)" = 0 ] || fail "no chromium on PATH: sudo apt-get install chromium, and run this again"

log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
limits='-o Acquire::http::Timeout=30 -o Acquire::Retries=2 -o DPkg::Lock::Timeout=120'
# shellcheck disable=SC2086  # several words on purpose
if ! { apt-get $limits update && apt-get $limits install -y --no-install-recommends chromium fonts-dejavu-core; } \
    >"$log" 2>&1; then
    fail "apt-get install chromium failed: $(sed '/^ *$/d' "$log" | tail -n 1) (details: $log)"
fi
rm "$log"
path=$(found) || fail "the package chromium brought no command of that name: install another Chromium or Chrome"
say "$path"
