"""What a run is told at its start; the rules themselves are tried on the overlays in test_hyperpod."""

import re

from manifests import HYPERPOD

from skyrl_maze.manifest_start import VARIABLES


def test_the_variables_are_those_that_the_script_reads():
    script = (HYPERPOD / "train_job.sh").read_text(encoding="utf-8")
    code = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    assert set(re.findall(r"\$\{(MAZE_\w+?)[:-]", code)) == set(VARIABLES)
