# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""What sysfs and /dev/vfio show of our devices now, read only where something may have changed.

Looks and reports; what follows from a sight is decided in `ledger`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from kata_device_plugin.preference import Place
from pcifacts import function, ids, iommu, sysfs, vfio
from pcifacts.address import PciAddress, by_ordinal
from pcifacts.errors import PciAddressError, PcifactsError
from pcifacts.ids import DeviceKind
from pcifacts.sysfs import Roots, Skipped


class Standing(StrEnum):
    """How a device was seen."""

    USABLE = "usable"
    """On a VFIO driver, its node is the one that sysfs names, its IOMMU group can be owned by one VM."""
    UNUSABLE = "unusable"
    """On a VFIO driver, but something is missing."""
    WITHOUT_NODES = "without-nodes"
    """On a VFIO driver of a kernel that makes no per-device nodes."""
    OFF_VFIO = "off-vfio"
    """On the bus, and on no VFIO driver."""
    ABSENT = "absent"
    """Not on the bus."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One device as it was seen. `kind` and `place` are None where only its absence could be seen."""

    address: PciAddress
    standing: Standing
    reason: str = ""
    kind: DeviceKind | None = None
    node: str = ""
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What one look gave: the devices it concerned, and the entries that could not be understood."""

    sightings: tuple[Sighting, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(slots=True)
class _Facts:
    """What does not change while a function stays on the bus.

    `identity` is the inode and change time of its sysfs directory; `node_identity` that of its node when it was last
    seen to be usable, None otherwise.
    """

    address: PciAddress
    identity: tuple[int, int]
    kind: DeviceKind | None
    place: Place
    companions: tuple[PciAddress, ...]
    node_identity: tuple[int, int] | None = None


class Scanner:
    """Reads the node, and remembers of every cdev the facts that can't change while its function stays.

    The link from cdev to function is read anew at every look, since the kernel gives a free number to the next device.

    Reads: <sysfs>/class/vfio-dev, <sysfs>/bus/pci, <sysfs>/kernel/iommu_groups, <dev-vfio>/devices
    """

    def __init__(self, roots: Roots) -> None:
        """Start with nothing known; nothing is read yet."""
        self._roots = roots
        self._facts: dict[str, _Facts] = {}
        self._numa_nodes: dict[int, int | None] = {}
        self._upstreams: dict[tuple[str, ...], tuple[str, ...]] = {}

    def everything(self, listed: Iterable[PciAddress]) -> Observation:
        """Look at every cdev, and at the listed devices that have none.

        Raises: PathUnreadable when a directory can't be listed: then nothing is known, and nothing must be concluded.
        """
        names = sysfs.entries(self._roots.vfio_class)
        skipped: list[Skipped] = list(vfio.orphan_nodes(self._roots))
        sightings = list(self._look(sorted(names or (), key=_natural), skipped, anew=False))
        present = frozenset(names or ())
        self._facts = {name: facts for name, facts in self._facts.items() if name in present}
        if names is None:
            sightings.extend(self._on_drivers_of_old_kernels())
        seen = {sighting.address for sighting in sightings}
        sightings.extend(self._without_cdev(address) for address in listed if address not in seen)
        return Observation(tuple(sightings), tuple(skipped))

    def names(self, names: Iterable[str]) -> Observation:
        """Look at these cdevs, and at the devices that were behind them before.

        Shape: names as in /dev/vfio/devices; others are skipped.
        """
        names = sorted(set(names), key=_natural)
        before = [self._facts[name].address for name in names if name in self._facts]
        skipped: list[Skipped] = []
        sightings = list(self._look(names, skipped))
        seen = {sighting.address for sighting in sightings}
        sightings.extend(self._without_cdev(address) for address in before if address not in seen)
        return Observation(tuple(sightings), tuple(skipped))

    def is_still(self, address: PciAddress, node: str) -> bool:
        """Whether a device is usable through this node, as it was when it was listed; a handful of system calls."""
        name = node[node.rfind("/") + 1 :]
        if self._is_as_it_was(name):
            return self._facts[name].address == address
        seen = [sighting for sighting in self._look([name], []) if sighting.address == address]
        return bool(seen) and seen[0].standing is Standing.USABLE

    def device(self, address: PciAddress) -> Sighting:
        """Look at one device, whatever its cdev is now."""
        return self._without_cdev(address)

    def _look(self, names: Iterable[str], skipped: list[Skipped], *, anew: bool = True) -> Iterator[Sighting]:
        for name in names:
            if not anew and self._is_as_it_was(name):
                facts = self._facts[name]
                node = vfio.node_path(self._roots, name)
                yield Sighting(facts.address, Standing.USABLE, "", facts.kind, node, facts.place)
                continue
            cdev = vfio.cdev(self._roots, name)
            if isinstance(cdev, vfio.Cdev):
                try:
                    sighting = self._sighting(cdev)
                except PcifactsError as error:
                    self._facts.pop(name, None)
                    skipped.append(function.skipped_function(self._roots, cdev.address, error))
                else:
                    if sighting is not None:
                        yield sighting
            else:
                self._facts.pop(name, None)
                if cdev is not None:
                    skipped.append(cdev)

    def _is_as_it_was(self, name: str) -> bool:
        """Whether a cdev that was usable leads to the same function, through the same node: two system calls.

        A function that left the bus or changed its driver took its node with it, and a new node is a new inode. A
        group with companions is judged anew each time: their drivers change without a trace here.
        """
        facts = self._facts.get(name)
        if facts is None or facts.node_identity is None or facts.companions:
            return False
        try:
            link = os.readlink(f"{self._roots.vfio_class}/{name}")
            node = os.lstat(vfio.node_path(self._roots, name))
        except OSError:
            return False
        is_same = link.endswith(f"/{facts.address.text}/vfio-dev/{name}")
        return is_same and facts.node_identity == (node.st_ino, node.st_ctime_ns)

    def _sighting(self, cdev: vfio.Cdev) -> Sighting | None:
        """Judge one cdev; None when the function behind it is not ours or has just gone."""
        facts = self._facts_of(cdev)
        if facts is None or facts.kind is None:
            return None
        node = vfio.node_path(self._roots, cdev.name)
        facts.node_identity = None
        standing, reason = Standing.USABLE, ""
        if cdev.device_number is None:
            standing = Standing.WITHOUT_NODES
            reason = (
                "the kernel made no character device for it (VFIO_DEVICE_CDEV is not built in, or there is no IOMMU)"
            )
        else:
            judged = vfio.judge_node(node, cdev.device_number)
            if not judged.is_usable:
                standing, reason = Standing.UNUSABLE, judged.reason
            elif facts.companions:
                standing, reason = self._companions(facts)
        if standing is Standing.USABLE:
            facts.node_identity = _identity(node)
        return Sighting(cdev.address, standing, reason, facts.kind, node, facts.place)

    def _facts_of(self, cdev: vfio.Cdev) -> _Facts | None:
        known = self._facts.get(cdev.name)
        directory = function.directory(self._roots, cdev.address)
        identity = _identity(directory + "/")
        if identity is None:
            return None
        if known is not None and known.address == cdev.address and known.identity == identity:
            return known
        traits = function.read_traits(self._roots, cdev.address)
        if traits is None:
            return None
        kind = ids.kind_of(traits.vendor, traits.class_code)
        # A virtual function carries a slice of a GPU and shares the ids of the whole one.
        if kind is not None and sysfs.exists(directory + "/physfn"):
            kind = None
        place = Place(self._numa(traits.numa_node), self._shared(cdev.upstream), (cdev.address.ordinal,))
        companions = () if kind is None else self._companions_of(cdev.address)
        facts = _Facts(cdev.address, identity, kind, place, companions)
        self._facts[cdev.name] = facts
        return facts

    def _shared(self, upstream: tuple[str, ...]) -> tuple[str, ...]:
        """Keep one copy of what many devices sit below."""
        return self._upstreams.setdefault(upstream, upstream)

    def _numa(self, node: int | None) -> int | None:
        """Leave out a node that the machine does not have: the kubelet could never satisfy it.

        Source: k8s.io/kubernetes pkg/kubelet/cm/topologymanager/bitmask refuses bits above 63
        """
        if node is not None and node not in self._numa_nodes:
            nodes = f"{self._roots.sysfs}/devices/system/node"
            exists = not sysfs.exists(nodes) or sysfs.exists(f"{nodes}/node{node}")
            self._numa_nodes[node] = node if exists and node < 64 else None
        return None if node is None else self._numa_nodes[node]

    def _companions_of(self, address: PciAddress) -> tuple[PciAddress, ...]:
        group = function.iommu_group(self._roots, address)
        if group is None:
            return ()
        return tuple(member for member in iommu.group_members(self._roots, group).found if member != address)

    def _companions(self, facts: _Facts) -> tuple[Standing, str]:
        """Judge the rest of the IOMMU group, whose drivers come and go without an event."""
        read = (function.read_function(self._roots, member) for member in facts.companions)
        members = [member for member in read if member is not None and not member.class_code.is_bridge]
        obstacles = iommu.obstacles(members)
        if not obstacles:
            return Standing.USABLE, ""
        first = obstacles[0]
        return Standing.UNUSABLE, (
            f"its IOMMU group {first.iommu_group} is shared with {first.address}, which {first.driver} holds"
        )

    def _without_cdev(self, address: PciAddress) -> Sighting:
        try:
            named = vfio.cdev_of(self._roots, address)
            # Kata goes from the node to the function, so that is the way that has to lead here.
            cdev = None if named is None else vfio.cdev(self._roots, named.name)
            if isinstance(cdev, vfio.Cdev) and cdev.address == address:
                sighting = self._sighting(cdev)
                if sighting is not None:
                    return sighting
            if not function.is_present(self._roots, address):
                return Sighting(address, Standing.ABSENT, "vanished from the bus")
            driver = function.driver(self._roots, address)
        except PcifactsError as error:
            return Sighting(address, Standing.UNUSABLE, str(error))
        if vfio.is_vfio_driver(driver):
            return Sighting(address, Standing.UNUSABLE, f"on {driver}, which shows no VFIO device for it")
        return Sighting(address, Standing.OFF_VFIO, f"on driver {driver}" if driver else "on no driver")

    def _on_drivers_of_old_kernels(self) -> Iterator[Sighting]:
        """Find bound devices where class vfio-dev does not exist: VFIO not loaded, or a kernel before v6.1."""
        drivers = f"{self._roots.sysfs}/bus/pci/drivers"
        for driver in sorted(sysfs.entries(drivers) or ()):
            if not vfio.is_vfio_driver(driver):
                continue
            addresses = []
            for name in sysfs.entries(f"{drivers}/{driver}") or ():
                try:
                    addresses.append(PciAddress.parse(name))
                except PciAddressError:
                    continue  # bind, unbind, new_id and the like stand in the same directory
            for address in sorted(addresses, key=by_ordinal):
                try:
                    traits = function.read_traits(self._roots, address)
                except PcifactsError:
                    continue
                kind = None if traits is None else ids.kind_of(traits.vendor, traits.class_code)
                if kind is not None:
                    yield Sighting(
                        address, Standing.WITHOUT_NODES, "the kernel shows no VFIO devices (older than v6.1)", kind
                    )


def _natural(name: str) -> tuple[int, str]:
    """Put vfio10 after vfio9."""
    return len(name), name


def _identity(path: str) -> tuple[int, int] | None:
    """Return inode and change time; a link at the end is followed only with a slash behind it."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
