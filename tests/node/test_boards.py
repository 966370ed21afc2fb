# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What the plugin would advertise on every board: the plugin is told nothing of platforms, and this table is data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kata_device_plugin import cli
from simnode import boards, tree

GPU, NVSWITCH = "nvidia.com/gpu", "nvidia.com/nvswitch"

EXPECTED = {
    "hgx_h100": {GPU: 8, NVSWITCH: 4},
    "hgx_h200": {GPU: 8, NVSWITCH: 4},
    "hgx_b200": {GPU: 8},
    "hgx_b300": {GPU: 8},
    "gb200_tray": {GPU: 4},
    "gb300_tray": {GPU: 4},
    "gh200": {GPU: 1},
    "vera_rubin_tray": {GPU: 4},
    "pcie_h100_nvl": {GPU: 4},
    "rtx_pro_6000": {GPU: 4},
    "mixed": {GPU: 4},
    "thousand_gpus": {GPU: 1000},
    "vgpu_host": {},
    "no_iommu": {},
    "no_cdev_kernel": {},
    "old_kernel": {},
    "empty": {},
}

WITHOUT_NODES = ("no_cdev_kernel", "old_kernel")


def listed(live: tree.LiveNode, capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, object]], list[str]]:
    """Return the rows of `list -o json` and the events on standard error."""
    paths = ["--sysfs", str(live.sysfs), "--dev-vfio", str(live.dev_vfio)]
    assert cli.main([*paths, "list", "-o", "json"]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), [json.loads(line)["event"] for line in printed.err.splitlines()]


def counts(rows: list[dict[str, object]]) -> dict[str, int]:
    resources = [str(row["resource"]) for row in rows]
    return {resource: resources.count(resource) for resource in dict.fromkeys(resources)}


def test_no_board_is_without_an_expectation() -> None:
    assert set(EXPECTED) == set(boards.ALL)


@pytest.mark.parametrize("board", EXPECTED)
def test_a_board_advertises_exactly_its_devices(board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = tree.LiveNode.create(tmp_path, boards.ALL[board]())
    rows, events = listed(live, capsys)
    assert counts(rows) == EXPECTED[board]
    assert all(row["health"] == "Healthy" for row in rows)
    for row in rows:
        address = str(row["id"])
        assert row["node"] == str(live.node_path(address))
        assert row["cdiName"] == f"{row['resource']}={address}"
    assert events == (["node.without-device-nodes"] if board in WITHOUT_NODES else [])


@pytest.mark.parametrize("board", [board for board, expected in EXPECTED.items() if expected])
def test_a_board_on_its_host_drivers_advertises_nothing(
    board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = tree.LiveNode.create(tmp_path, boards.unbound(boards.ALL[board]()))
    assert listed(live, capsys) == ([], [])


def test_only_what_is_bound_to_vfio_now_is_advertised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = tree.LiveNode.create(tmp_path, boards.pcie_h100_nvl())
    first, second, third, _ = [str(row["id"]) for row in listed(live, capsys)[0]]
    live.unbind(first)
    live.unbind(second)
    live.bind(second, "nvidia")
    rows, _ = listed(live, capsys)
    assert first not in {row["id"] for row in rows}
    assert second not in {row["id"] for row in rows}
    assert third in {row["id"] for row in rows}


def test_ids_do_not_move_when_a_neighbour_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = tree.LiveNode.create(tmp_path, boards.hgx_h100())
    before = [row["id"] for row in listed(live, capsys)[0]]
    gone = str(before.pop(3))
    live.remove(gone)
    assert [row["id"] for row in listed(live, capsys)[0]] == before


def test_the_table_for_people_has_a_line_a_device_and_says_why_one_is_unhealthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = tree.LiveNode.create(tmp_path, boards.pcie_h100_nvl())
    address = str(listed(live, capsys)[0][0]["id"])
    live.damage(address, tree.Fault.NODE_MISSING)
    paths = ["--sysfs", str(live.sysfs), "--dev-vfio", str(live.dev_vfio)]
    assert cli.main([*paths, "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["RESOURCE", "ID", "HEALTH", "NODE", "NUMA", "REASON"]
    assert len(lines) == 5
    assert lines[1].split()[:3] == [GPU, address, "Unhealthy"]
    assert "does not exist" in lines[1]


def test_a_node_without_anything_lists_nothing_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--sysfs", str(tmp_path), "--dev-vfio", str(tmp_path), "list", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("argv", [["--mode", "on"], ["list", "--output", "yaml"], ["apply"], ["--sys", "/sys"]])
def test_bad_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err
