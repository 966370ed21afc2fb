# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Every device of this product on the node, with what stands between it and a guest.

The table that decides is `ids.KINDS`. The device plugin prints this, and whoever binds devices starts from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pcifacts import function, vfio
from pcifacts.errors import PcifactsError
from pcifacts.function import PciFunction
from pcifacts.ids import VENDORS, DeviceKind, kind_of
from pcifacts.sysfs import Roots, Scan
from pcifacts.vfio import Cdev, DeviceNode, NodeState


class Standing(StrEnum):
    """How near a device is to a guest."""

    USABLE = "usable"
    """On a VFIO driver, and its node is there."""
    NO_DRIVER = "no-driver"
    HOST_DRIVER = "host-driver"
    """On a driver that is not a VFIO driver."""
    NO_VFIO_DEVICE = "no-vfio-device"
    """On a VFIO driver, but sysfs shows no VFIO device: the kernel is older than v6.1, or the driver is busy probing."""
    NO_DEVICE_NUMBER = "no-device-number"
    """The VFIO device has no character device: the kernel lacks VFIO_DEVICE_CDEV, or VFIO runs without an IOMMU."""
    NODE_UNUSABLE = "node-unusable"
    """The kernel made a character device, and the node in /dev/vfio/devices is not it."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device: the function, what it is, its VFIO device and node if it has them."""

    function: PciFunction
    kind: DeviceKind
    cdev: Cdev | None
    node: DeviceNode | None

    @property
    def standing(self) -> Standing:
        """How near the device is to a guest."""
        return standing(self.function.driver, self.node)


def standing(driver: str | None, node: DeviceNode | None) -> Standing:
    """Decide how near a device is to a guest, from its driver and its node (None: no VFIO device)."""
    if driver is None:
        return Standing.NO_DRIVER
    if not vfio.is_vfio_driver(driver):
        return Standing.HOST_DRIVER
    if node is None:
        return Standing.NO_VFIO_DEVICE
    if node.is_usable:
        return Standing.USABLE
    if node.state is NodeState.NO_DEVICE_NUMBER:
        return Standing.NO_DEVICE_NUMBER
    return Standing.NODE_UNUSABLE


def devices(roots: Roots) -> Scan[Device]:
    """Return every device on the node, ascending by address.

    A function whose vendor can't be read is skipped and reported, since it may be one; functions of other vendors
    are looked at no further.

    Reads: <sysfs>/bus/pci/devices and below; for devices also <sysfs>/class/vfio-dev and <dev-vfio>/devices.
    Raises: PathUnreadable when <sysfs>/bus/pci/devices can't be listed.
    """
    listed = function.addresses(roots)
    found: list[Device] = []
    skipped = list(listed.skipped)
    for address in listed.found:
        try:
            if function.vendor(roots, address) not in VENDORS:
                continue
            facts = function.read_function(roots, address)
            kind = None if facts is None else kind_of(facts.vendor, facts.class_code)
            if facts is None or kind is None:
                continue
            cdev = vfio.cdev_of(roots, address)
            node = None if cdev is None else vfio.device_node(roots, cdev.name)
        except PcifactsError as err:
            skipped.append(function.skipped_function(roots, address, err))
        else:
            found.append(Device(facts, kind, cdev, node))
    return Scan(tuple(found), tuple(skipped))
