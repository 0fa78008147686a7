"""`skyrl.entrypoints.main_base +recipe=maze`: train.

SkyRL reaches it as well, with `trainer.override_entrypoint=skyrl_maze.entrypoints.main_base`.
"""

import os
import sys

# Ray would replay `uv run ...` on every worker, which a wheel given by a local path does not survive.
# It reads this when it is imported, so it comes first.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


def main() -> None:
    """Train with the settings of the command line; exit 0, or nonzero after one clear line."""
    from skyrl_maze.launch import launch

    sys.exit(launch(sys.argv[1:]))


if __name__ == "__main__":
    main()
