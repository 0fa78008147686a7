"""Shared by the suite: the model cache lies below pytest's own folder, so that each session builds anew."""

import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# No test is timed: on a busy machine a deadline would tell of the machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for the whole session; goes into `XDG_CACHE_HOME`."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run_skyrl_maze(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs `skyrl-maze ...` in this process, in a folder of its own; gives exit code, stdout and stderr."""
    from skyrl_maze import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["skyrl-maze", *map(str, argv)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run
