# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Vendor ids, class codes, and the one table that says which PCI functions are devices of this product.

Source: PCI Code and ID Assignment Specification; Linux include/linux/pci_ids.h for the values used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

VENDOR_NVIDIA: Final = 0x10DE

BASE_DISPLAY: Final = 0x03
BASE_BRIDGE: Final = 0x06

SUBCLASS_VGA: Final = 0x00
SUBCLASS_3D: Final = 0x02
SUBCLASS_BRIDGE_OTHER: Final = 0x80

# Bridges that carry other functions: host, PCI-to-PCI, CardBus, semi-transparent PCI-to-PCI. An NVSwitch is a bridge
# of subclass "other" (80), carries nothing as far as PCI knows, and is a device.
_FORWARDING: Final = frozenset({0x00, 0x04, 0x07, 0x09})


class DeviceKind(StrEnum):
    """What a device is. The value is the last part of its resource name."""

    GPU = "gpu"
    NVSWITCH = "nvswitch"


@dataclass(frozen=True, slots=True)
class ClassCode:
    """The 24-bit class code of a function, as the sysfs attribute `class` holds it."""

    value: int

    @property
    def base(self) -> int:
        """Bits 23 to 16: the base class."""
        return self.value >> 16

    @property
    def subclass(self) -> int:
        """Bits 15 to 8."""
        return self.value >> 8 & 0xFF

    @property
    def prog_if(self) -> int:
        """Bits 7 to 0: the programming interface. No test here looks at it."""
        return self.value & 0xFF

    @property
    def is_bridge(self) -> bool:
        """Whether the function carries others, so that it is never handed to a guest itself."""
        return self.base == BASE_BRIDGE and self.subclass in _FORWARDING

    def __str__(self) -> str:
        return f"{self.value:06x}"


@dataclass(frozen=True, slots=True)
class KindRow:
    """One row of the table: a function with exactly this vendor, base class and subclass is of this kind."""

    kind: DeviceKind
    vendor: int
    base: int
    subclass: int


# A GPU on a board without a display shows itself as a 3D controller (0302), a card that can drive one as a VGA
# controller (0300); NVIDIA's own administration tool takes both as GPUs and 0680 as an NVSwitch.
# Source: gpu-admin-tools pci/devices.py
KINDS: Final = (
    KindRow(DeviceKind.GPU, VENDOR_NVIDIA, BASE_DISPLAY, SUBCLASS_3D),
    KindRow(DeviceKind.GPU, VENDOR_NVIDIA, BASE_DISPLAY, SUBCLASS_VGA),
    KindRow(DeviceKind.NVSWITCH, VENDOR_NVIDIA, BASE_BRIDGE, SUBCLASS_BRIDGE_OTHER),
)

VENDORS: Final = frozenset(row.vendor for row in KINDS)
"""The vendors that occur in the table: a function of any other vendor needs no further look."""

_KIND_BY_IDENTITY: Final = {(row.vendor, row.base << 8 | row.subclass): row.kind for row in KINDS}


def kind_of(vendor: int, class_code: ClassCode) -> DeviceKind | None:
    """Return what a function is, or None when it is no device of this product."""
    return _KIND_BY_IDENTITY.get((vendor, class_code.value >> 8))
