"""Fetches a model from the Hugging Face Hub into a folder that all nodes see: once, whole, and checked.

Whoever comes second waits for the first. A connection that breaks is taken up where it broke; a job that is
started again keeps the files that were whole. `FETCHED.json` is written when every file has the checksum that
the Hub gives for it; from then on the Hub is not asked again.
"""

import fnmatch
import json
import sys
from pathlib import Path
from typing import Annotated

import filelock
import typer
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from skyrl_maze.durable import new_file
from skyrl_maze.errors import NotReadyError, SetupError, exit_code
from skyrl_maze.faults import cause_of

MARKER = "FETCHED.json"
MOST_WAIT_S = 7 * 86400
_TRIES = 5


def fetch(repo: str, folder: Path, revision: str = "main", files: str = "*", wait_s: float = 1800) -> bool:
    """Make `folder` hold the files of a revision; return whether anything had to be fetched.

    Args:
        repo: such as `VisGym/visgym_model`.
        folder: gets the files under their names in the repository.
        revision: branch, tag or commit. A branch is asked for once; what it pointed to is kept in the marker.
        files: pattern of the names of the files that are wanted; `*` matches `/` as well.
        wait_s: how long to wait for another process that fetches into `folder`.

    Raises:
        NotReadyError: the Hub cannot be reached, a checksum differs, or another process has not finished in
            time.
        SetupError: the Hub refuses, or `folder` holds something else or cannot be written.
    """
    wanted = {"repo": repo, "revision": revision, "files": files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock", timeout=wait_s)
        with lock:
            if (folder / MARKER).exists():
                _check_marker(folder / MARKER, wanted)
                return False
            for left in folder.glob(".cache/huggingface/download/**/*.incomplete"):
                left.unlink()  # of a process that was killed; they are never taken up
            commit = _download(repo, folder, revision, files)
            with new_file(folder / MARKER) as file:
                file.write(json.dumps({**wanted, "commit": commit}).encode() + b"\n")
            return True
    except filelock.Timeout:
        raise NotReadyError(
            f"another job has held {folder}/.lock for {wait_s:.0f} s; see whether it still fetches, "
            "and start this one again"
        ) from None
    except NotImplementedError as error:  # what filelock makes of ENOSYS
        raise SetupError(f"{folder} cannot be locked ({error}); mount it with the option flock") from error
    except OSError as error:
        if isinstance(error, SetupError):
            raise
        raise SetupError(f"cannot fetch {repo} into {folder}: {cause_of(error)}") from error


def _check_marker(marker: Path, wanted: dict[str, str]) -> None:
    try:
        found = dict(json.loads(marker.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:  # it is written at once and whole, so somebody has changed it
        raise SetupError(f"{marker} is damaged ({cause_of(error)}); remove it to fetch anew") from error
    if {key: found.get(key) for key in wanted} != wanted:
        raise SetupError(
            f"{marker.parent} holds {found.get('files')} of {found.get('repo')} at {found.get('revision')}, "
            f"and {wanted['files']} of {wanted['repo']} at {wanted['revision']} is asked for; "
            "give that another folder, or remove this one"
        )


def _download(repo: str, folder: Path, revision: str, files: str) -> str:
    """Fetch and check; return the commit that `revision` points to."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()  # reads the token from the file in HF_TOKEN_PATH, if there is one
    retries = Retrying(
        stop=stop_after_attempt(_TRIES),
        wait=wait_random_exponential(max=30),
        retry=retry_if_exception(_may_pass),
        reraise=True,
    )
    try:
        commit = str(retries(api.model_info, repo, revision=revision).sha)
        print(f"fetching {files} of {repo} at {commit} into {folder}", flush=True)
        retries(api.snapshot_download, repo, revision=commit, local_dir=folder, allow_patterns=files)
        checked = retries(api.verify_repo_checksums, repo, revision=commit, local_dir=folder)
    except HfHubHTTPError as error:
        kind = NotReadyError if _may_pass(error) else SetupError
        raise kind(f"the Hub refuses {repo} at {revision}: {cause_of(error)}") from error
    except Exception as error:  # whatever the network makes the libraries say
        kind = NotReadyError if _may_pass(error) else SetupError
        raise kind(f"cannot fetch {repo} into {folder}: {cause_of(error)}; try again") from error
    wrong = [file["path"] for file in checked.mismatches]
    for path in wrong:
        (folder / path).unlink()  # or the next try would take it for whole
    missing = [path for path in checked.missing_paths if fnmatch.fnmatch(path, files)]
    if wrong or missing or checked.checked_count == 0:
        kind = NotReadyError if wrong else SetupError
        raise kind(
            f"{repo} at {commit}: {checked.checked_count} file(s) match {files!r}, damaged: {wrong}, "
            f"missing: {missing}; try again"
        )
    return commit


def _may_pass(error: BaseException) -> bool:
    """Whether it is of the network or the Hub's servers; not an answer (404), a name or this disk."""
    from huggingface_hub.errors import HFValidationError

    response = getattr(error, "response", None)
    if response is not None:
        return bool(response.status_code >= 500)
    return not isinstance(error, OSError | HFValidationError)


def main(
    repo: Annotated[str, typer.Argument(help="Such as VisGym/visgym_model.")],
    folder: Annotated[Path, typer.Argument(help="Gets the files; on a disk that all nodes see.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    files: Annotated[str, typer.Option(help="Pattern of the files' names.")] = "*",
    wait_s: Annotated[
        float, typer.Option(min=0, max=MOST_WAIT_S, help="How long to wait for another job that fetches.")
    ] = 1800,
) -> None:
    """Fetch a model from the Hugging Face Hub once, whole and checked.

    Example: python -m skyrl_maze.hyperpod.fetch VisGym/visgym_model /shared/models/visgym_model
    """
    try:
        fetched = fetch(repo, folder, revision, files, wait_s)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(exit_code(error)) from None
    print(f"{repo} is in {folder}, {'fetched and checked' if fetched else 'as fetched before'}")


if __name__ == "__main__":
    typer.run(main)
