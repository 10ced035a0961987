"""Draws a trace as a waterfall for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sealmesh.telemetry.attributes import Attribute, AttributeValue
from sealmesh.telemetry.trace_store import SpanRecord, Trace

__all__ = ["waterfall"]

# Attributes that help to read a trace, and how they are called there; the rest is noise at a glance.
_SHOWN: Final[Mapping[str, str]] = {
    Attribute.HTTP_STATUS: "http",
    Attribute.GEN_AI_MODEL: "model",
    Attribute.GEN_AI_INPUT_TOKENS: "in",
    Attribute.GEN_AI_CACHED_TOKENS: "cached",
    Attribute.GEN_AI_OUTPUT_TOKENS: "out",
    Attribute.GEN_AI_FINISH_REASON: "finish",
    Attribute.GEN_AI_TIME_TO_FIRST_TOKEN_S: "ttft_s",
    Attribute.KV_BLOCKS_ASKED: "blocks_asked",
    Attribute.KV_BLOCKS_HIT: "blocks_hit",
    Attribute.KV_BLOCKS_STORED: "blocks_stored",
    Attribute.KV_BYTES: "bytes",
    Attribute.KV_OUTCOME: "kv",
    Attribute.PII_FINDINGS: "findings",
    Attribute.PII_TYPES: "types",
    Attribute.PII_RESTORED: "restored",
    Attribute.WORKER_NAME: "worker",
    Attribute.ERROR_TYPE: "error",
    Attribute.ERROR_REASON: "reason",
}
_COLORS: Final = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def waterfall(trace: Trace, *, bar_width: int = 32) -> RenderableType:
    """A table of the trace: service, span, offset, bar, duration, what matters about it.

    Args:
        trace: what to draw.
        bar_width: characters of the time axis.
    """
    started = datetime.fromtimestamp(trace.start_ns / 1e9, UTC).astimezone()
    total_ns = max(1, trace.end_ns - trace.start_ns)
    services = list(dict.fromkeys(span.service for span in trace.spans))
    title = Text.assemble(
        ("trace ", "dim"),
        (trace.trace_id, "bold"),
        (f"  {started:%Y-%m-%d %H:%M:%S}  ", "dim"),
        (_duration(total_ns), "bold"),
        (f"  {len(trace.spans)} spans, {len(services)} services", "dim"),
    )
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("service", no_wrap=True)
    table.add_column("span", overflow="fold")
    table.add_column("offset", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("duration", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for depth, span in trace.walk():
        color = _COLORS[services.index(span.service) % len(_COLORS)]
        failed = span.status == "error"
        table.add_row(
            Text(span.service, color),
            Text("  " * depth + _short(span), "red" if failed else ""),
            _duration(span.start_ns - trace.start_ns),
            Text(_bar(span, trace.start_ns, total_ns, bar_width), "red" if failed else color),
            _duration(span.duration_ns),
            Text(_remarks(span.attributes), "dim"),
        )
    return Group(title, table)


def _short(span: SpanRecord) -> str:
    """The name without the package of an RPC; an arrow for the calling side."""
    package, slash, method = span.name.rpartition("/")
    name = f"{package.rpartition('.')[2]}{slash}{method}"
    return f"→ {name}" if span.kind == "client" else name


def _bar(span: SpanRecord, origin_ns: int, total_ns: int, width: int) -> str:
    """A bar to an eighth of a character; never empty, never beyond the axis."""
    start = min(width * 8 - 1, max(0, (span.start_ns - origin_ns) * width * 8 // total_ns))
    length = max(1, min(width * 8 - start, span.duration_ns * width * 8 // total_ns))
    lead, cells = start // 8, (start % 8 + length + 7) // 8
    full, rest = divmod(length, 8)
    bar = _EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")
    return (" " * lead + bar.ljust(cells)).ljust(width)[:width]


def _duration(nanoseconds: int) -> str:
    milliseconds = nanoseconds / 1e6
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.2f} s"
    return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


def _remarks(attributes: Mapping[str, AttributeValue]) -> str:
    return " ".join(f"{label}={attributes[name]}" for name, label in _SHOWN.items() if name in attributes)
