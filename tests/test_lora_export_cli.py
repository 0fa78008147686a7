"""The commands around an adapter: what they print, and how they refuse."""

import pytest

from skyrl_maze import cli, lora_export_cli
from skyrl_maze.export import ExportReport


@pytest.fixture
def run(run_skyrl_maze, monkeypatch):
    """Runs `... COMMAND` as the console script does, on a terminal of the usual width."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(cli, "app", lora_export_cli.app)
    return run_skyrl_maze


@pytest.fixture
def exported(monkeypatch):
    """Lets `export_merged` give a report, and notes what it was asked for."""
    asked = []

    def set_report(**changes):
        report = ExportReport(
            **{"merged_tensors": 252, "shards": 4, "update_norm": 1.0, "rounding_share": 0.021, **changes}
        )

        def export_merged(base, adapter, out, progress):
            asked.append((str(base), str(adapter), str(out)))
            progress(256, 256)
            return report

        monkeypatch.setattr(lora_export_cli, "export_merged", export_merged)
        return asked

    return set_report


EXPORT = ("export", "--base", "b", "--adapter", "a", "--out", "o")


def test_export_says_what_it_made(run, exported):
    asked = exported()
    code, out, err = run(*EXPORT)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "model     o",
        "merged    252 tensors in 4 files",
        "rounding  2.1% of the update",
    ]
    assert asked == [("b", "a", "o")]


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"update_norm": 0.0, "rounding_share": 0.0}, "The adapter adds nothing: every B is zero"),
        ({"rounding_share": 0.4}, "Rounding took much of the update: serve the adapter beside its base"),
    ],
)
def test_export_says_what_is_odd(run, exported, report, said):
    exported(**report)
    _, out, _ = run(*EXPORT)
    assert out.splitlines()[-1].startswith(said)


def test_upload_says_where(run, monkeypatch):
    def upload_adapter(folder, address, name, progress):
        progress(1, 2)
        return f"{address}/{name}"

    monkeypatch.setattr(lora_export_cli, "upload_adapter", upload_adapter)
    code, out, err = run("upload", "a", "--to", "s3://b/p", "--name", "v1")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["adapter   s3://b/p/v1", "marker    s3://b/p/v1/COMPLETE"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (EXPORT, "error: export of a with base b: no base model at b: it is not a folder"),
        (
            ("upload", "a", "--to", "s3://b/p", "--name", "v1"),
            "error: no adapter at a: adapter_config.json and",
        ),
        (
            ("upload", "a", "--to", "b/p", "--name", "v1"),
            "error: cannot publish to 'b/p': give an address such as",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(run, argv, said):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith(said)
    assert len(err.splitlines()) == 1


def test_the_bar_moves_on_a_terminal_alone(monkeypatch, capsys):
    shown = []
    for is_terminal in ("0", "1"):
        monkeypatch.setenv("TTY_COMPATIBLE", is_terminal)
        with lora_export_cli._bar("merging", lora_export_cli.MofNCompleteColumn()) as progress:
            progress(3, 7)
        shown.append(capsys.readouterr())
    (quiet_out, quiet_err), (out, err) = shown
    assert (quiet_out, quiet_err, out) == ("", "", "")
    assert "3/7" in err


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ("export", ("needs no export", "bfloat16 loses", "must not exist", "Example: export --base")),
        ("upload", ("COMPLETE", "extra s3", "never overwritten", "Credentials")),
    ],
)
def test_help_teaches(run, command, taught):
    code, out, _ = run(command, "--help")
    words = " ".join(out.replace("│", " ").split())
    assert code == 0
    assert [part for part in taught if part not in words] == []
