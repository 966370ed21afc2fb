# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The CDI directories: what is written when, what is removed, what is reported, and what happens when nothing can be."""

from __future__ import annotations

import json

import pytest
from grpclib import GRPCError
from grpclib.const import Status
from tests.cluster.host import GPU, SWITCH, NewHost

from simcluster.async_tests import clock_rate
from simcluster.devices import Received
from simnode import boards


async def test_an_id_is_on_disk_before_the_list_that_names_it(new_host: NewHost) -> None:
    async with new_host(boards.unbound(boards.hgx_h100())) as host:
        early: list[tuple[str, set[str]]] = []

        def look(resource: str, received: Received) -> None:
            if missing := received.healthy - set(host.spec(resource)):
                early.append((resource, set(missing)))

        host.kubelet.on_list = look
        await host.plugin()
        # Devices only come here: what is on disk is never less than what was last listed.
        for count, address in enumerate(host.of(GPU), start=1):
            host.live.unbind(address)
            host.live.bind(address)
            if count in (1, 4, 8):
                await host.served(gpu=count)
        assert not early
        assert len(host.kubelet.history(GPU)) >= 3


async def test_a_device_without_a_node_is_left_out_and_the_others_are_written(new_host: NewHost) -> None:
    async with new_host() as host:
        first, *rest = host.of(GPU)
        node = host.live.node_path(first)
        assert node is not None
        node.unlink()
        await host.plugin_in_process()
        await host.becomes(GPU, healthy=7, unhealthy=1)
        assert set(host.spec(GPU)) == set(rest)


async def test_without_devices_there_is_no_file(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin_in_process()
        await host.served()
        for address in host.of(SWITCH):
            host.live.remove(address)
        await host.becomes(SWITCH, healthy=0, unhealthy=4)
        assert not host.spec_path(SWITCH).exists()
        assert plugin.lines.having("cdi.removed", resource=SWITCH)


@clock_rate(20)
async def test_a_file_that_somebody_removed_or_spoiled_is_put_right(new_host: NewHost) -> None:
    async with new_host() as host:
        await host.plugin_in_process()
        await host.served()
        expected = host.spec(GPU)
        host.spec_path(GPU).unlink()
        await host.wait_for(lambda: host.spec_path(GPU).exists())
        assert host.spec(GPU) == expected
        host.spec_path(GPU).write_text("spoiled")
        await host.wait_for(lambda: host.spec_path(GPU).read_text() != "spoiled")
        assert host.spec(GPU) == expected
        assert len(host.kubelet.history(GPU)) == 1


async def test_own_left_overs_are_removed_at_the_start_and_other_files_are_not_touched(new_host: NewHost) -> None:
    async with new_host(boards.empty()) as host:
        host.paths.cdi_dir.mkdir()
        stale = json.dumps({"cdiVersion": "0.5.0", "kind": GPU, "devices": [_device("0000:01:00.0", "/dev/gone")]})
        own = ("kata.nvidia.com-gpu.json", "kata.nvidia.com-nvswitch.json", "kata.nvidia.com-pgpu.json")
        others = ("nvidia.com-gpu.json", "kata.example.com-gpu.json", "nvidia.yaml", "kata.nvidia.com-gpu.yaml.bak")
        for name in (*own, *others):
            (host.paths.cdi_dir / name).write_text(stale)
        plugin = await host.plugin_in_process()
        await plugin.lines.wait_for("node.without-devices")
        await host.wait_for(lambda: {path.name for path in host.paths.cdi_dir.iterdir()} == set(others))
        for name in others:
            assert (host.paths.cdi_dir / name).read_text() == stale


async def test_a_file_of_an_earlier_run_is_replaced_before_anything_is_offered(new_host: NewHost) -> None:
    async with new_host() as host:
        host.paths.cdi_dir.mkdir()
        host.spec_path(GPU).write_text(
            json.dumps(
                {
                    "cdiVersion": "0.5.0",
                    "kind": GPU,
                    # The node of another device by now, and a device that is no more.
                    "devices": [_device(host.of(GPU)[0], host.node_of(host.of(GPU)[1])), _device("0000:ff:00.0", "/x")],
                }
            )
        )
        await host.plugin_in_process()
        await host.served()
        assert host.spec(GPU) == {address: host.node_of(address) for address in host.of(GPU)}


@pytest.mark.parametrize("place", ["cdi_dir", "cdi_static_dir"])
@clock_rate(10)
async def test_a_file_of_somebody_else_that_stops_sandboxes_is_told_once_until_it_is_mended(
    place: str, new_host: NewHost
) -> None:
    async with new_host() as host:
        directory = host.paths.cdi_dir if place == "cdi_dir" else host.paths.cdi_static_dir
        directory.mkdir()
        broken, clash, sound = (directory / name for name in ("broken.json", "clash.json", "sound.yaml"))
        broken.write_text("{")
        clash.write_text(
            json.dumps({"cdiVersion": "0.5.0", "kind": GPU, "devices": [_device(host.of(GPU)[0], "/dev/null")]})
        )
        sound.write_text("cdiVersion: 0.5.0\nkind: example.com/net\ndevices: []\n")
        plugin = await host.plugin_in_process()
        await host.served()
        for path in (broken, clash):
            said = await plugin.lines.wait_for("cdi.foreign-problem", path=str(path))
            assert said.fields["reason"]
            assert said.fields["hint"]
        assert len(plugin.lines.having("cdi.foreign-problem")) == 2
        content = clash.read_text()
        broken.unlink()
        await plugin.lines.wait_for("cdi.foreign-solved", path=str(broken))
        assert clash.read_text() == content
        assert len(plugin.lines.having("cdi.foreign-problem")) == 2


# When nothing can be written.


@clock_rate(20)
async def test_what_cannot_be_written_is_not_offered_and_is_as_soon_as_it_can_be(new_host: NewHost) -> None:
    async with new_host() as host:
        # What a read-only file system does to a process without privileges, this does to any.
        host.paths.cdi_dir.write_text("a file where the directory should be")
        plugin = await host.plugin_in_process()
        for resource in (GPU, SWITCH):
            failed = await plugin.lines.wait_for("cdi.failed", resource=resource)
            assert str(host.spec_path(resource)) in failed.fields["error"]
            assert failed.fields["hint"]
        await host.becomes(GPU, healthy=0, unhealthy=8)
        await host.becomes(SWITCH, healthy=0, unhealthy=4)
        host.paths.cdi_dir.unlink()
        await host.served()
        for resource in (GPU, SWITCH):
            await plugin.lines.wait_for("cdi.recovered", resource=resource)
            assert len(plugin.lines.having("cdi.failed", resource=resource)) == 1
        assert len(host.spec(GPU)) == 8


async def test_on_a_full_disk_what_the_file_says_already_stays_on_offer(new_host: NewHost) -> None:
    async with new_host() as host:
        late = host.of(GPU)[7]
        host.live.unbind(late)
        plugin = await host.plugin()
        await host.served(gpu=7, nvswitch=4)
        before = host.spec_path(GPU).read_bytes()
        plugin.limit_file_size(0)
        host.live.bind(late)
        await host.becomes(GPU, healthy=7, unhealthy=1)
        assert host.kubelet.unhealthy(GPU) == {late}
        assert host.spec_path(GPU).read_bytes() == before
        await plugin.lines.wait_for("cdi.failed", resource=GPU)
        # A request for what is on offer is granted, one for what is not is told why.
        assert await host.kubelet.grant(GPU, [host.of(GPU)[0]]) == (f"{GPU}={host.of(GPU)[0]}",)
        with pytest.raises(GRPCError, match="cannot be written"):
            await host.kubelet.grant(GPU, [late])
        assert [path.name for path in host.paths.cdi_dir.iterdir() if path.name.startswith(".")] == []
        plugin.limit_file_size(None)
        # Whoever makes room leaves a trace in the directory.
        (host.paths.cdi_dir / "big-file").touch()
        (host.paths.cdi_dir / "big-file").unlink()
        await host.served(gpu=8, nvswitch=4)
        assert late in host.spec(GPU)


async def test_on_a_full_disk_no_name_leads_to_another_device(new_host: NewHost) -> None:
    async with new_host() as host:
        first, second = host.of(GPU)[:2]
        plugin = await host.plugin()
        await host.served()
        plugin.limit_file_size(0)
        for address in (first, second):
            host.live.unbind(address)
        for address in (second, first):
            host.live.bind(address)
        await plugin.lines.wait_for("cdi.failed", resource=GPU)
        await host.wait_for(lambda: not {first, second} & host.kubelet.healthy(GPU))
        await host.wait_for(
            lambda: all(host.function_behind(node) == name for name, node in host.spec(GPU).items()), what="true names"
        )
        plugin.limit_file_size(None)
        (host.paths.cdi_dir / "big-file").touch()
        await host.served()
        assert host.spec(GPU) == {address: host.node_of(address) for address in host.of(GPU)}


@clock_rate(20)
async def test_a_request_that_cannot_be_made_true_on_disk_is_refused_and_its_successor_is_not(
    new_host: NewHost,
) -> None:
    async with new_host() as host:
        plugin = await host.plugin_in_process()
        await host.served()
        aside = host.paths.cdi_dir.rename(host.root / "aside")
        host.paths.cdi_dir.write_text("in the way")
        with pytest.raises(GRPCError) as caught:
            await host.kubelet.grant(GPU, [host.of(GPU)[0]])
        assert caught.value.status in (Status.UNAVAILABLE, Status.NOT_FOUND)
        assert "cannot be written" in str(caught.value.message)
        host.paths.cdi_dir.unlink()
        aside.rename(host.paths.cdi_dir)
        await host.served()
        assert await host.kubelet.grant(GPU, [host.of(GPU)[0]])
        assert plugin.lines.having("allocation.refused")


def _device(name: str, node: str) -> dict[str, object]:
    return {"name": name, "containerEdits": {"deviceNodes": [{"path": node}]}}
