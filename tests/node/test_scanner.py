# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The plugin's looks at a node, on directory trees that change as a kernel changes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_device_plugin.scanner import Observation, Scanner, Sighting, Standing
from pcifacts.address import PciAddress
from pcifacts.errors import PathUnreadable
from pcifacts.sysfs import Roots
from simnode import boards, tree
from simnode.tree import Fault


class Node:
    """A board on disk, the scanner that looks at it, and its devices in address order."""

    def __init__(self, root: Path, board: str) -> None:
        self.live = tree.LiveNode.create(root, boards.ALL[board]())
        self.scanner = Scanner(Roots(str(self.live.sysfs), str(self.live.dev_vfio)))
        self.addresses = sorted(sighting.address for sighting in self.scanner.everything(()).sightings)

    def look(self, *listed: PciAddress) -> dict[PciAddress, Sighting]:
        return by_address(self.scanner.everything(listed))


def by_address(observation: Observation) -> dict[PciAddress, Sighting]:
    sightings = {sighting.address: sighting for sighting in observation.sightings}
    assert len(sightings) == len(observation.sightings)
    return sightings


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "pcie_h100_nvl")


def test_a_listed_device_is_told_apart_by_where_it_went(node: Node) -> None:
    gone, unbound, elsewhere, stays = node.addresses
    node.live.remove(gone.text)
    node.live.unbind(unbound.text)
    node.live.unbind(elsewhere.text)
    node.live.bind(elsewhere.text, "nvidia")
    standings = {address: sighting.standing for address, sighting in node.look(*node.addresses).items()}
    assert standings == {
        gone: Standing.ABSENT,
        unbound: Standing.OFF_VFIO,
        elsewhere: Standing.OFF_VFIO,
        stays: Standing.USABLE,
    }
    assert "nvidia" in node.scanner.device(elsewhere).reason


def test_a_changed_name_concerns_the_device_that_was_behind_it_and_the_one_that_is(node: Node) -> None:
    first, second, *_ = node.addresses
    name, other = node.live.cdev(first.text), node.live.cdev(second.text)
    assert name is not None
    assert other is not None
    node.live.unbind(first.text)
    node.live.unbind(second.text)
    # Bound in the other order, each has the number that the other one had.
    node.live.bind(second.text)
    node.live.bind(first.text)
    assert node.live.cdev(second.text) == name
    sightings = by_address(node.scanner.names([name]))
    assert {sighting.node for sighting in sightings.values()} == {
        str(node.live.node_path(first.text)),
        str(node.live.node_path(second.text)),
    }
    assert sightings[second].node.endswith(name)
    assert sightings[first].node.endswith(other)


def test_a_name_that_never_was_or_is_no_cdev_concerns_nobody(node: Node) -> None:
    assert by_address(node.scanner.names(["vfio99"])) == {}
    observation = node.scanner.names(["noise", "vfio0x"])
    assert observation.sightings == ()
    assert {entry.name for entry in observation.skipped} == {"noise", "vfio0x"}


def test_facts_are_read_again_only_for_what_changed(node: Node) -> None:
    """The attributes of a device that stayed are made wrong on disk: only who reads them again notices."""
    stayed, moved, *_ = node.addresses
    for address in (stayed, moved):
        directory = node.live.device_dir(address.text)
        (directory / "numa_node").write_text("7\n")
    assert node.look()[stayed].place == node.scanner.device(stayed).place
    assert node.look()[stayed].place is not None
    numa = {address: sighting.place.numa_node for address, sighting in node.look().items() if sighting.place}
    assert 7 not in numa.values()
    node.live.unbind(moved.text)
    node.live.bind(moved.text)
    numa = {address: sighting.place.numa_node for address, sighting in node.look().items() if sighting.place}
    assert numa[moved] == 7
    assert numa[stayed] != 7


@pytest.mark.parametrize(
    "fault",
    [
        Fault.NO_DEVICE_NUMBER,
        Fault.NODE_MISSING,
        Fault.NODE_DANGLING,
        Fault.NODE_IS_A_FILE,
        Fault.NODE_IS_ANOTHER_DEVICE,
        Fault.MALFORMED_DEVICE_NUMBER,
        Fault.CDEV_GONE_FROM_SYSFS,
        Fault.DANGLING_CDEV,
        Fault.MALFORMED_VENDOR,
        Fault.EMPTY_VENDOR,
        Fault.MISSING_VENDOR,
        Fault.UNREADABLE_VENDOR,
        Fault.MALFORMED_CLASS,
        Fault.EMPTY_CLASS,
        Fault.MISSING_CLASS,
        Fault.UNREADABLE_CLASS,
        Fault.DANGLING_FUNCTION,
    ],
)
def test_a_damaged_device_is_never_usable_and_hides_no_neighbour(fault: Fault, tmp_path: Path) -> None:
    live = tree.LiveNode.create(tmp_path, boards.pcie_h100_nvl())
    roots = Roots(str(live.sysfs), str(live.dev_vfio))
    damaged, *others = sorted(by_address(Scanner(roots).everything(())))
    undo = live.damage(damaged.text, fault)
    scanner = Scanner(roots)
    observation = scanner.everything([damaged])
    sightings = by_address(observation)
    assert sightings[damaged].standing is not Standing.USABLE
    assert all(sightings[address].standing is Standing.USABLE for address in others)
    assert sightings[damaged].reason or observation.skipped
    undo()
    assert by_address(scanner.everything([damaged]))[damaged].standing is Standing.USABLE


@pytest.mark.parametrize("fault", [Fault.MALFORMED_NUMA, Fault.EMPTY_NUMA, Fault.MISSING_NUMA, Fault.UNREADABLE_NUMA])
def test_an_unknown_numa_node_costs_nothing_but_the_topology(fault: Fault, tmp_path: Path) -> None:
    live = tree.LiveNode.create(tmp_path, boards.pcie_h100_nvl())
    scanner = Scanner(Roots(str(live.sysfs), str(live.dev_vfio)))
    address = min(by_address(scanner.everything(())))
    live.damage(address.text, fault)
    sighting = by_address(Scanner(Roots(str(live.sysfs), str(live.dev_vfio))).everything(()))[address]
    assert sighting.standing is Standing.USABLE
    assert sighting.place is not None
    assert sighting.place.numa_node is None


@pytest.mark.parametrize(
    ("numa", "expected"), [("-1\n", None), ("0\n", 0), ("1\n", None), ("64\n", None), ("63\n", None)]
)
def test_a_numa_node_that_the_machine_does_not_have_is_left_out(
    numa: str, expected: int | None, tmp_path: Path
) -> None:
    live = tree.LiveNode.create(tmp_path, boards.pcie_h100_nvl())
    (live.sysfs / "devices/system/node/node0").mkdir(parents=True, exist_ok=True)
    roots = Roots(str(live.sysfs), str(live.dev_vfio))
    address = min(by_address(Scanner(roots).everything(())))
    live.write_attribute(address.text, "numa_node", numa.encode())
    place = by_address(Scanner(roots).everything(()))[address].place
    assert place is not None
    assert place.numa_node == expected


def test_a_stray_node_and_a_stray_name_are_reported_once_each(node: Node) -> None:
    node.live.litter(node.live.dev_vfio / "devices" / "vfio77")
    node.live.litter(node.live.sysfs / "class" / "vfio-dev" / "noise")
    observation = node.scanner.everything(())
    assert sorted(entry.name for entry in observation.skipped) == ["noise", "vfio77"]
    assert len(observation.sightings) == 4


@pytest.mark.parametrize("folder", ["class/vfio-dev"])
def test_a_directory_that_cannot_be_listed_gives_no_observation_at_all(folder: str, node: Node) -> None:
    undo = node.live.block(node.live.sysfs / folder)
    with pytest.raises(PathUnreadable) as caught:
        node.scanner.everything(node.addresses)
    assert folder in caught.value.path
    undo()
    assert len(node.look()) == 4


def test_a_group_that_a_host_driver_shares_is_not_usable_until_it_lets_go(tmp_path: Path) -> None:
    node = Node(tmp_path, "rtx_pro_6000")
    card = next(address for address in node.addresses if node.live.is_present(f"{address.slot}.1"))
    audio = f"{card.slot}.1"
    node.live.unbind(audio)
    assert node.look()[card].standing is Standing.USABLE
    node.live.bind(audio, "snd_hda_intel")
    sighting = node.look()[card]
    assert sighting.standing is Standing.UNUSABLE
    assert audio in sighting.reason
    assert "snd_hda_intel" in sighting.reason
    node.live.unbind(audio)
    node.live.bind(audio, "vfio-pci")
    assert node.look()[card].standing is Standing.USABLE


def test_virtual_functions_are_never_offered_as_whole_gpus(tmp_path: Path) -> None:
    assert Node(tmp_path, "vgpu_host").addresses == []


@pytest.mark.parametrize("board", ["no_cdev_kernel", "old_kernel"])
def test_a_kernel_without_device_nodes_is_told_apart_with_the_devices_that_it_keeps_back(
    board: str, tmp_path: Path
) -> None:
    sightings = Node(tmp_path, board).look()
    assert len(sightings) == 4
    assert {sighting.standing for sighting in sightings.values()} == {Standing.WITHOUT_NODES}
    assert all(sighting.reason for sighting in sightings.values())


def test_a_thousand_devices_are_all_seen_and_wide_domains_among_them(tmp_path: Path) -> None:
    node = Node(tmp_path, "thousand_gpus")
    assert len(node.addresses) == 1000
    assert any(address.domain > 0xFFFF for address in node.addresses)
