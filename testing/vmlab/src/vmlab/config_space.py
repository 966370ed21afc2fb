# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Configuration space of a PCI Express endpoint with power management and function level reset.

Only what a kernel looks at before and while vfio-pci holds a function: no interrupts, no bus mastering, no error
reporting. Register names and offsets are those of Linux include/uapi/linux/pci_regs.h.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

SIZE: Final = 4096

_PM: Final = 0x60
_PM_CTRL: Final = _PM + 4
_EXP: Final = 0x78
_EXP_DEVCTL: Final = _EXP + 8
_SERIAL: Final = 0x100

# Source: Linux include/uapi/linux/pci_regs.h
_CAP_ID_PM: Final = 0x01
_CAP_ID_EXP: Final = 0x10
_CAP_ID_SHPC: Final = 0x0C
_EXT_CAP_ID_DSN: Final = 0x03
_STATUS_CAP_LIST: Final = 0x0010
_EXP_ENDPOINT_V2: Final = 0x0002
_EXP_DEVCAP_FLR: Final = 1 << 28
_EXP_DEVCTL_BCR_FLR: Final = 1 << 15
_PM_CAP_VERSION_3: Final = 0x0003
_PM_CTRL_NO_SOFT_RESET: Final = 0x0008
_PM_CTRL_STATE_MASK: Final = 0x0003
_BAR_64_PREFETCHABLE: Final = 0x0C
_COMMAND_WRITABLE: Final = 0x0547

# 2.5 GT/s, one lane, as every emulated root port has it. Source: Linux include/uapi/linux/pci_regs.h (LNKCAP, LNKSTA)
_LINK: Final = 0x0011


class PowerState(IntEnum):
    """PCI_PM_CTRL's state field. Source: PCI Power Management specification 1.2, 3.2.4"""

    D0 = 0
    D1 = 1
    D2 = 2
    D3HOT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a function says it is. `bars` maps the index of each 64-bit BAR to its size in bytes, a power of two."""

    vendor: int
    device: int
    class_code: int
    subsystem_vendor: int
    subsystem_device: int
    revision: int
    bars: Mapping[int, int]
    serial: int = 0


class ConfigSpace:
    """4096 bytes, of which the writable bits can be written."""

    def __init__(self, identity: Identity) -> None:
        """Start in D0, with no BAR placed."""
        self._power_on, self._writable = _layout(identity)
        self._bytes = bytearray(self._power_on)
        self._power_management_hidden = False

    @property
    def power_state(self) -> PowerState:
        """The state that was last written to PCI_PM_CTRL."""
        return PowerState(self._bytes[_PM_CTRL] & _PM_CTRL_STATE_MASK)

    def hide_power_management(self) -> None:
        """Show the power management capability as one that QEMU passes through, until the next reset.

        While QEMU makes a device it looks for this capability, and if it finds it unmaps the BARs in D3hot by itself:
        reads then give 0 and never get here. Silicon answers all ones. QEMU looks once, before the machine's first
        reset; the guest looks after it.

        Source: observed on QEMU 11.1
        """
        self._power_management_hidden = True

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`."""
        _check(offset, size)
        found = bytearray(self._bytes[offset : offset + size])
        if self._power_management_hidden and offset <= _PM < offset + size:
            found[_PM - offset] = _CAP_ID_SHPC
        return bytes(found)

    def write(self, offset: int, content: bytes) -> bool:
        """Write the writable bits; return whether that starts a function level reset, which is then up to the caller.

        The bit that starts it reads as zero ever after. Source: PCI Express Base Specification 4.0, 6.6.2
        """
        _check(offset, len(content))
        for at, byte in enumerate(content, offset):
            mask = self._writable[at]
            self._bytes[at] = (self._bytes[at] & ~mask) | (byte & mask)
        top = _EXP_DEVCTL + 1 - offset
        return 0 <= top < len(content) and bool(content[top] << 8 & _EXP_DEVCTL_BCR_FLR)

    def reset(self) -> None:
        """Go back to what it was at power on."""
        self._bytes[:] = self._power_on
        self._power_management_hidden = False


def _check(offset: int, size: int) -> None:
    if size < 1 or offset < 0 or offset + size > SIZE:
        raise ValueError(f"config space: access to {size} bytes at {offset:#x}, expected within {SIZE} bytes")


def _layout(identity: Identity) -> tuple[bytes, bytes]:
    """Return the bytes at power on, and a mask of the writable bits."""
    content, writable = bytearray(SIZE), bytearray(SIZE)

    def put(form: str, offset: int, *values: int) -> None:
        struct.pack_into("<" + form, content, offset, *values)

    def allow(form: str, offset: int, *masks: int) -> None:
        struct.pack_into("<" + form, writable, offset, *masks)

    put("HHHH", 0x00, identity.vendor, identity.device, 0, _STATUS_CAP_LIST)
    allow("H", 0x04, _COMMAND_WRITABLE)
    put("I", 0x08, identity.class_code << 8 | identity.revision)
    for index, size in identity.bars.items():
        put("II", 0x10 + 4 * index, _BAR_64_PREFETCHABLE, 0)
        mask = ~(size - 1) & (1 << 64) - 1
        allow("II", 0x10 + 4 * index, mask & 0xFFFFFFFF, mask >> 32)
    put("HH", 0x2C, identity.subsystem_vendor, identity.subsystem_device)
    put("B", 0x34, _PM)
    allow("B", 0x0C, 0xFF)  # cache line size
    allow("B", 0x3C, 0xFF)  # interrupt line

    put("BBHH", _PM, _CAP_ID_PM, _EXP, _PM_CAP_VERSION_3, _PM_CTRL_NO_SOFT_RESET)
    allow("H", _PM_CTRL, _PM_CTRL_STATE_MASK)

    put("BBHIHH", _EXP, _CAP_ID_EXP, 0, _EXP_ENDPOINT_V2, _EXP_DEVCAP_FLR, 0, 0)
    put("IHH", _EXP + 0x0C, _LINK, 0, _LINK)
    allow("H", _EXP_DEVCTL, ~_EXP_DEVCTL_BCR_FLR & 0xFFFF)

    put("III", _SERIAL, 1 << 16 | _EXT_CAP_ID_DSN, identity.serial & 0xFFFFFFFF, identity.serial >> 32)
    return bytes(content), bytes(writable)
