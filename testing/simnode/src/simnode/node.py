# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""A node as one frozen value: its PCI functions, and what its kernel offers.

A node that no kernel could show is refused when it is made, with every complaint at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

VFIO_DRIVERS: Final = frozenset({"vfio-pci", "nvgrace_gpu_vfio_pci", "mlx5_vfio_pci"})
"""The VFIO drivers that boards use, under the names that they register.

Source: Linux drivers/vfio/pci/vfio_pci.c, nvgrace-gpu/main.c and mlx5/main.c (the latter two: KBUILD_MODNAME).
"""

_ADDRESS: Final = re.compile(r"(?:[0-9a-f]{4}|[1-9a-f][0-9a-f]{4,7}):[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_ROOT: Final = re.compile(r"pci((?:[0-9a-f]{4}|[1-9a-f][0-9a-f]{4,7})):([0-9a-f]{2})")
_PCI_BRIDGE: Final = 0x0604


class ImpossibleNode(Exception):
    """No kernel could show such a node. `complaints` holds every reason."""

    def __init__(self, name: str, complaints: tuple[str, ...]) -> None:
        super().__init__(name, complaints)
        self.name = name
        self.complaints = complaints

    def __str__(self) -> str:
        return f"{self.name}: {len(self.complaints)} complaints: " + "; ".join(self.complaints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One PCI function.

    `address` is spelled as sysfs spells it. `parents` is what stands above it, the root first:
    ("pci0000:15", "0000:15:01.0"). `numa` None is written as -1, which is what a kernel says when firmware does not
    tell. `vf_of` names the physical function of a virtual one.
    """

    address: str
    vendor: int
    device: int
    class_code: int
    parents: tuple[str, ...]
    subsystem_vendor: int = 0
    subsystem_device: int = 0
    driver: str | None = None
    numa: int | None = None
    iommu_group: int | None = None
    vf_of: str | None = None

    @property
    def on_vfio(self) -> bool:
        """Whether a VFIO driver holds the function."""
        return self.driver in VFIO_DRIVERS

    @property
    def is_pci_bridge(self) -> bool:
        """Whether other functions may sit below this one."""
        return self.class_code >> 8 == _PCI_BRIDGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What the node's kernel offers.

    `vfio_class`: VFIO devices show in class vfio-dev (v6.1). `device_nodes`: they also get a character device in
    /dev/vfio/devices (v6.6 with VFIO_DEVICE_CDEV). `iommu`: there is an IOMMU, without which vfio-pci refuses.
    """

    iommu: bool = True
    vfio_class: bool = True
    device_nodes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host. Making one checks it.

    Raises: ImpossibleNode.
    """

    name: str
    devices: tuple[Device, ...] = ()
    kernel: Kernel = field(default_factory=Kernel)

    def __post_init__(self) -> None:
        """Refuse a node that no kernel could show."""
        complaints = tuple(_complaints(self))
        if complaints:
            raise ImpossibleNode(self.name, complaints)

    def device(self, address: str) -> Device:
        """Return the function at an address.

        Raises: KeyError.
        """
        for device in self.devices:
            if device.address == address:
                return device
        raise KeyError(address)

    def with_device(self, address: str, **changes: object) -> Node:
        """Return this node with some fields of one function changed.

        Raises: KeyError, ImpossibleNode.
        """
        changed = replace(self.device(address), **changes)  # type: ignore[arg-type]
        return replace(self, devices=tuple(changed if d.address == address else d for d in self.devices))

    def without_device(self, address: str) -> Node:
        """Return this node with one function gone.

        Raises: KeyError, ImpossibleNode.
        """
        gone = self.device(address)
        return replace(self, devices=tuple(d for d in self.devices if d is not gone))


def _complaints(node: Node) -> Iterator[str]:
    known = {device.address: device for device in node.devices}
    if node.kernel.device_nodes and not node.kernel.vfio_class:
        yield "the kernel has nodes for VFIO devices but no class for them"
    for address, count in Counter(device.address for device in node.devices).items():
        if count > 1:
            yield f"{address} occurs {count} times"
    for device in node.devices:
        yield from _device_complaints(device, known, node.kernel)


def _device_complaints(device: Device, known: dict[str, Device], kernel: Kernel) -> Iterator[str]:
    where = device.address
    if not _ADDRESS.fullmatch(where):
        yield f"{where!r} is not how sysfs spells an address"
        return
    for name, value, limit in (
        ("vendor", device.vendor, 0xFFFF),
        ("device", device.device, 0xFFFF),
        ("subsystem vendor", device.subsystem_vendor, 0xFFFF),
        ("subsystem device", device.subsystem_device, 0xFFFF),
        ("class", device.class_code, 0xFFFFFF),
    ):
        if not 0 <= value <= limit:
            yield f"{where}: {name} {value:#x} does not fit"
    yield from _parent_complaints(device, known)
    if device.numa is not None and device.numa < 0:
        yield f"{where}: NUMA node {device.numa}; unknown is None"
    if device.iommu_group is not None and device.iommu_group < 0:
        yield f"{where}: IOMMU group {device.iommu_group}"
    if kernel.iommu and device.iommu_group is None and device.on_vfio:
        yield f"{where} is on {device.driver} and in no IOMMU group"
    if not kernel.iommu and device.iommu_group is not None:
        yield f"{where} is in an IOMMU group of a node without an IOMMU"
    if not kernel.iommu and device.on_vfio:
        yield f"{where} is on {device.driver}, which refuses every function without an IOMMU"
    if device.on_vfio and device.is_pci_bridge:
        yield f"{where}: {device.driver} takes no bridges"
    if device.vf_of is not None:
        physical = known.get(device.vf_of)
        if physical is None:
            yield f"{where} is a virtual function of {device.vf_of}, which is not there"
        elif physical.vf_of is not None:
            yield f"{where} is a virtual function of a virtual function"
        elif physical.parents != device.parents:
            yield f"{where} sits elsewhere than its physical function {device.vf_of}"


def _parent_complaints(device: Device, known: dict[str, Device]) -> Iterator[str]:
    where = device.address
    if not device.parents or not _ROOT.fullmatch(device.parents[0]):
        yield f"{where}: the first parent is no PCI root"
        return
    # The last root decides the domain: a second one starts where a bridge opens a domain of its own (Intel VMD).
    domain = ""
    for index, parent in enumerate(device.parents):
        root = _ROOT.fullmatch(parent)
        if root:
            domain = root[1]
            continue
        above = known.get(parent)
        if above is None:
            yield f"{where}: parent {parent} is not there"
        elif above.parents != device.parents[:index]:
            yield f"{where}: parent {parent} sits elsewhere"
        elif not above.is_pci_bridge and not _opens_domain(device.parents, index):
            yield f"{where}: parent {parent} is no PCI bridge"
    if where.split(":")[0] != domain:
        yield f"{where}: its root is in domain {domain}"


def _opens_domain(parents: tuple[str, ...], index: int) -> bool:
    return index + 1 < len(parents) and _ROOT.fullmatch(parents[index + 1]) is not None
