# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""PCI functions that answer register by register, and remember every access.

The seam is `Registers`: whatever has these three methods can stand behind BAR0. Here it is a plain register file; a
firmware simulator fits in the same place.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from vmlab.config_space import ConfigSpace, Identity, PowerState

BAR0: Final = 0


class Reset(StrEnum):
    """What made a function forget."""

    FUNCTION = "function level reset"
    DEVICE = "reset of the slot or the machine"


class Registers(Protocol):
    """What lies behind BAR0. Offsets and sizes are in bytes; values are unsigned and little-endian."""

    def read(self, offset: int, size: int) -> int:
        """Return what is there."""

    def write(self, offset: int, size: int, value: int) -> None:
        """Change it."""

    def reset(self, cause: Reset) -> None:
        """Go back to the state after that reset."""


class Kind(StrEnum):
    """What an access was."""

    READ = "read"
    WRITE = "write"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Access:
    """One access as it reached a function's BAR0, or a reset. `value` is what was read or written."""

    kind: Kind
    offset: int = 0
    size: int = 0
    value: int = 0
    reset: Reset | None = None


class RegisterFile:
    """Registers of 32 bits that hold what was last written to them; those never written are zero."""

    def __init__(self, power_on: Mapping[int, int]) -> None:
        """Start with these values, by offset."""
        self._power_on = dict(power_on)
        self._values = dict(power_on)

    def read(self, offset: int, size: int) -> int:
        """Return what is there, of whatever size."""
        return self._word(offset, size) >> 8 * (offset % 4) & (1 << 8 * size) - 1

    def write(self, offset: int, size: int, value: int) -> None:
        """Change what is there, of whatever size."""
        first = offset - offset % 4
        shift = 8 * (offset % 4)
        mask = ((1 << 8 * size) - 1) << shift
        changed = self._word(offset, size) & ~mask | value << shift & mask
        for at in range(first, offset + size, 4):
            self._values[at] = changed >> 8 * (at - first) & 0xFFFFFFFF

    def reset(self, _cause: Reset) -> None:
        """Forget everything written."""
        self._values = dict(self._power_on)

    def _word(self, offset: int, size: int) -> int:
        first = offset - offset % 4
        return sum(self._values.get(at, 0) << 8 * (at - first) for at in range(first, offset + size, 4))


class PciFunction:
    """One function: configuration space, registers behind BAR0, and a journal of what reached them."""

    def __init__(self, name: str, identity: Identity, registers: Registers) -> None:
        """Make a function in D0. `name` is for file names and messages."""
        self.name = name
        self.identity = identity
        self.registers = registers
        self._config = ConfigSpace(identity)
        self._lost = False
        self._journal: list[Access] = []
        # QEMU's thread and the test's meet here.
        self._lock = threading.Lock()

    @property
    def journal(self) -> tuple[Access, ...]:
        """Every access to BAR0 and every reset so far, in order."""
        with self._lock:
            return tuple(self._journal)

    @property
    def power_state(self) -> PowerState:
        """The power state that the guest put it in."""
        return self._config.power_state

    def lose(self) -> None:
        """Fall off the bus: everything reads as all ones, nothing can be written."""
        with self._lock:
            self._lost = True

    def attach(self) -> None:
        """Get ready for a machine that is about to be made."""
        with self._lock:
            self._config.hide_power_management()

    def read_config(self, offset: int, size: int) -> bytes:
        """Return bytes of the configuration space."""
        with self._lock:
            found = self._config.read(offset, size)
            return b"\xff" * size if self._lost else found

    def write_config(self, offset: int, content: bytes) -> None:
        """Write to the configuration space; a function level reset that this starts is over when it returns."""
        with self._lock:
            if not self._lost and self._config.write(offset, content):
                self._reset(Reset.FUNCTION)

    def read_bar(self, offset: int, size: int) -> int:
        """Return what BAR0 holds: all ones while the function sleeps or is lost.

        Source: PCI Express Base Specification 4.0, 5.3.1.4.1 (in D3hot only configuration requests are answered)
        """
        with self._lock:
            value = self.registers.read(offset, size) if self._answers() else (1 << 8 * size) - 1
            self._journal.append(Access(Kind.READ, offset, size, value))
            return value

    def write_bar(self, offset: int, size: int, value: int) -> None:
        """Write to BAR0; nothing happens while the function sleeps or is lost."""
        with self._lock:
            self._journal.append(Access(Kind.WRITE, offset, size, value))
            if self._answers():
                self.registers.write(offset, size, value)

    def reset(self) -> None:
        """Be reset from outside: by the machine, or through the slot."""
        with self._lock:
            self._reset(Reset.DEVICE)

    def _answers(self) -> bool:
        return not self._lost and self._config.power_state is PowerState.D0

    def _reset(self, cause: Reset) -> None:
        self._journal.append(Access(Kind.RESET, reset=cause))
        self._config.reset()
        self.registers.reset(cause)


# NV_PMC_BOOT_0 names the chip. Source: Linux drivers/gpu/drm/nouveau/nvkm/engine/device/base.c (0x180 is GH100)
_BOOT_0: Final = 0x0
_GH100_A1: Final = 0x180000A1
# Source: inferred; a switch has the register at the same place, and its chip is no GPU
_LS10_A1: Final = 0x070000A1


def h100(name: str) -> PciFunction:
    """Return an H100 SXM5 GPU. Source: pci.ids (10de:2330)."""
    identity = Identity(
        vendor=0x10DE,
        device=0x2330,
        class_code=0x030200,
        subsystem_vendor=0x10DE,
        subsystem_device=0x16C1,
        revision=0xA1,
        bars={BAR0: 16 << 20},
    )
    return PciFunction(name, identity, RegisterFile({_BOOT_0: _GH100_A1}))


def nvswitch(name: str) -> PciFunction:
    """Return an NVSwitch of the third generation. Source: pci.ids (10de:22a3)."""
    identity = Identity(
        vendor=0x10DE,
        device=0x22A3,
        class_code=0x068000,
        subsystem_vendor=0x10DE,
        subsystem_device=0x1796,
        revision=0xA1,
        bars={BAR0: 32 << 20},
    )
    return PciFunction(name, identity, RegisterFile({_BOOT_0: _LS10_A1}))
