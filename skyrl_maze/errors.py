"""What goes wrong, by whom it is to be mended.

Every error of this package is a `SkyRLMazeError` and also the standard type that fits it, so both
`except SkyRLMazeError` and `except ValueError` work. An error is built from its finished message alone:
that is what survives pickling, and Ray carries errors from process to process as pickles.

A message says what was tried, what was given, what is allowed and what to do next.
"""

import difflib
from collections.abc import Iterable
from typing import Self


class SkyRLMazeError(Exception):
    """Base of every error this package raises on purpose."""

    @classmethod
    def from_problems(cls, title: str, problems: Iterable[str]) -> Self:
        """An error that lists several problems below its title."""
        return cls("\n  - ".join([title, *problems]))


class MazeError(SkyRLMazeError, ValueError):
    """A maze, a position or a picture of it that cannot exist."""


class ConfigError(SkyRLMazeError, ValueError):
    """A recipe, a command line or an environment setting that cannot be run; lists every problem."""


class RewardError(SkyRLMazeError, ValueError):
    """A reward that is not a finite number."""


class DatasetError(SkyRLMazeError, ValueError):
    """A maze set that cannot be made, read or used for training."""


class AdapterError(SkyRLMazeError, ValueError):
    """An adapter, or a part of one, that cannot be written, merged, trusted or loaded."""


class RecordError(SkyRLMazeError, ValueError):
    """A result of an evaluation that cannot be read, written or compared."""


class ReportError(SkyRLMazeError, ValueError):
    """A page that cannot be made, or cannot be written where it was to go."""


class EndpointError(SkyRLMazeError, RuntimeError):
    """A model behind an address that cannot be played with."""


class CheckpointError(SkyRLMazeError, ValueError):
    """A checkpoint that cannot be written, trusted, or continued with these settings."""


class ManifestError(SkyRLMazeError, ValueError):
    """A Kubernetes manifest that cannot be read or built; lists every problem."""


class SetupError(SkyRLMazeError, RuntimeError):
    """The machine lacks what the run needs: a GPU, a package, disk space, a free port."""


class NotReadyError(SetupError):
    """Something that the run needs is not there yet; the same command may work later."""


class LostNodeError(SkyRLMazeError, RuntimeError):
    """A node of the cluster ended while a run used it."""


def exit_code(error: SkyRLMazeError) -> int:
    """What a command ends with: 2, or 75 (EX_TEMPFAIL of BSD's sysexits.h) where another try may mend it."""
    return 75 if isinstance(error, NotReadyError) else 2


def closest(name: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'keyword'?"` for the closest allowed name, or an empty string."""
    matches = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
