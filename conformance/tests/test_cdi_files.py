# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Our CDI files, as the reference libraries see them; and while they are rewritten, as a consumer that never rests."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conformance.conftest import NewMachine
from conformance.json_lines import Refused
from conformance.machine import GPU, SWITCH, Machine, names, put
from conformance.reference_cdi import CdiLibrary
from conformance.waiting import wait_until

from simnode import boards


def test_our_files_are_faultless_and_name_every_device(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    for library in machine.cdi:
        findings = library.refresh()
        # The directory for administrators is not there, which is no error of a file.
        assert (findings.error, findings.files) == ("", {})
        assert set(library.devices()) == {*names(GPU, machine.of(GPU)), *names(SWITCH, machine.of(SWITCH))}


def test_a_whole_board_is_injected_at_once_in_the_order_asked(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    wanted = [*names(SWITCH, machine.of(SWITCH)), *names(GPU, machine.of(GPU))]
    for library in machine.cdi:
        library.refresh()
        nodes = library.inject(*wanted)
        assert [machine.live.function_behind(node.path) for node in nodes] == [*machine.of(SWITCH), *machine.of(GPU)]
        # Every node of the tree has the same number, so every rule counts for every node.
        assert {(node.type, *node.permissions.split("+")) for node in nodes} == {("c", *["rw"] * 12)}


def test_a_daemon_that_follows_the_directory_sees_a_rebound_device_at_its_new_node(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    first, second = machine.of(GPU)[:2]
    for library in machine.cdi:
        library.open((machine.cdi_static_dir, machine.cdi_dir), watch=True)
    machine.live.unbind(first)
    machine.live.unbind(second)
    machine.live.bind(second)
    machine.live.bind(first)
    machine.kubelet.wait(GPU, healthy=machine.bound(GPU))

    def follows(library: CdiLibrary) -> bool:
        try:
            nodes = library.inject(*names(GPU, (first, second)))
        except Refused:
            return False
        return [machine.live.function_behind(node.path) for node in nodes] == [first, second]

    for library in machine.cdi:
        wait_until(lambda library=library: follows(library), lambda: "both names lead to the new nodes")  # type: ignore[misc]


def test_a_consumer_that_never_rests_sees_no_torn_and_no_missing_file(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    stays, *others = machine.of(GPU)
    spec = machine.cdi_dir / "kata.nvidia.com-gpu.json"
    raw_reads: list[int] = []
    over = threading.Event()

    def read_raw() -> set[frozenset[str]]:
        seen = set()
        while not over.is_set():
            devices = json.loads(spec.read_bytes())["devices"]
            seen.add(frozenset(device["name"] for device in devices))
            raw_reads.append(len(devices))
        return seen

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read_raw)
        consumers = [pool.submit(library.hammer, names(GPU, [stays]), for_ms=2500) for library in machine.cdi]
        try:
            while not all(consumer.done() for consumer in consumers):
                for address in others:
                    machine.live.unbind(address)
                    machine.kubelet.wait(GPU, healthy=machine.bound(GPU))
                for address in others:
                    machine.live.bind(address)
                machine.kubelet.wait(GPU, healthy=machine.bound(GPU))
        finally:
            over.set()
        for consumer in consumers:
            saw = consumer.result()
            assert (saw.wrong, saw.failed, saw.missing) == ((), (), 0)
            assert saw.rounds > 100
        assert len(reading.result()) >= len(others)
    assert len(raw_reads) > 100


def test_a_removed_or_damaged_file_of_ours_is_true_again_before_the_next_pod_starts(machine: Machine) -> None:
    from conformance.real_kubelet import Pod

    machine.plugin()
    machine.settle()
    spec = machine.cdi_dir / "kata.nvidia.com-gpu.json"
    for uid, damage in (("removed", None), ("torn", spec.read_bytes()[:100]), ("foreign", b'{"cdiVersion": "9.9"}')):
        if damage is None:
            spec.unlink()
        else:
            put(spec, damage)
        given = machine.kubelet.allocate(Pod.of(uid, gpu=2))["main"]
        for library in machine.cdi:
            assert library.refresh().error == ""
        assert machine.functions(given) == set(given.ids[GPU])


@pytest.mark.parametrize("board", ["gb200_tray", "mixed", "rtx_pro_6000"])
def test_addresses_of_every_shape_are_names_for_both_libraries(new_machine: NewMachine, board: str) -> None:
    machine = new_machine(boards.ALL[board]())
    machine.kubelet.start()
    machine.plugin()
    resources = tuple(resource for resource in (GPU, SWITCH) if machine.bound(resource))
    machine.settle(*resources)
    for library in machine.cdi:
        assert {name.partition("=")[2] for name in library.devices()} == {
            address for resource in resources for address in machine.bound(resource)
        }
