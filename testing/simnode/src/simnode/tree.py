# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""A node written below a directory, and changed in the order in which a kernel changes it.

The layout is the kernel's: devices/pciDDDD:BB/.../<address> holds the attributes, everything else is a link to it.
A VFIO device node is a link to /dev/null, and its `dev` attribute says 1:3, so that nothing here needs privileges.

Order of a bind: driver links, the group's node, the VFIO device in sysfs, its class link, its `dev` attribute, its
node. Order of an unbind: driver links, the node, `dev`, the class link, the VFIO device, the group's node. So a
VFIO device's node comes last and goes first, as far as its VFIO device is concerned; the driver links go even earlier.

Source: Linux drivers/base/dd.c (driver_sysfs_add before the probe, driver_sysfs_remove before the remove),
drivers/base/core.c (device_add makes class links before `dev` and the devtmpfs node, device_del goes back),
drivers/vfio/vfio_main.c (the group is set before the device is added and removed after it is deleted),
drivers/base/devtmpfs.c (folders are made and removed with their first and last node), drivers/vfio/vfio_main.c
(numbers come from an ida: the lowest free one). Observed on Linux 7.3, QEMU 11.1.
"""

from __future__ import annotations

import heapq
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from simnode.node import VFIO_DRIVERS, Device, Node

_NODE_TARGET: Final = "/dev/null"
_NODE_NUMBER: Final = "1:3\n"
"""What /dev/null is. Source: Linux Documentation/admin-guide/devices.txt"""

Undo = Callable[[], None]


class KernelRefusal(Exception):
    """The kernel would answer a write with an error. `errno_name` says which."""

    def __init__(self, subject: str, errno_name: str, why: str) -> None:
        super().__init__(subject, errno_name, why)
        self.subject = subject
        self.errno_name = errno_name
        self.why = why

    def __str__(self) -> str:
        return f"{self.subject}: {self.errno_name}, {self.why}"


class Fault(StrEnum):
    """Damage to one device that `LiveNode.damage` can do; see there for how it looks on disk."""

    MALFORMED_VENDOR = "malformed vendor"
    EMPTY_VENDOR = "empty vendor"
    MISSING_VENDOR = "missing vendor"
    UNREADABLE_VENDOR = "unreadable vendor"
    MALFORMED_CLASS = "malformed class"
    EMPTY_CLASS = "empty class"
    MISSING_CLASS = "missing class"
    UNREADABLE_CLASS = "unreadable class"
    MALFORMED_NUMA = "malformed numa_node"
    EMPTY_NUMA = "empty numa_node"
    MISSING_NUMA = "missing numa_node"
    UNREADABLE_NUMA = "unreadable numa_node"
    DANGLING_FUNCTION = "dangling bus link"
    DANGLING_DRIVER = "dangling driver link"
    DANGLING_CDEV = "dangling class link"
    CDEV_GONE_FROM_SYSFS = "node without a device in sysfs"
    NO_DEVICE_NUMBER = "no dev attribute"
    MALFORMED_DEVICE_NUMBER = "malformed dev attribute"
    NODE_MISSING = "node missing"
    NODE_DANGLING = "node is a dangling link"
    NODE_IS_A_FILE = "node is a plain file"
    NODE_IS_ANOTHER_DEVICE = "node has another number"


_ATTRIBUTE_FAULTS: Final[dict[Fault, tuple[str, bytes | None]]] = {
    Fault.MALFORMED_VENDOR: ("vendor", b"10de?\n"),
    Fault.EMPTY_VENDOR: ("vendor", b""),
    Fault.MISSING_VENDOR: ("vendor", None),
    Fault.MALFORMED_CLASS: ("class", b"0x03_200\n"),
    Fault.EMPTY_CLASS: ("class", b""),
    Fault.MISSING_CLASS: ("class", None),
    Fault.MALFORMED_NUMA: ("numa_node", b"zero\n"),
    Fault.EMPTY_NUMA: ("numa_node", b""),
    Fault.MISSING_NUMA: ("numa_node", None),
}
_BLOCKED_ATTRIBUTES: Final = {
    Fault.UNREADABLE_VENDOR: "vendor",
    Fault.UNREADABLE_CLASS: "class",
    Fault.UNREADABLE_NUMA: "numa_node",
}


class LiveNode:
    """A node on disk. `sysfs` and `dev_vfio` are the directories to point a program at."""

    def __init__(self, root: Path, node: Node) -> None:
        self.root = root
        self.sysfs = root / "sys"
        self.dev_vfio = root / "dev" / "vfio"
        self.node = node
        self._sys = str(self.sysfs)
        self._vfio = str(self.dev_vfio)
        self._devices = {device.address: device for device in node.devices}
        self._present: set[str] = set()
        self._drivers: dict[str, str] = {}
        self._cdevs: dict[str, int] = {}
        self._free: list[int] = []
        self._next_number = 0
        self._group_users: dict[int, int] = {}
        self._below: Counter[str] = Counter()
        # How often a function came onto the bus, and how often it got a VFIO device: an undo of damage to something
        # that the kernel has taken away since must not bring it back.
        self._arrivals: Counter[str] = Counter()
        self._openings: Counter[str] = Counter()
        self._kept = root / "kept"
        self._kept_count = 0

    @classmethod
    def create(cls, root: Path, node: Node) -> LiveNode:
        """Write the node below `root`, which may exist; its functions are bound in the order of the node.

        Without a bound VFIO device there is no /dev/vfio and no class vfio-dev: the module is not loaded.
        """
        live = cls(root, node)
        for folder in ("bus/pci/devices", "bus/pci/drivers", "class", "kernel", "devices"):
            os.makedirs(f"{live._sys}/{folder}", exist_ok=True)
        os.makedirs(os.path.dirname(live._vfio), exist_ok=True)
        if node.kernel.iommu:
            os.makedirs(f"{live._sys}/kernel/iommu_groups", exist_ok=True)
        # A bridge before what sits below it, a physical function before its virtual ones.
        for device in sorted(node.devices, key=lambda d: (len(d.parents), d.vf_of is not None)):
            live._add(device)
        for device in node.devices:
            if device.driver is not None:
                live.bind(device.address, device.driver)
        return live

    # What is there now.

    def cdev(self, address: str) -> str | None:
        """Return the name of the function's VFIO device, or None."""
        number = self._cdevs.get(address)
        return None if number is None else f"vfio{number}"

    def driver(self, address: str) -> str | None:
        """Return the driver that holds the function, or None."""
        return self._drivers.get(address)

    def is_present(self, address: str) -> bool:
        """Whether the function is on the bus."""
        return address in self._present

    def state(self) -> Node:
        """Return the node as it stands now. Functions that are off the bus are left out."""
        return replace(
            self.node,
            devices=tuple(
                replace(device, driver=self._drivers.get(device.address))
                for device in self.node.devices
                if device.address in self._present
            ),
        )

    def device_dir(self, address: str) -> Path:
        """Return the function's own folder below sys/devices, whether it is there or not."""
        return Path(self._dir(address))

    def node_path(self, address: str) -> Path | None:
        """Return the path of the function's device node, or None when it has no VFIO device."""
        name = self.cdev(address)
        return None if name is None else self.dev_vfio / "devices" / name

    # What a kernel does.

    def bind(self, address: str, driver: str = "vfio-pci") -> str | None:
        """Attach a driver; return the name of the VFIO device that this made, or None.

        Raises: KernelRefusal where the kernel would refuse.
        """
        device = self._devices[address]
        if address not in self._present:
            raise KernelRefusal(address, "ENODEV", "not on the bus")
        if address in self._drivers:
            raise KernelRefusal(address, "EBUSY", f"{self._drivers[address]} holds it")
        on_vfio = driver in VFIO_DRIVERS
        if on_vfio and device.iommu_group is None:
            raise KernelRefusal(address, "EINVAL", "in no IOMMU group")
        folder = self._dir(address)
        driver_dir = f"{self._sys}/bus/pci/drivers/{driver}"
        if not os.path.isdir(driver_dir):
            os.mkdir(driver_dir)
            for control in ("bind", "unbind", "new_id", "remove_id", "uevent"):
                _write(f"{driver_dir}/{control}", "")
        up = self._up(device)
        os.symlink(f"{up}/bus/pci/drivers/{driver}", f"{folder}/driver")
        os.symlink(f"../../../../{self._below_sys(device)}", f"{driver_dir}/{address}")
        self._drivers[address] = driver
        return self._open_vfio(device) if on_vfio else None

    def unbind(self, address: str) -> None:
        """Detach the driver.

        Raises: KernelRefusal where the kernel would refuse.
        """
        driver = self._drivers.get(address)
        if driver is None:
            raise KernelRefusal(address, "ENODEV", "no driver holds it")
        device = self._devices[address]
        _unlink(f"{self._sys}/bus/pci/drivers/{driver}/{address}")
        _unlink(f"{self._dir(address)}/driver")
        del self._drivers[address]
        if driver in VFIO_DRIVERS:
            self._close_vfio(device)

    def remove(self, address: str) -> None:
        """Take the function off the bus, as surprise removal or a write to its `remove` does.

        Source: Linux drivers/pci/remove.c (driver first), drivers/base/core.c device_del (bus link before folder).
        Raises: KernelRefusal where there is nothing to remove.
        """
        if address not in self._present:
            raise KernelRefusal(address, "ENOENT", "not on the bus")
        if self._below[address]:
            raise KernelRefusal(
                address, "ENOTEMPTY", f"{self._below[address]} functions sit below it; remove those first"
            )
        device = self._devices[address]
        if address in self._drivers:
            self.unbind(address)
        self._present.discard(address)
        self._below.subtract(_above(device))
        folder = self._dir(address)
        _unlink(f"{folder}/subsystem")
        _unlink(f"{self._sys}/bus/pci/devices/{address}")
        if device.iommu_group is not None:
            self._leave_group(device)
        if device.vf_of is not None:
            self._unlink_virtual(device)
        shutil.rmtree(folder, ignore_errors=True)

    def rescan(self, address: str) -> None:
        """Put a removed function back on the bus, held by no driver.

        Raises: KernelRefusal when it is on the bus already, or what it sits below is not.
        """
        if address in self._present:
            raise KernelRefusal(address, "EEXIST", "on the bus already")
        device = self._devices[address]
        missing = [parent for parent in device.parents if parent in self._devices and parent not in self._present]
        if missing:
            raise KernelRefusal(address, "ENODEV", f"{missing[0]} is not on the bus")
        self._add(device)

    def plug(self, device: Device) -> None:
        """Add a function that the node did not have; its driver, if any, is bound.

        Raises: ImpossibleNode.
        """
        self.node = replace(self.node, devices=(*self.node.devices, device))
        self._devices[device.address] = device
        self._add(device)
        if device.driver is not None:
            self.bind(device.address, device.driver)

    # What a kernel does not do.

    def damage(self, address: str, fault: Fault) -> Undo:
        """Damage what belongs to one function, and return what repairs it.

        The damage works against root too: what is unreadable is a link to itself (ELOOP), not a file mode.
        """
        folder = self._dir(address)
        if fault in _ATTRIBUTE_FAULTS:
            name, content = _ATTRIBUTE_FAULTS[fault]
            return self.write_attribute(address, name, content)
        of_function = self._while_counted(self._arrivals, address)
        if fault in _BLOCKED_ATTRIBUTES:
            return self._replaced(f"{folder}/{_BLOCKED_ATTRIBUTES[fault]}", _loop, of_function)
        if fault is Fault.DANGLING_FUNCTION:
            return self._replaced(f"{self._sys}/bus/pci/devices/{address}", _dangle, of_function)
        if fault is Fault.DANGLING_DRIVER:
            return self._replaced(f"{folder}/driver", _dangle, of_function)
        cdev = self.cdev(address)
        if cdev is None:
            raise KernelRefusal(address, "ENOENT", "no VFIO device to damage")
        of_cdev = self._while_counted(self._openings, address)
        entry = f"{self._sys}/class/vfio-dev/{cdev}"
        if fault is Fault.CDEV_GONE_FROM_SYSFS:
            undo_entry = self._replaced(entry, None, of_cdev)
            undo_folder = self._replaced(f"{folder}/vfio-dev", None, of_cdev)

            def undo() -> None:
                undo_folder()
                undo_entry()

            return undo
        node = f"{self._vfio}/devices/{cdev}"
        path, make = _CDEV_DAMAGE[fault](entry, f"{folder}/vfio-dev/{cdev}/dev", node)
        return self._replaced(path, make, of_cdev)

    def write_attribute(self, address: str, name: str, content: bytes | None) -> Undo:
        """Put other bytes into an attribute of a function, or take it away with None; return what repairs it."""
        make = None if content is None else _writer(content)
        return self._replaced(f"{self._dir(address)}/{name}", make, self._while_counted(self._arrivals, address))

    def block(self, path: Path) -> Undo:
        """Make a file or folder unreadable for everybody, and return what repairs it."""
        return self._replaced(str(path), _loop, lambda: True)

    def litter(self, path: Path, content: bytes = b"") -> Undo:
        """Put a file where the kernel puts none, and return what removes it."""
        return self._replaced(str(path), _writer(content), lambda: True)

    # How it is done.

    def _dir(self, address: str) -> str:
        return f"{self._sys}/{self._below_sys(self._devices[address])}"

    @staticmethod
    def _below_sys(device: Device) -> str:
        return "devices/" + "/".join((*device.parents, device.address))

    @staticmethod
    def _up(device: Device) -> str:
        """Return the way from the function's folder to sysfs's root."""
        return "/".join([".."] * (len(device.parents) + 2))

    def _while_counted(self, counter: Counter[str], address: str) -> Callable[[], bool]:
        """Return a test that holds as long as what is there now has neither gone nor come anew."""
        count = counter[address]
        if counter is self._openings:
            return lambda: counter[address] == count and address in self._cdevs
        return lambda: counter[address] == count and address in self._present

    def _replaced(self, path: str, make: Callable[[str], None] | None, still_there: Callable[[], bool]) -> Undo:
        """Put something else at a path (nothing, with None) and keep what was there outside of the tree."""
        kept = None
        if os.path.lexists(path):
            self._kept.mkdir(exist_ok=True)
            kept = f"{self._kept}/{self._kept_count}"
            self._kept_count += 1
            os.rename(path, kept)
        if make is not None:
            make(path)
        made = _inode(path)

        def undo() -> None:
            if made is not None and _inode(path) == made:
                os.unlink(path)
            if kept is not None and os.path.lexists(kept) and still_there() and not os.path.lexists(path):
                os.rename(kept, path)

        return undo

    def _add(self, device: Device) -> None:
        folder = self._dir(device.address)
        os.makedirs(folder, exist_ok=True)
        opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            for name, content in _attributes(device).items():
                _write(name, content, folder=opened)
        finally:
            os.close(opened)
        up = self._up(device)
        os.symlink(f"{up}/bus/pci", f"{folder}/subsystem")
        os.symlink(f"../../../{self._below_sys(device)}", f"{self._sys}/bus/pci/devices/{device.address}")
        if device.iommu_group is not None:
            members = f"{self._sys}/kernel/iommu_groups/{device.iommu_group}/devices"
            os.makedirs(members, exist_ok=True)
            kind = f"{self._sys}/kernel/iommu_groups/{device.iommu_group}/type"
            if not os.path.exists(kind):
                _write(kind, "DMA\n")
            os.symlink(f"../../../../{self._below_sys(device)}", f"{members}/{device.address}")
            os.symlink(f"{up}/kernel/iommu_groups/{device.iommu_group}", f"{folder}/iommu_group")
        if device.vf_of is not None:
            self._link_virtual(device, folder)
        self._present.add(device.address)
        self._below.update(_above(device))
        self._arrivals[device.address] += 1

    def _leave_group(self, device: Device) -> None:
        group = f"{self._sys}/kernel/iommu_groups/{device.iommu_group}"
        _unlink(f"{group}/devices/{device.address}")
        _unlink(f"{self._dir(device.address)}/iommu_group")
        if not os.listdir(f"{group}/devices"):
            shutil.rmtree(group)

    def _link_virtual(self, device: Device, folder: str) -> None:
        # A virtual function is a sibling of its physical one, in the same folder or another function of the bus.
        physical = self._dir(str(device.vf_of))
        os.symlink(f"../{device.vf_of}", f"{folder}/physfn")
        index = 0
        while os.path.lexists(f"{physical}/virtfn{index}"):
            index += 1
        os.symlink(f"../{device.address}", f"{physical}/virtfn{index}")

    def _unlink_virtual(self, device: Device) -> None:
        physical = self._dir(str(device.vf_of))
        with suppress(OSError):
            for name in os.listdir(physical):
                if name.startswith("virtfn") and os.readlink(f"{physical}/{name}") == f"../{device.address}":
                    _unlink(f"{physical}/{name}")

    def _open_vfio(self, device: Device) -> str | None:
        kernel = self.node.kernel
        if not os.path.isdir(self._vfio):
            # Loading the module makes the container node and, from v6.1, the class.
            os.makedirs(self._vfio)
            os.symlink(_NODE_TARGET, f"{self._vfio}/vfio")
        if kernel.vfio_class and not os.path.isdir(f"{self._sys}/class/vfio-dev"):
            os.mkdir(f"{self._sys}/class/vfio-dev")
        group = device.iommu_group or 0
        users = self._group_users.get(group, 0)
        if users == 0:
            os.symlink(_NODE_TARGET, f"{self._vfio}/{group}")
        self._group_users[group] = users + 1
        if not kernel.vfio_class:
            # Older kernels keep VFIO devices to themselves; only the group shows.
            return None
        number = heapq.heappop(self._free) if self._free else self._next_number
        if number == self._next_number:
            self._next_number += 1
        self._cdevs[device.address] = number
        self._openings[device.address] += 1
        name = f"vfio{number}"
        folder = f"{self._dir(device.address)}/vfio-dev"
        entry = f"{folder}/{name}"
        os.mkdir(folder)
        os.mkdir(entry)
        uevent = f"MAJOR=1\nMINOR=3\nDEVNAME=vfio/devices/{name}\n" if kernel.device_nodes else ""
        _write(f"{entry}/uevent", uevent)
        os.symlink(f"../../{'../' * (len(device.parents) + 2)}class/vfio-dev", f"{entry}/subsystem")
        os.symlink(f"../../../{device.address}", f"{entry}/device")
        os.symlink(f"../../{self._below_sys(device)}/vfio-dev/{name}", f"{self._sys}/class/vfio-dev/{name}")
        if kernel.device_nodes:
            _write(f"{entry}/dev", _NODE_NUMBER)
            nodes = f"{self._vfio}/devices"
            try:
                os.symlink(_NODE_TARGET, f"{nodes}/{name}")
            except FileNotFoundError:
                os.mkdir(nodes)
                os.symlink(_NODE_TARGET, f"{nodes}/{name}")
        # An idle device on vfio-pci sleeps.
        _write(f"{self._dir(device.address)}/power_state", "D3hot\n")
        return name

    def _close_vfio(self, device: Device) -> None:
        _write(f"{self._dir(device.address)}/power_state", "D0\n")
        number = self._cdevs.pop(device.address, None)
        if number is not None:
            name = f"vfio{number}"
            nodes = f"{self._vfio}/devices"
            _unlink(f"{nodes}/{name}")
            # Fails while other nodes are there, as it should.
            with suppress(OSError):
                os.rmdir(nodes)
            folder = f"{self._dir(device.address)}/vfio-dev"
            _unlink(f"{folder}/{name}/dev")
            _unlink(f"{self._sys}/class/vfio-dev/{name}")
            shutil.rmtree(folder, ignore_errors=True)
            heapq.heappush(self._free, number)
        group = device.iommu_group or 0
        self._group_users[group] -= 1
        if self._group_users[group] == 0:
            _unlink(f"{self._vfio}/{group}")


def _attributes(device: Device) -> dict[str, str]:
    """Return the attributes of a function as the kernel prints them.

    Source: Linux drivers/pci/pci-sysfs.c, Documentation/ABI/testing/sysfs-bus-pci
    """
    domain_bus_slot = device.address
    return {
        "vendor": f"0x{device.vendor:04x}\n",
        "device": f"0x{device.device:04x}\n",
        "subsystem_vendor": f"0x{device.subsystem_vendor:04x}\n",
        "subsystem_device": f"0x{device.subsystem_device:04x}\n",
        "class": f"0x{device.class_code:06x}\n",
        "revision": "0xa1\n",
        "numa_node": f"{-1 if device.numa is None else device.numa}\n",
        "driver_override": "(null)\n",
        "enable": "0\n",
        "power_state": "D0\n",
        "reset_method": "flr bus\n",
        "modalias": (
            f"pci:v{device.vendor:08X}d{device.device:08X}sv{device.subsystem_vendor:08X}"
            f"sd{device.subsystem_device:08X}bc{device.class_code >> 16:02X}"
            f"sc{device.class_code >> 8 & 0xFF:02X}i{device.class_code & 0xFF:02X}\n"
        ),
        "uevent": (
            f"PCI_CLASS={device.class_code:X}\nPCI_ID={device.vendor:04X}:{device.device:04X}\n"
            f"PCI_SUBSYS_ID={device.subsystem_vendor:04X}:{device.subsystem_device:04X}\n"
            f"PCI_SLOT_NAME={domain_bus_slot}\n"
        ),
    }


def _write(path: str, content: str | bytes, *, folder: int | None = None) -> None:
    data = content.encode() if isinstance(content, str) else content
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=folder)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _unlink(path: str) -> None:
    # Damage may have taken it already; the kernel's own removal never fails either.
    with suppress(FileNotFoundError):
        os.unlink(path)


def _writer(content: bytes) -> Callable[[str], None]:
    return lambda path: _write(path, content)


def _linker(target: str) -> Callable[[str], None]:
    return lambda path: os.symlink(target, path)


def _dangle(path: str) -> None:
    os.symlink("../nowhere/gone", path)


def _loop(path: str) -> None:
    os.symlink(os.path.basename(path), path)


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _above(device: Device) -> tuple[str, ...]:
    """Return the functions that keep this one from hanging in the air."""
    above = tuple(parent for parent in device.parents if not parent.startswith("pci"))
    return above if device.vf_of is None else (*above, device.vf_of)


_CdevDamage = Callable[[str, str, str], tuple[str, Callable[[str], None] | None]]

# From (class entry, dev attribute, node) to what is replaced, and by what.
_CDEV_DAMAGE: Final[dict[Fault, _CdevDamage]] = {
    Fault.DANGLING_CDEV: lambda entry, _dev, _node: (entry, _dangle),
    Fault.NO_DEVICE_NUMBER: lambda _entry, dev, _node: (dev, None),
    Fault.MALFORMED_DEVICE_NUMBER: lambda _entry, dev, _node: (dev, _writer(b"one:three\n")),
    Fault.NODE_MISSING: lambda _entry, _dev, node: (node, None),
    Fault.NODE_DANGLING: lambda _entry, _dev, node: (node, _dangle),
    Fault.NODE_IS_A_FILE: lambda _entry, _dev, node: (node, _writer(b"")),
    Fault.NODE_IS_ANOTHER_DEVICE: lambda _entry, _dev, node: (node, _linker("/dev/zero")),
}
