#!/bin/sh
# Makes .venv-serving: Ray Serve LLM with the vLLM that it pins, built for CPUs, as locked in
# requirements/serving-cpu.txt. It is for the tests of serving; SKYRL_MAZE_SERVING names another place.
set -eu
unset CDPATH VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
cd "$(dirname "$0")/.."

lock=requirements/serving-cpu.txt
place=${SKYRL_MAZE_SERVING:-.venv-serving}
stamp=$place/.lock-digest

digest=$(sha256sum <$lock)
[ "$(cat "$stamp" 2>/dev/null)" != "$digest" ] || exit 0
free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
[ "$free_kb" -ge 9000000 ] || {
    echo "setup: $((free_kb / 1000000)) GB free, 9 GB are needed for $place: free some and run this again" >&2
    exit 1
}
echo "setup: making $place (about 2.5 GB to download, 7 GB on disk: this takes minutes)"
.venv/bin/uv venv --quiet --clear --no-config --python .venv/bin/python "$place"
.venv/bin/uv pip install --quiet --no-config --python "$place/bin/python" --no-deps --require-hashes \
    --compile-bytecode --requirement $lock
printf '%s\n' "$digest" >"$stamp"
echo "setup: done: $place is ready"
