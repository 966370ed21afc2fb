# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path

import pytest

from pcifacts import function, iommu
from pcifacts.address import PciAddress
from pcifacts.errors import PathUnreadable
from pcifacts.function import PciFunction
from pcifacts.ids import ClassCode
from pcifacts.sysfs import Roots, SkipKind
from simnode import boards
from simnode.tree import LiveNode

GPU = PciAddress.parse("0000:21:00.0")
AUDIO = PciAddress.parse("0000:21:00.1")


@pytest.fixture
def card(tmp_path: Path) -> LiveNode:
    """Two workstation cards with an audio function each, and two server cards."""
    return LiveNode.create(tmp_path, boards.rtx_pro_6000())


@pytest.fixture
def card_roots(card: LiveNode) -> Roots:
    return Roots(str(card.sysfs), str(card.dev_vfio))


def members(roots: Roots, address: PciAddress) -> list[PciFunction]:
    group = function.iommu_group(roots, address)
    assert group is not None
    read = [function.read_function(roots, member) for member in iommu.group_members(roots, group).found]
    return [member for member in read if member is not None]


def test_every_group_is_listed_with_its_members(card: LiveNode, card_roots: Roots) -> None:
    by_group: dict[int, list[str]] = {}
    for device in card.node.devices:
        if device.iommu_group is not None:
            by_group.setdefault(device.iommu_group, []).append(device.address)
    assert iommu.groups(card_roots).found == tuple(sorted(by_group))
    for group, addresses in by_group.items():
        assert [str(member) for member in iommu.group_members(card_roots, group).found] == sorted(addresses)


def test_a_workstation_card_shares_its_group_with_its_audio_function(card_roots: Roots) -> None:
    assert [member.address for member in members(card_roots, GPU)] == [GPU, AUDIO]
    assert not iommu.is_singleton(members(card_roots, GPU))
    assert iommu.is_singleton(members(card_roots, PciAddress.parse("0000:61:00.0")))


def test_a_group_is_viable_while_no_host_driver_holds_a_member(card: LiveNode, card_roots: Roots) -> None:
    assert iommu.is_viable(members(card_roots, GPU))
    card.unbind(str(AUDIO))
    assert iommu.is_viable(members(card_roots, GPU))
    card.bind(str(AUDIO), "snd_hda_intel")
    assert [member.address for member in iommu.obstacles(members(card_roots, GPU))] == [AUDIO]
    assert not iommu.is_viable(members(card_roots, GPU))


@pytest.mark.parametrize(
    ("driver", "viable"),
    [
        (None, True),
        ("vfio-pci", True),
        ("mlx5_vfio_pci", True),
        ("pcieport", True),
        ("pci-stub", True),
        ("nvidia", False),
        ("nouveau", False),
        ("snd_hda_intel", False),
        ("pciback", False),
    ],
)
def test_a_driver_leaves_a_group_to_its_user_or_does_not(driver: str | None, *, viable: bool) -> None:
    member = _function(driver, 0x030200)
    assert iommu.is_viable([member]) == viable
    assert iommu.obstacles([member]) == (() if viable else (member,))


def test_bridges_do_not_make_a_group_shared() -> None:
    assert iommu.is_singleton([_function("pcieport", 0x060400), _function("vfio-pci", 0x030200)])
    assert not iommu.is_singleton([_function("vfio-pci", 0x068000), _function("vfio-pci", 0x030200)])
    assert not iommu.is_singleton([_function("pcieport", 0x060400)])


def test_a_node_without_an_iommu_has_no_groups(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.no_iommu())
    roots = Roots(str(live.sysfs), str(live.dev_vfio))
    assert iommu.groups(roots).found == ()
    assert iommu.group_members(roots, 7).found == ()


def test_members_that_are_no_pci_functions_are_skipped(card: LiveNode, card_roots: Roots) -> None:
    group = function.iommu_group(card_roots, GPU)
    card.litter(card.sysfs / f"kernel/iommu_groups/{group}/devices/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001")
    card.litter(card.sysfs / "kernel/iommu_groups/notes")
    assert group is not None
    scan = iommu.group_members(card_roots, group)
    assert scan.found == (GPU, AUDIO)
    assert [skipped.kind for skipped in scan.skipped] == [SkipKind.NOT_PCI]
    assert [skipped.name for skipped in iommu.groups(card_roots).skipped] == ["notes"]


def test_groups_that_cannot_be_listed_are_an_error(card: LiveNode, card_roots: Roots) -> None:
    card.block(card.sysfs / "kernel/iommu_groups")
    with pytest.raises(PathUnreadable):
        iommu.groups(card_roots)


def _function(driver: str | None, class_code: int) -> PciFunction:
    return PciFunction(
        address=GPU,
        vendor=0x10DE,
        device=0x2330,
        subsystem_vendor=None,
        subsystem_device=None,
        class_code=ClassCode(class_code),
        driver=driver,
        numa_node=None,
        iommu_group=7,
        is_virtual_function=False,
        upstream=(),
    )
