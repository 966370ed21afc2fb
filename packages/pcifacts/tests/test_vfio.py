# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcifacts import vfio
from pcifacts.address import PciAddress
from pcifacts.errors import PathUnreadable
from pcifacts.sysfs import Roots, SkipKind, Skipped
from pcifacts.vfio import Cdev, CdevLink, NodeState
from simnode import boards
from simnode.tree import Fault, LiveNode

GPU = PciAddress.parse("0000:16:00.0")
OTHER = PciAddress.parse("0000:27:00.0")


def roots_of(live: LiveNode) -> Roots:
    return Roots(str(live.sysfs), str(live.dev_vfio))


def test_a_cdev_leads_to_its_function_and_back(roots: Roots) -> None:
    scan = vfio.cdevs(roots)
    assert [(cdev.name, cdev.number, str(cdev.address)) for cdev in scan.found] == [
        ("vfio0", 0, "0000:16:00.0"),
        ("vfio1", 1, "0000:27:00.0"),
        ("vfio2", 2, "0000:85:00.0"),
        ("vfio3", 3, "0000:a6:00.0"),
    ]
    assert scan.skipped == ()
    for cdev in scan.found:
        assert vfio.cdev_of(roots, cdev.address) == cdev
        assert vfio.cdev(roots, cdev.name) == cdev
        assert cdev.device_number == (1, 3)
        assert cdev.upstream == (f"pci{str(cdev.address)[:5]}{cdev.address.bus - 1:02x}", cdev.upstream[1])


def test_a_link_leads_to_the_functions_own_folder(live: LiveNode, roots: Roots) -> None:
    for link in vfio.links(roots).found:
        assert link.directory == str(live.device_dir(str(link.address)))
        assert vfio.link(roots, link.name) == link


def test_cdevs_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.thousand_gpus(24))
    assert [cdev.number for cdev in vfio.cdevs(roots_of(live)).found] == list(range(24))


def test_wide_domains_and_deep_hierarchies_are_followed(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.mixed())
    cdev = vfio.cdev_of(roots_of(live), PciAddress.parse("10000:02:00.0"))
    assert cdev is not None
    assert cdev.upstream == ("pci0000:60", "0000:60:00.5", "pci10000:00", "10000:00:04.0")
    assert cdev in vfio.cdevs(roots_of(live)).found


def test_a_number_is_another_function_after_a_rebind(live: LiveNode, roots: Roots) -> None:
    for address in (GPU, OTHER):
        live.unbind(str(address))
    for address in (OTHER, GPU):
        live.bind(str(address))
    names = {cdev.name: cdev.address for cdev in vfio.cdevs(roots).found}
    assert names["vfio0"] == OTHER
    assert names["vfio1"] == GPU


def test_what_is_gone_is_none(live: LiveNode, roots: Roots) -> None:
    live.unbind(str(GPU))
    assert vfio.cdev(roots, "vfio0") is None
    assert vfio.cdev_of(roots, GPU) is None
    assert not vfio.has_vfio_device(roots, GPU)
    assert vfio.has_vfio_device(roots, OTHER)


def test_a_node_without_vfio_has_no_cdevs(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.empty())
    roots = roots_of(live)
    assert vfio.cdevs(roots).found == ()
    assert vfio.links(roots).found == ()
    assert vfio.group_nodes(roots).found == ()
    assert vfio.orphan_nodes(roots) == ()
    assert not vfio.has_vfio_class(roots)


# Kernels without per-device nodes.


def test_a_kernel_without_device_nodes_has_cdevs_without_numbers(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.no_cdev_kernel())
    roots = roots_of(live)
    scan = vfio.cdevs(roots)
    assert len(scan.found) == 4
    assert {cdev.device_number for cdev in scan.found} == {None}
    assert vfio.device_node(roots, "vfio0").state is NodeState.NO_DEVICE_NUMBER
    assert vfio.has_vfio_class(roots)
    assert [node.is_noiommu for node in vfio.group_nodes(roots).found] == [False] * 4


def test_an_old_kernel_shows_no_class_and_no_device(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.old_kernel())
    roots = roots_of(live)
    assert not vfio.has_vfio_class(roots)
    assert not vfio.has_vfio_device(roots, GPU)
    assert vfio.cdevs(roots).found == ()
    assert len(vfio.group_nodes(roots).found) == 4


# Nodes.


def test_a_node_is_usable_when_it_is_the_device_that_sysfs_names(live: LiveNode, roots: Roots) -> None:
    node = vfio.device_node(roots, "vfio0")
    assert node.is_usable
    assert node.path == str(live.node_path(str(GPU))) == vfio.node_path(roots, "vfio0")
    assert node.expected == node.observed == (1, 3)
    assert "1:3" in node.reason


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (Fault.NODE_MISSING, NodeState.ABSENT),
        (Fault.NODE_DANGLING, NodeState.ABSENT),
        (Fault.NODE_IS_A_FILE, NodeState.NOT_CHARACTER),
        (Fault.NODE_IS_ANOTHER_DEVICE, NodeState.WRONG_NUMBER),
        (Fault.NO_DEVICE_NUMBER, NodeState.NO_DEVICE_NUMBER),
        (Fault.MALFORMED_DEVICE_NUMBER, NodeState.MALFORMED_NUMBER),
        (Fault.CDEV_GONE_FROM_SYSFS, NodeState.NO_DEVICE_NUMBER),
        (Fault.DANGLING_CDEV, NodeState.NO_DEVICE_NUMBER),
    ],
)
def test_a_damaged_node_is_judged(live: LiveNode, roots: Roots, fault: Fault, state: NodeState) -> None:
    undo = live.damage(str(GPU), fault)
    node = vfio.device_node(roots, "vfio0")
    assert node.state is state
    assert not node.is_usable
    assert node.path in node.reason
    assert vfio.device_node(roots, "vfio1").is_usable
    undo()
    assert vfio.device_node(roots, "vfio0").is_usable


def test_a_node_behind_an_unreadable_folder_is_judged_unreadable(live: LiveNode, roots: Roots) -> None:
    live.block(live.dev_vfio / "devices")
    node = vfio.device_node(roots, "vfio0")
    assert node.state is NodeState.UNREADABLE
    assert "cannot be looked at" in node.reason


def test_a_wrong_number_is_named_with_the_right_one(live: LiveNode, roots: Roots) -> None:
    live.damage(str(GPU), Fault.NODE_IS_ANOTHER_DEVICE)
    node = vfio.device_node(roots, "vfio0")
    assert (node.expected, node.observed) == ((1, 3), (1, 5))
    assert node.reason.endswith("is device 1:5, expected 1:3")


def test_every_state_of_a_node_has_a_sentence() -> None:
    for state in NodeState:
        assert vfio.DeviceNode("/dev/vfio/devices/vfio9", state).reason.startswith("/dev/vfio/devices/vfio9 ")


# Entries that are not what they should be.


def test_a_node_without_a_device_in_sysfs_is_an_orphan(live: LiveNode, roots: Roots) -> None:
    assert vfio.orphan_nodes(roots) == ()
    live.damage(str(GPU), Fault.CDEV_GONE_FROM_SYSFS)
    live.litter(live.dev_vfio / "devices/junk")
    assert [(orphan.name, orphan.kind) for orphan in vfio.orphan_nodes(roots)] == [
        ("junk", SkipKind.ORPHAN_NODE),
        ("vfio0", SkipKind.ORPHAN_NODE),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vfio", SkipKind.MALFORMED_NAME),
        ("vfio01", SkipKind.MALFORMED_NAME),
        ("vfio-1", SkipKind.MALFORMED_NAME),
        ("vfio²", SkipKind.MALFORMED_NAME),
        ("mdev0", SkipKind.MALFORMED_NAME),
        ("noiommu-vfio4", SkipKind.NOIOMMU),
        ("vfio9", SkipKind.DANGLING),
    ],
)
def test_an_entry_that_leads_nowhere_is_skipped_once(live: LiveNode, roots: Roots, name: str, kind: SkipKind) -> None:
    live.litter(live.sysfs / "class/vfio-dev" / name)
    scan = vfio.cdevs(roots)
    assert [(skipped.name, skipped.kind) for skipped in scan.skipped] == [(name, kind)]
    assert len(scan.found) == 4


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(Fault.DANGLING_CDEV, SkipKind.DANGLING), (Fault.MALFORMED_DEVICE_NUMBER, SkipKind.MALFORMED)],
)
def test_a_damaged_cdev_is_skipped_and_hides_no_other(
    live: LiveNode, roots: Roots, fault: Fault, kind: SkipKind
) -> None:
    undo = live.damage(str(GPU), fault)
    scan = vfio.cdevs(roots)
    assert [(skipped.name, skipped.kind) for skipped in scan.skipped] == [("vfio0", kind)]
    assert [cdev.number for cdev in scan.found] == [1, 2, 3]
    one = vfio.cdev(roots, "vfio0")
    assert isinstance(one, Skipped)
    assert one == scan.skipped[0]
    undo()
    assert vfio.cdevs(roots).skipped == ()


def test_an_unreadable_number_is_skipped_as_unreadable(live: LiveNode, roots: Roots) -> None:
    live.block(live.sysfs / "class/vfio-dev/vfio0/dev")
    (skipped,) = vfio.cdevs(roots).skipped
    assert skipped.kind is SkipKind.UNREADABLE


def test_an_entry_that_leads_in_a_circle_is_skipped_as_unreadable(live: LiveNode, roots: Roots) -> None:
    live.block(live.sysfs / "class/vfio-dev/vfio0")
    (skipped,) = vfio.cdevs(roots).skipped
    assert (skipped.name, skipped.kind) == ("vfio0", SkipKind.UNREADABLE)


def test_a_mediated_device_is_no_pci_function(live: LiveNode, roots: Roots) -> None:
    parent = live.device_dir(str(GPU)) / "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
    (parent / "vfio-dev/vfio9").mkdir(parents=True)
    (parent / "vfio-dev/vfio9/device").symlink_to("../../../83b8f4f2-509f-382f-3c1e-e6bfe0fa1001")
    target = os.path.relpath(parent / "vfio-dev/vfio9", live.sysfs / "class/vfio-dev")
    (live.sysfs / "class/vfio-dev/vfio9").symlink_to(target)
    scan = vfio.cdevs(roots)
    assert [(skipped.name, skipped.kind) for skipped in scan.skipped] == [("vfio9", SkipKind.NOT_PCI)]
    assert len(scan.found) == 4


def test_a_copied_tree_reads_like_the_original(tmp_path: Path) -> None:
    function = tmp_path / "sys/devices/pci0000:00/0000:00:10.0/0000:01:00.0"
    function.mkdir(parents=True)
    entry = tmp_path / "sys/class/vfio-dev/vfio0"
    entry.mkdir(parents=True)
    (entry / "dev").write_text("511:0\n")
    (entry / "device").symlink_to(function)
    roots = Roots(str(tmp_path / "sys"), str(tmp_path / "dev"))
    expected = Cdev("vfio0", 0, PciAddress.parse("0000:01:00.0"), ("pci0000:00", "0000:00:10.0"), (511, 0))
    assert vfio.cdevs(roots).found == (expected,)
    (link,) = vfio.links(roots).found
    assert link == CdevLink("vfio0", 0, expected.address, expected.upstream, os.path.realpath(function))


def test_a_class_that_cannot_be_listed_is_an_error(live: LiveNode, roots: Roots) -> None:
    live.block(live.sysfs / "class/vfio-dev")
    for ask in (vfio.cdevs, vfio.links, vfio.orphan_nodes):
        with pytest.raises(PathUnreadable):
            ask(roots)


# Group nodes.


def test_group_nodes_are_told_from_the_rest(live: LiveNode, roots: Roots) -> None:
    live.litter(live.dev_vfio / "noiommu-3")
    live.litter(live.dev_vfio / "notes")
    scan = vfio.group_nodes(roots)
    groups = sorted(d.iommu_group for d in live.node.devices if d.on_vfio and d.iommu_group is not None)
    assert [(node.group, node.is_noiommu) for node in scan.found] == sorted(
        [*((group, False) for group in groups), (3, True)]
    )
    assert [(skipped.name, skipped.kind) for skipped in scan.skipped] == [("notes", SkipKind.MALFORMED_NAME)]


# Names.


@given(st.integers(0, 10**9))
def test_every_number_is_read_from_its_name(number: int) -> None:
    assert vfio.cdev_number(f"vfio{number}") == number


@given(st.text(max_size=12))
def test_no_other_name_has_a_number(name: str) -> None:
    number = vfio.cdev_number(name)
    assert number is None or name == f"vfio{number}"


@pytest.mark.parametrize(
    "name",
    [
        "vfio-pci",
        "nvgrace_gpu_vfio_pci",
        "mlx5_vfio_pci",
        "hisi-acc-vfio-pci",
        "pds_vfio_pci",
        "virtio_vfio_pci",
        "qat_vfio_pci",
        "xe-vfio-pci",
    ],
)
def test_vfio_drivers_are_known_by_their_names(name: str) -> None:
    assert vfio.is_vfio_driver(name)


@pytest.mark.parametrize("name", [None, "", "nvidia", "nouveau", "pci-stub", "pcieport", "vfio", "vfio-platform"])
def test_other_drivers_are_not(name: str | None) -> None:
    assert not vfio.is_vfio_driver(name)
