# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""PCI functions: who they are, what holds them, where they sit.

Does not judge what a function is good for; that is `ids` and `inventory`.

Source: Linux Documentation/ABI/testing/sysfs-bus-pci, drivers/pci/pci-sysfs.c.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from pcifacts import sysfs
from pcifacts.address import PciAddress, by_ordinal
from pcifacts.errors import AttributeMalformed, AttributeMissing, PathUnreadable, PciAddressError, PcifactsError
from pcifacts.ids import ClassCode
from pcifacts.sysfs import Roots, Scan, SkipKind, Skipped


@dataclass(frozen=True, slots=True)
class Traits:
    """The three attributes that decide what a function is and where it belongs; cheap to read for many."""

    vendor: int
    class_code: ClassCode
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One PCI function as sysfs describes it now.

    `numa_node` and `iommu_group` are None when not known or not there. `upstream` names what stands between the
    function and the processor, the root first: ("pci0000:00", "0000:00:10.0").
    """

    address: PciAddress
    vendor: int
    device: int
    subsystem_vendor: int | None
    subsystem_device: int | None
    class_code: ClassCode
    driver: str | None
    numa_node: int | None
    iommu_group: int | None
    is_virtual_function: bool
    upstream: tuple[str, ...]


def directory(roots: Roots, address: PciAddress) -> str:
    """Return the sysfs path of a function; nothing is read."""
    return f"{roots.sysfs}/bus/pci/devices/{address.text}"


def vendor(roots: Roots, address: PciAddress) -> int | None:
    """Return the vendor id, or None when the function is not on the bus.

    Reads: <sysfs>/bus/pci/devices/<address>/vendor
    Raises: AttributeMissing, AttributeMalformed, AttributeUnreadable.
    """
    return _required(directory(roots, address), "vendor", 4)


def read_traits(roots: Roots, address: PciAddress) -> Traits | None:
    """Return vendor, class code and NUMA node, or None when the function is not on the bus.

    Reads: <sysfs>/bus/pci/devices/<address>/{vendor,class,numa_node}
    Raises: AttributeMissing, AttributeMalformed, AttributeUnreadable.
    """
    path = directory(roots, address)
    traits = traits_in(path)
    if traits is None:
        _refuse_damage(path, "vendor", evidence=path)
    return traits


def traits_in(path: str) -> Traits | None:
    """Return vendor, class code and NUMA node from a function's folder, or None when the folder is gone.

    Reads: <path>/{vendor,class,numa_node}
    Raises: AttributeMissing, AttributeMalformed, AttributeUnreadable.
    """
    vendor_text = sysfs.attribute(path + "/vendor")
    class_text = sysfs.attribute(path + "/class")
    node = sysfs.numa_node(path + "/numa_node")
    if vendor_text is None or class_text is None:
        # A folder reached by its own name loses its link `subsystem` first of all, then its attributes.
        _refuse_damage(path, "vendor" if vendor_text is None else "class", evidence=path + "/subsystem")
        return None
    return _traits(path, vendor_text, class_text, node)


def read_function(roots: Roots, address: PciAddress) -> PciFunction | None:
    """Return everything about one function, or None when it is not on the bus.

    Reads: <sysfs>/bus/pci/devices/<address>/{vendor,device,subsystem_*,class,numa_node}, its links
    driver, iommu_group and physfn, and the link <address> itself.
    Raises: AttributeMissing, AttributeMalformed, AttributeUnreadable, PathUnreadable.
    """
    path = directory(roots, address)
    traits = read_traits(roots, address)
    device_id = _required(path, "device", 4)
    if traits is None or device_id is None:
        return None
    return PciFunction(
        address=address,
        vendor=traits.vendor,
        device=device_id,
        subsystem_vendor=sysfs.hexadecimal(path + "/subsystem_vendor", 4),
        subsystem_device=sysfs.hexadecimal(path + "/subsystem_device", 4),
        class_code=traits.class_code,
        driver=driver(roots, address),
        numa_node=traits.numa_node,
        iommu_group=iommu_group(roots, address),
        is_virtual_function=sysfs.exists(path + "/physfn"),
        upstream=upstream(roots, address),
    )


def driver(roots: Roots, address: PciAddress) -> str | None:
    """Return the name of the driver that holds the function, or None.

    Reads: <sysfs>/bus/pci/devices/<address>/driver
    Raises: PathUnreadable, AttributeMalformed.
    """
    return sysfs.link_name(directory(roots, address) + "/driver")


def iommu_group(roots: Roots, address: PciAddress) -> int | None:
    """Return the number of the function's IOMMU group, or None when it is in none.

    Reads: <sysfs>/bus/pci/devices/<address>/iommu_group
    Raises: PathUnreadable, AttributeMalformed.
    """
    path = directory(roots, address) + "/iommu_group"
    name = sysfs.link_name(path)
    if name is None:
        return None
    if not (name.isascii() and name.isdigit()):
        raise AttributeMalformed(path, expected="a link to a numbered group", observed=ascii(name))
    return int(name)


def upstream(roots: Roots, address: PciAddress) -> tuple[str, ...]:
    """Return what stands between the function and the processor, the root first; empty when it can't be told.

    Reads: <sysfs>/bus/pci/devices/<address>
    """
    path = directory(roots, address)
    try:
        target = sysfs.link(path)
    except (AttributeMalformed, PathUnreadable):
        # A tree that was copied rather than mounted has folders where sysfs has links.
        target = os.path.realpath(path)
    return sysfs.below_root((target or "").split("/"))[:-1]


def is_present(roots: Roots, address: PciAddress) -> bool:
    """Whether the function is on the bus.

    Reads: <sysfs>/bus/pci/devices/<address>
    """
    return sysfs.exists(directory(roots, address))


def addresses(roots: Roots) -> Scan[PciAddress]:
    """Return the addresses on the bus, ascending.

    Reads: <sysfs>/bus/pci/devices
    Raises: PathUnreadable when the directory can't be listed.
    """
    found: list[PciAddress] = []
    skipped: list[Skipped] = []
    for name in sysfs.entries(roots.pci_devices) or ():
        try:
            found.append(PciAddress.parse(name))
        except PciAddressError as err:
            skipped.append(Skipped(name, str(err), SkipKind.MALFORMED_NAME, f"{roots.pci_devices}/{name}"))
    found.sort(key=by_ordinal)
    return Scan(tuple(found), tuple(skipped))


def functions(roots: Roots) -> Scan[PciFunction]:
    """Return every function on the bus, ascending; one that can't be read is skipped and hides no other.

    Reads: <sysfs>/bus/pci/devices and below.
    Raises: PathUnreadable when the directory can't be listed.
    """
    listed = addresses(roots)
    found: list[PciFunction] = []
    skipped = list(listed.skipped)
    for address in listed.found:
        try:
            function = read_function(roots, address)
        except PcifactsError as err:
            skipped.append(skipped_function(roots, address, err))
        else:
            if function is not None:
                found.append(function)
    return Scan(tuple(found), tuple(skipped))


def skipped_function(roots: Roots, address: PciAddress, err: PcifactsError) -> Skipped:
    """Say why one function gave no fact."""
    if isinstance(err, AttributeMissing) and not os.path.exists(directory(roots, address)):
        kind = SkipKind.DANGLING
    elif isinstance(err, PathUnreadable):
        kind = SkipKind.UNREADABLE
    else:
        kind = SkipKind.MALFORMED
    return Skipped(address.text, str(err), kind, directory(roots, address))


def _required(path: str, name: str, digits: int) -> int | None:
    """Read an attribute that every function has; None means that the function left the bus meanwhile."""
    value = sysfs.hexadecimal(f"{path}/{name}", digits)
    if value is None:
        _refuse_damage(path, name, evidence=path)
    return value


def _refuse_damage(path: str, name: str, *, evidence: str) -> None:
    """Tell removal from damage: a function that is still on the bus has its link there, and all of its attributes.

    Source: Linux drivers/base/bus.c, bus_remove_device: links first, then the attributes.
    Raises: AttributeMissing.
    """
    if sysfs.exists(evidence):
        raise AttributeMissing(f"{path}/{name}", expected="an attribute that every PCI function has")


# Few combinations occur on one node, and one that was understood once need not be parsed again.
_known_traits: Final[dict[tuple[bytes, bytes, int | None], Traits]] = {}
_KNOWN_LIMIT: Final = 1024


def _traits(path: str, vendor_text: bytes, class_text: bytes, node: int | None) -> Traits:
    key = (vendor_text, class_text, node)
    known = _known_traits.get(key)
    if known is None:
        vendor_id = sysfs.parse_hexadecimal(path + "/vendor", vendor_text, 4)
        class_value = sysfs.parse_hexadecimal(path + "/class", class_text, 6)
        if len(_known_traits) >= _KNOWN_LIMIT:
            _known_traits.clear()
        known = _known_traits[key] = Traits(vendor_id, ClassCode(class_value), node)
    return known
