# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The measurements, each with every subject in turn. Times are taken by the kubelet or by whoever changes the node.

Keys of samples are `<what>@<devices>`; units are in the name or milliseconds.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.plugin import proc
from bench.plugin.board import Board
from bench.plugin.extent import BOARD, MANY, MOST, SCANNED, Extent
from bench.plugin.kubelet import Kubelet, Order, State
from bench.plugin.samples import Samples
from bench.plugin.subject import OURS, Place, Running, Subject

GO_LOOP: Final = "go loop"
UNKNOWN_ID: Final = "ffff:ff:1f.7"
# A quiet moment between two events: our plugin gathers arrivals that follow one another within 50 ms.
_QUIET_S: Final = 0.15
# How often a subject that never saw an event is asked again before it counts as blind to it.
_TRIES: Final = 2


class NothingToMeasure(Exception):
    """Our own plugin lists nothing. `log` is the end of what it said."""

    def __init__(self, devices: int, log: str) -> None:
        super().__init__(devices, log)
        self.devices = devices
        self.log = log

    def __str__(self) -> str:
        return f"{OURS}: lists nothing on a node with {self.devices} devices, its log ends: {self.log or 'empty'}"


@dataclass(frozen=True, slots=True)
class Lab:
    """What every measurement needs."""

    root: Path
    kubelet: Path
    privileged: bool
    extent: Extent
    samples: Samples
    say: Callable[[str], None]
    _places: dict[tuple[int, str], Place] = field(default_factory=dict)

    def board(self, count: int) -> Board:
        """Write a node of a size."""
        self.say(f"writing a node with {count} devices")
        return Board(self.root / f"n{count}", count, privileged=self.privileged)

    def place(self, board: Board, name: str) -> Place:
        """Make a place on a node; one that is named twice is the same."""
        known = board.count, name
        if known not in self._places:
            # By number: a socket's path may have 107 bytes, and a subject's name may be long.
            root = self.root / f"p{len(self._places)}"
            self._places[known] = Place(root, board, privileged=self.privileged)
        return self._places[known]


@dataclass(frozen=True, slots=True)
class Session:
    """A subject that runs beside a kubelet; `state` is how far it came."""

    subject: Subject
    place: Place
    kubelet: Kubelet
    running: Running
    started_ns: int
    state: State


@contextmanager
def session(lab: Lab, subject: Subject, place: Place, *, expected: int) -> Iterator[Session]:
    """Start a kubelet, then the subject, and wait for the list."""
    place.empty()
    with Kubelet(lab.kubelet, place.plugin_dir, place.kubelet_log) as kubelet:
        kubelet.start()
        with place.prepare(subject) as running:
            started_ns = running.go()
            state = kubelet.wait(expected, after_ns=started_ns, within_s=lab.extent.start_patience_s)
            yield Session(subject, place, kubelet, running, started_ns, state)


class Reach:
    """How many devices each subject lists on a node, found by a first start that is not counted."""

    def __init__(self, lab: Lab, subjects: Sequence[Subject], board: Board) -> None:
        self._healthy: dict[str, int] = {}
        for subject in subjects:
            lab.say(f"{board.count} devices: first start of {subject.name}, not counted")
            with session(lab, subject, lab.place(board, subject.name), expected=board.count) as warm:
                reached = warm.kubelet.state()
                self._healthy[subject.name] = reached.healthy
                lab.samples.note(subject.name, f"devices@{board.count}", _described(reached))
                if not reached.healthy:
                    log = warm.place.log.read_text(errors="replace")[-500:].strip()
                    if subject.name == OURS:
                        raise NothingToMeasure(board.count, log)
                    lab.say(f"{subject.name} lists nothing; its log ends: {log or 'empty'}")

    def of(self, subject: Subject) -> int:
        """Return how many devices it lists, 0 for a subject that does not work here."""
        return self._healthy[subject.name]

    def working(self, subjects: Sequence[Subject]) -> list[Subject]:
        """Return the subjects that list anything."""
        return [subject for subject in subjects if self.of(subject)]


def in_use(lab: Lab, subjects: Sequence[Subject], board: Board, reach: Reach) -> None:
    """Start, events both ways and Allocate; in each round every subject once."""
    extent, count = lab.extent, board.count
    rounds = extent.rounds if count == BOARD else extent.rounds_of_many
    gpus = iter(board.gpus * (rounds * len(subjects) * extent.events))
    blind: set[tuple[str, str]] = set()
    for number in range(rounds + extent.starts):
        for subject in reach.working(subjects):
            full = number < rounds
            lab.say(f"{count} devices: {'round' if full else 'start'} {number + 1} of {subject.name}")
            with session(lab, subject, lab.place(board, subject.name), expected=reach.of(subject)) as running:
                _record_start(lab, running, count)
                if full and running.state.met:
                    # In this order: a peer that never sees a device return has fewer and fewer to allocate.
                    _allocations(lab, running)
                    _events(lab, running, gpus, blind)


def _record_start(lab: Lab, running: Session, count: int) -> None:
    name, state = running.subject.name, running.state
    if not state.met:
        lab.samples.add(name, f"registered@{count}", missed=1)
        lab.samples.add(name, f"listed@{count}", missed=1)
        return
    lab.samples.add(name, f"registered@{count}", _ms(max(state.registered.values()) - running.started_ns))
    lab.samples.add(name, f"listed@{count}", _ms(state.at_ns - running.started_ns))


def _events(lab: Lab, running: Session, gpus: Iterator[str], blind: set[tuple[str, str]]) -> None:
    """Take devices away and bring them back, one at a time; what is never seen is not waited for again and again."""
    name, board = running.subject.name, running.place.board
    patience_s = lab.extent.event_patience_s
    found: dict[str, list[float]] = {"gone": [], "back": []}
    missed = {"gone": 0, "back": 0}
    healthy = running.state.healthy
    sees_returns = (name, "back") not in blind
    for _ in range(lab.extent.events if sees_returns else min(lab.extent.events, len(board.gpus))):
        address = next(gpus)
        for way, change, expected in (("gone", board.take_away, healthy - 1), ("back", board.bring_back, healthy)):
            time.sleep(_QUIET_S)
            at_ns = change(address)
            if (name, way) in blind or (way == "back" and missed["gone"]):
                continue
            state = running.kubelet.wait(expected, after_ns=at_ns, within_s=patience_s)
            if state.met:
                found[way].append(_ms(state.at_ns - at_ns))
                continue
            missed[way] += 1
            if missed[way] >= _TRIES and not found[way]:
                blind.add((name, way))
        if (name, "gone") in blind or (sees_returns and (name, "back") in blind):
            break
        healthy = running.kubelet.state().healthy
    for way, values in found.items():
        if values or missed[way]:
            lab.samples.add(name, f"{way}@{board.count}", *values, missed=missed[way])


def _allocations(lab: Lab, running: Session) -> None:
    name, count = running.subject.name, running.place.board.count
    devices = running.kubelet.state().devices
    resource = max(devices, key=lambda resource: len(devices[resource]))
    ids = devices[resource]
    for size in (1, 8):
        if len(ids) < size:
            continue
        groups = [[one] for one in ids[:8]] if size == 1 else [list(ids[:size])]
        answer = running.kubelet.allocate(resource, groups, calls=lab.extent.calls, warm_up=lab.extent.calls // 5)
        if isinstance(answer, str):
            lab.samples.add(name, f"allocate-{size}@{count}", missed=1)
            lab.samples.note(name, f"allocate-refusal-{size}@{count}", answer)
        else:
            lab.samples.add(name, f"allocate-{size}@{count}", *(ns / 1e3 for ns in answer))
    used = proc.memory(running.running.pid)
    lab.samples.add(name, f"rss-used@{count}", used.rss)
    code, message = running.kubelet.refusal(resource, UNKNOWN_ID)
    time.sleep(_QUIET_S)
    named = "names it" if UNKNOWN_ID in message else "does not name it"
    lives = "" if running.running.is_alive else ", and the process is gone"
    lab.samples.note(name, f"unknown-id@{count}", f"{code}, {named}{lives}")


def idle(lab: Lab, subjects: Sequence[Subject], boards: Sequence[tuple[Board, Reach]]) -> None:
    """Memory and activity of subjects that nobody asks for anything, all of them at the same time."""
    extent = lab.extent
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(
                session(lab, subject, lab.place(board, f"{subject.name} idle"), expected=reach.of(subject))
            )
            for board, reach in boards
            for subject in reach.working(subjects)
        ]
        lab.say(f"idle: {len(sessions)} processes settle for {extent.settle_s:g} s, then {extent.idle_s} s are counted")
        time.sleep(extent.settle_s)
        for running in sessions:
            name, count, pid = running.subject.name, running.place.board.count, running.running.pid
            memory = proc.memory(pid)
            lab.samples.add(name, f"rss@{count}", memory.rss)
            lab.samples.add(name, f"pss@{count}", memory.pss)
            lab.samples.add(name, f"anonymous@{count}", memory.anonymous)
            lab.samples.add(name, f"threads@{count}", proc.threads(pid))
        watched = [running for running in sessions if running.place.board.count != MOST]
        counts = [[proc.activity(running.running.pid)] for running in watched]
        began_s = time.monotonic()
        for second in range(1, extent.idle_s + 1):
            time.sleep(max(0.0, began_s + second - time.monotonic()))
            for running, seen in zip(watched, counts, strict=True):
                seen.append(proc.activity(running.running.pid))
        for running, seen in zip(watched, counts, strict=True):
            name, count = running.subject.name, running.place.board.count
            awake = sum(after.sleeps != before.sleeps for before, after in itertools.pairwise(seen))
            per_minute = 60 / extent.idle_s
            lab.samples.add(name, f"cpu-us@{count}", (seen[-1].cpu_ns - seen[0].cpu_ns) / 1e3 / extent.idle_s)
            lab.samples.add(name, f"wake-ups@{count}", (seen[-1].sleeps - seen[0].sleeps) * per_minute)
            lab.samples.add(name, f"awake@{count}", awake * per_minute)


def restarts(lab: Lab, subjects: Sequence[Subject], board: Board, reach: Reach) -> None:
    """A kubelet that goes and comes back, in each order; the time runs from its new socket."""
    for number in range(lab.extent.restarts):
        for order in (_emptied, _alone, _gap, _absent):
            for subject in reach.working(subjects):
                key = f"restart-{order.__name__.removeprefix('_')}@{board.count}"
                lab.say(f"kubelet restart, {key}, round {number + 1} of {subject.name}")
                took_ms = order(lab, subject, lab.place(board, subject.name), reach.of(subject))
                if took_ms is None:
                    lab.samples.add(subject.name, key, missed=1)
                else:
                    lab.samples.add(subject.name, key, took_ms)


def _emptied(lab: Lab, subject: Subject, place: Place, expected: int) -> float | None:
    """Killed; after a pause the directory is emptied and the new socket made at once, as by a kubelet."""
    return _after_death(lab, subject, place, expected, Order.EMPTIED)


def _alone(lab: Lab, subject: Subject, place: Place, expected: int) -> float | None:
    """Killed; after a pause only its own socket is made again, so that the plugin's stays where it is."""
    return _after_death(lab, subject, place, expected, Order.ALONE)


def _gap(lab: Lab, subject: Subject, place: Place, expected: int) -> float | None:
    """Killed and the directory emptied; the new socket comes much later."""
    return _after_death(lab, subject, place, expected, Order.EMPTIED, gap_s=lab.extent.absence_s)


def _after_death(
    lab: Lab, subject: Subject, place: Place, expected: int, order: Order, *, gap_s: float = 0.0
) -> float | None:
    with session(lab, subject, place, expected=expected) as running:
        if not running.state.met:
            return None
        running.kubelet.kill()
        with Kubelet(lab.kubelet, place.plugin_dir, place.kubelet_log) as new:
            time.sleep(lab.extent.pause_s)
            if gap_s:
                for path in place.plugin_dir.iterdir():
                    path.unlink()
                time.sleep(gap_s)
            return _took_ms(lab, new, expected, order)


def _absent(lab: Lab, subject: Subject, place: Place, expected: int) -> float | None:
    """There is no kubelet when the plugin starts; its first socket comes later."""
    place.empty()
    with (
        Kubelet(lab.kubelet, place.plugin_dir, place.kubelet_log) as kubelet,
        place.prepare(subject) as running,
    ):
        running.go()
        time.sleep(lab.extent.absence_s)
        return _took_ms(lab, kubelet, expected, Order.EMPTIED)


def _took_ms(lab: Lab, kubelet: Kubelet, expected: int, order: Order) -> float | None:
    at_ns = kubelet.start(order)
    state = kubelet.wait(expected, after_ns=at_ns, within_s=lab.extent.restart_patience_s)
    return _ms(max(state.registered.values()) - at_ns) if state.met else None


def scans(lab: Lab, program: Path, boards: Sequence[Board]) -> None:
    """One pass over every device, ours and the Go loop's in turns, each in a process of its own."""
    for board in boards:
        lab.say(f"scan of {board.count} devices")
        passes = lab.extent.scan_passes_of_most if board.count == SCANNED[-1] else lab.extent.scan_passes
        ours = [sys.executable, "-m", "bench.plugin.scan", str(board.sysfs), str(board.dev_vfio)]
        with _asked(ours) as python, _asked([str(program), str(board.sysfs)]) as go:
            turns = [(OURS, python, "facts"), (GO_LOOP, go, "facts"), (OURS, python, "first"), (OURS, python, "again")]
            # The first pass of each is not counted: it fills caches and grows heaps.
            for number in range(passes + 1):
                for name, process, what in turns:
                    count, took_ns = _answer(process, what)
                    if count < board.count:
                        raise RuntimeError(f"{name}, {what}: {count} devices seen, expected {board.count}")
                    if number:
                        lab.samples.add(name, f"scan-{what}@{board.count}", took_ns / 1e6)
    for count in (board.count for board in boards):
        # The Go loop does one thing; every pass of ours is held against it.
        for what in ("first", "again"):
            for done in lab.samples.rounds(GO_LOOP, f"scan-facts@{count}"):
                lab.samples.add(GO_LOOP, f"scan-{what}@{count}", *done.values)


@contextmanager
def _asked(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _answer(process: subprocess.Popen[str], what: str) -> tuple[int, int]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(what + "\n")
    process.stdin.flush()
    count, took_ns = process.stdout.readline().split()
    return int(count), int(took_ns)


def everything(lab: Lab, subjects: Sequence[Subject], scan_program: Path) -> None:
    """Run every measurement."""
    written: dict[int, Board] = {}

    def board(count: int) -> Board:
        if count not in written:
            written[count] = lab.board(count)
        return written[count]

    reached = {count: Reach(lab, subjects, board(count)) for count in (BOARD, MANY, MOST)}
    for count in (BOARD, MANY):
        in_use(lab, subjects, board(count), reached[count])
    restarts(lab, subjects, board(BOARD), reached[BOARD])
    idle(lab, subjects, [(board(count), reach) for count, reach in reached.items()])
    scans(lab, scan_program, [board(count) for count in SCANNED])


def _ms(ns: int) -> float:
    return ns / 1e6


def _described(state: State) -> str:
    parts = [f"{len(ids)} of {resource}" for resource, ids in sorted(state.devices.items())]
    return (", ".join(parts) or "nothing") + (f"; {state.numa} with a NUMA node" if state.numa else "; no NUMA nodes")
