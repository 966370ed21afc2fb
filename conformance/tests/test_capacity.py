# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What the real kubelet counts: at start, and after devices went and came."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance.conftest import NewMachine
from conformance.json_lines import Refused
from conformance.machine import GPU, SWITCH, Machine
from conformance.real_kubelet import Capacity
from conformance.waiting import wait_until

from simnode import boards


def _counts(machine: Machine) -> tuple[Capacity, dict[str, int]]:
    capacity = machine.kubelet.capacity()
    return capacity, {resource: len(machine.bound(resource)) for resource in (GPU, SWITCH) if machine.of(resource)}


def test_a_hgx_h100_has_eight_gpus_and_four_switches_from_the_start(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    expected = {GPU: 8, SWITCH: 4}
    assert machine.kubelet.capacity() == Capacity(expected, expected, ())


def test_each_device_is_on_the_numa_node_that_sysfs_names(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    held = {**machine.kubelet.devices(GPU).numa, **machine.kubelet.devices(SWITCH).numa}
    assert held == {
        device.address: (device.numa,)
        for device in machine.live.node.devices
        if device.address in {*machine.of(GPU), *machine.of(SWITCH)}
    }


@pytest.mark.parametrize("board", sorted(boards.ALL))
def test_each_board_has_in_the_kubelet_what_is_bound_on_it(new_machine: NewMachine, board: str) -> None:
    machine = new_machine(boards.ALL[board]())
    machine.kubelet.start()
    plugin = machine.plugin()
    if not machine.bound(GPU):
        plugin.wait_for("run.started")
        assert machine.kubelet.capacity() == Capacity({}, {}, ())
        return
    resources = tuple(resource for resource in (GPU, SWITCH) if machine.bound(resource))
    machine.settle(*resources)
    expected = {resource: len(machine.bound(resource)) for resource in resources}
    assert machine.kubelet.capacity() == Capacity(expected, expected, ())


def test_devices_bound_after_the_start_are_counted(new_machine: NewMachine) -> None:
    machine = new_machine(boards.unbound(boards.hgx_h100()))
    machine.kubelet.start()
    plugin = machine.plugin()
    plugin.wait_for("node.without-devices")
    assert machine.kubelet.capacity() == Capacity({}, {}, ())
    for address in (*machine.of(GPU), *machine.of(SWITCH)):
        machine.live.back_on_vfio(address)
    machine.settle()


def test_a_device_lost_from_the_bus_is_unhealthy_and_back_when_it_returns(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    lost = machine.of(GPU)[3]
    machine.live.remove(lost)
    machine.settle()
    assert machine.kubelet.devices(GPU).unhealthy == (lost,)
    assert machine.kubelet.capacity() == Capacity({GPU: 8, SWITCH: 4}, {GPU: 7, SWITCH: 4}, ())
    machine.live.back_on_vfio(lost)
    machine.settle()
    assert machine.kubelet.capacity() == Capacity({GPU: 8, SWITCH: 4}, {GPU: 8, SWITCH: 4}, ())


def test_a_device_given_to_a_host_driver_leaves_the_count_and_comes_back_with_it(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    taken = machine.of(SWITCH)[1]
    machine.live.off_vfio(taken)
    held = machine.kubelet.wait(SWITCH, healthy=machine.bound(SWITCH), unhealthy=())
    machine.check_resolution()
    assert taken not in held.healthy
    assert machine.kubelet.capacity() == Capacity({GPU: 8, SWITCH: 3}, {GPU: 8, SWITCH: 3}, ())
    machine.live.back_on_vfio(taken)
    machine.settle()
    assert machine.kubelet.capacity() == Capacity({GPU: 8, SWITCH: 4}, {GPU: 8, SWITCH: 4}, ())


def test_a_rebind_to_vfio_never_lowers_the_capacity(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    seen = []
    for address in machine.of(GPU):
        machine.live.unbind(address)
        seen.append(machine.kubelet.wait(GPU, healthy=machine.bound(GPU)))
        machine.live.back_on_vfio(address)
        seen.append(machine.kubelet.wait(GPU, healthy=machine.bound(GPU)))
        machine.check_resolution()
    assert {len(held.healthy) + len(held.unhealthy) for held in seen} == {8}


def test_all_devices_may_leave_and_the_resource_stays(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    for address in machine.of(SWITCH):
        machine.live.off_vfio(address)
    machine.kubelet.wait(SWITCH, healthy=(), unhealthy=())
    assert machine.kubelet.capacity() == Capacity({GPU: 8, SWITCH: 0}, {GPU: 8, SWITCH: 0}, ())
    assert not (machine.cdi_dir / "kata.nvidia.com-nvswitch.json").exists()
    machine.check_resolution()
    for address in machine.of(SWITCH):
        machine.live.back_on_vfio(address)
    machine.settle()


def test_cdev_numbers_that_swap_owners_are_followed(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    first, second = machine.of(GPU)[:2]
    before = machine.live.cdev(first), machine.live.cdev(second)
    machine.live.unbind(first)
    machine.live.unbind(second)
    machine.live.bind(second)
    machine.live.bind(first)
    assert (machine.live.cdev(second), machine.live.cdev(first)) == before
    names = f"{GPU}={first}", f"{GPU}={second}"

    def swapped() -> bool:
        # What was true before the swap holds healthy ids too, so the names have to be looked at.
        try:
            for library in machine.cdi:
                library.refresh()
                nodes = [library.inject(name)[0].path for name in names]
                if [machine.live.function_behind(path) for path in nodes] != [first, second]:
                    return False
        except Refused:
            return False
        return True

    wait_until(swapped, lambda: "both names lead to the cdevs that their devices have now")
    machine.settle()


def test_the_kubelet_runs_the_release_that_the_test_names(
    machine: Machine, release: str, program: Callable[[str], Path]
) -> None:
    version: dict[str, Any] = dict(machine.kubelet.version())
    assert version["kubernetes"].startswith(f"v{release}."), json.dumps(version, indent=2)
    staging = {module: used for module, used in version["modules"].items() if module == "k8s.io/kubelet"}
    assert staging == {"k8s.io/kubelet": "v0" + version["kubernetes"].removeprefix("v1")}
