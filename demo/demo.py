# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The plugin's main job, shown on a simulated node: `make demo`.

Real: the plugin, its process, its sockets, its files. Simulated: the board, which is a directory tree, and the kubelet,
which runs in this program. Every step checks what it shows; the first one that does not hold ends the demo with exit
code 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

from simcluster.kubelet import Kubelet
from simcluster.plugin import Paths, PluginProcess, run_plugin
from simcluster.waiting import Changes, NotInTime
from simnode import boards
from simnode.tree import LiveNode

T = TypeVar("T")

GPU: Final = "nvidia.com/gpu"
SWITCH: Final = "nvidia.com/nvswitch"
BOARD: Final = {GPU: 8, SWITCH: 4}

_STEP_LIMIT_S: Final = 15.0
_STEPS = count(1)


class DoesNotHold(Exception):
    """Something that the demo claims is not so."""


def main() -> int:
    """Run the demo; return the exit code."""
    started_s = time.monotonic()
    print("kata-device-plugin on a simulated node. No hardware, no cluster, no root.")
    try:
        # Short, since the path of a socket may have 107 bytes.
        with tempfile.TemporaryDirectory(
            prefix="kata-demo-", dir="/tmp" if os.access("/tmp", os.W_OK) else None
        ) as root:
            asyncio.run(_demo(Path(root)))
    except (DoesNotHold, AssertionError) as error:
        print(f"\nThis does not hold: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        return 1
    print(f"\nEverything held. {time.monotonic() - started_s:.1f} s.")
    return 0


async def _demo(root: Path) -> None:
    live = _show_node(root)
    paths = Paths(
        sysfs=live.sysfs,
        dev_vfio=live.dev_vfio,
        device_plugin_dir=root / "kubelet",
        cdi_dir=root / "cdi",
        cdi_static_dir=root / "etc-cdi",
    )
    changes = Changes()
    async with (
        Kubelet(paths.device_plugin_dir, changes=changes) as kubelet,
        run_plugin(paths, changes=changes) as plugin,
    ):
        await _show_registration(kubelet, plugin, paths, root)
        _show_cdi(paths, root)
        await _show_allocation(kubelet, paths, root)
        await _show_loss_and_return(kubelet, live)
        await _show_kubelet_restart(kubelet)
        await _show_stop(plugin, paths, root)


def _show_node(root: Path) -> LiveNode:
    _step("A node with an HGX H100 board")
    live = LiveNode.create(root / "node", boards.hgx_h100())
    nodes = sorted(path.name for path in (live.dev_vfio / "devices").iterdir())
    _hold(len(nodes) == sum(BOARD.values()), f"{len(nodes)} VFIO device nodes")
    _say(
        "Written to disk as Linux would show it in /sys and /dev. Eight GPUs and four NVSwitches are bound to vfio-pci,"
    )
    _say(f"so the kernel made {len(nodes)} device nodes: dev/vfio/devices/{nodes[0]} and its like.")
    return live


async def _show_registration(kubelet: Kubelet, plugin: PluginProcess, paths: Paths, root: Path) -> None:
    _step("The plugin starts, and registers with a kubelet")
    _say("$ kata-device-plugin " + " ".join(_below(root, flag) for flag in paths.flags))
    await _within(
        kubelet, lambda: all(kubelet.serves(*expected) for expected in BOARD.items()), "eight GPUs and four switches"
    )
    for resource in BOARD:
        received = kubelet.history(resource)[-1]
        took_s = _registered_s(kubelet, resource) - plugin.started_s
        _say(f"{resource}: {len(received.healthy)} devices, registered {_ms(took_s)} after the process was started")
        for device in received.devices:
            _say(f"    {device.id}  {device.health}  NUMA node {', '.join(map(str, device.numa)) or 'unknown'}")
    _say("The ids are PCI addresses. They never shift, whatever happens to a neighbour.")


def _show_cdi(paths: Paths, root: Path) -> None:
    _step("The files that tell the container runtime what an id means")
    for resource, number in BOARD.items():
        path = _spec(paths, resource)
        document = json.loads(path.read_text())
        _hold(document["kind"] == resource, f"{path} is for {document['kind']}")
        _hold(len(document["devices"]) == number, f"{path} names {len(document['devices'])} devices")
        _say(f"{_below(root, str(path))}: {number} devices, written before the kubelet was told of them")
    lines = _spec(paths, GPU).read_text().splitlines()
    for line in (*lines[:5], "    ..."):
        _say("    " + _below(root, line))
    _say("One device node per device, and nothing else.")


async def _show_allocation(kubelet: Kubelet, paths: Paths, root: Path) -> None:
    _step("A pod asks for two GPUs and a switch")
    for resource, number in ((GPU, 2), (SWITCH, 1)):
        booking = await kubelet.allocate("pod", "main", resource, number)
        for name in booking.cdi:
            kind, _, device_id = name.partition("=")
            _hold(kind == resource and device_id in booking.ids, f"asked for {booking.ids}, was given {name}")
            node = _nodes(paths, resource)[device_id]
            function = (paths.sysfs / "class/vfio-dev" / Path(node).name / "device").resolve().name
            _hold(function == device_id, f"{node} leads to {function}, expected {device_id}")
            _say(f"{name}  ->  {_below(root, node)}")
    _say("The plugin answers with CDI names only. Both GPUs are on one NUMA node, since it was asked which to prefer.")
    numa = {kubelet.device(GPU, device_id).numa for device_id in kubelet.booked("pod")[0].ids}
    _hold(len(numa) == 1, f"GPUs of NUMA nodes {numa}")


async def _show_loss_and_return(kubelet: Kubelet, live: LiveNode) -> None:
    _step("A GPU falls off the bus, and comes back")
    gone = max(kubelet.healthy(GPU))
    began_s = time.monotonic()
    live.remove(gone)
    await _within(kubelet, lambda: gone in kubelet.unhealthy(GPU), f"{gone} unhealthy")
    took = _ms(kubelet.history(GPU)[-1].at_s - began_s)
    _hold(kubelet.allocatable(GPU) == 7, f"{kubelet.allocatable(GPU)} allocatable")
    _hold(kubelet.capacity(GPU) == 8, f"capacity {kubelet.capacity(GPU)}")
    _say(f"{gone} removed: Unhealthy in the kubelet's list after {took}. Capacity 8, allocatable 7.")
    live.rescan(gone)
    began_s = time.monotonic()
    live.bind(gone)
    await _within(kubelet, lambda: kubelet.serves(GPU, 8), f"{gone} healthy")
    took = _ms(kubelet.history(GPU)[-1].at_s - began_s)
    _say(f"{gone} bound to vfio-pci again: Healthy after {took}. No other id has moved.")


async def _show_kubelet_restart(kubelet: Kubelet) -> None:
    _step("The kubelet restarts")
    booked = kubelet.booked()
    began_s = time.monotonic()
    await kubelet.restart()
    await _within(kubelet, lambda: all(kubelet.serves(*expected) for expected in BOARD.items()), "everything back")
    for resource in BOARD:
        took = _ms(_registered_s(kubelet, resource) - began_s)
        _say(f"{resource}: registered again after {took}, {kubelet.allocatable(resource)} devices")
    _hold(kubelet.booked() == booked, "the pod lost its devices")
    _say("A kubelet that starts removes every socket in its directory, ours among them. The pod keeps its devices.")


async def _show_stop(plugin: PluginProcess, paths: Paths, root: Path) -> None:
    _step("The plugin is told to stop")
    ended = await plugin.terminate()
    _hold(ended.code == 0, f"exit code {ended.code}")
    _say(f"SIGTERM: ended after {_ms(ended.seconds)}, exit code {ended.code}.")
    sockets = [
        path.name for path in paths.device_plugin_dir.iterdir() if path.is_socket() and path.name != "kubelet.sock"
    ]
    _hold(not sockets, f"sockets left behind: {sockets}")
    for resource in BOARD:
        _hold(_spec(paths, resource).exists(), f"{_spec(paths, resource)} is gone")
    _say(
        f"Its sockets are gone. {_below(root, str(_spec(paths, GPU)))} stays: a container that restarts meanwhile needs it."
    )


def _registered_s(kubelet: Kubelet, resource: str) -> float:
    """Return when the kubelet last told the plugin that a resource is registered."""
    answered_s = kubelet.accepted(resource)[-1].answered_s
    assert answered_s is not None
    return answered_s


def _spec(paths: Paths, resource: str) -> Path:
    return paths.cdi_dir / f"kata.{resource.replace('/', '-')}.json"


def _nodes(paths: Paths, resource: str) -> dict[str, str]:
    """Return the device node of every name in a CDI file, as a runtime reads it."""
    document = json.loads(_spec(paths, resource).read_text())
    return {
        device["name"]: node["path"]
        for device in document["devices"]
        for node in device["containerEdits"]["deviceNodes"]
    }


async def _within(kubelet: Kubelet, condition: Callable[[], T], what: str) -> None:
    try:
        await kubelet.wait_for(condition, timeout_s=_STEP_LIMIT_S, what=what)
    except NotInTime as error:
        raise DoesNotHold(str(error)) from error


def _hold(is_so: bool, otherwise: str) -> None:  # noqa: FBT001 - reads like assert
    if not is_so:
        raise DoesNotHold(otherwise)


def _step(title: str) -> None:
    print(f"\n{next(_STEPS)}. {title}")


def _say(text: str) -> None:
    print(f"   {text}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _below(root: Path, text: str) -> str:
    """Leave out where the demo's directory lies."""
    return text.replace(f"{root}/", "")


if __name__ == "__main__":
    sys.exit(main())
