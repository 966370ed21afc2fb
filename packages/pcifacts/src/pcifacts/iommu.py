# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""IOMMU groups, their members, and whether a group can be owned by one user.

Group numbers are valid from boot to boot only.

Source: Linux Documentation/ABI/testing/sysfs-kernel-iommu_groups, Documentation/driver-api/vfio.rst.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pcifacts import sysfs, vfio
from pcifacts.address import PciAddress, by_ordinal
from pcifacts.errors import PciAddressError
from pcifacts.function import PciFunction
from pcifacts.sysfs import Roots, Scan, SkipKind, Skipped

# Drivers that leave DMA to whoever owns the group. Everything else that is bound keeps the group from a user.
# Source: driver_managed_dma in Linux drivers/pci/pcie/portdrv.c and drivers/pci/pci-stub.c; VFIO drivers set it too.
_BYSTANDERS: Final = frozenset({"pcieport", "pci-stub"})


def groups(roots: Roots) -> Scan[int]:
    """Return the numbers of the IOMMU groups, ascending; empty without an IOMMU.

    Reads: <sysfs>/kernel/iommu_groups
    Raises: PathUnreadable when the directory can't be listed.
    """
    found: list[int] = []
    skipped: list[Skipped] = []
    for name in sysfs.entries(roots.iommu_groups) or ():
        path = f"{roots.iommu_groups}/{name}"
        if name.isascii() and name.isdigit():
            found.append(int(name))
        else:
            skipped.append(Skipped(name, f"{path}: not the number of a group", SkipKind.MALFORMED_NAME, path))
    return Scan(tuple(sorted(found)), tuple(skipped))


def group_members(roots: Roots, group: int) -> Scan[PciAddress]:
    """Return the PCI functions in a group, ascending; empty when there is no such group.

    Reads: <sysfs>/kernel/iommu_groups/<group>/devices
    Raises: PathUnreadable when the directory can't be listed.
    """
    folder = f"{roots.iommu_groups}/{group}/devices"
    found: list[PciAddress] = []
    skipped: list[Skipped] = []
    for name in sysfs.entries(folder) or ():
        try:
            found.append(PciAddress.parse(name))
        except PciAddressError as err:
            skipped.append(Skipped(name, str(err), SkipKind.NOT_PCI, f"{folder}/{name}"))
    found.sort(key=by_ordinal)
    return Scan(tuple(found), tuple(skipped))


def is_singleton(members: Iterable[PciFunction]) -> bool:
    """Whether a group holds one function that can be handed out; bridges do not count."""
    return sum(not member.class_code.is_bridge for member in members) == 1


def obstacles(members: Iterable[PciFunction]) -> tuple[PciFunction, ...]:
    """Return the members whose driver keeps the group from being owned by a VFIO user; none means viable."""
    return tuple(
        member
        for member in members
        if member.driver is not None and member.driver not in _BYSTANDERS and not vfio.is_vfio_driver(member.driver)
    )


def is_viable(members: Iterable[PciFunction]) -> bool:
    """Whether a VFIO user can own the group as it stands."""
    return not obstacles(members)
