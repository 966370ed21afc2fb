# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The tables. Pure: samples in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.plugin import targets
from bench.plugin.extent import BOARD, MANY, MOST, SCANNED
from bench.plugin.measure import GO_LOOP
from bench.plugin.samples import Figure, Samples, ratio
from bench.plugin.subject import OURS


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: what, and which percentile of which samples. `q` 0 stands for an answer in words."""

    title: str
    key: str
    q: float = 0.5


@dataclass(frozen=True, slots=True)
class Table:
    """A heading and its lines. `rivals` replaces the peers, for what only some other program does."""

    title: str
    rows: tuple[Row, ...]
    rivals: tuple[str, ...] = ()


def _sized(text: str, key: str, sizes: Iterable[int], q: float = 0.5) -> list[Row]:
    return [Row(f"{text}, {size:,} devices", f"{key}@{size}", q) for size in sizes]


_BOTH: Final = (BOARD, MANY)
_ALL: Final = (BOARD, MANY, MOST)

TABLES: Final = (
    Table("What is listed", tuple(_sized("healthy devices", "devices", _ALL, 0))),
    Table(
        "Start, ms from exec",
        (
            *_sized("every resource registered", "registered", _BOTH),
            *_sized("every device listed", "listed", _BOTH),
        ),
    ),
    Table(
        "Idle memory, MiB",
        (
            *_sized("RSS", "rss", _ALL),
            *_sized("PSS", "pss", _ALL),
            *_sized("anonymous", "anonymous", _ALL),
            *_sized("RSS after the Allocates below", "rss-used", _BOTH),
        ),
    ),
    Table(
        "Idle activity",
        (
            *_sized("threads", "threads", _BOTH),
            *_sized("processor time, µs a second", "cpu-us", _BOTH),
            *_sized("wake-ups a minute", "wake-ups", _BOTH),
            *_sized("seconds of a minute with one", "awake", _BOTH),
        ),
    ),
    Table(
        "Device event to the kubelet's stream, ms",
        (*_sized("gone", "gone", _BOTH), *_sized("back", "back", _BOTH)),
    ),
    Table(
        "Allocate from a Go client, µs",
        (
            *_sized("1 device, p50", "allocate-1", _BOTH),
            *_sized("1 device, p99", "allocate-1", _BOTH, 0.99),
            *_sized("8 devices, p50", "allocate-8", _BOTH),
            *_sized("8 devices, p99", "allocate-8", _BOTH, 0.99),
            *_sized("an id that was never listed", "unknown-id", (BOARD,), 0),
        ),
    ),
    Table(
        "Kubelet restart, ms from the new socket until all is registered",
        (
            Row("killed, folder emptied, new socket at once", f"restart-emptied@{BOARD}"),
            Row("killed, only kubelet.sock made again", f"restart-alone@{BOARD}"),
            Row("killed, folder emptied, new socket much later", f"restart-gap@{BOARD}"),
            Row("no kubelet at the plugin's start", f"restart-absent@{BOARD}"),
        ),
    ),
    Table(
        "Scan, ms a pass (the Go loop reads vendor, class and NUMA node)",
        (
            *_sized("the same facts", "scan-facts", SCANNED),
            *_sized("everything that a start looks at", "scan-first", SCANNED),
            *_sized("everything that a rescan looks at", "scan-again", SCANNED),
        ),
        (GO_LOOP,),
    ),
)


def number(value: float) -> str:
    """Return a number with three digits that count."""
    for limit, digits in ((9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def cell(figure: Figure | None) -> str:
    """Return a figure with what it lacks."""
    if figure is None:
        return "-"
    if figure.value is None:
        return f"never (0 of {figure.tried})"
    return number(figure.value) + (f" ({figure.missed} of {figure.tried} missed)" if figure.missed else "")


def rendered(samples: Samples, peers: Sequence[str]) -> str:
    """Return every table of which anything was measured."""
    return "\n".join(part for table in TABLES if (part := _table(table, samples, peers)))


def _table(table: Table, samples: Samples, peers: Sequence[str]) -> str:
    rivals = table.rivals or tuple(peers)
    lines = [(table.title, OURS, *(head for rival in rivals for head in (rival, "ours is")), "target", "")]
    for row in table.rows:
        line = _words(row, samples, rivals) if row.q == 0 else _numbers(row, samples, rivals)
        if any(text not in ("", "-") for text in line[1:-2]):
            lines.append(line)
    return _aligned(lines) if len(lines) > 1 else ""


def _words(row: Row, samples: Samples, rivals: Sequence[str]) -> tuple[str, ...]:
    said = [samples.text(subject, row.key) or "-" for subject in (OURS, *rivals)]
    return (row.title, said[0], *(text for answer in said[1:] for text in (answer, "")), "", "")


def _numbers(row: Row, samples: Samples, rivals: Sequence[str]) -> tuple[str, ...]:
    ours = samples.figure(OURS, row.key, row.q)
    others: list[str] = []
    for rival in rivals:
        other = samples.figure(rival, row.key, row.q)
        times = None if ours is None or other is None else ratio(ours, other)
        others += [cell(other), "" if times is None else f"x{number(times)}"]
    target = targets.find(row.key, row.q)
    limit = None if target is None else targets.bound(target, samples, rivals)
    if limit is None or ours is None:
        return (row.title, cell(ours), *others, "", "")
    allowed = number(limit.low) if limit.low == limit.high else f"{number(limit.low)} to {number(limit.high)}"
    return (row.title, cell(ours), *others, f"<= {allowed} ({limit.origin})", limit.verdict(ours))


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join((text[0], "-" * max(map(len, text)), *text[1:], ""))
