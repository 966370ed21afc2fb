# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Where facts are read, and the few ways in which they are read.

This is the only module of the package that opens a file. Reads are plain system calls on strings: open, one read
into a small buffer, close. A scan of thousands of functions spends its time here.

Source: Linux Documentation/filesystems/sysfs.rst (one value per file, links for relations).
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, Generic, TypeVar

from pcifacts.errors import AttributeMalformed, AttributeUnreadable, PathUnreadable

T = TypeVar("T")

# Longer than any attribute read here; an answer that fills it is malformed.
_BUFFER_BYTES: Final = 64

# The attribute or its device is gone. ENODEV is what an open attribute of a removed device answers (kernfs).
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO})


@dataclass(frozen=True, slots=True)
class Roots:
    """The directories that facts come from: sysfs, and devtmpfs's folder of VFIO nodes."""

    sysfs: str = "/sys"
    dev_vfio: str = "/dev/vfio"

    @property
    def pci_devices(self) -> str:
        """Folder with one link per PCI function."""
        return self.sysfs + "/bus/pci/devices"

    @property
    def vfio_class(self) -> str:
        """Folder with one link per VFIO device."""
        return self.sysfs + "/class/vfio-dev"

    @property
    def iommu_groups(self) -> str:
        """Folder with one folder per IOMMU group."""
        return self.sysfs + "/kernel/iommu_groups"

    @property
    def device_nodes(self) -> str:
        """Folder with one character node per VFIO device."""
        return self.dev_vfio + "/devices"


class SkipKind(StrEnum):
    """Why an entry of a directory gave no fact."""

    MALFORMED_NAME = "malformed-name"
    MALFORMED = "malformed"
    UNREADABLE = "unreadable"
    DANGLING = "dangling"
    NOT_PCI = "not-pci"
    NOIOMMU = "noiommu"
    ORPHAN_NODE = "orphan-node"


@dataclass(frozen=True, slots=True)
class Skipped:
    """One directory entry that gave no fact: its name, and why in one sentence."""

    name: str
    reason: str
    kind: SkipKind = SkipKind.MALFORMED
    path: str = ""


@dataclass(frozen=True, slots=True)
class Scan(Generic[T]):
    """What one look at a directory gave: the facts, in the order of their kind, and the entries left out."""

    found: tuple[T, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def attribute(path: str) -> bytes | None:
    """Return the bytes of a small attribute, or None when it does not exist.

    Raises: AttributeUnreadable when the kernel refuses the read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, _BUFFER_BYTES)
        finally:
            os.close(descriptor)
    except OSError as err:
        if err.errno in _ABSENT:
            return None
        raise AttributeUnreadable(path, errno=err.errno or 0, observed=os.strerror(err.errno or 0)) from err


def hexadecimal(path: str, digits: int) -> int | None:
    """Return an attribute of the form 0x<digits hexadecimal digits>, or None when it does not exist.

    Raises: AttributeUnreadable, AttributeMalformed.
    """
    data = attribute(path)
    return None if data is None else parse_hexadecimal(path, data, digits)


def parse_hexadecimal(path: str, data: bytes, digits: int) -> int:
    """Return the number in what was read from `path`, in the form 0x<digits hexadecimal digits>.

    Raises: AttributeMalformed.
    """
    value = _hexadecimal(data, digits)
    if value is None:
        raise AttributeMalformed(path, expected=f"0x and {digits} hexadecimal digits", observed=excerpt(data))
    return value


def numa_node(path: str) -> int | None:
    """Return the NUMA node in an attribute; None when it is unknown in whatever way.

    No node, -1, an empty or malformed text and a refused read all mean the same to a caller: not known.
    """
    try:
        data = attribute(path)
    except AttributeUnreadable:
        return None
    return None if data is None else _numa_node(data)


def device_number(path: str) -> tuple[int, int] | None:
    """Return (major, minor) from an attribute `dev`, or None when it does not exist.

    Raises: AttributeUnreadable, AttributeMalformed.
    """
    data = attribute(path)
    if data is None:
        return None
    number = _device_number(data)
    if number is None:
        raise AttributeMalformed(path, expected="major:minor", observed=excerpt(data))
    return number


def link(path: str) -> str | None:
    """Return the target of a symbolic link, or None when there is no link; the target may dangle.

    Raises: PathUnreadable when the kernel refuses, AttributeMalformed when something else than a link is there.
    """
    try:
        return os.readlink(path)
    except OSError as err:
        if err.errno in _ABSENT:
            return None
        if err.errno == errno.EINVAL:
            raise AttributeMalformed(path, expected="a symbolic link", observed="something else") from err
        raise PathUnreadable(path, errno=err.errno or 0, observed=os.strerror(err.errno or 0)) from err


def link_name(path: str) -> str | None:
    """Return the last component of a link's target, or None when there is no link.

    Raises: as `link`.
    """
    target = link(path)
    return None if target is None else target[target.rfind("/") + 1 :]


def entries(path: str) -> list[str] | None:
    """Return the names in a directory, in no order, or None when there is no such directory.

    Raises: PathUnreadable.
    """
    try:
        return os.listdir(path)
    except OSError as err:
        if err.errno in _ABSENT:
            return None
        raise PathUnreadable(
            path, errno=err.errno or 0, observed=os.strerror(err.errno or 0), expected="a readable directory"
        ) from err


def exists(path: str) -> bool:
    """Whether there is a directory entry of this name; a dangling link counts."""
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def is_absence(err: OSError) -> bool:
    """Whether an error means that there is nothing, rather than that it can't be read."""
    return err.errno in _ABSENT


def below_root(parts: list[str]) -> tuple[str, ...]:
    """Return the components of a device's path from its PCI root down; empty when it hangs below none.

    What stands before the root (a platform device on some Arm machines) is left out; a second root further down
    (Intel VMD) stays.
    """
    for index, part in enumerate(parts):
        # pciDDDD:BB; the shape is enough, since nothing else in such a path begins and ends so.
        if part.startswith("pci") and part[-3:-2] == ":":
            return tuple(parts[index:])
    return ()


def excerpt(data: bytes) -> str:
    """Return the start of what was read, safe to print on one line."""
    return "an empty file" if not data else ascii(data[:32].decode("latin-1"))


@lru_cache(maxsize=1024)
def _hexadecimal(data: bytes, digits: int) -> int | None:
    text = data.rstrip(b"\n")
    if len(text) != digits + 2 or not text.startswith(b"0x"):
        return None
    try:
        value = int(text, 16)
    except ValueError:
        return None
    # int() also takes underscores.
    return value if f"0x{value:0{digits}x}".encode() == text.lower() else None


@lru_cache(maxsize=256)
def _numa_node(data: bytes) -> int | None:
    text = data.strip()
    # A node number has at most ten digits (it is an int), and isdigit() on bytes knows ASCII only.
    return int(text) if text.isdigit() and len(text) <= 10 else None


@lru_cache(maxsize=256)
def _device_number(data: bytes) -> tuple[int, int] | None:
    major, colon, minor = data.rstrip(b"\n").partition(b":")
    if not colon or not (major.isdigit() and minor.isdigit()) or len(data) > 24:
        return None
    return int(major), int(minor)
