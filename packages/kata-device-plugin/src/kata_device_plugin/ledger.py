# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Which devices are listed, and in what health: decided from what was seen, and nothing else.

Pure but for its own state: time comes in as a number, nothing is read. A device is on the list from the first time
that it is seen on a VFIO driver until it is seen off it; what vanishes stays on the list, Unhealthy, since a pod may
still hold its id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from kata_device_plugin.preference import Place
from kata_device_plugin.scanner import Sighting, Standing
from pcifacts.address import PciAddress, by_ordinal
from pcifacts.ids import DeviceKind

# sysfs sends no events: after a device lost its node it is looked at again at these times, counted from its last
# change of standing. An unbind by hand, or a rebind to another driver, has settled by the last but one.
RECHECKS_S: Final = (0.02, 0.1, 0.5, 1.0)

# A device off VFIO drivers for this long was taken off on purpose; less is a rebind, which must not move the capacity.
SETTLED_S: Final = 0.45


@dataclass(frozen=True, slots=True)
class Listed:
    """One device on the list. `reason` says why it is not healthy; `node` is the path of its cdev while it is."""

    address: PciAddress
    kind: DeviceKind
    place: Place
    node: str
    healthy: bool
    reason: str = ""


class Verdict(StrEnum):
    """What became of a device."""

    LISTED = "listed"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    MOVED = "moved"
    """Healthy before and after, behind another cdev or in another place."""
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Change:
    """One device that changed; `listed` is how it stands now, or how it last stood when it left."""

    verdict: Verdict
    listed: Listed
    reason: str = ""


@dataclass(slots=True)
class _Unsettled:
    standing: Standing
    since_s: float
    step: int = 0


class Ledger:
    """The list of devices, advanced by sightings."""

    def __init__(self) -> None:
        """Start with an empty list."""
        self._listed: dict[PciAddress, Listed] = {}
        self._unsettled: dict[PciAddress, _Unsettled] = {}

    def addresses(self) -> tuple[PciAddress, ...]:
        """Every address on the list."""
        return tuple(self._listed)

    def find(self, address: PciAddress) -> Listed | None:
        """Return how a device is listed, or None when it is not."""
        return self._listed.get(address)

    def of_kind(self, kind: DeviceKind) -> tuple[Listed, ...]:
        """Return the listed devices of a kind by address."""
        members = [listed for listed in self._listed.values() if listed.kind is kind]
        members.sort(key=lambda listed: by_ordinal(listed.address))
        return tuple(members)

    def apply(self, sightings: Iterable[Sighting], now_s: float) -> tuple[Change, ...]:
        """Take in what was seen; return what changed, in the order of the sightings."""
        changes: list[Change] = []
        for sighting in sightings:
            self._settle(sighting, now_s)
            before = self._listed.get(sighting.address)
            if sighting.standing in (Standing.USABLE, Standing.UNUSABLE) and sighting.kind and sighting.place:
                changes.extend(self._present(before, sighting, sighting.kind, sighting.place))
            elif before is not None:
                changes.extend(self._missing(before, sighting, now_s))
        return tuple(changes)

    def due(self, now_s: float) -> tuple[PciAddress, ...]:
        """Return the devices that have to be looked at again by now, and plan their next look."""
        due = [address for address, state in self._unsettled.items() if state.since_s + RECHECKS_S[state.step] <= now_s]
        for address in due:
            state = self._unsettled[address]
            state.step += 1
            if state.step == len(RECHECKS_S):
                del self._unsettled[address]
        return tuple(due)

    def due_at_s(self) -> float | None:
        """Return when the next device has to be looked at again, or None when all have settled."""
        return min((state.since_s + RECHECKS_S[state.step] for state in self._unsettled.values()), default=None)

    def _present(self, before: Listed | None, sighting: Sighting, kind: DeviceKind, place: Place) -> Iterable[Change]:
        healthy = sighting.standing is Standing.USABLE
        after = Listed(sighting.address, kind, place, sighting.node, healthy, sighting.reason)
        if before == after:
            return
        if before is not None and before.kind is not kind:
            yield Change(Verdict.LEFT, before, f"another device, of kind {kind}, sits at its address")
            before = None
        self._listed[sighting.address] = after
        if before is None:
            yield Change(Verdict.LISTED, after, sighting.reason)
        elif before.healthy == healthy:
            yield Change(Verdict.MOVED if healthy else Verdict.UNHEALTHY, after, sighting.reason)
        else:
            yield Change(Verdict.HEALTHY if healthy else Verdict.UNHEALTHY, after, sighting.reason)

    def _missing(self, before: Listed, sighting: Sighting, now_s: float) -> Iterable[Change]:
        state = self._unsettled.get(sighting.address)
        off_purpose = sighting.standing in (Standing.OFF_VFIO, Standing.WITHOUT_NODES)
        if off_purpose and (state is None or now_s - state.since_s >= SETTLED_S):
            del self._listed[sighting.address]
            self._unsettled.pop(sighting.address, None)
            yield Change(Verdict.LEFT, before, sighting.reason)
            return
        after = replace(before, healthy=False, reason=sighting.reason)
        if after != before:
            self._listed[sighting.address] = after
            yield Change(Verdict.UNHEALTHY, after, sighting.reason)

    def _settle(self, sighting: Sighting, now_s: float) -> None:
        """Watch a device that lost its node more closely until it stays as it is."""
        if sighting.standing is Standing.USABLE or sighting.address not in self._listed:
            self._unsettled.pop(sighting.address, None)
            return
        state = self._unsettled.get(sighting.address)
        listed = self._listed[sighting.address]
        if state is None:
            if listed.healthy or sighting.standing is Standing.OFF_VFIO:
                self._unsettled[sighting.address] = _Unsettled(sighting.standing, now_s)
        elif state.standing is not sighting.standing:
            self._unsettled[sighting.address] = _Unsettled(sighting.standing, now_s)
