# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Instances of the plugin that come, go, are killed, and overlap; and what each leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from tests.cluster.host import GPU, SWITCH, Host, NewHost, patience

from simcluster.async_tests import clock_rate
from simcluster.kubelet import Fault, Generation
from simcluster.plugin import Lines, run_to_end
from simnode import boards

both = pytest.mark.parametrize("generation", list(Generation))


@both
@pytest.mark.parametrize("how", ["terminated", "killed"])
@pytest.mark.parametrize("ends", ["older", "newer"])
@clock_rate(20)
async def test_after_an_overlap_the_instance_that_is_left_serves_everything(
    ends: str, how: str, generation: Generation, new_host: NewHost
) -> None:
    async with new_host(generation=generation) as host:
        # The one that stays runs on the fast clock: that another was killed it sees with its next rescan only.
        if ends == "older":
            ending = await host.plugin()
            await _listened_to(ending.lines)
            staying = await host.plugin_in_process()
            await _listened_to(staying.lines)
        else:
            staying = await host.plugin_in_process()
            await _listened_to(staying.lines)
            ending = await host.plugin()
            await _listened_to(ending.lines)
        assert len(host.kubelet.accepted(GPU)) == 2
        await (ending.terminate() if how == "terminated" else ending.kill())
        await host.wait_for(lambda: _serves(staying.lines, host, GPU) and _serves(staying.lines, host, SWITCH))
        assert {resource: host.states(resource) for resource in (GPU, SWITCH)} == {
            resource: dict.fromkeys(host.of(resource), "Healthy") for resource in (GPU, SWITCH)
        }
        booking = await host.kubelet.allocate("pod", "main", GPU, 8)
        assert set(booking.cdi) == {f"{GPU}={address}" for address in host.spec(GPU)}
        await host.wait_for(lambda: host.sockets() <= _endpoints(staying.lines), what="no socket of the other left")


async def _listened_to(lines: Lines) -> None:
    for resource in (GPU, SWITCH):
        await lines.wait_for("kubelet.listening", resource=resource)


def _endpoints(lines: Lines) -> set[str]:
    return {line.fields["endpoint"] for line in lines.having("kubelet.registered")}


def _serves(lines: Lines, host: Host, resource: str) -> bool:
    """Whether the kubelet takes devices from this instance, and from no other."""
    return (
        host.kubelet.serves(resource, len(host.of(resource)))
        and host.kubelet.endpoint(resource) in _endpoints(lines)
        and host.kubelet.streams(resource) > 0
    )


@both
async def test_two_instances_do_not_keep_registering_over_each_other(generation: Generation, new_host: NewHost) -> None:
    async with new_host(generation=generation) as host:
        old = await host.plugin()
        await _listened_to(old.lines)
        new = await host.plugin()
        await _listened_to(new.lines)
        # Another resource change is seen by both and makes neither of them register.
        gone = host.of(GPU)[0]
        host.live.remove(gone)
        for plugin in (old, new):
            await plugin.lines.wait_for("device.unhealthy", device=gone)
        assert len(host.kubelet.accepted(GPU)) == 2
        assert len(host.kubelet.accepted(SWITCH)) == 2
        assert "sibling.gone" not in old.lines.events() + new.lines.events()


async def test_after_a_kill_the_next_instance_ends_with_the_same_list_and_removes_the_dead_sockets(
    new_host: NewHost,
) -> None:
    async with new_host() as host:
        first = await host.plugin()
        await host.served()
        before = host.kubelet.history(GPU)[-1].devices
        await first.kill()
        dead = host.sockets()
        assert len(dead) == 2
        assert len(host.spec(GPU)) == 8
        await host.wait_for(lambda: host.kubelet.is_stopped(GPU))
        await host.plugin()
        await host.served()
        assert host.kubelet.history(GPU)[-1].devices == before
        assert not host.sockets() & dead
        assert len(host.sockets()) == 2


async def test_ids_and_names_are_the_same_whatever_the_order_in_which_devices_were_bound(
    new_host: NewHost, tmp_path: Path
) -> None:
    async with new_host(boards.unbound(boards.hgx_h100())) as host:
        for address in (*host.of(GPU), *host.of(SWITCH)):
            if host.live.driver(address):
                host.live.unbind(address)
        runs = []
        for order in (1, -1):
            for address in (*host.of(GPU), *host.of(SWITCH))[::order]:
                host.live.bind(address)
            plugin = await host.plugin()
            await host.served()
            runs.append({resource: host.kubelet.history(resource)[-1].devices for resource in (GPU, SWITCH)})
            await plugin.terminate()
            await host.wait_for(lambda: host.kubelet.is_stopped(GPU) and host.kubelet.is_stopped(SWITCH))
            for address in (*host.of(GPU), *host.of(SWITCH)):
                host.live.unbind(address)
        assert runs[0] == runs[1]


async def test_ids_do_not_move_when_a_device_in_the_middle_is_gone_at_the_next_start(new_host: NewHost) -> None:
    async with new_host() as host:
        first = await host.plugin()
        await host.served()
        await first.terminate()
        gone = host.of(GPU)[4]
        host.live.remove(gone)
        await host.wait_for(lambda: host.kubelet.is_stopped(GPU))
        await host.plugin()
        await host.served(gpu=7, nvswitch=4)
        assert host.kubelet.history(GPU)[-1].ids == tuple(address for address in host.of(GPU) if address != gone)


async def test_devices_that_are_open_are_listed_like_all_others(new_host: NewHost) -> None:
    async with new_host() as host:
        held = [os.open(host.node_of(address), os.O_RDWR) for address in host.of(GPU)]
        try:
            await host.plugin_in_process()
            await host.served(gpu=8, nvswitch=4)
        finally:
            for descriptor in held:
                os.close(descriptor)


# Sockets.


async def test_only_own_dead_sockets_are_removed(new_host: NewHost) -> None:
    async with new_host() as host:
        kept = ["other.sock", "kata-nvidia.com-gpu.sock", "kata-example.com-gpu-01234567.sock"]
        for name in (*kept, "kata-nvidia.com-gpu-01234567.sock"):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(host.paths.device_plugin_dir / name))
        await host.plugin_in_process()
        await host.served()
        own = {host.kubelet.accepted(resource)[0].endpoint for resource in (GPU, SWITCH)}
        assert host.sockets() == {*kept, *own}


async def test_a_directory_too_long_for_sockets_ends_the_run_with_one_clear_line(directory: Path) -> None:
    long = directory / ("d" * (107 - len(str(directory)) - len("/kata-nvidia.com-nvswitch-01234567.sock")))
    flags = [f"--sysfs={directory}", f"--dev-vfio={directory}", f"--cdi-dir={directory}/cdi"]
    code, output, lines = await run_to_end([*flags, f"--device-plugin-dir={long}"])
    assert (code, output) == (2, "")
    (line,) = lines.all
    assert line.says("run.finished", level="error", exit_code=2)
    assert "expected at most 107 bytes" in line.fields["error"]
    assert "--device-plugin-dir" in line.fields["hint"]
    lines.check()


async def test_the_longest_directory_that_sockets_fit_in_is_served_from(directory: Path, new_host: NewHost) -> None:
    async with new_host(kubelet=False) as host:
        length = 107 - len("/kata-nvidia.com-nvswitch-01234567.sock") - len(str(directory)) - 1
        longest = directory / ("d" * length)
        host.move_plugin_dir(longest)
        await host.kubelet.start()
        await host.plugin_in_process()
        await host.served()
        assert {len(str(longest / name)) for name in host.sockets()} == {107, 102}


async def test_a_directory_that_no_socket_can_be_made_in_is_told_once_and_used_when_it_can(new_host: NewHost) -> None:
    async with new_host(kubelet=False) as host:
        host.paths.device_plugin_dir.write_text("a file where the directory should be")
        plugin = await host.plugin_in_process()
        for resource in (GPU, SWITCH):
            failed = await plugin.lines.wait_for("socket.failed", resource=resource)
            assert failed.fields["reason"] == "Not a directory"
        assert len(host.spec(GPU)) == 8
        host.paths.device_plugin_dir.unlink()
        await host.kubelet.start()
        await host.served()
        assert len(plugin.lines.having("socket.failed")) == 2


# Ends.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_at_once_with_streams_open_and_leaves_the_cdi_files(
    number: signal.Signals, new_host: NewHost
) -> None:
    async with new_host() as host:
        plugin = await host.plugin()
        await host.served()
        lists = len(host.kubelet.history(GPU))
        plugin.send(number)
        ended = await plugin.wait()
        assert ended.code == 0
        assert ended.seconds < patience(1)
        assert plugin.lines.all[-1].says("run.finished", exit_code=0)
        assert host.sockets() == set()
        assert len(host.spec(GPU)) == 8
        assert len(host.spec(SWITCH)) == 4
        # A plain stop takes nothing off the list: pods that run keep what they have.
        assert len(host.kubelet.history(GPU)) == lists
        assert host.kubelet.history(GPU)[-1].healthy == set(host.of(GPU))


@pytest.mark.parametrize("when", ["no kubelet", "refused", "hanging", "no stream", "no devices", "deaf kubelet"])
async def test_it_can_be_ended_whatever_it_is_waiting_for(when: str, new_host: NewHost) -> None:
    board = boards.empty() if when == "no devices" else boards.hgx_h100()
    faults = {"refused": Fault.REFUSE, "hanging": Fault.HANG, "no stream": Fault.NO_STREAM}
    async with new_host(board, kubelet=False) as host:
        if when in faults:
            host.kubelet.fail(faults[when])
        if when != "no kubelet":
            await host.kubelet.start(deaf=when == "deaf kubelet")
        plugin = await host.plugin_in_process()
        match when:
            case "no kubelet":
                await plugin.lines.wait_for("socket.failed")
            case "refused":
                await plugin.lines.wait_for("kubelet.refused")
            case "hanging":
                await host.wait_for(lambda: len(host.kubelet.attempts) == 2)
            case "no stream":
                await plugin.lines.wait_for("kubelet.registered")
            case "no devices":
                await plugin.lines.wait_for("node.without-devices")
            case _:
                await host.wait_for(lambda: len(host.sockets()) == 2)
        began_s = time.monotonic()
        await plugin.stop()
        assert time.monotonic() - began_s < patience(1)
        assert host.sockets() == set()


async def test_nothing_of_a_device_is_held_open(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin()
        await host.served()
        await host.kubelet.allocate("pod", "main", GPU, 8)
        await host.kubelet.pre_start(GPU, host.of(GPU))
        # What stands for a device node here is a link to /dev/null, which is also what the process was given to read.
        opened = plugin.open_files()
        assert opened.count("/dev/null") == 1
        assert not [path for path in opened if path.startswith((str(host.paths.dev_vfio), str(host.paths.sysfs)))]
