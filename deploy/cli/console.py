"""The terminal: plain where it is a file or a pipe, coloured where it is a screen (NO_COLOR honoured)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

_FILE_WIDTH = 200
_DETAIL_CHARACTERS = 60


class Step:
    """A running step. `update` may be called often."""

    def __init__(self, progress: Progress | None, label: str) -> None:
        self._progress = progress
        self._label = label
        self._task = progress.add_task(escape(label), total=None, detail="") if progress else None

    def update(self, detail: str = "", fraction: float | None = None) -> None:
        """`fraction` of the whole, 0 to 1; without one the bar only moves."""
        if self._progress is None or self._task is None:
            return
        self._progress.update(
            self._task,
            detail=escape(
                detail if len(detail) <= _DETAIL_CHARACTERS else f"{detail[: _DETAIL_CHARACTERS - 1]}…"
            ),
            total=None if fraction is None else 1.0,
            completed=0 if fraction is None else fraction,
        )

    def remove(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


class Terminal:
    """What commands print to: results on standard output, everything else on standard error."""

    def __init__(self) -> None:
        self.out = Console(highlight=False, soft_wrap=True)
        if not self.out.is_terminal:
            # A file has no width; tables cut to 80 columns would lose what a reader greps for.
            self.out.width = _FILE_WIDTH
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None

    def json(self, value: object) -> None:
        """One JSON document for scripts, never coloured or wrapped."""
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")
        sys.stdout.flush()

    def error(self, message: str) -> None:
        one_line = " ".join(message.split("\n")).strip()
        self.err.print(f"[bold red]error:[/] {escape(one_line)}")

    def warn(self, message: str) -> None:
        self.err.print(f"[bold yellow]warning:[/] {escape(message)}")

    def note(self, message: str) -> None:
        self.err.print(escape(message))

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Within it steps are drawn at the bottom of a terminal; elsewhere they are lines when done."""
        if not self.err.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[detail]}"),
        )
        with Progress(*columns, console=self.err, transient=True) as progress:
            self._progress = progress
            try:
                yield
            finally:
                self._progress = None

    def start_step(self, label: str) -> Step:
        return Step(self._progress, label)

    @contextmanager
    def step(self, label: str) -> Iterator[Step]:
        """One step with its time; a line stays when it is done."""
        started = time.monotonic()
        step = self.start_step(label)
        try:
            yield step
        finally:
            step.remove()
        self.done(label, time.monotonic() - started)

    def done(self, label: str, seconds: float | None = None) -> None:
        taken = "" if seconds is None else f" [dim]({seconds:.1f} s)[/]"
        self.err.print(f"[green]✓[/] {escape(label)}{taken}")

    def failed(self, label: str) -> None:
        self.err.print(f"[red]✗[/] {escape(label)}")


def plain_table(*columns: str) -> Table:
    """A table with little drawn around it, so that more fits."""
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    return table


def human_bytes(count: float) -> str:
    """1536 as "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of nested tables with dotted names."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
