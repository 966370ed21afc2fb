# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""VFIO devices: from cdev to function and back, the nodes in /dev/vfio, and which drivers are VFIO drivers.

A cdev's number says nothing about its function: the kernel gives out the lowest free number and reuses it after a
rebind. Every question is therefore answered from sysfs anew.

Source: Linux Documentation/driver-api/vfio.rst; drivers/vfio/vfio_main.c (class vfio-dev, since v6.1),
drivers/vfio/device_cdev.c (node vfio/devices/vfio<N>, since v6.6), drivers/vfio/group.c (vfio/<group>).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from pcifacts import function, sysfs
from pcifacts.address import PciAddress
from pcifacts.errors import PathUnreadable, PciAddressError, PcifactsError
from pcifacts.sysfs import Roots, Scan, SkipKind, Skipped

# What /dev/vfio holds beside group nodes: the container node, and the folder of device nodes.
_NO_GROUP: Final = frozenset({"vfio", "devices"})
_NOIOMMU_PREFIX: Final = "noiommu-"

# How every link in class vfio-dev begins, and how much of that leads to sysfs itself.
_TO_DEVICES: Final = "../../devices/"
_TO_SYSFS: Final = len("../..")


@dataclass(frozen=True, slots=True)
class CdevLink:
    """What the link of a VFIO device in class vfio-dev says: the function behind it, and where that sits.

    `directory` is the function's own folder in sysfs, the shortest way to its attributes.
    """

    name: str
    number: int
    address: PciAddress
    upstream: tuple[str, ...]
    directory: str


@dataclass(frozen=True, slots=True)
class Cdev:
    """One VFIO device: its name in class vfio-dev, the PCI function behind it, and where that function sits.

    `device_number` is (major, minor), or None when the kernel made no character device for it.
    """

    name: str
    number: int
    address: PciAddress
    upstream: tuple[str, ...]
    device_number: tuple[int, int] | None


class NodeState(StrEnum):
    """What a look at a device node found."""

    USABLE = "usable"
    NO_DEVICE_NUMBER = "no-device-number"
    """The kernel made no character device: it is built without VFIO_DEVICE_CDEV, or runs VFIO without an IOMMU."""
    MALFORMED_NUMBER = "malformed-number"
    ABSENT = "absent"
    UNREADABLE = "unreadable"
    NOT_CHARACTER = "not-a-character-device"
    WRONG_NUMBER = "wrong-number"


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node and what was found there; numbers are (major, minor)."""

    path: str
    state: NodeState
    expected: tuple[int, int] | None = None
    observed: tuple[int, int] | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the node is the character device that sysfs says it is."""
        return self.state is NodeState.USABLE

    @property
    def reason(self) -> str:
        """One sentence for people."""
        match self.state:
            case NodeState.USABLE:
                return f"{self.path} is character device {_spelled(self.expected)}"
            case NodeState.NO_DEVICE_NUMBER:
                return f"{self.path} cannot exist, the kernel made no character device for it"
            case NodeState.MALFORMED_NUMBER:
                return f"{self.path} has no readable device number in sysfs"
            case NodeState.ABSENT:
                return f"{self.path} does not exist"
            case NodeState.UNREADABLE:
                return f"{self.path} cannot be looked at"
            case NodeState.NOT_CHARACTER:
                return f"{self.path} is not a character device"
            case NodeState.WRONG_NUMBER:
                return f"{self.path} is device {_spelled(self.observed)}, expected {_spelled(self.expected)}"


@dataclass(frozen=True, slots=True)
class GroupNode:
    """A node of an IOMMU group in /dev/vfio; `is_noiommu` for a group without an IOMMU behind it."""

    path: str
    group: int
    is_noiommu: bool


def is_vfio_driver(name: str | None) -> bool:
    """Whether a driver of this name hands its functions to VFIO.

    Source: upstream names every VFIO PCI driver so: vfio-pci, mlx5_vfio_pci, nvgrace_gpu_vfio_pci,
    hisi-acc-vfio-pci, pds_vfio_pci, virtio_vfio_pci, qat_vfio_pci, xe-vfio-pci.
    """
    return name is not None and "vfio-pci" in name.replace("_", "-")


def cdev_number(name: str) -> int | None:
    """Return N of vfio<N> as the kernel spells it, or None for every other name."""
    digits = name[4:]
    if name.startswith("vfio") and digits.isdigit() and digits.isascii() and (digits[0] != "0" or len(digits) == 1):
        return int(digits)
    return None


def node_path(roots: Roots, name: str) -> str:
    """Return the path of a cdev's node; nothing is read."""
    return f"{roots.dev_vfio}/devices/{name}"


def links(roots: Roots) -> Scan[CdevLink]:
    """Return where every VFIO device leads, by number, at the price of one link each.

    Reads: <sysfs>/class/vfio-dev and its links.
    Raises: PathUnreadable when the directory can't be listed.
    """
    found: list[CdevLink] = []
    skipped: list[Skipped] = []
    for name in sysfs.entries(roots.vfio_class) or ():
        answer = link(roots, name)
        if isinstance(answer, CdevLink):
            found.append(answer)
        elif answer is not None:
            skipped.append(answer)
    found.sort(key=_by_number)
    return Scan(tuple(found), tuple(skipped))


def cdevs(roots: Roots) -> Scan[Cdev]:
    """Return the VFIO devices that are PCI functions, by number.

    Reads: <sysfs>/class/vfio-dev, its links, and the attribute `dev` of each.
    Raises: PathUnreadable when the directory can't be listed.
    """
    linked = links(roots)
    found: list[Cdev] = []
    skipped = list(linked.skipped)
    for placed in linked.found:
        answer = _with_number(roots, placed)
        if isinstance(answer, Cdev):
            found.append(answer)
        else:
            skipped.append(answer)
    return Scan(tuple(found), tuple(skipped))


def link(roots: Roots, name: str) -> CdevLink | Skipped | None:
    """Return where one VFIO device leads: None when it is gone, Skipped when that is no PCI function.

    Reads: <sysfs>/class/vfio-dev/<name>; where that is no link, its link `device`.
    """
    path = f"{roots.vfio_class}/{name}"
    number = cdev_number(name)
    if number is None and cdev_number(name.removeprefix(_NOIOMMU_PREFIX)) is not None:
        return Skipped(name, f"{path}: runs without an IOMMU, no guest may have it", SkipKind.NOIOMMU, path)
    if number is None:
        return Skipped(name, f"{path}: not the name of a VFIO device, expected vfio<N>", SkipKind.MALFORMED_NAME, path)
    tail = "/vfio-dev/" + name
    try:
        # ../../devices/pci0000:00/0000:00:10.0/0000:01:00.0/vfio-dev/vfio0
        target = os.readlink(path)
        if target.startswith(_TO_DEVICES) and target.endswith(tail):
            place = target[_TO_SYSFS : -len(tail)]
            parents, _, last = place.rpartition("/")
            return CdevLink(name, number, PciAddress.parse(last), _upstream(parents), roots.sysfs + place)
    except (OSError, PciAddressError):
        pass  # Not the kernel's layout, or gone, or not a PCI function: the slow way tells these apart.
    return _resolved_link(path, name, number)


def cdev(roots: Roots, name: str) -> Cdev | Skipped | None:
    """Return one VFIO device anew: None when it is gone, Skipped when there is something that can't be used.

    Reads: <sysfs>/class/vfio-dev/<name>, and its attribute `dev`.
    """
    placed = link(roots, name)
    return _with_number(roots, placed) if isinstance(placed, CdevLink) else placed


def cdev_of(roots: Roots, address: PciAddress) -> Cdev | None:
    """Return the VFIO device of a function, or None when it has none.

    Reads: <sysfs>/bus/pci/devices/<address>/vfio-dev/
    Raises: PathUnreadable, AttributeUnreadable, AttributeMalformed.
    """
    folder = function.directory(roots, address) + "/vfio-dev"
    for name in sysfs.entries(folder) or ():
        number = cdev_number(name)
        if number is not None:
            device_number = sysfs.device_number(f"{folder}/{name}/dev")
            return Cdev(name, number, address, function.upstream(roots, address), device_number)
    return None


def has_vfio_device(roots: Roots, address: PciAddress) -> bool:
    """Whether the kernel registered a VFIO device for the function; false on kernels before v6.1.

    Reads: <sysfs>/bus/pci/devices/<address>/vfio-dev
    """
    return sysfs.exists(function.directory(roots, address) + "/vfio-dev")


def has_vfio_class(roots: Roots) -> bool:
    """Whether VFIO is loaded and new enough (v6.1) to show its devices in sysfs.

    Reads: <sysfs>/class/vfio-dev
    """
    return sysfs.exists(roots.vfio_class)


def device_node(roots: Roots, name: str) -> DeviceNode:
    """Judge the node of a cdev: a character device with the number that sysfs gives.

    Links are followed, so that a node may be put elsewhere by whoever made the directory.

    Reads: <sysfs>/class/vfio-dev/<name>/dev, <dev-vfio>/devices/<name>
    """
    path = node_path(roots, name)
    try:
        expected = sysfs.device_number(f"{roots.vfio_class}/{name}/dev")
    except PcifactsError:
        return DeviceNode(path, NodeState.MALFORMED_NUMBER)
    if expected is None:
        return DeviceNode(path, NodeState.NO_DEVICE_NUMBER)
    return judge_node(path, expected)


def judge_node(path: str, expected: tuple[int, int]) -> DeviceNode:
    """Judge a node against the number that it must have, both (major, minor).

    Reads: the node's inode, links followed; it is not opened.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return DeviceNode(path, NodeState.ABSENT, expected)
    except OSError:
        return DeviceNode(path, NodeState.UNREADABLE, expected)
    if not stat.S_ISCHR(status.st_mode):
        return DeviceNode(path, NodeState.NOT_CHARACTER, expected)
    observed = (os.major(status.st_rdev), os.minor(status.st_rdev))
    if observed != expected:
        return DeviceNode(path, NodeState.WRONG_NUMBER, expected, observed)
    return DeviceNode(path, NodeState.USABLE, expected, observed)


def orphan_nodes(roots: Roots) -> tuple[Skipped, ...]:
    """Return the entries of <dev-vfio>/devices that no VFIO device in sysfs accounts for.

    Reads: <dev-vfio>/devices, <sysfs>/class/vfio-dev
    Raises: PathUnreadable when a directory can't be listed.
    """
    nodes = sysfs.entries(roots.device_nodes)
    if not nodes:
        return ()
    known = frozenset(sysfs.entries(roots.vfio_class) or ())
    orphans: list[Skipped] = []
    for name in sorted(nodes):
        path = node_path(roots, name)
        # A device that comes or goes between the two listings is no orphan: look again at both.
        if name in known or sysfs.exists(f"{roots.vfio_class}/{name}") or not sysfs.exists(path):
            continue
        orphans.append(Skipped(name, f"{path}: no VFIO device of this name in sysfs", SkipKind.ORPHAN_NODE, path))
    return tuple(orphans)


def group_nodes(roots: Roots) -> Scan[GroupNode]:
    """Return the group nodes in /dev/vfio, by number.

    Reads: <dev-vfio>
    Raises: PathUnreadable when the directory can't be listed.
    """
    found: list[GroupNode] = []
    skipped: list[Skipped] = []
    for name in sysfs.entries(roots.dev_vfio) or ():
        if name in _NO_GROUP:
            continue
        digits = name.removeprefix(_NOIOMMU_PREFIX)
        path = f"{roots.dev_vfio}/{name}"
        if digits.isascii() and digits.isdigit():
            found.append(GroupNode(path, int(digits), is_noiommu=digits != name))
        else:
            skipped.append(Skipped(name, f"{path}: not the name of a group node", SkipKind.MALFORMED_NAME, path))
    found.sort(key=lambda node: (node.group, node.is_noiommu))
    return Scan(tuple(found), tuple(skipped))


def _with_number(roots: Roots, placed: CdevLink) -> Cdev | Skipped:
    path = f"{roots.vfio_class}/{placed.name}"
    try:
        number = sysfs.device_number(path + "/dev")
    except PcifactsError as err:
        return _skipped(placed.name, path, err)
    return Cdev(placed.name, placed.number, placed.address, placed.upstream, number)


def _resolved_link(path: str, name: str, number: int) -> CdevLink | Skipped | None:
    """Find the function behind an entry that is not the kernel's link, such as one of a copied tree."""
    device = path + "/device"
    if not sysfs.exists(path):
        return None
    try:
        directory = os.path.realpath(device, strict=True)
    except OSError as err:
        if sysfs.is_absence(err):
            return Skipped(name, f"{path}: leads to no device", SkipKind.DANGLING, path)
        return Skipped(name, f"{path}: cannot be followed, {err.strerror}", SkipKind.UNREADABLE, path)
    parts = directory.split("/")
    try:
        address = PciAddress.parse(parts[-1])
    except PciAddressError as err:
        return Skipped(name, f"{path}: the device behind it is no PCI function, {err.observed}", SkipKind.NOT_PCI, path)
    return CdevLink(name, number, address, sysfs.below_root(parts)[:-1], directory)


@lru_cache(maxsize=1024)
def _upstream(path: str) -> tuple[str, ...]:
    # Functions behind one port have it in common, and share the value.
    return sysfs.below_root(path.split("/"))


def _skipped(name: str, path: str, err: PcifactsError) -> Skipped:
    kind = SkipKind.UNREADABLE if isinstance(err, PathUnreadable) else SkipKind.MALFORMED
    return Skipped(name, str(err), kind, path)


def _by_number(placed: CdevLink) -> int:
    return placed.number


def _spelled(number: tuple[int, int] | None) -> str:
    return "unknown" if number is None else f"{number[0]}:{number[1]}"
