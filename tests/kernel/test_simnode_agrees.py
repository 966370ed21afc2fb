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

# What differs and is known to, by state; every other difference fails. docs/simulation.md says what each means.
KNOWN: Mapping[str, tuple[str, str]] = {}

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
    """Return what is not the same: what the kernel shows, and what the simulation does."""
    return {
        path: (real.get(path, "not asked"), simulated.get(path, "not asked"))
        for path in sorted({*real, *simulated})
        if real.get(path) != simulated.get(path)
    }


@pytest.mark.parametrize("device_nodes", [True, False], ids=["with device nodes", "without device nodes"])
def test_bound_and_unbound_functions_look_as_on_the_kernel(
    node: RealNode, tmp_path: Path, *, device_nodes: bool
) -> None:
    node.load_vfio(stock=not device_nodes)
    live = LiveNode.create(tmp_path, _simulated(node, Kernel(device_nodes=device_nodes)))
    # vfio-pci binds in the order in which functions came onto the bus, and numbers go by that.
    for address, _ in sorted(node.cdevs().items(), key=itemgetter(1)):
        live.bind(address)
    first, second = node.gpus
    found: dict[str, dict[str, tuple[str, str]]] = {"bound": {}, "unbound": {}, "bound again, in the other order": {}}
    found["bound"] = _differences(_real_shape(node, first), _simulated_shape(live, first))
    node.unbind(first)
    live.unbind(first)
    found["unbound"] = _differences(_real_shape(node, first), _simulated_shape(live, first))
    node.unbind(second)
    live.unbind(second)
    for address in (second, first):
        node.bind(address)
        live.bind(address)
    found["bound again, in the other order"] = _differences(_real_shape(node, first), _simulated_shape(live, first))
    unknown = {
        state: {path: pair for path, pair in differences.items() if KNOWN.get(path) != pair}
        for state, differences in found.items()
    }
    assert not any(unknown.values()), json.dumps(unknown, indent=1)
