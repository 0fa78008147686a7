#!/usr/bin/env bash
# The job: fetches the model once, waits for the GPUs, then trains or resumes.
#
#   ray job submit --no-wait --address sagemaker_ray://skyrl-visgym/hyperpod-ns-maze -- train_job.sh [key=value ...]
#
# Arguments are settings of SkyRL and the recipe. What the pods' environment says (overlays/*/run.yaml) can be
# said anew for one job: `-- env MAZE_RUN_ID=maze-b train_job.sh trainer.policy.optimizer_config.lr=3.0e-5`.
#
#   MAZE_RECIPE          recipe, or the path of one
#   MAZE_RUN_ID          names the run's folder; the same id resumes from its last checkpoint
#   MAZE_OVERRIDES       key=value settings, separated by spaces or line ends; none may hold one
#   MAZE_SHARED          the folder that all nodes see
#   MAZE_MODEL_REPO      fetched into $MAZE_SHARED/models; empty: nothing is
#   MAZE_MODEL_REVISION  branch, tag or commit of it
#   MAZE_MODEL_FILES     pattern of its files
#   MAZE_WAIT_S          how long another job's download, and the GPUs, are waited for
#
# Exits as the trainer does: 0 done, 1 failed, 2 could not start, 75 could not start yet, 130 interrupted; 143 when
# stopped before it.
set -euo pipefail

recipe=${MAZE_RECIPE:-maze}
run_id=${MAZE_RUN_ID:-$recipe}
shared=${MAZE_SHARED:-/shared}
model_repo=${MAZE_MODEL_REPO-}
wait_s=${MAZE_WAIT_S:-1800}

# SkyRL writes this one into its log and into Ray's runtime environment. The file in HF_TOKEN_PATH is enough.
unset HF_TOKEN HUGGING_FACE_HUB_TOKEN
# What the workers have as well is to run, not what lies in this folder: the installed package, or the one of
# --working-dir, which Ray has put before it.
export PYTHONSAFEPATH=1

# Runs one step in the background: bash acts on a signal while it waits, not while a command runs in front.
step() {
    "$@" &
    child=$!
    wait "$child"
    child=
}

stop() {
    trap - TERM INT
    if [[ -n $child ]]; then
        kill -TERM "$child" 2>/dev/null || true
        wait "$child" || true
    fi
    exit 143
}

child=
trap stop TERM INT

read -r -d '' -a overrides <<<"${MAZE_OVERRIDES-}" || true # to the end, for it may be of several lines
settings=(
    "+recipe=$recipe"
    "run.id='$run_id'" # quoted for YAML: an id may look like a number
    "run.root=$shared/runs/$run_id"
    "${overrides[@]}"
    "$@"
)

if [[ -n $model_repo ]]; then
    step python -m skyrl_maze.hyperpod.fetch "$model_repo" "$shared/models/${model_repo##*/}" \
        --revision "${MAZE_MODEL_REVISION:-main}" --files "${MAZE_MODEL_FILES:-*}" --wait-s "$wait_s"
fi
step python -m skyrl_maze.hyperpod.ready --wait-s "$wait_s" -- "${settings[@]}"

# From here on this process is the trainer's: signals reach it and its exit code is the job's. It draws the
# mazes into data.mazes.folder, unless they are there.
trap - TERM INT
exec python -m skyrl.train.entrypoints.main_base \
    trainer.override_entrypoint=skyrl_maze.entrypoints.main_base "${settings[@]}"
