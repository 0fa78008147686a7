"""scripts/bootstrap.sh with stand-ins for Python, pip and uv: no package is installed here."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = ("cpu", "dev", "docs")  # what makes .venv
TOOLS = "awk cat cp cut df dirname du env grep kill mkdir mv rm sed sh sha256sum tail uname"

# Stands in for a Python, also inside the .venv that it makes. `-c` is answered by the real Python, under
# another version number; everything else is written down.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) exec {real} -I -S -c '
import importlib.util, sys
code, sys.executable, sys.version_info = sys.argv[1], sys.argv[2], {version}
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: find_spec(name) if {has_venv} or name != "venv" else None
exec(code)' "$2" "$0" ;;
    "-V "*) echo "Python {name}" ;;
    "-m venv")
        mkdir -p "$3/bin"
        echo "command = $0 $*" >"$3/pyvenv.cfg"
        cp "$0" "$3/bin/python"
        : >"$3/has-pip" ;;
    "-m pip")
        [ "$3" != --version ] || exec test -e .venv/has-pip
        env >environment.txt
        echo "pip $*" >>calls.txt
        cp fake-uv .venv/bin/uv ;;
esac
"""

FAKE_UV = """#!/bin/sh
[ "$1" != --version ] || { echo "uv 9.9.9 (fake)"; exit 0; }
echo "uv $*" >>calls.txt
[ ! -e uv-fails.txt ] || { cat uv-fails.txt >&2; exit 2; }
[ ! -e uv-is-killed ] || { rm uv-is-killed; kill -9 $PPID; exit 1; }
"""


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def fake_python(path: Path, version: tuple[int, int, int] = (3, 12, 1), has_venv: bool = True) -> Path:
    name = ".".join(map(str, version))
    real = shlex.quote(sys.executable)
    return write_script(path, FAKE_PYTHON.format(real=real, version=version, has_venv=has_venv, name=name))


class Checkout:
    """A checkout with stand-in locks, a PATH of its own (`bin`) and a home folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.home = folder / "the checkout", folder / "bin", folder / "home"
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        (self.root / "requirements").mkdir(parents=True)
        (self.root / "pyproject.toml").write_text("")
        (self.root / "requirements/cpu.txt").write_text("numpy==1 \\\n    --hash=sha256:1\n")
        locked = enumerate(["ruff==1", "uv==9.9.9", "zip==1"], start=2)
        lock = "".join(f"{name} \\\n    --hash=sha256:{number}\n" for number, name in locked)
        (self.root / "requirements/dev.txt").write_text(lock)
        (self.root / "requirements/docs.txt").write_text("mkdocs==1 \\\n    --hash=sha256:5\n")
        script = (ROOT / "scripts/bootstrap.sh").read_text()
        self.script = write_script(self.root / "scripts/bootstrap.sh", script)
        write_script(self.root / "fake-uv", FAKE_UV)

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": str(self.bin), "HOME": str(self.home), **environment}
        return subprocess.run([self.script], env=variables, capture_output=True, text=True, check=False)

    def calls(self) -> list[str]:
        """What pip and uv were asked for since the last time."""
        path = self.root / "calls.txt"
        calls = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return calls

    def failure(self, **environment: str) -> str:
        """The one line that a set-up prints which cannot go on."""
        done = self.run(**environment)
        assert done.returncode == 1, done.stdout
        lines = done.stderr.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("setup: ")
        return lines[0].removeprefix("setup: ")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def python(checkout: Checkout) -> Path:
    """A Python 3.12 on the PATH."""
    return fake_python(checkout.bin / "python3.12")


def test_prints_a_line_per_stage_and_installs_the_locks(checkout: Checkout, python: Path) -> None:
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["making", *["installing"] * 3, "done:"]
    assert f"making .venv with {python}" in done.stdout
    pip, packages, package = checkout.calls()
    assert pip == "pip -m pip install --no-deps --require-hashes -r .venv/uv.txt"
    uv_lock = (checkout.root / ".venv/uv.txt").read_text()
    assert uv_lock == "uv==9.9.9 \\\n    --hash=sha256:3\n"
    for wanted in ("--require-hashes", "--compile-bytecode", *(f"requirements/{lock}.txt" for lock in LOCKS)):
        assert wanted in packages.split()
    assert "--reinstall" not in packages
    assert package.endswith("--no-deps --no-build-isolation --editable .")


def test_does_nothing_the_second_time(checkout: Checkout, python: Path) -> None:
    checkout.run()
    checkout.calls()
    start = time.monotonic()
    done = checkout.run()
    assert time.monotonic() - start < 1
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert checkout.calls() == []


@pytest.mark.parametrize("changed", [*(f"requirements/{lock}.txt" for lock in LOCKS), "pyproject.toml"])
def test_installs_again_when_a_lock_changes(checkout: Checkout, python: Path, changed: str) -> None:
    checkout.run()
    checkout.calls()
    with (checkout.root / changed).open("a") as file:
        file.write("# changed\n")
    assert checkout.run().returncode == 0
    packages, package = checkout.calls()  # the same uv is there already
    assert "requirements/cpu.txt" in packages
    assert "--editable" in package


def test_interrupted_installation_is_repeated_from_scratch(checkout: Checkout, python: Path) -> None:
    (checkout.root / "uv-is-killed").touch()
    assert checkout.run().returncode != 0
    assert not (checkout.root / ".venv/.setup-stamp").exists()
    checkout.calls()
    assert checkout.run().returncode == 0
    assert "--reinstall" in checkout.calls()[0]
    assert checkout.run().stdout == ""


def test_interrupted_making_of_the_environment_is_resumed(checkout: Checkout, python: Path) -> None:
    checkout.run()
    (checkout.root / ".venv/.setup-stamp").unlink()
    (checkout.root / ".venv/has-pip").unlink()
    assert f"making .venv with {python}" in checkout.run().stdout


def test_unfinished_stamp_is_not_taken_as_done(checkout: Checkout, python: Path) -> None:
    checkout.run()
    checkout.calls()
    stamp = checkout.root / ".venv/.setup-stamp"
    stamp.write_text(stamp.read_text()[:20])
    checkout.run()
    assert len(checkout.calls()) == 2


def test_passes_over_a_shim_that_finds_no_command(checkout: Checkout) -> None:
    shim = '#!/bin/sh\necho "pyenv: $0: command not found" >&2\nexit 127\n'
    write_script(checkout.bin / "python3.12", shim)
    python = fake_python(checkout.home / ".pyenv/versions/3.13.0/bin/python", (3, 13, 0))
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert f"making .venv with {python}" in done.stdout


def test_looks_in_pyenv_root(checkout: Checkout, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "py env/versions/3.12.9/bin/python")
    assert f"making .venv with {python}" in checkout.run(PYENV_ROOT=str(tmp_path / "py env")).stdout


def test_asks_uv_for_a_python(checkout: Checkout, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "managed/python")
    got = tmp_path / "got"
    find = f"[ -e {got} ] && echo {python}"
    write_script(checkout.bin / "uv", f"#!/bin/sh\ncase $2 in install) : >{got} ;; find) {find} ;; esac\n")
    assert f"making .venv with {python}" in checkout.run().stdout


@pytest.mark.parametrize("version", [(3, 11, 9), (3, 14, 0)])
def test_no_python_that_fits(checkout: Checkout, version: tuple[int, int, int]) -> None:
    fake_python(checkout.bin / "python3", version)
    line = checkout.failure()
    assert line.startswith("no working Python 3.12 or 3.13 on PATH or under pyenv: install one")
    assert not (checkout.root / ".venv").exists()


def test_python_without_venv_is_the_last_choice(checkout: Checkout) -> None:
    fake_python(checkout.bin / "python3.12", has_venv=False)
    line = checkout.failure()
    assert line.startswith("python3.12 has no venv module: install it")
    assert "apt install python3.12-venv" in line
    python = fake_python(checkout.bin / "python3.13", (3, 13, 2))
    assert f"making .venv with {python}" in checkout.run().stdout


def test_too_little_disk(checkout: Checkout, python: Path) -> None:
    (checkout.bin / "df").unlink()
    write_script(checkout.bin / "df", "#!/bin/sh\necho Header\necho disk 9 9 2000000 1% /\n")
    line = checkout.failure()
    assert line == f"2 GB free in {checkout.root}, about 9 GB are needed: free some and run this again"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("error: write: No space left on device (os error 28)", "the disk is full: free 9 GB"),
        ("cause: dns error: failed to lookup", "cannot reach the package index: check the network"),
        (
            "error: hash mismatch for numpy\n\n",
            "failed: error: hash mismatch for numpy; mend that and run this again",
        ),
    ],
)
def test_failed_installation(checkout: Checkout, python: Path, output: str, expected: str) -> None:
    failing = checkout.root / "uv-fails.txt"
    failing.write_text(output)
    assert checkout.failure().startswith(expected)
    failing.unlink()
    assert checkout.run().returncode == 0


def replace_python(checkout: Checkout) -> None:
    fake_python(checkout.root / ".venv/bin/python", (3, 11, 4))


def remove_python(checkout: Checkout) -> None:
    (checkout.root / ".venv/bin/python").unlink()
    (checkout.root / ".venv/bin/python").symlink_to("/nonexistent/python")


def move_away(checkout: Checkout) -> None:
    (checkout.root / ".venv/pyvenv.cfg").write_text("command = python -m venv /elsewhere/.venv\n")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            replace_python,
            ".venv holds Python 3.11.4, not Python 3.12 or 3.13: remove .venv and run this again",
        ),
        (remove_python, ".venv holds a Python that is gone, not Python 3.12 or 3.13: remove .venv"),
        (
            move_away,
            "the checkout was moved, and the commands in .venv still point to its old place: remove .venv",
        ),
    ],
)
def test_environment_that_cannot_be_used(
    checkout: Checkout, python: Path, spoil: Callable[[Checkout], None], expected: str
) -> None:
    checkout.run()
    spoil(checkout)
    assert checkout.failure().startswith(expected)


def test_venv_that_is_a_file(checkout: Checkout, python: Path) -> None:
    (checkout.root / ".venv").touch()
    assert checkout.failure() == ".venv is not a folder: move it away and run this again"


def test_other_machine(checkout: Checkout, python: Path) -> None:
    (checkout.bin / "uname").unlink()
    write_script(checkout.bin / "uname", '#!/bin/sh\n[ "$1" = -s ] && echo Darwin || echo arm64\n')
    assert checkout.failure() == "the locked packages are for Linux on x86_64, this is Darwin on arm64"


def test_callers_environment_does_not_reach_the_stages(checkout: Checkout, python: Path) -> None:
    kept = {"PIP_INDEX_URL": "file:///mirror", "PIP_CERT": "/etc/cert.pem", "PIP_DEFAULT_TIMEOUT": "60"}
    dropped = {
        "PIP_TARGET": "/tmp/x",
        "PIP_REQUIRE_VIRTUALENV": "1",
        "PIP_CONSTRAINT": "/tmp/c",
        "VIRTUAL_ENV": "/v",
    }
    dropped |= {
        "PYTHONPATH": "/p",
        "PYTHONDONTWRITEBYTECODE": "1",
        "UV_EXCLUDE_NEWER": "2020-01-01",
        "CDPATH": "/",
    }
    done = checkout.run(**kept, **dropped, PIP_USER="1")
    assert done.returncode == 0, done.stderr
    seen = dict(line.split("=", 1) for line in (checkout.root / "environment.txt").read_text().splitlines())
    assert {name: seen.get(name) for name in kept} == kept
    assert not dropped.keys() & seen.keys()
    assert seen["PIP_USER"] == "0"


# --- A browser for the tests of the report page ---


def see_to_browser(bin_folder: Path, user: int, **tools: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/browser.sh as `user`, with stand-ins for `tools` as the only commands beside a few."""
    for tool in ("mktemp", "rm", "sed", "sh", "tail"):
        (bin_folder / tool).symlink_to(str(shutil.which(tool)))
    for name, text in {"id": f"echo {user}", **tools}.items():
        write_script(bin_folder / name, f"#!/bin/sh\n{text}\n")
    script = ROOT / "scripts/browser.sh"
    return subprocess.run(
        [script], env={"PATH": str(bin_folder)}, cwd=bin_folder, capture_output=True, text=True, check=False
    )


def test_a_browser_that_is_there_is_taken(tmp_path: Path) -> None:
    done = see_to_browser(tmp_path, 1000, **{"google-chrome": "exit 1"})
    assert (done.returncode, done.stdout) == (0, f"browser: {tmp_path / 'google-chrome'}\n")


def test_root_gets_a_browser_from_apt(tmp_path: Path) -> None:
    apt = 'echo "$*" >>calls; case $* in *install*) cp id chromium;; esac'
    (tmp_path / "cp").symlink_to(str(shutil.which("cp")))
    done = see_to_browser(tmp_path, 0, **{"apt-get": apt})
    assert (done.returncode, done.stdout) == (0, f"browser: {tmp_path / 'chromium'}\n")
    update, install = (tmp_path / "calls").read_text().splitlines()
    assert update.endswith(" update")
    assert " install -y --no-install-recommends chromium" in install
    assert "Acquire::http::Timeout=30" in install


@pytest.mark.parametrize(
    ("user", "apt", "why"),
    [
        (1000, {"apt-get": ""}, "no chromium on PATH: sudo apt-get install chromium, and run this again"),
        (0, {}, "no chromium on PATH: install one with this system's packages"),
        (0, {"apt-get": "echo oh dear; exit 100"}, "apt-get install chromium failed: oh dear (details: "),
        (0, {"apt-get": ""}, "the package chromium brought no command of that name: "),
    ],
)
def test_without_a_browser_one_line_says_what_to_do(
    tmp_path: Path, user: int, apt: dict[str, str], why: str
) -> None:
    done = see_to_browser(tmp_path, user, **apt)
    assert done.returncode == 1
    assert done.stderr.startswith(f"browser: {why}")
    assert done.stderr.count("\n") == 1


# --- promtool for the tests of the alert rules ---


def see_to_promtool(folder: Path, user: int, **tools: str) -> subprocess.CompletedProcess[str]:
    """Run a checkout's scripts/promtool.sh as `user`, with stand-ins for `tools` beside a few commands."""
    script = folder / "checkout/scripts/promtool.sh"
    write_script(script, (ROOT / "scripts/promtool.sh").read_text())
    for tool in ("dirname", "mkdir", "mktemp", "mv", "rm", "sed", "sh", "tail", "touch"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, text in {"id": f"echo {user}", **tools}.items():
        write_script(folder / name, f"#!/bin/sh\n{text}\n")
    return subprocess.run(
        [script], env={"PATH": str(folder)}, cwd=folder, capture_output=True, text=True, check=False
    )


UNPACK = 'mkdir -p "$3/usr/bin"; echo "$2" >"$3/usr/bin/promtool"'


@pytest.mark.parametrize("place", ["promtool", "checkout/.venv/bin/promtool"])
def test_a_promtool_that_is_there_is_taken(tmp_path: Path, place: str) -> None:
    write_script(tmp_path / place, "#!/bin/sh\n")
    done = see_to_promtool(tmp_path, 1000)
    assert (done.returncode, done.stdout) == (0, f"promtool: {tmp_path / place}\n")


@pytest.mark.parametrize("user", [0, 1000])
def test_promtool_alone_is_taken_out_of_debians_package(tmp_path: Path, user: int) -> None:
    (tmp_path / "checkout/.venv/bin").mkdir(parents=True)
    apt = {"apt-get": "touch prometheus_2_all.deb", "dpkg-deb": UNPACK}
    done = see_to_promtool(tmp_path, user, **apt)
    made = tmp_path / "checkout/.venv/bin/promtool"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"promtool: {made}\n", "")
    assert made.read_text().endswith("/prometheus_2_all.deb\n")


def test_root_fetches_apts_lists_where_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "checkout/.venv/bin").mkdir(parents=True)
    lists = tmp_path / "lists"
    text = f"case $* in *update*) touch {lists};; *) [ -e {lists} ] && touch prometheus_2_all.deb;; esac"
    done = see_to_promtool(tmp_path, 0, **{"apt-get": text, "dpkg-deb": UNPACK})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkout/.venv/bin/promtool").exists()


@pytest.mark.parametrize(
    ("user", "setup", "apt", "why"),
    [
        (0, False, {}, "no .venv: run make setup, then this again"),
        (0, True, {}, "no promtool on PATH: install prometheus with this system's packages"),
        (1000, True, {"apt-get": "exit 100"}, "apt-get download prometheus failed: sudo apt-get update, and"),
        (0, True, {"apt-get": "echo oh dear; exit 100"}, "apt-get download prometheus failed: oh dear"),
    ],
)
def test_without_promtool_one_line_says_what_to_do(
    tmp_path: Path, user: int, setup: bool, apt: dict[str, str], why: str
) -> None:
    (tmp_path / "checkout" / (".venv/bin" if setup else "")).mkdir(parents=True)
    done = see_to_promtool(tmp_path, user, **apt)
    assert done.returncode == 1
    assert done.stderr.startswith(f"promtool: {why}")
    assert done.stderr.count("\n") == 1


def test_script_is_executable() -> None:
    scripts = ("bootstrap", "serving", "lock", "promtool")
    for script in (*(f"scripts/{name}.sh" for name in scripts), ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("rehearse", ".venv/bin/skyrl.entrypoints.main_base +recipe=maze_cpu key=value"),
        ("test", ".venv/bin/python -m pytest key=value"),
        ("docs", "NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict key=value"),
        ("test-fast", '.venv/bin/python -m pytest -m "not slow and not rehearsal" key=value'),
    ],
)
def test_make_sets_up_first(target: str, command: str) -> None:
    listed = subprocess.run(
        ["make", "--dry-run", target, "ARGS=key=value"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line for line in listed.stdout.splitlines() if not line.startswith("make")] == [
        "scripts/bootstrap.sh",
        command,
    ]


def test_make_lists_its_targets() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    assert (
        re.findall(r"^  make (\S+) ", listed, re.MULTILINE)[: len(targets[1].split())] == targets[1].split()
    )
