"""Shared by the suite: the model cache lies below pytest's own folder, so that each session builds anew."""

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
