"""Writes docs/licences.md: every package locked for a run or for serving, and the licence that it declares.

An installed package is read where it lies. For one that is not (what only GPUs need) the page keeps its row
while the version stays; otherwise its wheel is downloaded from the package index and read.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/licences.md"
LOCKS = ("cpu", "gpu", "serving")
NONE = "none declared"

Pin = tuple[str, str]
"""Normalised name, and version."""

ABOUT = """\
# Licences

`skyrl_maze` itself is Apache-2.0, and so are the schemas of KubeRay in it (`hyperpod/kuberay/NOTICE`).
These are the packages that `requirements/{cpu,gpu,serving}.txt` lock, with the licence that each declares in
its own metadata: its expression, else its licence field, else its classifiers, else the first line of its
licence file. What a package bundles may have others. Nobody has checked the declarations.

Made by `make licences`.

"""


def locked(lock: str) -> dict[Pin, str]:
    """Each pin of a lock with its lines, hashes included."""
    text = (ROOT / f"requirements/{lock}.txt").read_text(encoding="utf-8")
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    pins = [re.match(r"([A-Za-z0-9._-]+)==(\S+)", block) for block in blocks]
    return {
        (canonicalize_name(pin[1]), pin[2]): block for pin, block in zip(pins, blocks, strict=True) if pin
    }


def licence_of(package: Distribution) -> str:
    """What a package says of its licence, on one line."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return expression
    field = (metadata.get("License") or "").strip().removeprefix("UNKNOWN")
    if field and len(field) <= 80 and "\n" not in field:
        return field
    classifiers = [c for c in metadata.get_all("Classifier", []) if c.startswith("License :: ")]
    if classifiers:
        return ", ".join(c.rpartition(" :: ")[2] for c in classifiers)
    inside = [str(file).partition(".dist-info/")[2] for file in package.files or []]
    files = [name for name in inside if re.match(r"(?i)(un)?licen[cs]e|copying", name.rpartition("/")[2])]
    text = "\n".join(filter(None, (field, *map(package.read_text, files))))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else NONE


def licences(packages: Iterable[Distribution], wanted: Iterable[Pin]) -> dict[Pin, str]:
    """Licences of those packages that are wanted."""
    found = ((package, (canonicalize_name(package.name), package.version)) for package in packages)
    pins = set(wanted)
    return {pin: licence_of(package) for package, pin in found if pin in pins}


def written() -> Iterator[tuple[Pin, str, str]]:
    """(pin, licence, locks) of each row of the page as it is."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    for name, version, licence, locks in re.findall(r"^\| (\S+) \| (\d\S*) \| (.*) \| (.*) \|$", text, re.M):
        yield (name, version), licence, locks


def downloaded(blocks: Iterable[str]) -> Iterator[Distribution]:
    """The packages of some lines of a lock, as wheels from the index."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pins.txt").write_text("".join(blocks), encoding="utf-8")
        command = ["pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", folder]
        command += ["--requirement", f"{folder}/pins.txt"]
        subprocess.run([sys.executable, "-m", *command], check=True)
        yield from distributions(path=[str(wheel) for wheel in Path(folder).glob("*.whl")])


def main() -> None:
    blocks = {lock: locked(lock) for lock in LOCKS}
    pins = sorted({pin for lock in LOCKS for pin in blocks[lock]})
    known = {pin: licence for pin, licence, _ in written()} | licences(distributions(), pins)
    for lock in LOCKS:
        if missing := sorted(blocks[lock].keys() - known.keys()):
            print(f"downloading {len(missing)} packages of requirements/{lock}.txt", file=sys.stderr)
            known |= licences(downloaded(blocks[lock][pin] for pin in missing), missing)
    if unknown := sorted("==".join(pin) for pin in set(pins) - known.keys()):
        sys.exit(f"error: no wheel of {', '.join(unknown)} was found; install it, and try again")
    rows = ["| package | version | licence | locked in |", "|---|---|---|---|"]
    for pin in pins:
        locks = ", ".join(lock for lock in LOCKS if pin in blocks[lock])
        rows.append(f"| {' | '.join(pin)} | {known[pin].replace('|', '/')} | {locks} |")
    PAGE.write_text(ABOUT + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(pins)} packages")


if __name__ == "__main__":
    main()
