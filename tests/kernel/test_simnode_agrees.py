# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated node looks like the kernel's own: the same function, in the same state, seen by the same program."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

import pytest
from tests.kernel.payload import INSIDE
from tests.kernel.real_node import RealNode

from simnode.node import Device, Kernel, Node
from simnode.tree import LiveNode

# Lines of files that the kernel shows and the simulation leaves out; nothing of ours reads them. When the simulation
# comes to have them, this fails and the entry goes.
LEFT_OUT: Mapping[str, tuple[str, ...]] = {"function/uevent": ("DRIVER=", "MODALIAS=")}

# Root ports of QEMU. Source: QEMU docs/specs/pci-ids.rst
_ROOT_PORT = (0x1B36, 0x000C)


def _simulated(node: RealNode, kernel: Kernel) -> Node:
    """Return the board of the guest as a simulated node, with the numbers that its kernel gave out."""
    devices = []
    for name, function in node.guest.functions.items():
        address, port = node.address(name), node.guest.machine.port(name)
        root = ("pci0000:00",)
        devices.append(
            Device(
                address=port,
                vendor=_ROOT_PORT[0],
                device=_ROOT_PORT[1],
                class_code=0x060400,
                parents=root,
                driver="pcieport",
                iommu_group=_group(node, port),
            )
        )
        identity = function.identity
        devices.append(
            Device(
                address=address,
                vendor=identity.vendor,
                device=identity.device,
                class_code=identity.class_code,
                subsystem_vendor=identity.subsystem_vendor,
                subsystem_device=identity.subsystem_device,
                parents=(*root, port),
                iommu_group=_group(node, address),
            )
        )
    return Node(name="guest", devices=tuple(devices), kernel=kernel)


def _group(node: RealNode, address: str) -> int:
    return int(node.guest.run(f"basename $(readlink /sys/bus/pci/devices/{address}/iommu_group)").out)


def _real_shape(node: RealNode, address: str) -> dict[str, str]:
    shape: dict[str, str] = json.loads(node.guest.run(f"python3 /payload/sysfs_shape.py /sys /dev/vfio {address}").out)
    return shape


def _simulated_shape(live: LiveNode, address: str) -> dict[str, str]:
    program = [sys.executable, str(INSIDE / "sysfs_shape.py"), str(live.sysfs), str(live.dev_vfio), address]
    shape: dict[str, str] = json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    return shape


def _differences(real: Mapping[str, str], simulated: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return what is not the same, known differences aside: what the kernel shows, and what the simulation does."""
    found = {}
    for path in sorted({*real, *simulated}):
        lines = real.get(path, "not asked").splitlines(keepends=True)
        expected = "".join(line for line in lines if not line.startswith(LEFT_OUT.get(path, ("\0",))))
        observed = simulated.get(path, "not asked")
        if expected != observed:
            found[path] = (expected, observed)
    return found


@pytest.mark.parametrize("device_nodes", [True, False], ids=["with device nodes", "without device nodes"])
def test_a_function_looks_as_on_the_kernel_after_every_step(
    node: RealNode, tmp_path: Path, *, device_nodes: bool
) -> None:
    first, second = node.gpus
    live = LiveNode.create(tmp_path, _simulated(node, Kernel(device_nodes=device_nodes)))
    found: dict[str, dict[str, tuple[str, str]]] = {}

    def compare(state: str) -> None:
        found[state] = _differences(_real_shape(node, first), _simulated_shape(live, first))

    compare("VFIO not loaded")
    node.load_vfio(stock=not device_nodes)
    # vfio-pci binds in the order in which functions came onto the bus, and numbers go by that.
    for address, _ in sorted(node.cdevs().items(), key=itemgetter(1)):
        live.bind(address)
    compare("bound")
    for address in (first, second):
        node.unbind(address)
        live.unbind(address)
        compare(f"{address} unbound")
    for address in (second, first):
        node.bind(address)
        live.bind(address)
    compare("bound again, in the other order")
    node.remove(first)
    live.remove(first)
    compare("off the bus")
    node.rescan()
    live.rescan(first)
    live.bind(first)
    compare("back on the bus, bound by its ids")
    differing = {state: differences for state, differences in found.items() if differences}
    assert not differing, json.dumps(differing, indent=1)
