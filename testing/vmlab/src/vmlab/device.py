# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""PCI functions that a guest finds on its bus: configuration space here, registers behind a seam.

A function has the capabilities that the kernel's handling of NVIDIA GPUs and NVSwitches turns on: power management with
D3hot, and PCI Express with Function Level Reset. What BAR0 does is for whoever implements `Registers`;
`RegisterFile` remembers what is written and knows the identification register, no more.

QEMU (since 10.0) models PCI power management itself and unmaps the BARs in D3hot, after which a read gives 0 and never
comes here; silicon answers all ones. Until the first reset, which QEMU does when the machine starts, the capability is
therefore shown under an id that QEMU passes through; from then on the guest reads it as power management and reads in
D3hot arrive. Observed on QEMU 11.1.

Source: PCI Local Bus Specification 3.0 chapter 6; PCI Bus Power Management Interface Specification 1.2 chapter 3;
PCI Express Base Specification 5.0 section 7.5.3; names and offsets as in Linux include/uapi/linux/pci_regs.h.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final, Protocol

CONFIG_SIZE: Final = 4096
NVIDIA: Final = 0x10DE

_COMMAND: Final = 0x04
_BARS: Final = 0x10
_BARS_END: Final = 0x28
_SUBSYSTEM: Final = 0x2C
_CAPABILITIES: Final = 0x34
_INTERRUPT_LINE: Final = 0x3C
_CACHE_LINE: Final = 0x0C

_POWER: Final = 0x60
_POWER_STATE: Final = _POWER + 4
_EXPRESS: Final = 0x78
_DEVICE_CONTROL: Final = _EXPRESS + 8
_LINK_CONTROL: Final = _EXPRESS + 0x10
_DEVICE_CONTROL_2: Final = _EXPRESS + 0x28
_SERIAL_NUMBER: Final = 0x100

_ID_POWER: Final = 0x01
_ID_EXPRESS: Final = 0x10
# CompactPCI hot swap: nothing in QEMU looks at it.
_ID_NOT_MODELLED: Final = 0x06
_FLR_CAPABLE: Final = 1 << 28
_INITIATE_FLR_HIGH_BYTE: Final = 0x80
_MEMORY_64_PREFETCHABLE: Final = 0xC
_D3HOT: Final = 3


class Reset(StrEnum):
    """What reset a function."""

    FUNCTION_LEVEL = "function-level"
    DEVICE = "device"
    """The bus, or the machine, was reset."""


class Registers(Protocol):
    """What stands behind the BARs of a function. Called from one thread; offsets and widths in bytes."""

    def read(self, bar: int, offset: int, width: int) -> int:
        """Return the value that a read of this width gets."""

    def write(self, bar: int, offset: int, width: int, value: int) -> None:
        """Take a write."""

    def reset(self, kind: Reset) -> None:
        """Return to the state after a reset."""


class RegisterFile:
    """Registers that keep what is written until a reset; `at_reset` maps offsets in BAR0 to 32-bit values."""

    def __init__(self, at_reset: dict[int, int]) -> None:
        self._at_reset = dict(at_reset)
        self._words: dict[tuple[int, int], int] = {}
        self.reset(Reset.DEVICE)

    def read(self, bar: int, offset: int, width: int) -> int:
        """Return the bytes at an offset; what was never written is 0."""
        first, last = offset & ~3, (offset + width - 1) & ~3
        words = (self._words.get((bar, at), 0) for at in range(first, last + 4, 4))
        data = b"".join(struct.pack("<I", word) for word in words)
        return int.from_bytes(data[offset - first : offset - first + width], "little")

    def write(self, bar: int, offset: int, width: int, value: int) -> None:
        """Keep the bytes."""
        for index in range(width):
            at, shift = (offset + index) & ~3, 8 * ((offset + index) & 3)
            byte = value >> 8 * index & 0xFF
            word = self._words.get((bar, at), 0)
            self._words[bar, at] = word & ~(0xFF << shift) | byte << shift

    def reset(self, kind: Reset) -> None:  # noqa: ARG002 - every reset is the same here
        """Forget what was written."""
        self._words = {(0, offset): value for offset, value in self._at_reset.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a function is: ids as in its configuration space, sizes of its 64-bit BARs in bytes by index."""

    vendor: int
    device: int
    class_code: int
    subsystem_vendor: int
    subsystem_device: int
    revision: int = 0xA1
    bars: tuple[tuple[int, int], ...] = ((0, 16 << 20),)
    boot_0: int = 0
    """NV_PMC_BOOT_0, the word at offset 0 of BAR0."""


# Ids: NVIDIA gpu-admin-tools gpu/devid_properties.py and the PCI ID database. BAR0 of a GPU is 16 MiB, of an NVSwitch
# 32 MiB. NV_PMC_BOOT_0: NVIDIA open-gpu-kernel-modules dev_boot.h, architecture in bits 28:24; of the switch a guess.
H100: Final = Identity(
    vendor=NVIDIA,
    device=0x2330,
    class_code=0x030200,
    subsystem_vendor=NVIDIA,
    subsystem_device=0x16C1,
    boot_0=0x180000A1,
)
NVSWITCH: Final = Identity(
    vendor=NVIDIA,
    device=0x22A3,
    class_code=0x068000,
    subsystem_vendor=NVIDIA,
    subsystem_device=0x1796,
    bars=((0, 32 << 20),),
    boot_0=0x070000A1,
)


class ConfigSpace:
    """The 4096 bytes of a function's configuration space, with what may be written and what a reset leaves."""

    def __init__(self, identity: Identity) -> None:
        image, mask = bytearray(CONFIG_SIZE), bytearray(CONFIG_SIZE)
        struct.pack_into("<HH", image, 0, identity.vendor, identity.device)
        struct.pack_into("<HH", image, _COMMAND, 0, 1 << 4)  # there is a list of capabilities
        struct.pack_into("<H", mask, _COMMAND, 0x0547)
        struct.pack_into("<I", image, 0x08, identity.class_code << 8 | identity.revision)
        for index, size in identity.bars:
            struct.pack_into("<I", image, _BARS + 4 * index, _MEMORY_64_PREFETCHABLE)
            struct.pack_into("<II", mask, _BARS + 4 * index, -size & 0xFFFFFFFF, 0xFFFFFFFF)
        struct.pack_into("<HH", image, _SUBSYSTEM, identity.subsystem_vendor, identity.subsystem_device)
        image[_CAPABILITIES] = _POWER
        mask[_CACHE_LINE] = mask[_INTERRUPT_LINE] = 0xFF
        # Version 3, and registers survive D3hot (No_Soft_Reset).
        struct.pack_into("<BBHH", image, _POWER, _ID_POWER, _EXPRESS, 0x0003, 0x0008)
        struct.pack_into("<H", mask, _POWER_STATE, _D3HOT)
        # An endpoint, version 2, that can reset itself; its link runs at 16 lanes of 32 GT/s, wherever it is plugged.
        struct.pack_into("<BBH", image, _EXPRESS, _ID_EXPRESS, 0, 0x0002)
        struct.pack_into("<IH", image, _EXPRESS + 4, _FLR_CAPABLE | 0x8FE1, 0x2810)
        struct.pack_into("<IHH", image, _EXPRESS + 0xC, 0x00416105, 0, 0x1105)
        struct.pack_into("<I", image, _EXPRESS + 0x24, 0x00070993)
        struct.pack_into("<H", mask, _DEVICE_CONTROL, 0x7FFF)
        struct.pack_into("<H", mask, _LINK_CONTROL, 0x0043)
        struct.pack_into("<H", mask, _DEVICE_CONTROL_2, 0xFFFF)
        struct.pack_into("<III", image, _SERIAL_NUMBER, 0x00010003, identity.device, 0x48B02D00)
        self._at_reset, self._mask = bytes(image), bytes(mask)
        self._now = image
        self._power_hidden = True

    @property
    def power_state(self) -> int:
        """0 for D0, 3 for D3hot."""
        return self._now[_POWER_STATE] & _D3HOT

    def read(self, offset: int, width: int) -> bytes:
        """Return bytes as the guest sees them."""
        seen = bytearray(self._now[offset : offset + width])
        if self._power_hidden and offset <= _POWER < offset + width:
            seen[_POWER - offset] = _ID_NOT_MODELLED
        return bytes(seen)

    def write(self, offset: int, data: bytes) -> bool:
        """Take a write; return whether it asked for a Function Level Reset."""
        for index, byte in enumerate(data):
            may = self._mask[offset + index]
            self._now[offset + index] = self._now[offset + index] & ~may | byte & may
        high = _DEVICE_CONTROL + 1
        return offset <= high < offset + len(data) and bool(data[high - offset] & _INITIATE_FLR_HIGH_BYTE)

    def reset(self, kind: Reset) -> None:
        """Return to the state after a reset; QEMU keeps the addresses of BARs over a reset of the machine by itself."""
        bars = self._now[_BARS:_BARS_END]
        self._now = bytearray(self._at_reset)
        if kind is Reset.DEVICE:
            self._power_hidden = False
            self._now[_BARS:_BARS_END] = bars


class Operation(IntEnum):
    """What the journal of a function holds."""

    READ = 0
    WRITE = 1
    RESET = 2


@dataclass(frozen=True, slots=True)
class Access:
    """One access to a BAR that reached the function, or a reset (then `kind` says which)."""

    operation: Operation
    bar: int = 0
    offset: int = 0
    width: int = 0
    value: int = 0
    kind: Reset | None = None


@dataclass(slots=True)
class Function:
    """A function as the bus sees it: configuration space, registers, power, and the journal of what arrived."""

    identity: Identity
    registers: Registers
    lost: bool = False
    """Fallen off the bus: every read gives ones, every write is ignored."""
    journal: list[Access] = field(default_factory=list)
    config: ConfigSpace = field(init=False)

    def __post_init__(self) -> None:
        """Start with the configuration space of a function that was just powered."""
        self.config = ConfigSpace(self.identity)

    @classmethod
    def of(cls, identity: Identity) -> Function:
        """Return a function with a plain register file."""
        return cls(identity, RegisterFile({0: identity.boot_0}))

    def bar_size(self, index: int) -> int:
        """Return the size of a BAR, 0 when there is none."""
        return dict(self.identity.bars).get(index, 0)

    def read_config(self, offset: int, width: int) -> bytes:
        """Answer a read of configuration space."""
        return b"\xff" * width if self.lost else self.config.read(offset, width)

    def write_config(self, offset: int, data: bytes) -> None:
        """Take a write to configuration space."""
        if not self.lost and self.config.write(offset, data):
            self.reset(Reset.FUNCTION_LEVEL)

    def read_bar(self, bar: int, offset: int, width: int) -> int:
        """Answer a read of a register: all ones while the function sleeps."""
        awake = not self.lost and self.config.power_state == 0
        value = self.registers.read(bar, offset, width) if awake else (1 << 8 * width) - 1
        self.journal.append(Access(Operation.READ, bar, offset, width, value))
        return value

    def write_bar(self, bar: int, offset: int, width: int, value: int) -> None:
        """Take a write to a register; a sleeping function ignores it."""
        self.journal.append(Access(Operation.WRITE, bar, offset, width, value))
        if not self.lost and self.config.power_state == 0:
            self.registers.write(bar, offset, width, value)

    def reset(self, kind: Reset) -> None:
        """Reset the function."""
        self.journal.append(Access(Operation.RESET, kind=kind))
        self.config.reset(kind)
        self.registers.reset(kind)
