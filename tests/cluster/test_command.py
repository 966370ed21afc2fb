# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The command line: `list` in both formats, and what the program says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cluster.host import GPU, SWITCH, NewHost

from kata_device_plugin import VERSION, cli
from simcluster.plugin import run_to_end
from simnode import boards
from simnode.tree import Fault, LiveNode


async def test_list_as_json_says_what_would_be_advertised(new_host: NewHost) -> None:
    async with new_host(kubelet=False) as host:
        broken = host.of(GPU)[3]
        host.live.damage(broken, Fault.NODE_MISSING)
        code, output, lines = await run_to_end(["list", "-o", "json", *host.paths.flags])
        assert code == 0
        rows = json.loads(output)
        assert [row["id"] for row in rows] == [*host.of(GPU), *host.of(SWITCH)]
        for row in rows:
            assert row["cdiName"] == f"{row['resource']}={row['id']}"
            assert row["health"] == ("Unhealthy" if row["id"] == broken else "Healthy")
            assert row["node"] == host.node_of(row["id"])
            assert bool(row["reason"]) is (row["id"] == broken)
        assert lines.all == []
        lines.check()
        # Looking writes nothing.
        assert not host.paths.cdi_dir.exists()
        assert not host.paths.device_plugin_dir.exists()


async def test_list_as_a_table_has_a_line_for_each_device(new_host: NewHost) -> None:
    async with new_host(kubelet=False) as host:
        code, output, _ = await run_to_end([*host.paths.flags, "list"])
        assert code == 0
        head, *rows = output.splitlines()
        assert head.split() == ["RESOURCE", "ID", "HEALTH", "NODE", "NUMA", "REASON"]
        assert [row.split()[:3] for row in rows] == [
            [resource, address, "Healthy"] for resource in (GPU, SWITCH) for address in host.of(resource)
        ]


async def test_list_agrees_with_what_the_kubelet_is_told(new_host: NewHost) -> None:
    async with new_host(boards.mixed()) as host:
        host.live.damage(host.bound(GPU)[0], Fault.NODE_IS_A_FILE)
        await host.plugin_in_process()
        await host.wait_for(
            lambda: all(host.kubelet.history(resource) for resource in (GPU, SWITCH) if host.bound(resource))
        )
        _, output, _ = await run_to_end(["list", "--output=json", *host.paths.flags])
        listed = {(row["resource"], row["id"], row["health"], row["numaNode"]) for row in json.loads(output)}
        told = {
            (resource, device.id, device.health, device.numa[0] if device.numa else None)
            for resource in host.kubelet.resources()
            for device in host.kubelet.history(resource)[-1].devices
        }
        assert listed == told


def test_a_mixed_node_is_listed_the_same_twenty_times(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveNode.create(directory, boards.mixed())
    display = next(device.address for device in boards.mixed().devices if device.class_code >> 8 == 0x0300)
    live.write_attribute(display, "boot_vga", b"1\n")
    for _ in range(20):
        assert cli.main(["list", f"--sysfs={live.sysfs}", f"--dev-vfio={live.dev_vfio}"]) == 0
    output = capsys.readouterr().out
    assert output == output[: len(output) // 20] * 20


@pytest.mark.parametrize("board", ["no_cdev_kernel", "old_kernel"])
def test_list_says_why_bound_devices_are_missing(
    board: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = LiveNode.create(directory, boards.ALL[board]())
    assert cli.main(["list", "-o", "json", f"--sysfs={live.sysfs}", f"--dev-vfio={live.dev_vfio}"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == []
    (said,) = map(json.loads, printed.err.splitlines())
    assert said["event"] == "node.without-device-nodes"
    assert len(said["devices"]) == 4


async def test_list_of_what_cannot_be_read_is_an_error_and_not_an_empty_list(new_host: NewHost) -> None:
    async with new_host(kubelet=False) as host:
        host.live.block(host.paths.sysfs / "class" / "vfio-dev")
        code, output, lines = await run_to_end(["list", *host.paths.flags])
        assert (code, output) == (20, "")
        (said,) = lines.all
        assert said.says("run.finished", exit_code=20)
        assert "vfio-dev" in said.fields["error"]
        assert said.fields["hint"]


async def test_the_version_is_that_of_the_package() -> None:
    code, output, _ = await run_to_end(["--version"])
    assert (code, output) == (0, f"kata-device-plugin {VERSION}\n")


@pytest.mark.parametrize("argv", [["--mode=on"], ["--sys=/sys"], ["--selector", "10de:*"], ["list", "everything"]])
def test_there_are_no_flags_but_paths(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


async def test_the_first_and_the_last_line_of_a_run_say_with_what_and_how_it_ended(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin()
        await host.served()
        await plugin.terminate()
        first, last = plugin.lines.all[0], plugin.lines.all[-1]
        assert first.says("run.started", pid=plugin.pid, sysfs=str(host.paths.sysfs), cdi_dir=str(host.paths.cdi_dir))
        assert last.says("run.finished", exit_code=0)
        assert {line.fields["component"] for line in plugin.lines.all} == {"kata-device-plugin"}
        assert {line.fields["version"] for line in plugin.lines.all} == {VERSION}
