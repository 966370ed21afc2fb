# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The emulated machine: QEMU's command line, and the process.

Software emulation only: /dev/kvm exists on machines where it does not work, and a test must not depend on it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from vmlab.artifacts import Artifacts
from vmlab.build import qemu_command, qemu_environment

AGENT_PORT: Final = "vmlab.agent"

# Root ports start here on bus 0; what is behind the n-th of them is function 0000:<n+1>:00.0.
_FIRST_SLOT: Final = 0x10
_MOST_FUNCTIONS: Final = 12


class Iommu(StrEnum):
    """The IOMMU that the machine has."""

    INTEL = "intel"
    NONE = "none"


# QEMU aborts when a vfio-user device is behind an Intel IOMMU without caching mode. Source: observed on QEMU 11.1
_IOMMU: Final = {Iommu.INTEL: ("-device", "intel-iommu,intremap=on,caching-mode=on"), Iommu.NONE: ()}
_KERNEL: Final = {Iommu.INTEL: ("intel_iommu=on",), Iommu.NONE: ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is started. Sockets and logs lie in `folder`, whose path must be short: a socket's may have 107 bytes."""

    artifacts: Artifacts
    folder: Path
    functions: tuple[str, ...]
    iommu: Iommu = Iommu.INTEL
    payload: Path | None = None
    kernel_arguments: tuple[str, ...] = ()
    memory_mib: int = 1024
    cpus: int = 2

    @property
    def agent_socket(self) -> Path:
        """Where the guest's agent is reached."""
        return self.folder / "agent.sock"

    @property
    def console(self) -> Path:
        """What the guest wrote to its serial console."""
        return self.folder / "console.log"

    @property
    def output(self) -> Path:
        """What QEMU itself wrote."""
        return self.folder / "qemu.log"

    def function_socket(self, name: str) -> Path:
        """Where the server of a function listens."""
        return self.folder / f"{name}.sock"

    def command(self) -> list[str]:
        """Return QEMU's whole command."""
        if len(self.functions) > _MOST_FUNCTIONS:
            raise ValueError(f"{len(self.functions)} functions, expected at most {_MOST_FUNCTIONS}")
        return [
            *qemu_command(self.artifacts.qemu),
            *("-nodefaults", "-no-user-config", "-display", "none"),
            *("-machine", "q35,sata=off,smbus=off,usb=off,i8042=off"),
            *("-accel", "tcg,thread=multi", "-cpu", "max", "-m", str(self.memory_mib), "-smp", str(self.cpus)),
            *_IOMMU[self.iommu],
            *("-kernel", str(self.artifacts.kernel), "-initrd", str(self.artifacts.initrd)),
            *("-append", " ".join(self._kernel_command_line())),
            *_drive("root", self.artifacts.disk, "snapshot=on,cache=unsafe"),
            *(_drive("payload", self.payload, "readonly=on") if self.payload else ()),
            *("-device", "virtio-rng-pci"),
            *("-chardev", f"socket,id=agent,path={self.agent_socket},server=on,wait=off"),
            *("-device", "virtio-serial-pci", "-device", f"virtserialport,chardev=agent,name={AGENT_PORT}"),
            *("-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console"),
            *(argument for index, name in enumerate(self.functions) for argument in self._function(index, name)),
        ]

    def start(self) -> subprocess.Popen[bytes]:
        """Start QEMU. It dies with the thread that called this, however that ends."""
        with self.output.open("wb") as output:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=qemu_environment(self.artifacts.qemu),
            )

    def _kernel_command_line(self) -> Sequence[str]:
        # Without mitigations and without clearing every page the guest starts in three quarters of the time.
        speed = ("quiet", "mitigations=off", "init_on_alloc=0", "audit=0", "cryptomgr.notests=1")
        return ("root=/dev/vda", "rw", "console=ttyS0", *speed, *_KERNEL[self.iommu], *self.kernel_arguments)

    def _function(self, index: int, name: str) -> tuple[str, ...]:
        # One root port each, so that each is an IOMMU group of its own. A port that could go faster than the device
        # makes a bus reset end in ENOTTY. Source: observed on Linux 7.3, QEMU 11.1
        port = f"id=port{index},bus=pcie.0,chassis={index + 1},addr={_FIRST_SLOT + index:#x},x-speed=2_5"
        device = {
            "driver": "vfio-user-pci",
            "id": name,
            "bus": f"port{index}",
            "socket": {"type": "unix", "path": str(self.function_socket(name))},
        }
        return ("-device", f"pcie-root-port,{port}", "-device", json.dumps(device))


def address(index: int) -> str:
    """Return the PCI address of a machine's n-th function, from 0 on.

    Source: observed on QEMU 11.1 with SeaBIOS, which numbers the buses behind the root ports in slot order
    """
    return f"0000:{index + 1:02x}:00.0"


def _drive(name: str, path: Path, options: str) -> tuple[str, ...]:
    return (
        *("-drive", f"id={name},file={path},format=raw,if=none,{options}"),
        *("-device", f"virtio-blk-pci,drive={name}"),
    )
