# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What the kernel counts for a process and everything below it.

Source: Linux Documentation/filesystems/proc.rst (smaps_rollup, status), Documentation/scheduler/sched-stats.rst
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# What a vanished thread or process gives: it counts as nothing.
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class Memory:
    """In MiB. `rss` counts shared file pages whole, `pss` by share, `anonymous` is what nobody else could provide."""

    rss: float
    pss: float
    anonymous: float


@dataclass(frozen=True, slots=True)
class Activity:
    """Since the process began: time on a processor, and how often a thread of it went to sleep of its own accord.

    As often as it goes to sleep it is woken; how often others displace it says nothing about it.
    """

    cpu_ns: int
    sleeps: int


def memory(pid: int) -> Memory:
    """Return the memory of a process and its descendants."""
    found = {"Rss": 0, "Pss": 0, "Anonymous": 0}
    for member in family(pid):
        with suppress(*_GONE):
            for name, value in _fields(Path(f"/proc/{member}/smaps_rollup")):
                if name in found:
                    found[name] += int(value.split()[0])
    return Memory(*(found[name] / 1024 for name in ("Rss", "Pss", "Anonymous")))


def threads(pid: int) -> int:
    """Return the number of threads of a process and its descendants."""
    return sum(1 for _ in _tasks(family(pid)))


def activity(pid: int) -> Activity:
    """Return what a process and its descendants have done so far."""
    cpu_ns = sleeps = 0
    for task in _tasks(family(pid)):
        with suppress(*_GONE):
            cpu_ns += int((task / "schedstat").read_text().split()[0])
            sleeps += sum(int(value) for name, value in _fields(task / "status") if name == "voluntary_ctxt_switches")
    return Activity(cpu_ns, sleeps)


def family(pid: int) -> list[int]:
    """Return a process and its descendants, as they are now."""
    members = [pid]
    for member in members:
        for task in _tasks([member]):
            with suppress(*_GONE):
                members.extend(map(int, (task / "children").read_text().split()))
    return members


def _tasks(pids: Iterable[int]) -> Iterator[Path]:
    for pid in pids:
        with suppress(*_GONE):
            yield from Path(f"/proc/{pid}/task").iterdir()


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name, value.strip()
