# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The kubelet restarts, the plugin restarts, either is killed, and two instances of the plugin overlap."""

from __future__ import annotations

import pytest
from conformance.json_lines import Refused
from conformance.machine import GPU, SWITCH, Machine
from conformance.real_kubelet import Given, Pod

SECOND_NS = 1_000_000_000

# By then an instance that thinks that it has to register again has done so, whatever the kubelet said to it.
REGISTERED_AGAIN_S = 2.0


def _booked(machine: Machine) -> dict[str, Given]:
    """Pods that hold three GPUs and a switch between them."""
    return {
        "a": machine.kubelet.allocate(Pod.of("a", gpu=2))["main"],
        "b": machine.kubelet.allocate(Pod.of("b", gpu=1, nvswitch=1))["main"],
    }


def _check_intact(machine: Machine, booked: dict[str, Given]) -> None:
    """Every pod still has what it was given, and no other pod can have it."""
    for uid, given in booked.items():
        assert set(machine.kubelet.container(uid).cdi) == set(given.cdi)
        assert machine.kubelet.container(uid).ids == given.ids
        assert machine.functions(given) == {device for ids in given.ids.values() for device in ids}
    rest = machine.kubelet.allocate(Pod.of("rest", gpu=5, nvswitch=3))["main"]
    for given in booked.values():
        assert not set(given.cdi) & set(rest.cdi)
    machine.kubelet.free("rest")


def _back_within_a_second(machine: Machine, since_ns: int) -> None:
    for resource in (GPU, SWITCH):
        held = machine.kubelet.wait(resource, healthy=machine.bound(resource))
        assert held.at_ns - since_ns < SECOND_NS


def test_after_a_kubelet_restart_everything_is_back_within_a_second(machine: Machine) -> None:
    plugin = machine.plugin()
    machine.settle()
    booked = _booked(machine)
    checkpoint = machine.kubelet.checkpoint()
    _back_within_a_second(machine, machine.kubelet.restart())
    machine.check_resolution()
    assert machine.kubelet.checkpoint() == checkpoint
    _check_intact(machine, booked)
    assert plugin.is_running()


def test_after_a_killed_kubelet_came_back_everything_is_back_within_a_second(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    booked = _booked(machine)
    machine.kubelet.kill()
    _back_within_a_second(machine, machine.kubelet.come_back())
    machine.check_resolution()
    _check_intact(machine, booked)


def test_fifty_kubelet_restarts_in_a_row(machine: Machine) -> None:
    plugin = machine.plugin()
    machine.settle()
    booked = _booked(machine)
    for number in range(50):
        if number % 5 == 4:
            machine.kubelet.kill()
            started_ns = machine.kubelet.come_back()
        else:
            started_ns = machine.kubelet.restart()
        _back_within_a_second(machine, started_ns)
        machine.check_resolution()
    _check_intact(machine, booked)
    assert plugin.is_running()
    # Sockets of earlier rounds are gone: the kubelet's, and one per resource.
    assert len(list(machine.kubelet.plugin_dir.glob("*.sock"))) == 3


def test_kubelet_restarts_that_do_not_wait_for_the_plugin(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    booked = _booked(machine)
    for _ in range(20):
        machine.kubelet.restart()
    started_ns = machine.kubelet.restart()
    _back_within_a_second(machine, started_ns)
    machine.check_resolution()
    _check_intact(machine, booked)


def test_a_change_during_the_kubelets_absence_is_in_its_first_list(machine: Machine) -> None:
    machine.plugin()
    machine.settle()
    machine.kubelet.stop()
    lost, taken = machine.of(GPU)[:2]
    machine.live.remove(lost)
    machine.live.off_vfio(taken)
    machine.kubelet.start()
    machine.settle()


def test_the_plugin_started_first_waits_for_the_kubelet(machine: Machine) -> None:
    machine.kubelet.stop()
    plugin = machine.plugin()
    plugin.wait_for("kubelet.absent")
    started_ns = machine.kubelet.start()
    _back_within_a_second(machine, started_ns)
    machine.check_resolution()


def test_a_stopped_plugin_leaves_names_that_still_resolve_and_its_successor_the_allocations(machine: Machine) -> None:
    first = machine.plugin()
    machine.settle()
    booked = _booked(machine)
    assert first.terminate() == 0
    # Unhealthy as the stream ends; the names go on working, so that containers of the pods can start again.
    machine.kubelet.wait(GPU, healthy=(), unhealthy=machine.of(GPU))
    for given in booked.values():
        machine.functions(given)
    machine.plugin()
    machine.settle()
    _check_intact(machine, booked)


def test_a_killed_plugin_is_noticed_at_once_and_its_successor_takes_over(machine: Machine) -> None:
    first = machine.plugin()
    machine.settle()
    booked = _booked(machine)
    first.kill()
    machine.kubelet.wait(GPU, healthy=(), unhealthy=machine.of(GPU), within_s=1)
    with pytest.raises(Refused):
        machine.kubelet.allocate(Pod.of("new", gpu=1))
    machine.plugin()
    machine.settle()
    _check_intact(machine, booked)
    # What the killed one left is cleared away: the kubelet's socket, and one per resource.
    assert len(list(machine.kubelet.plugin_dir.glob("*.sock"))) == 3


@pytest.mark.parametrize("ending", ["terminate", "kill"])
@pytest.mark.parametrize("last", ["old", "new"])
def test_two_instances_overlap_and_whichever_ends_the_other_serves(machine: Machine, ending: str, last: str) -> None:
    old = machine.plugin()
    machine.settle()
    booked = _booked(machine)
    new = machine.plugin()
    new.wait_for("kubelet.listening", count=2)
    ends, stays = (old, new) if last == "new" else (new, old)
    getattr(ends, ending)()
    # A killed instance leaves its socket, so no directory event tells of its end; this one makes the other look around.
    (machine.kubelet.plugin_dir / "somebody-else.sock").touch()
    # Kubelets up to 1.35 lose the one that stays with the one that ends, so it has to register again. From 1.36 on a
    # second registration from the same socket is refused, and makes the kubelet forget to watch the first.
    machine.observe(for_s=REGISTERED_AGAIN_S)
    machine.settle()
    lost = machine.of(GPU)[7]
    machine.live.remove(lost)
    machine.settle()
    machine.live.back_on_vfio(lost)
    machine.settle()
    _check_intact(machine, booked)
    # The kubelet must be bound to the instance that is left, and to it alone.
    stays.kill()
    machine.kubelet.wait(GPU, healthy=(), unhealthy=machine.of(GPU), within_s=2)
    machine.plugin()
    machine.settle()
    _check_intact(machine, booked)


def test_the_kubelet_restarts_while_two_instances_overlap(machine: Machine) -> None:
    old = machine.plugin()
    machine.settle()
    booked = _booked(machine)
    new = machine.plugin()
    new.wait_for("kubelet.listening", count=2)
    machine.kubelet.restart()
    machine.settle()
    old.terminate()
    machine.settle()
    _check_intact(machine, booked)
    _back_within_a_second(machine, machine.kubelet.restart())
    _check_intact(machine, booked)


def test_ten_rolling_updates_in_a_row(machine: Machine) -> None:
    current = machine.plugin()
    machine.settle()
    booked = _booked(machine)
    for number in range(10):
        if number % 2:
            current.terminate()
            current = machine.plugin()
        else:
            successor = machine.plugin()
            successor.wait_for("kubelet.listening", count=2)
            current.terminate()
            current = successor
        machine.settle()
    _check_intact(machine, booked)
