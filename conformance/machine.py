# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""One node under test: a board as a directory tree, a real kubelet, the plugin, and both CDI libraries."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from conformance.plugin_process import PluginProcess
from conformance.real_kubelet import Given, Held, Kubelet
from conformance.reference_cdi import CdiLibrary, DeviceNode
from conformance.waiting import looks

from simnode.node import Device, Node
from simnode.tree import LiveNode

GPU: Final = "nvidia.com/gpu"
SWITCH: Final = "nvidia.com/nvswitch"
HOST_DRIVER: Final = "nvidia"


# Source: Linux Documentation/admin-guide/devices.txt, 1 char, number 3 (/dev/null)
_NULL: Final = os.makedev(1, 3)


class NodeWithDevices(LiveNode):
    """A tree whose VFIO nodes are character devices, since the CDI libraries do not follow links. Needs root."""

    def bind(self, address: str, driver: str = "vfio-pci") -> str | None:
        name = super().bind(address, driver)
        if name is not None and self.node.kernel.device_nodes:
            node = self.dev_vfio / "devices" / name
            made = self.root / f".{name}"
            os.mknod(made, stat.S_IFCHR | 0o600, _NULL)
            # One step, and the same number as before: at no moment is the cdev anything but usable.
            made.rename(node)
        return name

    def off_vfio(self, address: str) -> None:
        """Give a function to a host driver."""
        self.unbind(address)
        self.bind(address, HOST_DRIVER)

    def back_on_vfio(self, address: str) -> None:
        """Give a function, wherever it is, to vfio-pci."""
        if not self.is_present(address):
            self.rescan(address)
        if self.driver(address) is not None:
            self.unbind(address)
        self.bind(address)

    def function_behind(self, node: str) -> str:
        """Return which function a device node belongs to now, read from sysfs as Kata reads it.

        Source: kata-containers src/runtime-rs/crates/hypervisor, class/vfio-dev/vfioN/device
        """
        return os.path.basename(os.path.realpath(self.sysfs / "class" / "vfio-dev" / os.path.basename(node) / "device"))


class Machine:
    """The node. A context manager that ends every process it started."""

    def __init__(self, root: Path, board: Node, kubelet_binary: Path, release: str, cdi: Sequence[CdiLibrary]) -> None:
        self.root = root
        live = NodeWithDevices.create(root / "n", board)
        assert isinstance(live, NodeWithDevices)
        self.live = live
        state = root / "k"
        state.mkdir(mode=0o750)
        self.cdi_dir = root / "cdi"
        self.cdi_static_dir = root / "cdi-static"
        self.cdi = tuple(cdi)
        for library in self.cdi:
            library.open((self.cdi_static_dir, self.cdi_dir))
        self._stack = ExitStack()
        self.kubelet = self._stack.enter_context(Kubelet(kubelet_binary, state, release=release))
        self._instances = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def flags(self) -> tuple[str, ...]:
        """The path flags of the plugin's command."""
        return (
            f"--sysfs={self.live.sysfs}",
            f"--dev-vfio={self.live.dev_vfio}",
            f"--device-plugin-dir={self.kubelet.plugin_dir}",
            f"--cdi-dir={self.cdi_dir}",
            f"--cdi-static-dir={self.cdi_static_dir}",
        )

    def plugin(self, *command: str) -> PluginProcess:
        """Start an instance of the plugin, or of a command that takes the same flags."""
        self._instances += 1
        argv = command or (str(Path(sys.executable).with_name("kata-device-plugin")),)
        log = self.root / f"plugin-{self._instances}.log"
        return self._stack.enter_context(PluginProcess([*argv, *self.flags], log))

    # What should be.

    def of(self, resource: str) -> tuple[str, ...]:
        """Return the addresses of every function of a kind, on the bus or not."""
        return tuple(device.address for device in self.live.node.devices if _kind(device) == resource)

    def bound(self, resource: str) -> tuple[str, ...]:
        """Return the addresses of a kind that have a device node now."""
        if not self.live.node.kernel.device_nodes:
            return ()
        return tuple(address for address in self.of(resource) if self.live.cdev(address) is not None)

    # What is.

    def settle(self, *resources: str) -> None:
        """Wait until the kubelet holds exactly the bound devices as healthy, then check what they resolve to."""
        for resource in resources or (GPU, SWITCH):
            self.kubelet.wait(resource, healthy=self.bound(resource))
        self.check_resolution(*resources)

    def observe(self, *, for_s: float) -> list[Held]:
        """Look at the GPUs in the kubelet for so long; return each state that differs from the one before it."""
        seen: list[Held] = []
        for _ in looks(for_s=for_s):
            held = self.kubelet.devices(GPU)
            if not seen or seen[-1] != held:
                seen.append(held)
        return seen

    def check_resolution(self, *resources: str) -> None:
        """Check that every healthy id resolves, with every CDI library, to its own cdev, and no other id at all."""
        healthy = {
            f"{resource}={device}": device
            for resource in resources or (GPU, SWITCH)
            for device in self.kubelet.devices(resource).healthy
        }
        expected = {name: self._own_node(address) for name, address in healthy.items()}
        for library in self.cdi:
            findings = library.refresh()
            assert not findings.error, f"CDI {library.release}: {findings.error}"
            known = {name for name in library.devices() if name.partition("=")[0] in (resources or (GPU, SWITCH))}
            assert known == set(healthy), f"CDI {library.release} knows other names than the kubelet holds healthy"
            for name, node in expected.items():
                found = library.inject(name)
                assert found == (node,), f"CDI {library.release}: {name} is not its own node alone"

    def _own_node(self, address: str) -> DeviceNode:
        """Return what a function's name has to resolve to, having made sure that it is there and the function's own."""
        path = f"{self.live.dev_vfio}/devices/{self.live.cdev(address)}"
        assert stat.S_ISCHR(os.lstat(path).st_mode)
        assert self.live.function_behind(path) == address
        return DeviceNode(path, "c", os.major(_NULL), os.minor(_NULL), "rw")

    def functions(self, given: Given) -> frozenset[str]:
        """Return the functions that a container gets, through the CDI names that it was given and sysfs."""
        per_library = [
            frozenset(self.live.function_behind(node.path) for node in library.inject(*given.cdi))
            for library in self.cdi
        ]
        assert len(set(per_library)) == 1, f"the CDI libraries disagree: {per_library}"
        return per_library[0]


def _kind(device: Device) -> str | None:
    """Say what a function is, by the issue's rules and not by the plugin's code."""
    if device.vendor != 0x10DE or device.vf_of is not None:
        return None
    return {0x0302: GPU, 0x0300: GPU, 0x0680: SWITCH}.get(device.class_code >> 8)


def put(path: Path, text: str | bytes) -> None:
    """Write a file in one step, so that nobody reads half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(text.encode() if isinstance(text, str) else text)
    temporary.rename(path)


def names(resource: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Return CDI names in order."""
    return tuple(f"{resource}={address}" for address in addresses)
