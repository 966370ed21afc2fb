# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Registering with whatever kubelet there is: absent, restarting, refusing, hanging, closing streams."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cluster.host import GPU, SWITCH, Host, NewHost, patience

from simcluster.async_tests import clock_rate
from simcluster.kubelet import Fault, Generation
from simcluster.plugin import Lines
from simnode import boards
from simnode.tree import Fault as Damage

both = pytest.mark.parametrize("generation", list(Generation))

# A new kubelet socket is registered with within a second.
PROMPT_S = 1.0


@both
async def test_the_first_list_after_a_registration_is_complete(generation: Generation, new_host: NewHost) -> None:
    async with new_host(generation=generation) as host:
        await host.plugin()
        await host.served(gpu=8, nvswitch=4)
        for resource in (GPU, SWITCH):
            (only,) = host.kubelet.history(resource)
            assert only.ids == host.of(resource)
            assert len(host.kubelet.accepted(resource)) == 1


async def test_the_first_list_already_says_which_devices_are_unhealthy(new_host: NewHost) -> None:
    async with new_host() as host:
        broken = host.of(GPU)[2:4]
        mend = [host.live.damage(address, Damage.NODE_MISSING) for address in broken]
        plugin = await host.plugin_in_process()
        await host.wait_for(lambda: host.kubelet.history(GPU))
        first = host.kubelet.history(GPU)[0]
        assert first.unhealthy == set(broken)
        assert first.healthy == set(host.of(GPU)) - set(broken)
        for undo in mend:
            undo()
        await host.served(gpu=8, nvswitch=4)
        # Not once for each of them either: a list replaces everything, and the kubelet writes it to disk.
        assert len(host.kubelet.history(GPU)) <= 1 + len(broken)
        assert [line.fields["device"] for line in plugin.lines.having("device.healthy")] == list(broken)


async def test_each_resource_has_a_socket_of_its_own_named_for_resource_and_process(new_host: NewHost) -> None:
    async with new_host() as host:
        await host.plugin_in_process()
        await host.served()
        endpoints = {resource: host.kubelet.accepted(resource)[0].endpoint for resource in (GPU, SWITCH)}
        assert re.fullmatch(r"kata-nvidia\.com-gpu-[0-9a-f]{8}\.sock", endpoints[GPU])
        assert re.fullmatch(r"kata-nvidia\.com-nvswitch-[0-9a-f]{8}\.sock", endpoints[SWITCH])
        assert host.sockets() == set(endpoints.values())


async def test_a_resource_is_registered_with_its_first_device_and_stays_when_the_last_goes(new_host: NewHost) -> None:
    async with new_host(boards.unbound(boards.pcie_h100_nvl())) as host:
        plugin = await host.plugin_in_process()
        await plugin.lines.wait_for("node.without-devices")
        assert host.sockets() == set()
        first = host.of(GPU)[0]
        host.live.unbind(first)
        host.live.bind(first)
        await host.served(gpu=1)
        host.live.unbind(first)
        await host.wait_for(lambda: host.kubelet.history(GPU)[-1].devices == ())
        assert host.kubelet.streams(GPU) == 1
        assert host.kubelet.resources() == {GPU}
        assert not host.spec_path(GPU).exists()


@pytest.mark.parametrize("before", ["no directory", "empty directory", "socket of a dead kubelet", "plain file"])
async def test_a_kubelet_that_comes_later_is_waited_for_and_that_is_said_once(before: str, new_host: NewHost) -> None:
    async with new_host(kubelet=False) as host:
        if before != "no directory":
            host.paths.device_plugin_dir.mkdir()
        if before == "socket of a dead kubelet":
            await host.kubelet.start()
            await host.kubelet.kill()
        if before == "plain file":
            host.kubelet.socket.write_text("")
        plugin = await host.plugin_in_process()
        said = "socket.failed" if before == "no directory" else "kubelet.absent"
        for resource in (GPU, SWITCH):
            await plugin.lines.wait_for(said, resource=resource)
        if before == "plain file":
            host.kubelet.socket.unlink()
        began_s = time.monotonic()
        await host.kubelet.start()
        await host.served()
        assert _last_registered_s(host) - began_s < patience(PROMPT_S)
        assert len(plugin.lines.having(said)) == 2


def _remove(directory: Path) -> None:
    # Out of the way first: somebody may be making a socket in it.
    gone = directory.rename(directory.with_name("gone"))
    shutil.rmtree(gone)


async def _at_once(host: Host, _: Lines) -> None:
    await host.kubelet.restart()


async def _after_a_pause(host: Host, lines: Lines) -> None:
    await host.kubelet.kill()
    # Said only of a kubelet that stays away.
    for resource in (GPU, SWITCH):
        await lines.wait_for("kubelet.absent", resource=resource)
    await host.kubelet.start()


async def _bound_before_it_listens(host: Host, _: Lines) -> None:
    await host.kubelet.restart(bound_s=0.3)


async def _alone(host: Host, _: Lines) -> None:
    await host.kubelet.restart(sweep=False)


async def _with_a_new_directory(host: Host, _: Lines) -> None:
    await host.kubelet.kill()
    _remove(host.paths.device_plugin_dir)
    await host.kubelet.start()


async def _with_a_new_directory_after_a_pause(host: Host, lines: Lines) -> None:
    await host.kubelet.kill()
    _remove(host.paths.device_plugin_dir)
    for resource in (GPU, SWITCH):
        await lines.wait_for("socket.failed", resource=resource)
    await host.kubelet.start()


async def _twice_in_a_row(host: Host, _: Lines) -> None:
    await host.kubelet.restart()
    await host.kubelet.restart()


RESTARTS = (
    _at_once,
    _after_a_pause,
    _bound_before_it_listens,
    _alone,
    _with_a_new_directory,
    _with_a_new_directory_after_a_pause,
    _twice_in_a_row,
)


@pytest.mark.parametrize("restart", RESTARTS, ids=lambda restart: restart.__name__.strip("_"))
@both
async def test_a_new_kubelet_socket_is_registered_with_at_once(
    restart: Callable[[Host, Lines], Awaitable[None]], generation: Generation, new_host: NewHost
) -> None:
    async with new_host(generation=generation) as host:
        plugin = await host.plugin_in_process()
        await host.served()
        before = {resource: host.states(resource) for resource in (GPU, SWITCH)}
        booking = await host.kubelet.allocate("pod", "main", GPU, 3)
        await restart(host, plugin.lines)
        began_s = time.monotonic()
        await host.served()
        assert _last_registered_s(host) - began_s < patience(PROMPT_S)
        assert {resource: host.states(resource) for resource in (GPU, SWITCH)} == before
        # A directory that was removed took the checkpoint along.
        assert host.kubelet.booked() in ((booking,), ())


async def test_ten_restarts_in_a_row_end_with_one_registration_each(new_host: NewHost) -> None:
    async with new_host() as host:
        await host.plugin()
        await host.served()
        for _ in range(10):
            await host.kubelet.restart()
            await host.served()
            assert {resource: host.kubelet.streams(resource) for resource in (GPU, SWITCH)} == {GPU: 1, SWITCH: 1}
        assert len(host.kubelet.accepted(GPU)) == 11
        assert len(host.sockets()) == 2


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_kubelet_may_die_at_any_moment(seed: int, new_host: NewHost) -> None:
    moments = random.Random(seed)
    async with new_host() as host:
        await host.plugin()
        await host.served()
        for _ in range(30):
            await host.kubelet.kill()
            await asyncio.sleep(moments.random() * moments.choice((0, 0.01)))
            await host.kubelet.start(bound_s=moments.choice((0, 0.005)))
            await asyncio.sleep(moments.random() * moments.choice((0, 0.01, 0.03)))
        await host.served()
        assert {resource: host.kubelet.streams(resource) for resource in (GPU, SWITCH)} == {GPU: 1, SWITCH: 1}


async def test_a_kubelet_that_lost_the_stream_is_registered_with_again(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin_in_process()
        await host.served()
        await host.kubelet.drop_streams(GPU)
        assert host.kubelet.allocatable(GPU) == 0
        await host.served()
        await host.wait_for(
            lambda: (
                [line.event for line in plugin.lines.all if line.fields.get("resource") == GPU][-3:]
                == ["kubelet.gone", "kubelet.registered", "kubelet.listening"]
            )
        )
        assert len(host.kubelet.accepted(SWITCH)) == 1


async def test_an_own_socket_that_somebody_removed_is_made_and_registered_again(new_host: NewHost) -> None:
    async with new_host() as host:
        await host.plugin_in_process()
        await host.served()
        (host.paths.device_plugin_dir / host.kubelet.accepted(GPU)[0].endpoint).unlink()
        await host.wait_for(lambda: len(host.kubelet.accepted(GPU)) == 2)
        await host.served()
        assert host.kubelet.accepted(GPU)[1].endpoint in host.sockets()


# A kubelet that does it wrong.


@clock_rate(20)
async def test_a_refusal_is_said_once_and_tried_again_ever_more_rarely(new_host: NewHost) -> None:
    async with new_host() as host:
        host.kubelet.fail(Fault.REFUSE)
        plugin = await host.plugin_in_process()
        await host.wait_for(lambda: _attempts(host, GPU) == 5)
        at_s = [attempt.at_s for attempt in host.kubelet.attempts if attempt.resource == GPU]
        gaps_s = [later - earlier for earlier, later in pairwise(at_s)]
        # A second, two, four, eight: on this clock.
        assert all(gap_s > 0.9 * 2**step / 20 for step, gap_s in enumerate(gaps_s))
        (said,) = plugin.lines.having("kubelet.refused", resource=GPU)
        assert said.fields["reason"] == "UNKNOWN: the simulated kubelet refuses"
        host.kubelet.mend()
        await host.served()


async def test_a_refused_resource_does_not_hold_up_another(new_host: NewHost) -> None:
    async with new_host() as host:
        host.kubelet.fail(Fault.REFUSE, GPU)
        plugin = await host.plugin_in_process()
        await host.served(nvswitch=4)
        await plugin.lines.wait_for("kubelet.refused", resource=GPU)
        assert host.kubelet.allocatable(GPU) == 0
        host.kubelet.mend()
        await host.served()


@clock_rate(20)
async def test_a_kubelet_that_never_answers_is_given_up_on_and_asked_again(new_host: NewHost) -> None:
    async with new_host() as host:
        host.kubelet.fail(Fault.HANG, GPU)
        plugin = await host.plugin_in_process()
        await host.served(nvswitch=4)
        said = await plugin.lines.wait_for("kubelet.refused", resource=GPU)
        assert re.match("no answer within|DEADLINE_EXCEEDED", said.fields["reason"])
        host.kubelet.mend()
        await host.served()


@clock_rate(20)
async def test_a_kubelet_that_reads_nothing_is_waited_for(new_host: NewHost) -> None:
    async with new_host(kubelet=False) as host:
        await host.kubelet.start(deaf=True)
        plugin = await host.plugin_in_process()
        for resource in (GPU, SWITCH):
            await plugin.lines.wait_for("kubelet.refused", resource=resource)
        await host.kubelet.hear()
        await host.served()


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.NO_STREAM, Fault.REFUSE])
async def test_whatever_a_kubelet_did_its_successor_is_registered_with_at_once(fault: Fault, new_host: NewHost) -> None:
    async with new_host() as host:
        host.kubelet.fail(fault)
        await host.plugin_in_process()
        await host.wait_for(lambda: _attempts(host, GPU) and _attempts(host, SWITCH))
        host.kubelet.mend()
        began_s = time.monotonic()
        await host.kubelet.restart()
        await host.served()
        assert _last_registered_s(host) - began_s < patience(PROMPT_S)


@clock_rate(20)
async def test_a_registration_that_no_stream_follows_is_made_again(new_host: NewHost) -> None:
    async with new_host() as host:
        host.kubelet.fail(Fault.NO_STREAM)
        plugin = await host.plugin_in_process()
        await plugin.lines.wait_for("kubelet.registered", resource=GPU)
        host.kubelet.mend()
        await host.served()
        assert len(host.kubelet.accepted(GPU)) == 2


@clock_rate(20)
async def test_a_kubelet_that_keeps_closing_the_stream_is_not_run_after(new_host: NewHost) -> None:
    async with new_host() as host:
        host.kubelet.fail(Fault.DROP_STREAM)
        await host.plugin_in_process()
        await host.wait_for(lambda: _attempts(host, GPU) == 6)
        at_s = [attempt.at_s for attempt in host.kubelet.attempts if attempt.resource == GPU]
        # 0.1 s and twice that each time, at the least.
        assert (at_s[5] - at_s[0]) * 20 > 3
        host.kubelet.mend()
        await host.served()
        for received in host.kubelet.history(GPU):
            assert received.healthy == set(host.of(GPU))


async def test_a_kubelet_that_stops_reading_holds_up_nothing_else(new_host: NewHost) -> None:
    # Lists of a thousand devices fill what a kubelet lets a plugin send ahead after the second or third.
    async with new_host(boards.thousand_gpus()) as host:
        switch = "0000:00:1f.0"
        a_switch = boards.hgx_h100().device("0000:05:00.0")
        host.live.plug(replace(a_switch, address=switch, parents=("pci0000:00",), iommu_group=5000))
        host.kubelet.fail(Fault.STOP_READING, GPU)
        plugin = await host.plugin()
        await host.served(gpu=1000, nvswitch=1)
        for address in host.of(GPU)[:8]:
            host.live.remove(address)
            await plugin.lines.wait_for("device.unhealthy", device=address)
        assert len(host.kubelet.history(GPU)) == 1
        host.live.remove(switch)
        await host.becomes(SWITCH, healthy=0, unhealthy=1)
        ended = await plugin.terminate()
        assert ended.code == 0
        assert ended.seconds < patience(1)


async def test_a_plugin_that_is_told_to_stop_while_a_kubelet_hangs_stops(new_host: NewHost) -> None:
    async with new_host() as host:
        host.kubelet.fail(Fault.HANG)
        plugin = await host.plugin()
        await host.wait_for(lambda: _attempts(host, GPU) and _attempts(host, SWITCH))
        ended = await plugin.terminate()
        assert ended.code == 0
        assert ended.seconds < patience(1)
        assert host.sockets() == set()


def _attempts(host: Host, resource: str) -> int:
    return sum(attempt.resource == resource for attempt in host.kubelet.attempts)


def _last_registered_s(host: Host) -> float:
    answers = [host.kubelet.accepted(resource)[-1].answered_s for resource in (GPU, SWITCH)]
    return max(answer for answer in answers if answer is not None)
