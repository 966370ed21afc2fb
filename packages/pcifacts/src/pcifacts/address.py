# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""PCI addresses as sysfs spells them.

Source: Linux drivers/pci/probe.c, pci_setup_device: "%04x:%02x:%02x.%d" of domain, bus, slot and function. The
domain is an int, so it grows past four digits where the hardware has such domains (Intel VMD starts at 0x10000).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pcifacts.errors import PciAddressError

_EXPECTED: Final = "domain:bus:device.function in hexadecimal, such as 0000:65:00.0"
_LAST_BUS: Final = 0xFF
_LAST_DEVICE: Final = 0x1F
_LAST_FUNCTION: Final = 7

# Addresses recur at every scan. The bound is far above any node, and only keeps a stream of nonsense from growing it.
_PARSED_LIMIT: Final = 16_384
_parsed: Final[dict[str, PciAddress]] = {}


@dataclass(frozen=True, slots=True)
class PciAddress:
    """One PCI function's place: ordered by number, hashable, and `str()` is the name of its sysfs directory."""

    domain: int
    bus: int
    device: int
    function: int
    text: str = field(init=False, repr=False, compare=False)
    ordinal: int = field(init=False, repr=False, compare=False)
    """The address as one number; `sorted(..., key=by_ordinal)` is the fast way to order many."""

    def __post_init__(self) -> None:
        """Refuse numbers that no PCI function can have."""
        if not (
            self.domain >= 0
            and 0 <= self.bus <= _LAST_BUS
            and 0 <= self.device <= _LAST_DEVICE
            and 0 <= self.function <= _LAST_FUNCTION
        ):
            observed = f"domain {self.domain}, bus {self.bus}, device {self.device}, function {self.function}"
            raise PciAddressError(
                "PciAddress", expected="domain >= 0, bus <= 255, device <= 31, function <= 7", observed=observed
            )
        # The only way to fill a derived field of a frozen dataclass.
        object.__setattr__(self, "text", f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function:x}")
        object.__setattr__(self, "ordinal", self.domain << 16 | self.bus << 8 | self.device << 3 | self.function)

    @classmethod
    def parse(cls, text: str) -> PciAddress:
        """Read the sysfs spelling, in either case.

        The domain has four digits, or as many as it needs: a longer one with leading zeros is not how the kernel
        names a directory, and would give two spellings to one function.

        Raises: PciAddressError for every other text.
        """
        known = _parsed.get(text)
        if known is not None:
            return known
        try:
            domain, bus, place = text.split(":")
            device, function = place.split(".")
            address = cls(int(domain, 16), int(bus, 16), int(device, 16), int(function, 16))
        except (ValueError, PciAddressError):
            raise PciAddressError(ascii(text), expected=_EXPECTED, observed=ascii(text)) from None
        # int() takes signs, underscores, blanks and foreign digits: only the exact spelling is an address.
        if address.text != text.lower():
            raise PciAddressError(ascii(text), expected=_EXPECTED, observed=ascii(text))
        if len(_parsed) >= _PARSED_LIMIT:
            _parsed.clear()
        _parsed[text] = address
        return address

    def __str__(self) -> str:
        return self.text

    def __lt__(self, other: PciAddress) -> bool:
        return self.ordinal < other.ordinal

    def __le__(self, other: PciAddress) -> bool:
        return self.ordinal <= other.ordinal

    def __gt__(self, other: PciAddress) -> bool:
        return self.ordinal > other.ordinal

    def __ge__(self, other: PciAddress) -> bool:
        return self.ordinal >= other.ordinal

    def __hash__(self) -> int:
        return hash(self.ordinal)

    @property
    def slot(self) -> str:
        """The address without the function: what the functions of one card share."""
        return self.text[:-2]


def by_ordinal(address: PciAddress) -> int:
    """Sort key: the number of an address."""
    return address.ordinal
