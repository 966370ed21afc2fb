# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The kubelet's list follows the hardware: what comes, goes, changes drivers, breaks, and is none of our business."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from typing import Final

import pytest
from tests.cluster.host import GPU, SWITCH, Host, NewHost, patience
from tests.cluster.in_process import DeafWatch, Kernel

from simcluster.async_tests import clock_rate
from simnode import boards
from simnode.node import Device, Node
from simnode.tree import Fault

# "At once": an event, a look and a message; the limit is for a machine that does something else as well.
PROMPT_S: Final = 1.0


def one_gpu(address: str, *, group: int, **changes: object) -> Device:
    """A GPU straight below a root port of its own."""
    domain, bus, _ = address.split(":")
    root = f"pci{domain}:{bus}"
    traits = replace(boards.pcie_h100_nvl().device(_first_gpu(boards.pcie_h100_nvl())), iommu_group=group)
    return replace(traits, address=address, parents=(root,), **changes)  # type: ignore[arg-type]


def _first_gpu(board: Node) -> str:
    return next(device.address for device in board.devices if device.class_code >> 8 == 0x0302)


# Coming and going.


async def test_a_device_that_falls_off_the_bus_is_unhealthy_at_once_and_healthy_when_it_is_back(
    new_host: NewHost,
) -> None:
    async with new_host() as host:
        plugin = await host.plugin()
        await host.served()
        gone = host.of(GPU)[2]
        began_s = time.monotonic()
        host.live.remove(gone)
        await host.becomes(GPU, healthy=7, unhealthy=1)
        assert host.kubelet.history(GPU)[-1].at_s - began_s < patience(PROMPT_S)
        assert host.kubelet.unhealthy(GPU) == {gone}
        assert gone not in host.spec(GPU)
        await plugin.lines.wait_for("device.unhealthy", device=gone, reason="vanished from the bus")
        # A switch is not concerned.
        assert len(host.kubelet.history(SWITCH)) == 1
        host.live.rescan(gone)
        began_s = time.monotonic()
        host.live.bind(gone)
        await host.served()
        assert host.kubelet.history(GPU)[-1].at_s - began_s < patience(PROMPT_S)
        assert host.kubelet.history(GPU)[-1].ids == host.of(GPU)
        assert set(host.spec(GPU)) == set(host.of(GPU))


async def test_a_device_given_to_a_host_driver_leaves_the_list_and_comes_back_under_its_id(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin()
        await host.served()
        moved = host.of(GPU)[0]
        host.live.unbind(moved)
        host.live.bind(moved, "nvidia")
        await host.wait_for(lambda: moved in host.kubelet.unhealthy(GPU), what="unhealthy first")
        await host.served(gpu=7, nvswitch=4)
        assert (await plugin.lines.wait_for("device.left", device=moved)).fields["reason"] == "on driver nvidia"
        host.live.unbind(moved)
        host.live.bind(moved)
        await host.served()
        assert host.kubelet.history(GPU)[-1].ids == host.of(GPU)


async def test_a_rebind_does_not_move_the_capacity(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin_in_process()
        await host.served()
        moved = host.of(GPU)[0]
        host.live.unbind(moved)
        await plugin.lines.wait_for("device.unhealthy", device=moved)
        host.live.bind(moved)
        await plugin.lines.wait_for("device.healthy", device=moved)
        await host.served()
        assert {len(received.devices) for received in host.kubelet.history(GPU)} == {8}


async def test_devices_bound_after_the_start_appear_without_a_restart(new_host: NewHost) -> None:
    async with new_host(boards.unbound(boards.hgx_h100())) as host:
        plugin = await host.plugin()
        nothing = await plugin.lines.wait_for("node.without-devices")
        assert str(host.paths.dev_vfio) in nothing.fields["reason"]
        assert not host.paths.dev_vfio.exists()
        assert not host.paths.cdi_dir.exists()
        for address in (*host.of(GPU), *host.of(SWITCH)):
            if host.live.driver(address) is not None:
                host.live.unbind(address)
            host.live.bind(address)
        await host.served(gpu=8, nvswitch=4)
        assert len(plugin.lines.having("node.without-devices")) == 1
        assert plugin.lines.events().count("device.listed") == 12


async def test_a_burst_of_arrivals_is_not_one_list_for_each(new_host: NewHost) -> None:
    async with new_host(boards.unbound(boards.thousand_gpus(200))) as host:
        for address in host.of(GPU):
            host.live.unbind(address)
        host.live.bind(host.of(GPU)[0])
        await host.plugin_in_process()
        await host.served(gpu=1)
        for address in host.of(GPU)[1:]:
            host.live.bind(address)
        await host.served(gpu=200)
        assert len(host.kubelet.history(GPU)) < 20


async def test_the_directory_of_nodes_may_be_removed_and_made_anew(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin_in_process()
        await host.served()
        aside = host.paths.dev_vfio.with_name("aside")
        shutil.copytree(host.paths.dev_vfio, aside, symlinks=True)
        shutil.rmtree(host.paths.dev_vfio)
        await host.becomes(GPU, healthy=0, unhealthy=8)
        assert not host.spec_path(GPU).exists()
        aside.rename(host.paths.dev_vfio)
        await host.served()
        # Once more: the watch was put on the new directory.
        gone = host.of(GPU)[0]
        host.live.remove(gone)
        await host.becomes(GPU, healthy=7, unhealthy=1)
        assert "watch.unavailable" not in plugin.lines.events()


async def test_two_devices_that_swap_their_nodes_are_never_taken_for_one_another(new_host: NewHost) -> None:
    async with new_host() as host:
        await host.plugin_in_process()
        await host.served()
        first, second = host.of(GPU)[:2]
        nodes = (host.node_of(first), host.node_of(second))
        wrong = []

        def look(resource: str, _: object) -> None:
            for name, node in host.spec(resource).items():
                if host.function_behind(node) not in (name, "device"):
                    wrong.append((name, node))

        host.live.unbind(first)
        host.live.unbind(second)
        host.live.bind(second)
        host.live.bind(first)
        host.kubelet.on_list = look
        assert (host.node_of(second), host.node_of(first)) == nodes
        await host.wait_for(lambda: host.spec(GPU).get(first) == nodes[1] and host.spec(GPU).get(second) == nodes[0])
        await host.served()
        assert not wrong


# What is ours.


async def test_every_gpu_and_switch_of_the_vendor_is_ours_whatever_its_device_id(new_host: NewHost) -> None:
    unknown = one_gpu("0000:b0:00.0", group=900, device=0xFFFF)
    network = one_gpu("0000:b1:00.0", group=901, vendor=0x15B3, device=0x1021, class_code=0x020700)
    other = one_gpu("0000:b2:00.0", group=902, vendor=0x1002)
    async with new_host(Node(name="strangers", devices=(unknown, network, other))) as host:
        await host.plugin_in_process()
        await host.served(gpu=1)
        assert host.kubelet.history(GPU)[0].ids == (unknown.address,)
        assert host.kubelet.resources() == {GPU}


async def test_of_a_bound_a_driverless_and_a_host_driven_device_only_the_bound_one_is_listed(new_host: NewHost) -> None:
    devices = (
        one_gpu("0000:b0:00.0", group=900),
        one_gpu("0000:b1:00.0", group=901, driver="nvidia"),
        one_gpu("0000:b2:00.0", group=902, driver=None),
    )
    async with new_host(Node(name="half", devices=devices)) as host:
        await host.plugin_in_process()
        await host.served(gpu=1)
        assert host.kubelet.history(GPU)[0].ids == ("0000:b0:00.0",)


async def test_a_virtual_function_is_not_offered_as_the_whole_card(new_host: NewHost) -> None:
    async with new_host(boards.vgpu_host()) as host:
        physical = next(device.vf_of for device in host.board.devices if device.vf_of)
        host.live.unbind(physical)
        host.live.bind(physical)
        await host.plugin_in_process()
        await host.served(gpu=1)
        assert host.kubelet.history(GPU)[0].ids == (physical,)


async def test_no_device_is_in_two_resources_and_audio_functions_are_in_none(new_host: NewHost) -> None:
    async with new_host(boards.mixed()) as host:
        await host.plugin_in_process()
        await host.served()
        listed = [device_id for resource in host.kubelet.resources() for device_id in host.states(resource)]
        assert len(listed) == len(set(listed))
        assert set(listed) == {*host.bound(GPU), *host.bound(SWITCH)}
        classes = {host.board.device(device_id).class_code >> 16 for device_id in listed}
        assert 0x04 not in classes


async def test_addresses_that_contain_one_another_are_different_devices(new_host: NewHost) -> None:
    short, long = one_gpu("0000:0b:00.0", group=900), one_gpu("10000:0b:00.0", group=901)
    # vfio1 and vfio10 as well.
    fillers = tuple(one_gpu(f"0000:{bus:02x}:00.0", group=bus) for bus in range(0x20, 0x2A))
    async with new_host(Node(name="alike", devices=(short, *fillers, long))) as host:
        await host.plugin_in_process()
        await host.served(gpu=12)
        assert host.node_of(long.address).endswith("vfio11")
        for address in (short.address, long.address, *(device.address for device in fillers)):
            assert await host.kubelet.grant(GPU, [address]) == (f"{GPU}={address}",)
            assert host.spec(GPU)[address] == host.node_of(address)


async def test_a_group_that_a_host_driver_shares_is_unhealthy_whichever_member_changed_last(new_host: NewHost) -> None:
    async with new_host(boards.rtx_pro_6000()) as host:
        shared = [
            device
            for device in host.board.devices
            if device.class_code >> 8 == 0x0300 and device.vendor == 0x10DE and _companion(host, device)
        ]
        gpu = shared[0]
        audio = _companion(host, gpu)
        assert audio is not None
        for order in ("audio first", "gpu first"):
            for address in (audio.address, gpu.address):
                if host.live.driver(address) is not None:
                    host.live.unbind(address)
            if order == "audio first":
                host.live.bind(audio.address, "snd_hda_intel")
                host.live.bind(gpu.address)
            else:
                host.live.bind(gpu.address)
                host.live.bind(audio.address, "snd_hda_intel")
            plugin = await host.plugin_in_process()
            await host.becomes(GPU, healthy=3, unhealthy=1)
            (said,) = plugin.lines.having("device.listed", device=gpu.address)
            assert audio.address in said.fields["reason"]
            assert gpu.address not in host.spec(GPU)
            await plugin.stop()
            await host.kubelet.restart()


@clock_rate(20)
async def test_a_shared_group_is_noticed_without_any_event_too(new_host: NewHost) -> None:
    async with new_host(boards.rtx_pro_6000()) as host:
        gpu = next(
            device for device in host.board.devices if device.class_code >> 8 == 0x0300 and _companion(host, device)
        )
        audio = _companion(host, gpu)
        assert audio is not None
        await host.plugin_in_process()
        await host.served(gpu=4)
        if host.live.driver(audio.address) is not None:
            host.live.unbind(audio.address)
        host.live.bind(audio.address, "snd_hda_intel")
        await host.becomes(GPU, healthy=3, unhealthy=1)
        host.live.unbind(audio.address)
        host.live.bind(audio.address)
        await host.served(gpu=4)


def _companion(host: Host, gpu: Device) -> Device | None:
    return next(
        (
            device
            for device in host.board.devices
            if device.iommu_group == gpu.iommu_group and device.class_code >> 16 == 0x04
        ),
        None,
    )


# Topology.


async def test_a_numa_node_that_is_not_known_is_left_out(new_host: NewHost) -> None:
    async with new_host() as host:
        contents = (b"-1\n", b"0\n", b"1\n", b"", None, b"zero\n", b"64\n", b"99999999999\n")
        for address, content in zip(host.of(GPU), contents, strict=True):
            host.live.write_attribute(address, "numa_node", content)
        await host.plugin_in_process()
        await host.served()
        numa = [device.numa for device in host.kubelet.history(GPU)[0].devices]
        assert numa == [(), (0,), (1,), (), (), (), (), ()]


async def test_files_that_a_device_can_do_without_are_not_missed(new_host: NewHost) -> None:
    async with new_host() as host:
        for name in ("power_state", "numa_node", "reset_method", "subsystem_vendor", "subsystem_device", "uevent"):
            for address in host.of(GPU):
                host.live.write_attribute(address, name, None)
        plugin = await host.plugin_in_process()
        await host.served()
        assert "entry.skipped" not in plugin.lines.events()


# Damage.

LISTED_UNHEALTHY: Final = (
    Fault.NODE_MISSING,
    Fault.NODE_DANGLING,
    Fault.NODE_IS_A_FILE,
    Fault.NODE_IS_ANOTHER_DEVICE,
)
NOT_LISTED: Final = (
    Fault.MALFORMED_VENDOR,
    Fault.EMPTY_VENDOR,
    Fault.MISSING_VENDOR,
    Fault.UNREADABLE_VENDOR,
    Fault.MALFORMED_CLASS,
    Fault.EMPTY_CLASS,
    Fault.MISSING_CLASS,
    Fault.UNREADABLE_CLASS,
    Fault.DANGLING_FUNCTION,
    Fault.DANGLING_CDEV,
    Fault.CDEV_GONE_FROM_SYSFS,
    Fault.NO_DEVICE_NUMBER,
    Fault.MALFORMED_DEVICE_NUMBER,
)
NO_HARM: Final = (
    Fault.MALFORMED_NUMA,
    Fault.EMPTY_NUMA,
    Fault.MISSING_NUMA,
    Fault.UNREADABLE_NUMA,
    # The node is what says that it is on a VFIO driver.
    Fault.DANGLING_DRIVER,
)


def test_every_damage_is_tried() -> None:
    assert {*LISTED_UNHEALTHY, *NOT_LISTED, *NO_HARM} == set(Fault)


@pytest.mark.parametrize("fault", [*LISTED_UNHEALTHY, *NOT_LISTED, *NO_HARM])
@clock_rate(20)
async def test_a_damaged_device_is_never_offered_hides_nobody_and_recovers_by_itself(
    fault: Fault, new_host: NewHost
) -> None:
    async with new_host(boards.pcie_h100_nvl()) as host:
        damaged, *others = host.of(GPU)
        undo = host.live.damage(damaged, fault)
        plugin = await host.plugin_in_process()
        harmless = fault in NO_HARM
        await host.wait_for(lambda: host.kubelet.history(GPU))
        assert host.kubelet.healthy(GPU) == ({damaged} if harmless else set()) | set(others)
        assert host.kubelet.unhealthy(GPU) == ({damaged} if fault in LISTED_UNHEALTHY else set())
        assert (damaged in host.spec(GPU)) is harmless
        said = [line.event for line in plugin.lines.all if line.fields["level"] != "info"]
        # What is malformed is told by its path, once; what the kernel takes away in the course of things is not.
        assert len(said) <= 1
        undo()
        await host.served(gpu=4)
        assert host.spec(GPU)[damaged] == host.node_of(damaged)
        # Once more, now that it is listed.
        undo = host.live.damage(damaged, fault)
        if fault in LISTED_UNHEALTHY:
            await host.becomes(GPU, healthy=3, unhealthy=1)
        undo()
        await host.served(gpu=4)
        assert {device_id for device_id in others if not host.kubelet.device(GPU, device_id).is_healthy} == set()


async def test_a_board_of_broken_devices_offers_the_one_that_is_not(new_host: NewHost) -> None:
    async with new_host() as host:
        faults = (
            Fault.MALFORMED_VENDOR,
            Fault.UNREADABLE_CLASS,
            Fault.EMPTY_CLASS,
            Fault.DANGLING_CDEV,
            Fault.CDEV_GONE_FROM_SYSFS,
            Fault.NODE_IS_A_FILE,
            Fault.DANGLING_FUNCTION,
        )
        *broken, sound = host.of(GPU)
        for address, fault in zip(broken, faults, strict=True):
            host.live.damage(address, fault)
        host.live.litter(host.paths.dev_vfio / "devices" / "vfio99")
        host.live.litter(host.paths.dev_vfio / "devices" / "noise")
        plugin = await host.plugin()
        await host.served(nvswitch=4)
        await host.wait_for(lambda: host.kubelet.healthy(GPU) == {sound})
        assert set(host.spec(GPU)) == {sound}
        skipped = [line.fields["path"] for line in plugin.lines.having("entry.skipped")]
        assert len(skipped) == len(set(skipped))
        assert any(path.endswith("/noise") for path in skipped) or any(path.endswith("/vfio99") for path in skipped)


@pytest.mark.parametrize("when", ["at the start", "later"])
@pytest.mark.parametrize("name", ["sysfs", "dev_vfio"])
@clock_rate(20)
async def test_a_directory_that_cannot_be_read_says_nothing_about_the_devices(
    name: str, when: str, new_host: NewHost
) -> None:
    async with new_host() as host:
        blocked = host.paths.sysfs / "class" / "vfio-dev" if name == "sysfs" else host.paths.dev_vfio / "devices"
        if when == "at the start":
            undo = host.live.block(blocked)
            plugin = await host.plugin_in_process()
            said = await plugin.lines.wait_for("scan.failed")
            assert host.kubelet.attempts == []
        else:
            plugin = await host.plugin_in_process()
            await host.served()
            undo = host.live.block(blocked)
            said = await plugin.lines.wait_for("scan.failed")
        assert str(blocked) in said.fields["error"]
        undo()
        await plugin.lines.wait_for("scan.recovered")
        await host.served()
        assert len(plugin.lines.having("scan.failed")) == 1
        assert "device.left" not in plugin.lines.events()


# Kernels.


@pytest.mark.parametrize("board", ["no_cdev_kernel", "old_kernel"])
async def test_a_kernel_without_device_nodes_is_told_with_the_devices_it_keeps_back(
    board: str, new_host: NewHost
) -> None:
    async with new_host(boards.ALL[board]()) as host:
        plugin = await host.plugin_in_process()
        said = await plugin.lines.wait_for("node.without-device-nodes")
        assert said.fields["devices"] == list(host.of(GPU))
        assert said.fields["level"] == "warning"
        assert said.fields["reason"]
        await host.drained()
        # Nothing else, and no group nodes instead.
        assert host.kubelet.attempts == []
        assert not host.paths.cdi_dir.exists()
        assert plugin.lines.events() == ["node.without-device-nodes"]


async def test_without_an_iommu_there_is_one_line_that_says_so(new_host: NewHost) -> None:
    async with new_host(boards.no_iommu()) as host:
        plugin = await host.plugin_in_process()
        said = await plugin.lines.wait_for("node.without-devices")
        assert "IOMMU is off" in said.fields["reason"]
        await host.drained()
        assert plugin.lines.events() == ["node.without-devices"]


async def test_a_node_without_anything_is_a_valid_node(new_host: NewHost) -> None:
    async with new_host(boards.empty()) as host:
        shutil.rmtree(host.paths.sysfs)
        plugin = await host.plugin()
        await plugin.lines.wait_for("node.without-devices")
        assert plugin.is_running
        assert plugin.lines.events() == ["run.started", "node.without-devices"]


# Events.


@clock_rate(10)
async def test_without_inotify_it_polls_and_says_so(new_host: NewHost) -> None:
    async with new_host() as host:
        kernel = Kernel(refuses=True)
        plugin = await host.plugin_in_process(kernel.watch)
        said = await plugin.lines.wait_for("watch.unavailable")
        assert "max_user_instances" in said.fields["reason"]
        await host.served()
        gone = host.of(GPU)[0]
        host.live.remove(gone)
        await host.becomes(GPU, healthy=7, unhealthy=1)
        await host.kubelet.restart()
        await host.becomes(GPU, healthy=7, unhealthy=1)
        await host.becomes(SWITCH, healthy=4)
        assert kernel.asked > 1
        assert len(plugin.lines.having("watch.unavailable")) == 1
        kernel.refuses = False
        await plugin.lines.wait_for("watch.restored")
        host.live.rescan(gone)
        host.live.bind(gone)
        await host.served()


@clock_rate(10)
async def test_inotify_that_is_lost_later_is_made_up_for(new_host: NewHost) -> None:
    async with new_host() as host:
        kernel = Kernel()
        plugin = await host.plugin_in_process(kernel.watch)
        await host.served()
        kernel.lose()
        gone = host.of(GPU)[0]
        host.live.remove(gone)
        await host.becomes(GPU, healthy=7, unhealthy=1)
        assert len(plugin.lines.having("watch.unavailable")) == 1
        kernel.refuses = False
        await plugin.lines.wait_for("watch.restored")


@clock_rate(20)
async def test_it_works_where_no_event_ever_comes(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin_in_process(DeafWatch)
        await host.served()
        gone = host.of(GPU)[0]
        host.live.remove(gone)
        await host.becomes(GPU, healthy=7, unhealthy=1)
        await host.kubelet.restart()
        await host.becomes(GPU, healthy=7, unhealthy=1)
        host.live.rescan(gone)
        host.live.bind(gone)
        await host.served()
        assert "watch.unavailable" not in plugin.lines.events()


async def test_one_watch_serves_all_resources(new_host: NewHost) -> None:
    async with new_host() as host:
        kernel = Kernel()
        await host.plugin_in_process(kernel.watch)
        await host.served()
        assert kernel.asked == 1


async def test_it_is_silent_while_nothing_changes(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin()
        await host.served()
        for resource in (GPU, SWITCH):
            await plugin.lines.wait_for("kubelet.listening", resource=resource)
        mark, lists = plugin.lines.mark(), len(host.kubelet.history(GPU))
        specs = {resource: host.spec_path(resource).stat().st_mtime_ns for resource in (GPU, SWITCH)}
        # Noise in every directory that it watches, which it must look at and find that nothing changed.
        for node in (host.paths.dev_vfio / "devices").iterdir():
            os.utime(node, follow_symlinks=False)
        (host.paths.dev_vfio / "group").touch()
        for directory in (host.paths.device_plugin_dir, host.paths.cdi_dir):
            for name in ("noise.sock", "noise"):
                (directory / name).touch()
                (directory / name).unlink()
        host.paths.cdi_static_dir.mkdir()
        # What was noticed after the noise shows that the noise was noticed too.
        gone = host.of(SWITCH)[0]
        host.live.remove(gone)
        await plugin.lines.wait_for("device.unhealthy", device=gone)
        assert plugin.lines.events(since=mark)[0] == "device.unhealthy"
        assert len(host.kubelet.history(GPU)) == lists
        assert host.spec_path(GPU).stat().st_mtime_ns == specs[GPU]


@clock_rate(10)
async def test_rescans_that_find_nothing_new_are_silent_too(new_host: NewHost) -> None:
    async with new_host() as host:
        host.live.damage(host.of(GPU)[0], Fault.MALFORMED_VENDOR)
        # Without events every rescan asks for a watch again, so that they can be counted.
        kernel = Kernel(refuses=True)
        plugin = await host.plugin_in_process(kernel.watch)
        await host.served(gpu=7, nvswitch=4)
        await host.wait_for(lambda: plugin.lines.events().count("kubelet.listening") == 2)
        mark, asked = plugin.lines.mark(), kernel.asked
        await host.wait_for(lambda: kernel.asked > asked + 3)
        assert plugin.lines.events(since=mark) == []
        assert len(host.kubelet.history(GPU)) == 1


# Scale.


async def test_a_thousand_devices_are_listed_granted_and_followed(new_host: NewHost) -> None:
    async with new_host(boards.thousand_gpus()) as host:
        plugin = await host.plugin()
        await host.served(gpu=1000)
        assert host.kubelet.history(GPU)[0].ids == host.of(GPU)
        assert len(host.spec(GPU)) == 1000
        booking = await host.kubelet.allocate("pod", "main", GPU, 8)
        assert len({host.kubelet.device(GPU, device_id).numa for device_id in booking.ids}) == 1
        gone = host.of(GPU)[500]
        began_s = time.monotonic()
        host.live.remove(gone)
        await host.becomes(GPU, healthy=999, unhealthy=1)
        assert host.kubelet.history(GPU)[-1].at_s - began_s < patience(PROMPT_S)
        everything = await host.kubelet.grant(GPU, sorted(host.kubelet.healthy(GPU)))
        assert len(everything) == 999
        assert len(plugin.lines.having("device.listed")) == 1000


async def test_sixty_four_devices_are_registered_soon_after_the_start(new_host: NewHost) -> None:
    async with new_host(boards.thousand_gpus(64)) as host:
        plugin = await host.plugin()
        await host.served(gpu=64)
        answered_s = host.kubelet.accepted(GPU)[0].answered_s
        assert answered_s is not None
        assert answered_s - plugin.started_s < patience(2)
