"""Shared by the suite: the model cache lies below pytest's own folder, so that each session builds anew."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for the whole session; goes into `XDG_CACHE_HOME`."""
    return tmp_path_factory.mktemp("cache")
