"""`skyrl-maze report`: one HTML page of a run, of a result, or of two side by side."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or one that `skyrl-maze play --out` made.")],
    other: Annotated[Path | None, typer.Argument(help="Another one, to be shown beside it.")] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is no such page.")] = False,
) -> None:
    """Write one HTML file with the learning curve, all mazes and a replay of every episode.

    It can be made again at any time while the run goes on; what is not finished is left out, and it says so.

    Example: skyrl-maze report runs/maze-cpu --out report.html
    """
    from skyrl_maze.report import gather
    from skyrl_maze.report_page import render_page, write_page

    data = gather([folder] if other is None else [folder, other])
    page = render_page(data)
    write_page(out, page, force)
    evaluations = [
        point["evaluation"] for run in data["runs"] for point in run["curve"] if point["evaluation"]
    ]
    print(f"page         {out}, {len(page.encode()):,} bytes")
    print(f"evaluations  {len(evaluations)}")
    print(f"episodes     {sum(len(evaluation['episodes']) for evaluation in evaluations)}")
    for run in data["runs"]:
        for note in run["notes"]:
            print(f"note         {run['name']}: {note}")
