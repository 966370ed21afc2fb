# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What a pod gets: the ids that the kubelet books, and the CDI names that the container runtime is handed."""

from __future__ import annotations

import pytest
from conformance.conftest import NewMachine
from conformance.json_lines import Refused
from conformance.machine import GPU, SWITCH, Machine, names
from conformance.real_kubelet import Booking, Pod


@pytest.fixture
def running(machine: Machine) -> Machine:
    machine.plugin()
    machine.settle()
    return machine


def _node_of(machine: Machine, address: str) -> int | None:
    return next(device.numa for device in machine.live.node.devices if device.address == address)


def test_the_runtime_gets_cdi_names_and_nothing_else(running: Machine) -> None:
    given = running.kubelet.allocate(Pod.of("a", gpu=8, nvswitch=4))["main"]
    assert set(given.cdi) == {*names(GPU, running.of(GPU)), *names(SWITCH, running.of(SWITCH))}
    assert len(given.cdi) == 12
    assert (given.envs, given.annotations, given.devices, given.mounts) == ({}, {}, (), ())
    assert running.functions(given) == {*running.of(GPU), *running.of(SWITCH)}


def test_resource_and_id_as_kata_reads_them_are_the_cdi_names_of_the_runtime(running: Machine) -> None:
    # Kata joins what the pod-resources service says to "<resource>=<id>" and looks that up as a CDI name.
    # Source: kata-containers src/runtime/pkg/containerd-shim-v2/device_cold_plug.go
    pod = Pod("a", {"one": {GPU: 3, SWITCH: 1}, "two": {GPU: 2}})
    given = running.kubelet.allocate(pod)
    told = running.kubelet.pod_resources("a")
    assert set(told) == {"one", "two"}
    for container, resources in told.items():
        asked = {f"{resource}={device}" for resource, ids in resources.items() for device in ids}
        assert asked == set(given[container].cdi)
        for library in running.cdi:
            library.refresh()
            assert {running.live.function_behind(node.path) for node in library.inject(*sorted(asked))} == {
                device for ids in resources.values() for device in ids
            }
    assert not set(given["one"].ids[GPU]) & set(given["two"].ids[GPU])


def test_half_a_board_is_taken_from_one_numa_node(running: Machine) -> None:
    first, second = (running.kubelet.allocate(Pod.of(uid, gpu=4))["main"].ids[GPU] for uid in "ab")
    assert [{_node_of(running, address) for address in ids} for ids in (first, second)] in ([{0}, {1}], [{1}, {0}])


def test_single_numa_node_admits_four_gpus_and_refuses_five(machine: Machine) -> None:
    machine.kubelet.stop()
    machine.kubelet.start(numa_nodes=2, policy="single-numa-node")
    machine.plugin()
    machine.settle()
    with pytest.raises(Refused) as refused:
        machine.kubelet.allocate(Pod.of("five", gpu=5))
    assert refused.value.reason == "TopologyAffinityError"
    for uid in "ab":
        ids = machine.kubelet.allocate(Pod.of(uid, gpu=4))["main"].ids[GPU]
        assert len({_node_of(machine, address) for address in ids}) == 1


def test_what_is_booked_stands_in_the_checkpoint_as_it_was_handed_out(running: Machine) -> None:
    given = running.kubelet.allocate(Pod.of("a", gpu=2))["main"]
    assert running.kubelet.checkpoint() == (Booking("a", "main", GPU, given.ids[GPU], given.cdi),)
    assert set(given.cdi) == set(names(GPU, given.ids[GPU]))


def test_more_than_there_are_is_refused_and_nothing_stays_booked(running: Machine) -> None:
    running.kubelet.allocate(Pod.of("a", gpu=6))
    with pytest.raises(Refused) as refused:
        running.kubelet.allocate(Pod.of("b", gpu=3))
    assert refused.value.reason == "UnexpectedAdmissionError"
    assert len(running.kubelet.allocate(Pod.of("c", gpu=2))["main"].cdi) == 2


def test_a_lost_device_stays_with_its_pod_and_is_given_to_no_other(running: Machine) -> None:
    held = running.kubelet.allocate(Pod.of("a", gpu=1))["main"]
    (lost,) = held.ids[GPU]
    running.live.remove(lost)
    running.settle()

    others = running.kubelet.allocate(Pod.of("b", gpu=7))["main"]
    assert lost not in others.ids[GPU]
    with pytest.raises(Refused) as refused:
        running.kubelet.allocate(Pod.of("c", gpu=1))
    assert "unavailable" in refused.value.observed
    # The pod whose device is lost can't start again until it is back, and then has the same one.
    assert running.kubelet.container("a").cdi == held.cdi
    for library in running.cdi:
        library.refresh()
        with pytest.raises(Refused):
            library.inject(*held.cdi)
    running.live.back_on_vfio(lost)
    running.settle()
    assert running.kubelet.container("a") == held
    assert running.functions(held) == {lost}


def test_a_freed_device_is_given_to_the_next_pod(running: Machine) -> None:
    held = running.kubelet.allocate(Pod.of("a", gpu=8))["main"]
    running.kubelet.free("a")
    assert set(running.kubelet.allocate(Pod.of("b", gpu=8))["main"].cdi) == set(held.cdi)


def test_a_device_that_vanished_before_the_kubelet_knew_is_refused_by_name(new_machine: NewMachine) -> None:
    machine = new_machine()
    machine.kubelet.start()
    plugin = machine.plugin()
    machine.settle()
    everything = Pod.of("a", gpu=8)
    lost = machine.of(GPU)[5]
    # The kubelet may hear of the loss before it asks or after; either way the pod is refused, never given another.
    machine.live.remove(lost)
    with pytest.raises(Refused) as refused:
        machine.kubelet.allocate(everything)
    assert refused.value.reason == "UnexpectedAdmissionError"
    assert lost in refused.value.observed or "unavailable" in refused.value.observed
    machine.settle()
    assert machine.kubelet.devices(GPU).allocated == ()
    assert plugin.is_running()
