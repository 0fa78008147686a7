"""`ray job ... --address sagemaker_ray://` with the real toolkit: what it asks, and what a user sees.

A job that is submitted in this way is in test_hyperpod_job.py.
"""

import contextlib
import http.client
import logging
import os
import shutil
import ssl
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import hyperpod_gateway
import pytest
from hyperpod_gateway import COOKIE, Gateway
from manifests import ROOT
from ray._private.runtime_env.packaging import create_package
from test_packaging import git_files

RAY = str(Path(sys.executable).parent / "ray")
ADDRESS = "sagemaker_ray://skyrl-visgym/hyperpod-ns-maze"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Without a dashboard behind it."""
    with hyperpod_gateway.serve(Gateway("http://127.0.0.1:9", tmp_path_factory.mktemp("gateway"))) as gateway:
        yield gateway


@pytest.fixture
def gateway(served: Gateway) -> Gateway:
    served.creator = True
    served.requests.clear()
    return served


def last_line(gateway: Gateway, *, address: str = ADDRESS, **variables: str) -> str:
    """The last line that a `ray job list` that fails writes."""
    done = subprocess.run(
        [RAY, "job", "list", "--address", address],
        env={**CLEAN, **gateway.variables, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().splitlines()[-1].rpartition("TokenAcquisitionError: ")[2]


# --- The stand-in is no softer than the real one ---


def test_who_has_no_token_gets_no_link(gateway: Gateway) -> None:
    wrong = gateway.folder / "token.json"
    right = wrong.read_text()
    try:
        wrong.write_text('{"status": {"token": "expired"}}')
        assert last_line(gateway).startswith("Authentication failed when calling the K8s API. Your EKS cred")
    finally:
        wrong.write_text(right)
    assert not gateway.links


def test_a_link_opens_once_and_every_request_needs_the_cookie(gateway: Gateway) -> None:
    trust = ssl.create_default_context(cafile=gateway.variables["REQUESTS_CA_BUNDLE"])
    gateway.links.add("link")

    def status(path: str, cookie: str = "") -> int:
        connection = http.client.HTTPSConnection("localhost", gateway.port, context=trust, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Cookie": cookie})
            return connection.getresponse().status

    assert [status("/bearer-auth?token=link") for _ in range(2)] == [302, 401]
    assert status("/api/version") == status("/api/version", f"{COOKIE}=made-up") == 401


# --- What a user sees ---


def test_another_than_the_creator_is_refused(gateway: Gateway) -> None:
    gateway.creator = False
    assert last_line(gateway) == (
        "Access denied: you are not authorized to access cluster 'skyrl-visgym' in namespace "
        "'hyperpod-ns-maze'. Only the cluster creator can submit jobs."
    )


@pytest.mark.parametrize("address", [ADDRESS.replace("visgym", "visgyn"), "sagemaker_ray://skyrl-visgym"])
def test_an_unknown_cluster_is_said(gateway: Gateway, address: str) -> None:
    assert last_line(gateway, address=address).startswith("Resource not found for cluster 'skyrl-visgy")


def test_an_authority_that_is_not_trusted_is_masked(gateway: Gateway, tmp_path: Path) -> None:
    untrusted = last_line(gateway, REQUESTS_CA_BUNDLE="")
    assert untrusted.startswith(
        f"Unable to connect to dashboard endpoint at https://localhost:{gateway.port}."
    )
    wrong = (gateway.folder / "kubeconfig").read_text().replace("kubernetes.pem", "dashboard.pem")
    (tmp_path / "kubeconfig").write_text(wrong)
    untrusted = last_line(gateway, KUBECONFIG=str(tmp_path / "kubeconfig"))
    assert untrusted.startswith("Unable to connect to the K8s API server. Check your network")


def test_without_a_kubeconfig_the_command_that_makes_one_is_named(gateway: Gateway) -> None:
    assert "Run: aws eks update-kubeconfig" in last_line(gateway, KUBECONFIG="/nowhere")


def test_an_address_in_the_environment_wins_over_the_option(gateway: Gateway) -> None:
    assert "127.0.0.1:9" in last_line(gateway, RAY_ADDRESS="http://127.0.0.1:9")
    assert gateway.requests == []


# --- What is taken along ---

_LARGE = {".venv/lib/torch.so": 11, "runs/maze/a.safetensors": 11, ".git/a.pack": 11, "b.safetensors": 101}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What git has, and beside it what lies in a checkout that was worked in."""
    root = tmp_path / "checkout"
    for name in git_files():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    for name, size_mib in _LARGE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (root / name).open("wb") as file:
            file.truncate(size_mib << 20)
    for name in ("results/x/episodes.jsonl", "skyrl_maze/__pycache__/maze.pyc", "mine.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def packed(folder: Path, out: Path, caplog: pytest.LogCaptureFixture) -> tuple[int, set[str], list[str]]:
    """Size in bytes, files, and warnings, by Ray's own packaging."""
    with caplog.at_level(logging.WARNING):
        create_package(str(folder), out, include_gitignore=True, logger=logging.getLogger("package"))
    with zipfile.ZipFile(out) as archive:
        return out.stat().st_size, set(archive.namelist()), caplog.messages


def test_only_what_runs_is_taken_along(
    checkout: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size, names, warnings = packed(checkout, tmp_path / "package.zip", caplog)
    folders = ("skyrl_maze/", "entrypoints/", "recipes/", "hyperpod/")
    source = {name for name in git_files() if name.startswith(folders)}
    assert names == source | {"pyproject.toml", "mine.yaml"}
    assert size < 2 << 20
    assert warnings == []


def test_without_the_list_it_would_be_too_large(
    checkout: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkout / ".rayignore").unlink()
    size, _, warnings = packed(checkout, tmp_path / "package.zip", caplog)
    assert size > 100 << 20
    assert [warning for warning in warnings if "is very large" in warning]


def test_what_is_taken_along_can_run(
    checkout: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a pod: the package of the working directory, first on the path that Ray makes."""
    packed(checkout, tmp_path / "package.zip", caplog)
    shutil.unpack_archive(tmp_path / "package.zip", tmp_path / "job")
    code = "from skyrl_maze import recipes, hyperpod; print(*recipes.names(), *hyperpod.__path__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**CLEAN, "PYTHONPATH": str(tmp_path / "job")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "maze_cpu" in done.stdout.split()
    assert done.stdout.split()[-1] == str(tmp_path / "job/hyperpod")
