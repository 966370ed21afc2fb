# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""One simulated host: a board as a directory tree, a simulated kubelet, and instances of the plugin."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from tests.cluster.in_process import InProcess, Watcher, run_in_process

from kata_device_plugin.watch import DirectoryWatch
from simcluster.kubelet import Generation, Kubelet
from simcluster.plugin import Paths, PluginProcess, run_plugin
from simcluster.waiting import DEADLINE_S, Changes
from simnode.node import Device, Node
from simnode.tree import LiveNode

T = TypeVar("T")

GPU: Final = "nvidia.com/gpu"
SWITCH: Final = "nvidia.com/nvswitch"
KINDS: Final = {GPU: (0x0302, 0x0300), SWITCH: (0x0680,)}


def patience(seconds: float) -> float:
    """Return a limit for something that takes far less, as many times longer as the machine is overloaded now."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


NewHost = Callable[..., AbstractAsyncContextManager["Host"]]


class Host:
    """The host. At its end every process is told to stop and checked, and the kubelet must have no complaints."""

    def __init__(self, root: Path, board: Node, generation: Generation) -> None:
        self.root = root
        self.board = board
        self.changes = Changes()
        self.live = LiveNode.create(root / "n", board)
        self.paths = Paths(
            sysfs=self.live.sysfs,
            dev_vfio=self.live.dev_vfio,
            device_plugin_dir=root / "k",
            cdi_dir=root / "cdi",
            cdi_static_dir=root / "etc-cdi",
        )
        self.kubelet = Kubelet(self.paths.device_plugin_dir, generation=generation, changes=self.changes)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stack.__aexit__(kind, error, trace)
        finally:
            await self.kubelet.kill()
        if kind is None:
            self.kubelet.check()

    def move_plugin_dir(self, directory: Path) -> None:
        """Use another directory for sockets; before anything runs."""
        self.paths = replace(self.paths, device_plugin_dir=directory)
        self.kubelet.directory = directory

    # The plugin.

    async def plugin(self, **options: Any) -> PluginProcess:
        """Start an instance of the real command."""
        return await self._stack.enter_async_context(run_plugin(self.paths, changes=self.changes, **options))

    async def plugin_in_process(self, watcher: Watcher = DirectoryWatch) -> InProcess:
        """Start an instance in this process, on this loop's clock."""
        return await self._stack.enter_async_context(run_in_process(self.paths, self.changes, watcher))

    # What should be.

    def of(self, resource: str) -> tuple[str, ...]:
        """Return the addresses of a kind in their order, on the bus or not."""
        found = [device.address for device in self.live.node.devices if _is_kind(device, resource)]
        return tuple(sorted(found, key=lambda address: [int(part, 16) for part in re.split("[:.]", address)]))

    def bound(self, resource: str) -> tuple[str, ...]:
        """Return those of a kind that have a VFIO device now."""
        return tuple(address for address in self.of(resource) if self.live.cdev(address) is not None)

    def node_of(self, address: str) -> str:
        """Return the path of a device's node.

        Raises: AssertionError when it has none.
        """
        path = self.live.node_path(address)
        assert path is not None, f"{address} has no node"
        return str(path)

    # What is.

    def spec_path(self, resource: str) -> Path:
        """Return where the CDI file of a resource lies."""
        return self.paths.cdi_dir / f"kata.{resource.replace('/', '-')}.json"

    def spec(self, resource: str) -> dict[str, str]:
        """Return the node of every name in the CDI file of a resource; empty when there is none.

        Raises: AssertionError for a file that says anything else.
        """
        try:
            document = json.loads(self.spec_path(resource).read_text())
        except FileNotFoundError:
            return {}
        assert document.keys() == {"cdiVersion", "kind", "devices"}
        assert (document["cdiVersion"], document["kind"]) == ("0.5.0", resource)
        found = {}
        for device in document["devices"]:
            assert device.keys() == {"name", "containerEdits"}
            assert device["containerEdits"].keys() == {"deviceNodes"}
            (node,) = device["containerEdits"]["deviceNodes"]
            assert node == {"path": node["path"], "type": "c", "permissions": "rw"}
            found[device["name"]] = node["path"]
        assert len(found) == len(document["devices"])
        return found

    def function_behind(self, node: str) -> str:
        """Return which function a device node belongs to now, by the way that Kata goes."""
        return (self.paths.sysfs / "class" / "vfio-dev" / Path(node).name / "device").resolve().name

    def sockets(self) -> set[str]:
        """Return the names of the sockets in the kubelet's directory, its own left out."""
        try:
            entries = list(self.paths.device_plugin_dir.iterdir())
        except FileNotFoundError:
            return set()
        return {path.name for path in entries if path.is_socket() and path.name != "kubelet.sock"}

    def states(self, resource: str) -> Mapping[str, str]:
        """Return the health of every id as it was listed last; empty before the first list."""
        history = self.kubelet.history(resource)
        return {device.id: device.health for device in history[-1].devices} if history else {}

    # Waiting.

    async def wait_for(
        self, condition: Callable[[], T], *, timeout_s: float = DEADLINE_S, what: str = "condition"
    ) -> T:
        """Wait for something about the kubelet, a plugin, or a file."""
        return await self.kubelet.wait_for(condition, timeout_s=timeout_s, what=what)

    async def served(self, *, timeout_s: float = DEADLINE_S, **counts: int) -> None:
        """Wait until the kubelet can hand out exactly `gpu=` and `nvswitch=` devices, every listed one.

        Without counts, as many as are bound now.
        """
        expected = {f"nvidia.com/{name}": count for name, count in counts.items()} or {
            resource: len(self.bound(resource)) for resource in KINDS if self.bound(resource)
        }
        await self.wait_for(
            lambda: all(self.kubelet.serves(resource, count) for resource, count in expected.items()),
            timeout_s=timeout_s,
            what=f"served {expected}",
        )

    async def becomes(self, resource: str, *, healthy: int, unhealthy: int = 0) -> None:
        """Wait until the newest list has these numbers."""
        await self.wait_for(
            lambda: (
                (self.kubelet.allocatable(resource), self.kubelet.capacity(resource)) == (healthy, healthy + unhealthy)
                and not self.kubelet.is_stopped(resource)
            ),
            what=f"{resource}: {healthy} healthy, {unhealthy} unhealthy",
        )

    async def drained(self) -> None:
        """Let the loop turn until what is on its way in this process has arrived."""
        for _ in range(20):
            await asyncio.sleep(0)


def _is_kind(device: Device, resource: str) -> bool:
    return device.vendor == 0x10DE and device.vf_of is None and device.class_code >> 8 in KINDS[resource]
