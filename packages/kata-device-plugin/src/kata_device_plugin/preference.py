# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Which of the available devices a container should get: near to one another, and always the same answer.

Pure. Nothing here raises: an error would fail a pod's admission, and any correct set is better than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

_NOWHERE_NUMA = 1 << 30


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device sits.

    `numa_node` is None when unknown. `upstream` is the chain of PCI bridges above the device, root first, as sysfs
    spells them. `order` sorts devices by address.
    """

    numa_node: int | None
    upstream: tuple[str, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    device_id: str
    levels: tuple[tuple[int, str], ...]
    order: tuple[tuple[int, ...], str]
    fixed: bool


def preferred(
    available: Sequence[str], must_include: Sequence[str], size: int, places: Mapping[str, Place]
) -> tuple[str, ...]:
    """Choose `size` of the available ids, the must-includes first.

    The set stays on one NUMA node if it fits on one, then below one PCIe root, then below one switch, and so on down;
    of several places that fit, the fullest is used up first, so that large sets stay possible. What is still equal is
    decided by the lowest address. Ids without a known place come last.

    Shape: unique ids, must-includes in address order, then the others in address order. Exactly `size` of them,
    or as many as there are when fewer are available; the lowest must-includes when these alone are more than `size`.
    """
    fixed = set(must_include)
    candidates = sorted(
        (_candidate(device_id, places.get(device_id), fixed=device_id in fixed) for device_id in {*available, *fixed}),
        key=lambda candidate: candidate.order,
    )
    must = [candidate for candidate in candidates if candidate.fixed]
    if len(must) >= size:
        return tuple(candidate.device_id for candidate in must[: max(size, 0)])
    chosen = {candidate.device_id for candidate in _fill(candidates, size, 0)}
    rest = [candidate for candidate in candidates if candidate.device_id in chosen and not candidate.fixed]
    return tuple(candidate.device_id for candidate in [*must, *rest])


def _fill(candidates: Sequence[_Candidate], size: int, level: int) -> list[_Candidate]:
    """Choose `size` candidates with every fixed one among them; they all share the levels above `level`."""
    if size >= len(candidates):
        return list(candidates)
    fixed = [candidate for candidate in candidates if candidate.fixed]
    if all(len(candidate.levels) <= level for candidate in candidates):
        free = (candidate for candidate in candidates if not candidate.fixed)
        return [*fixed, *(candidate for candidate, _ in zip(free, range(size - len(fixed)), strict=False))]
    places = _partition(candidates, level)
    # Each place owes its fixed candidates; what it may get beyond them is shared out below.
    owed = [sum(candidate.fixed for candidate in place) for place in places]
    grants = owed.copy()
    missing = size - sum(owed)
    while missing > 0:
        room = [index for index, place in enumerate(places) if grants[index] < len(place)]
        index = min(room, key=lambda index: _rank(places[index], grants[index], missing, owed[index], level, index))
        share = min(missing, len(places[index]) - grants[index])
        grants[index] += share
        missing -= share
    return [
        candidate
        for place, grant in zip(places, grants, strict=True)
        if grant
        for candidate in _fill(place, grant, level + 1)
    ]


def _rank(
    place: Sequence[_Candidate], granted: int, missing: int, owed: int, level: int, index: int
) -> tuple[bool, bool, bool, int, int]:
    """Order places: with must-includes, then known ones, then the tightest that fits, else the one with most room."""
    room = len(place) - granted
    fits = room >= missing
    return not owed, _is_nowhere(place[0], level), not fits, room if fits else -room, index


def _is_nowhere(candidate: _Candidate, level: int) -> bool:
    return level >= len(candidate.levels) or candidate.levels[level][0] == _NOWHERE_NUMA


def _partition(candidates: Iterable[_Candidate], level: int) -> list[list[_Candidate]]:
    def key(candidate: _Candidate) -> tuple[int, str]:
        return candidate.levels[level] if level < len(candidate.levels) else (_NOWHERE_NUMA, "")

    places = [list(place) for _, place in groupby(sorted(candidates, key=key), key)]
    return sorted(places, key=lambda place: (_is_nowhere(place[0], level), place[0].order))


def _candidate(device_id: str, place: Place | None, *, fixed: bool) -> _Candidate:
    if place is None:
        return _Candidate(device_id, ((_NOWHERE_NUMA, ""),), ((_NOWHERE_NUMA,), device_id), fixed)
    numa = _NOWHERE_NUMA if place.numa_node is None else place.numa_node
    return _Candidate(
        device_id, ((numa, ""), *((0, bridge) for bridge in place.upstream)), (place.order, device_id), fixed
    )
