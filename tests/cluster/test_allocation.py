# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What a pod is given: names, in order, of devices that are what they were listed as."""

from __future__ import annotations

import time

import pytest
from grpclib import GRPCError
from grpclib.const import Status
from tests.cluster.host import GPU, SWITCH, Host, NewHost, patience
from tests.cluster.in_process import DeafWatch, InProcess

from simcluster.kubelet import Refused
from simcluster.names import is_qualified_cdi_name
from simnode import boards


async def serving(host: Host) -> InProcess:
    """Start an instance that will not be told of any change, so that what it listed can be made to be wrong."""
    plugin = await host.plugin_in_process(DeafWatch)
    await host.served()
    return plugin


async def test_the_answer_is_cdi_names_in_the_order_asked_and_each_is_in_the_file(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin()
        await host.served()
        asked = tuple(reversed(host.of(GPU)))
        names = await host.kubelet.grant(GPU, asked)
        assert names == tuple(f"{GPU}={address}" for address in asked)
        for name in names:
            assert is_qualified_cdi_name(name)
            kind, _, device_id = name.partition("=")
            assert kind == GPU
            node = host.spec(GPU)[device_id]
            assert node == f"{host.paths.dev_vfio}/devices/{host.live.cdev(device_id)}"
            assert host.function_behind(node) == device_id
        await plugin.lines.wait_for("device.allocated", resource=GPU, devices=list(asked))


async def test_each_container_of_a_message_is_answered_in_order(new_host: NewHost) -> None:
    async with new_host() as host:
        await serving(host)
        first, second, third = host.of(GPU)[:3]
        answers = await host.kubelet.grants(GPU, [[second, first], [], [third]])
        assert answers == ((f"{GPU}={second}", f"{GPU}={first}"), (), (f"{GPU}={third}",))
        assert await host.kubelet.grants(GPU, []) == ()


async def test_no_books_are_kept_on_who_has_what(new_host: NewHost) -> None:
    async with new_host() as host:
        await serving(host)
        first = host.of(GPU)[0]
        answers = [await host.kubelet.grant(GPU, [first]) for _ in range(3)]
        assert answers == [(f"{GPU}={first}",)] * 3
        # A pod that comes back after the kubelet lost its books gets what it asks for as well.
        await host.kubelet.allocate("a", "main", GPU, 8)
        host.kubelet.free("a")
        assert len((await host.kubelet.allocate("b", "main", GPU, 8)).cdi) == 8


@pytest.mark.parametrize(
    "unknown", ["0000:ff:00.0", "0", "vfio4", "", "0000:1b:00", "0000:1B:00.0", "10000:1b:00.0", "\N{SNOWMAN}" * 100]
)
async def test_an_unknown_id_fails_loudly_with_the_id_and_what_there_is(unknown: str, new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await serving(host)
        with pytest.raises(GRPCError) as caught:
            await host.kubelet.grant(GPU, [host.of(GPU)[0], unknown])
        assert caught.value.status is Status.NOT_FOUND
        assert f"{GPU}={unknown}: no such device is listed" in str(caught.value.message)
        for address in host.of(GPU):
            assert address in str(caught.value.message)
        (said,) = plugin.lines.having("allocation.refused")
        assert said.fields["hint"]
        # Nothing was granted on the way to the refusal, and the next request is answered.
        assert plugin.lines.having("device.allocated") == []
        assert await host.kubelet.grant(GPU, [host.of(GPU)[0]])


async def test_the_id_of_another_resource_is_unknown(new_host: NewHost) -> None:
    async with new_host() as host:
        await serving(host)
        with pytest.raises(GRPCError) as caught:
            await host.kubelet.grant(GPU, [host.of(SWITCH)[0]])
        assert caught.value.status is Status.NOT_FOUND


@pytest.mark.parametrize("what", ["vanished", "on the host driver", "on no driver", "another node", "node removed"])
@pytest.mark.parametrize("call", ["Allocate", "PreStartContainer"])
async def test_a_device_that_is_not_what_was_listed_is_refused_by_name(what: str, call: str, new_host: NewHost) -> None:
    async with new_host() as host:
        await serving(host)
        first, second = host.of(GPU)[:2]
        match what:
            case "vanished":
                host.live.remove(first)
                reason = "vanished from the bus"
            case "on the host driver":
                host.live.unbind(first)
                host.live.bind(first, "nvidia")
                reason = "on driver nvidia"
            case "on no driver":
                host.live.unbind(first)
                reason = "on no driver"
            case "another node":
                for address in (first, second):
                    host.live.unbind(address)
                for address in (second, first):
                    host.live.bind(address)
                reason = f"its node is {host.node_of(first)} now"
            case _:
                node = host.live.node_path(first)
                assert node is not None
                node.unlink()
                reason = f"{node} does not exist"
        assert first in host.kubelet.healthy(GPU), "the plugin was not to notice by itself"
        ask = host.kubelet.grant if call == "Allocate" else host.kubelet.pre_start
        with pytest.raises(GRPCError) as caught:
            await ask(GPU, [first])
        assert caught.value.status is Status.NOT_FOUND
        assert f"{GPU}={first}: {reason}" in str(caught.value.message)
        # What a request has shown to be wrong is put right in the list as well.
        await host.wait_for(lambda: first not in host.kubelet.healthy(GPU) or what == "another node")
        if what == "another node":
            await host.wait_for(lambda: host.spec(GPU)[first] == host.node_of(first))
        # Nobody else is concerned.
        rest = host.of(GPU)[2:]
        assert len(await host.kubelet.grant(GPU, rest)) == len(rest)


async def test_a_lost_device_does_not_fail_requests_that_are_not_about_it(new_host: NewHost) -> None:
    async with new_host() as host:
        await serving(host)
        lost, *rest = host.of(GPU)
        host.live.remove(lost)
        assert await host.kubelet.preferred(GPU, host.of(GPU), (), 2)
        assert await host.kubelet.preferred(GPU, rest, (), 7) == tuple(rest)
        assert len(await host.kubelet.grant(GPU, rest)) == 7


async def test_pre_start_container_is_answered_although_it_was_not_asked_for(new_host: NewHost) -> None:
    async with new_host() as host:
        await serving(host)
        await host.kubelet.pre_start(GPU, host.of(GPU))
        await host.kubelet.pre_start(GPU, ())


@pytest.mark.parametrize("damage", ["removed", "spoiled", "replaced by somebody else's"])
async def test_the_file_is_true_before_the_answer(damage: str, new_host: NewHost) -> None:
    async with new_host() as host:
        await serving(host)
        path = host.spec_path(GPU)
        match damage:
            case "removed":
                path.unlink()
            case "spoiled":
                path.write_text("{")
            case _:
                path.write_text('{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": []}')
        first = host.of(GPU)[0]
        await host.kubelet.grant(GPU, [first])
        assert host.spec(GPU) == {address: host.node_of(address) for address in host.of(GPU)}


async def test_a_pod_whose_device_was_lost_is_refused_until_it_is_back(new_host: NewHost) -> None:
    async with new_host() as host:
        await host.plugin_in_process()
        await host.served()
        booking = await host.kubelet.allocate("pod", "main", GPU, 2)
        host.live.remove(booking.ids[0])
        await host.becomes(GPU, healthy=7, unhealthy=1)
        with pytest.raises(Refused, match="no longer healthy"):
            await host.kubelet.allocate("pod", "main", GPU, 2)
        host.live.rescan(booking.ids[0])
        host.live.bind(booking.ids[0])
        await host.served()
        assert await host.kubelet.allocate("pod", "main", GPU, 2) == booking


async def test_names_are_of_the_devices_asked_for_and_not_of_what_sits_beside_them(new_host: NewHost) -> None:
    async with new_host(boards.rtx_pro_6000()) as host:
        await host.plugin_in_process()
        await host.served(gpu=4)
        booking = await host.kubelet.allocate("pod", "main", GPU, 4)
        assert set(booking.cdi) == {f"{GPU}={address}" for address in host.of(GPU)}
        assert set(host.spec(GPU)) == set(host.of(GPU))


# Preferences.


async def test_a_preference_has_the_size_asked_the_fixed_ones_and_one_numa_node(new_host: NewHost) -> None:
    async with new_host(boards.thousand_gpus(16)) as host:
        await host.plugin_in_process()
        await host.served(gpu=16)
        ids = host.of(GPU)
        # Nine are free, of two NUMA nodes, and two of them are fixed.
        available, fixed = (*ids[:6], *ids[8:11]), (ids[9], ids[2])
        began_s = time.monotonic()
        answer = await host.kubelet.preferred(GPU, available, fixed, 8)
        assert time.monotonic() - began_s < patience(0.1)
        assert len(set(answer)) == len(answer) == 8
        assert set(fixed) < set(answer) <= set(available)
        four = await host.kubelet.preferred(GPU, available, (), 4)
        assert len({host.kubelet.device(GPU, device_id).numa for device_id in four}) == 1


@pytest.mark.parametrize(
    ("available", "fixed", "size", "expected"),
    [(8, 0, 8, 8), (8, 8, 8, 8), (8, 0, 0, 0), (3, 0, 8, 3), (0, 0, 1, 0), (8, 3, 1, 1), (8, 2, -1, 0)],
)
async def test_a_preference_is_never_an_error(
    available: int, fixed: int, size: int, expected: int, new_host: NewHost
) -> None:
    async with new_host() as host:
        await host.plugin_in_process()
        await host.served()
        ids = host.of(GPU)
        answer = await host.kubelet.preferred(GPU, ids[:available], ids[:fixed], size)
        assert len(set(answer)) == len(answer) == expected
        assert set(answer) <= set(ids)


async def test_a_preference_among_ids_that_nobody_knows_is_among_them_all_the_same(new_host: NewHost) -> None:
    async with new_host() as host:
        await host.plugin_in_process()
        await host.served()
        answer = await host.kubelet.preferred(GPU, ["b", "a", "c"], ["c"], 2)
        assert answer == ("c", "a")
        first = host.of(GPU)[0]
        assert await host.kubelet.preferred(GPU, ["a", first], (), 1) == (first,)


async def test_without_topology_the_order_is_that_of_the_addresses(new_host: NewHost) -> None:
    async with new_host() as host:
        for address in host.of(SWITCH):
            host.live.write_attribute(address, "numa_node", b"-1\n")
        await host.plugin_in_process()
        await host.served()
        ids = host.of(SWITCH)
        assert await host.kubelet.preferred(SWITCH, tuple(reversed(ids)), (), 2) == ids[:2]
