"""Reads what a running run exports, from the endpoints that its events name, as Prometheus would."""

import contextlib
import json
import threading
import urllib.request
from collections import defaultdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from skyrl_maze.runlog import EVENTS_FILE

EVERY_S = 0.5


class Scraper:
    """Scrapes a run's endpoints from its start to its end, as a context around it.

    Args:
        root: the run's folder, which need not be there yet.
    """

    def __init__(self, root: Path) -> None:
        self._events, self._ended = root / EVENTS_FILE, threading.Event()
        self._thread = threading.Thread(target=self._scrape, daemon=True)
        self.seen: dict[str, set[tuple[frozenset[tuple[str, str]], float]]] = defaultdict(set)
        """Every sample by its metric's name: labels and value."""

    def __enter__(self) -> "Scraper":
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def _scrape(self) -> None:
        urls: list[str] = []
        while not self._ended.wait(EVERY_S):
            urls = urls or self._urls()
            for url in urls:
                with contextlib.suppress(OSError):  # it is about to end
                    with urllib.request.urlopen(url, timeout=10) as answer:
                        text = answer.read().decode()
                    for family in text_string_to_metric_families(text):
                        for sample in family.samples:
                            self.seen[sample.name].add((frozenset(sample.labels.items()), sample.value))

    def _urls(self) -> list[str]:
        if not self._events.exists():
            return []
        for line in self._events.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and (event := json.loads(line))["event"] == "exporting_metrics":
                return list(event["urls"])
        return []
