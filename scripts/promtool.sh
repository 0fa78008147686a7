#!/bin/sh
# Sees to promtool, which checks the alert rules: takes one that is there, else that of Debian's prometheus package.
#
# Only the one program is taken out of the package, into .venv/bin; nothing is installed and no service starts.
# Prints one line that says where it is, or what to do, and then exits 1.
set -eu
unset CDPATH
cd "$(dirname "$0")/.."

bin=$PWD/.venv/bin
say() { printf 'promtool: %s\n' "$*"; }
fail() { printf 'promtool: %s\n' "$*" >&2; exit 1; }

if path=$(PATH="$bin:$PATH" command -v promtool); then say "$path"; exit 0; fi
[ -d "$bin" ] || fail "no .venv: run make setup, then this again"
command -v apt-get >/dev/null 2>&1 || fail "no promtool on PATH: install prometheus with this system's packages"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
limits='-o Acquire::http::Timeout=30 -o Acquire::Retries=2'
# shellcheck disable=SC2086  # several words on purpose
get() { (cd "$folder" && apt-get $limits download prometheus) >"$folder/log" 2>&1; }
# shellcheck disable=SC2086
if ! get; then
    [ "$(id -u)" = 0 ] || fail "apt-get download prometheus failed: sudo apt-get update, and run this again"
    if ! apt-get $limits update >"$folder/log" 2>&1 || ! get; then
        fail "apt-get download prometheus failed: $(sed '/^ *$/d' "$folder/log" | tail -n 1)"
    fi
fi
dpkg-deb --extract "$folder"/prometheus_*.deb "$folder/package"
mv "$folder/package/usr/bin/promtool" "$bin/promtool"
say "$bin/promtool"
