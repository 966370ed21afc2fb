# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The simulated node of a measurement, and the moment at which it changes.

Everything is written by simnode, except the nodes in /dev/vfio: those are made here, so that the clock is read right
before one appears or goes, and so that they are character devices where that is allowed. A link would do for our
plugin, but a watch on it follows it to /dev/null, and a peer that watches files would miss what it can see on a node.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from bench.plugin.extent import BOARD

from simnode import boards
from simnode.node import Device, Node
from simnode.tree import LiveNode

# Source: Linux Documentation/admin-guide/devices.txt, 1 char
_MEMORY_DEVICES: Final = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
_NULL: Final = os.makedev(1, _MEMORY_DEVICES["null"])

_NVIDIA: Final = 0x10DE
_H100: Final = 0x2330
_CLASS_3D: Final = 0x030200
_CLASS_OTHER_BRIDGE: Final = 0x0680


def of_size(count: int) -> Node:
    """Return a node with so many devices on VFIO: an HGX H100 board for 12, otherwise GPUs of one kind."""
    if count == BOARD:
        return boards.hgx_h100()
    devices = []
    for index in range(count):
        # 32 devices on a bus, 256 buses in a domain; groups and NUMA nodes as on a host with access control services.
        domain, bus, slot = index >> 13, index >> 5 & 0xFF, index & 0x1F
        devices.append(
            Device(
                address=f"{domain:04x}:{bus:02x}:{slot:02x}.0",
                vendor=_NVIDIA,
                device=_H100,
                class_code=_CLASS_3D,
                parents=(f"pci{domain:04x}:{bus:02x}",),
                driver="vfio-pci",
                numa=index & 1,
                iommu_group=index,
            )
        )
    return Node(name=f"{count} GPUs", devices=tuple(devices))


class Board:
    """A node on disk, with what stands at /sys and at /dev."""

    def __init__(self, root: Path, count: int, *, privileged: bool) -> None:
        """Write the node; `privileged` makes character devices, otherwise nodes are links to /dev/null."""
        self.count = count
        self._privileged = privileged
        self._live = LiveNode.create(root / "live", of_size(count))
        self.sysfs = self._live.sysfs
        self.dev = root / "dev"
        self.dev_vfio = self.dev / "vfio"
        self.gpus = tuple(
            device.address
            for device in self._live.node.devices
            if device.on_vfio and device.class_code >> 8 != _CLASS_OTHER_BRIDGE
        )
        (self.dev_vfio / "devices").mkdir(parents=True)
        if privileged:
            self._furnish()
        self._make(self.dev_vfio / "vfio")
        for device in self._live.node.devices:
            if device.on_vfio:
                self._make(self._group_node(device.address))
                self._make(self._node(device.address))

    def take_away(self, address: str) -> int:
        """Take a function off the bus; return the moment before its node went (CLOCK_MONOTONIC, ns)."""
        node, group = self._node(address), self._group_node(address)
        at_ns = time.monotonic_ns()
        os.unlink(node)
        with suppress(OSError):
            os.rmdir(node.parent)
        os.unlink(group)
        self._live.remove(address)
        return at_ns

    def bring_back(self, address: str) -> int:
        """Put a function back and bind it; return the moment before its node appeared (CLOCK_MONOTONIC, ns)."""
        self._live.rescan(address)
        self._live.bind(address)
        self._make(self._group_node(address))
        node = self._node(address)
        node.parent.mkdir(exist_ok=True)
        at_ns = time.monotonic_ns()
        self._make(node)
        return at_ns

    def _node(self, address: str) -> Path:
        name = self._live.cdev(address)
        assert name is not None
        return self.dev_vfio / "devices" / name

    def _group_node(self, address: str) -> Path:
        return self.dev_vfio / str(self._live.node.device(address).iommu_group)

    def _make(self, path: Path) -> None:
        if self._privileged:
            os.mknod(path, stat.S_IFCHR | 0o600, _NULL)
        else:
            os.symlink("/dev/null", path)

    def _furnish(self) -> None:
        """Make what any program may expect in /dev."""
        for name, minor in _MEMORY_DEVICES.items():
            os.mknod(self.dev / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        os.symlink("/proc/self/fd", self.dev / "fd")
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{number}", self.dev / name)
        (self.dev / "shm").mkdir()
