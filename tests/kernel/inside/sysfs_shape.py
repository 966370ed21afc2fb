# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""What the code under test can see of one PCI function: names, links and contents, as sorted text.

Runs in the guest on the kernel's own sysfs, and on this machine on a simulated one; the two answers are compared.
Numbers that a kernel hands out (device numbers) are replaced by their names. Standard library only.

    sysfs_shape.py SYSFS DEV_VFIO ADDRESS
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator

ATTRIBUTES = (
    *("vendor", "device", "subsystem_vendor", "subsystem_device", "class", "revision", "numa_node", "modalias"),
    *("uevent", "driver_override", "reset_method", "enable"),
)
LINKS = ("driver", "iommu_group", "subsystem", "physfn")


def describe(path: str) -> str:
    """Return what is at a path; a link's target, a file's text."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return f"link to {os.readlink(path)}"
        if stat.S_ISDIR(status.st_mode):
            return "folder"
        with open(path) as file:
            text = file.read()
    except FileNotFoundError:
        return "absent"
    except OSError as error:
        return f"errno {error.errno}"
    return re.sub(r"(MAJOR|MINOR)=\d+", r"\1=N", text)


def node(path: str, number: str) -> str:
    """Return what kind of device node there is, and whether sysfs names the same number."""
    try:
        status = os.stat(path)
    except OSError as error:
        return f"errno {error.errno}"
    if not stat.S_ISCHR(status.st_mode):
        return "no character device"
    same = number.strip() == f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return "character device, numbered as in dev" if same else "character device of another number"


def names(path: str) -> str:
    """Return what a folder holds."""
    try:
        return " ".join(sorted(os.listdir(path)))
    except OSError as error:
        return f"errno {error.errno}"


def shape(sysfs: str, dev_vfio: str, address: str) -> Iterator[tuple[str, str]]:
    """Yield paths and what is there."""
    function = f"{sysfs}/bus/pci/devices/{address}"
    yield f"bus/pci/devices/{address}", describe(function)
    for name in (*ATTRIBUTES, *LINKS):
        yield f"function/{name}", describe(f"{function}/{name}")
    yield "function/vfio-dev: names", names(f"{function}/vfio-dev")
    for cdev in sorted(os.listdir(f"{function}/vfio-dev")) if os.path.isdir(f"{function}/vfio-dev") else ():
        entry = f"{function}/vfio-dev/{cdev}"
        for name in ("uevent", "device", "subsystem"):
            yield f"function/vfio-dev/{cdev}/{name}", describe(f"{entry}/{name}")
        number = describe(f"{entry}/dev")
        spelled = re.sub(r"\d+", "N", number)
        yield f"function/vfio-dev/{cdev}/dev", spelled
        yield f"class/vfio-dev/{cdev}", describe(f"{sysfs}/class/vfio-dev/{cdev}")
        yield f"dev/vfio/devices/{cdev}", node(f"{dev_vfio}/devices/{cdev}", number)
    yield "class/vfio-dev: names", names(f"{sysfs}/class/vfio-dev")
    driver = os.path.basename(os.readlink(f"{function}/driver")) if os.path.lexists(f"{function}/driver") else None
    if driver:
        yield f"bus/pci/drivers/{driver}/{address}", describe(f"{sysfs}/bus/pci/drivers/{driver}/{address}")
        for name in ("bind", "unbind", "new_id", "remove_id"):
            present = os.path.lexists(f"{sysfs}/bus/pci/drivers/{driver}/{name}")
            yield f"bus/pci/drivers/{driver}/{name}", "there" if present else "absent"
    if os.path.lexists(f"{function}/iommu_group"):
        group = os.path.basename(os.readlink(f"{function}/iommu_group"))
        folder = f"{sysfs}/kernel/iommu_groups/{group}"
        yield "iommu group: devices", names(f"{folder}/devices")
        yield f"iommu group: devices/{address}", describe(f"{folder}/devices/{address}")
        yield "iommu group: type", describe(f"{folder}/type")
        yield "dev/vfio: group node", "there" if os.path.exists(f"{dev_vfio}/{group}") else "absent"
    yield "dev/vfio/vfio", "there" if os.path.exists(f"{dev_vfio}/vfio") else "absent"
    yield "dev/vfio/devices: names", names(f"{dev_vfio}/devices")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dict(shape(*sys.argv[1:])), indent=1, sort_keys=True) + "\n")
