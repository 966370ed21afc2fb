# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The machine that a guest runs in: QEMU's command line, and its process.

q35 under software emulation, each function behind a root port of its own and so in an IOMMU group of its own. Measured
choices, all observed on QEMU 11.1: the Intel IOMMU needs caching mode with VFIO devices, or QEMU aborts; without
x-speed on the port a bus reset ends in ENOTTY; /dev/kvm, where there is one, may fail, so it is never used.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from vmlab.artifacts import Artifacts
from vmlab.build import qemu_command, qemu_environment
from vmlab.device import Identity
from vmlab.errors import MissingTools

FIRST_SLOT: Final = 0x10
AGENT_PORT: Final = "vmlab.agent"


class Iommu(StrEnum):
    """What the machine has between its functions and its memory."""

    NONE = "none"
    INTEL = "intel"
    AMD = "amd"
    VIRTIO = "virtio"

    @property
    def device(self) -> tuple[str, ...]:
        """What QEMU is told."""
        match self:
            case Iommu.NONE:
                return ()
            case Iommu.INTEL:
                return ("-device", "intel-iommu,intremap=on,caching-mode=on")
            case Iommu.AMD:
                return ("-device", "amd-iommu,intremap=on")
            case Iommu.VIRTIO:
                return ("-device", "virtio-iommu-pci")

    @property
    def kernel_arguments(self) -> str:
        """What the kernel is told."""
        return "intel_iommu=on" if self is Iommu.INTEL else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, before it runs. `functions` are named and stand on the bus in this order, from bus 1 on."""

    functions: Mapping[str, Identity]
    iommu: Iommu = Iommu.INTEL
    kernel_arguments: str = ""
    memory_mib: int = 1024
    processors: int = 2
    payload: Path | None = None
    """A raw ext4 image that the guest finds as its second disk."""
    extra: tuple[str, ...] = field(default=())

    def address(self, name: str) -> str:
        """Return the PCI address of a function, as sysfs in the guest spells it."""
        return f"0000:{list(self.functions).index(name) + 1:02x}:00.0"

    def port(self, name: str) -> str:
        """Return the PCI address of the root port above a function."""
        return f"0000:00:{FIRST_SLOT + list(self.functions).index(name):02x}.0"


def qemu_arguments(machine: Machine, artifacts: Artifacts, folder: Path) -> tuple[str, ...]:
    """Return QEMU's arguments; `folder` holds its sockets and its logs."""
    arguments = [
        *("-nodefaults", "-no-user-config", "-display", "none"),
        *("-machine", "q35,sata=off,smbus=off", "-accel", "tcg,thread=multi", "-cpu", "max"),
        *("-m", str(machine.memory_mib), "-smp", str(machine.processors)),
        *machine.iommu.device,
        *("-kernel", str(artifacts.kernel), "-initrd", str(artifacts.initrd)),
        "-append",
        " ".join(
            part
            for part in (
                "root=/dev/vda rw console=ttyS0 quiet",
                machine.iommu.kernel_arguments,
                machine.kernel_arguments,
            )
            if part
        ),
        *_disk("root", artifacts.disk),
        *(_disk("payload", machine.payload) if machine.payload else ()),
        *("-chardev", f"socket,path={folder}/agent.sock,server=on,wait=off,id=agent"),
        *("-device", "virtio-serial-pci", "-device", f"virtserialport,chardev=agent,name={AGENT_PORT}"),
        *("-chardev", f"file,path={folder}/console.log,id=console,append=on", "-serial", "chardev:console"),
        *("-device", "virtio-rng-pci"),
    ]
    for index, name in enumerate(machine.functions):
        port = f"pcie-root-port,id=port{index},bus=pcie.0,chassis={index + 1},addr={FIRST_SLOT + index:#x},x-speed=2_5"
        function = {
            "driver": "vfio-user-pci",
            "id": name,
            "bus": f"port{index}",
            "socket": {"type": "unix", "path": f"{folder}/{name}.sock"},
        }
        arguments += ["-device", port, "-device", json.dumps(function)]
    return (*arguments, *machine.extra)


def _disk(name: str, image: Path) -> tuple[str, ...]:
    drive = f"file={image},format=raw,if=none,id={name},cache=unsafe,snapshot=on"
    return ("-drive", drive, "-device", f"virtio-blk-pci,drive={name}")


def start_qemu(machine: Machine, artifacts: Artifacts, folder: Path) -> subprocess.Popen[bytes]:
    """Start QEMU; it dies with the thread that calls this.

    Raises: MissingTools.
    """
    # The kernel's own parent-death signal, so that not even a killed test leaves a guest behind.
    guard = shutil.which("setpriv")
    if guard is None:
        raise MissingTools({"setpriv": "util-linux"})
    argv = [
        guard,
        "--pdeathsig",
        "KILL",
        "--",
        *qemu_command(artifacts.qemu),
        *qemu_arguments(machine, artifacts, folder),
    ]
    with (folder / "qemu.log").open("ab") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=qemu_environment(artifacts.qemu),
        )
