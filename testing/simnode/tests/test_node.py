# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from simnode import boards
from simnode.node import Device, ImpossibleNode, Kernel, Node

ROOT = ("pci0000:15",)
PORT = Device(address="0000:15:01.0", vendor=0x8086, device=0x352A, class_code=0x060400, parents=ROOT)
GPU = Device(
    address="0000:16:00.0",
    vendor=0x10DE,
    device=0x2330,
    class_code=0x030200,
    parents=("pci0000:15", "0000:15:01.0"),
    driver="vfio-pci",
    numa=0,
    iommu_group=7,
)


def complaints(*devices: Device, kernel: Kernel | None = None) -> tuple[str, ...]:
    with pytest.raises(ImpossibleNode) as caught:
        Node(name="impossible", devices=devices, kernel=kernel or Kernel())
    assert str(caught.value).startswith("impossible: ")
    return caught.value.complaints


def test_a_gpu_behind_a_port_is_possible() -> None:
    assert Node(name="small", devices=(PORT, GPU)).device("0000:16:00.0") is GPU


IMPOSSIBLE = {
    "upper case": (replace(GPU, address="0000:1B:00.0"), "not how sysfs spells"),
    "a short domain": (replace(GPU, address="00:16:00.0"), "not how sysfs spells"),
    "a padded wide domain": (replace(GPU, address="00000:16:00.0"), "not how sysfs spells"),
    "a ninth function": (replace(GPU, address="0000:16:00.8"), "not how sysfs spells"),
    "a 33rd device": (replace(GPU, address="0000:16:20.0"), "not how sysfs spells"),
    "a wide vendor": (replace(GPU, vendor=0x110DE), "vendor 0x110de does not fit"),
    "a wide class": (replace(GPU, class_code=0x1030200), "class 0x1030200 does not fit"),
    "a negative device id": (replace(GPU, device=-1), "device -0x1 does not fit"),
    "no root": (replace(GPU, parents=("0000:15:01.0",)), "first parent is no PCI root"),
    "no parents": (replace(GPU, parents=()), "first parent is no PCI root"),
    "an unknown parent": (replace(GPU, parents=(*ROOT, "0000:15:02.0")), "parent 0000:15:02.0 is not there"),
    "another domain": (replace(GPU, address="0001:16:00.0"), "its root is in domain 0000"),
    "NUMA node -1": (replace(GPU, numa=-1), "NUMA node -1"),
    "a negative group": (replace(GPU, iommu_group=-2), "IOMMU group -2"),
    "VFIO without a group": (replace(GPU, iommu_group=None), "in no IOMMU group"),
    "VFIO on a bridge": (
        replace(GPU, class_code=0x060400),
        "takes no bridges",
    ),
    "a virtual function of nothing": (replace(GPU, vf_of="0000:16:00.1"), "which is not there"),
}


@pytest.mark.parametrize(("device", "complaint"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_function_that_no_kernel_shows_is_refused(device: Device, complaint: str) -> None:
    assert any(complaint in said for said in complaints(PORT, device))


def test_every_complaint_is_collected() -> None:
    said = complaints(PORT, replace(GPU, vendor=0x110DE, numa=-4), replace(GPU, address="0000:17:00.0", device=-1))
    assert len(said) == 3


def test_two_functions_at_one_address_are_refused() -> None:
    assert "0000:16:00.0 occurs 2 times" in complaints(PORT, GPU, GPU)


def test_nothing_sits_below_a_gpu() -> None:
    below = replace(GPU, address="0000:17:00.0", parents=(*GPU.parents, GPU.address))
    assert "0000:17:00.0: parent 0000:16:00.0 is no PCI bridge" in complaints(PORT, GPU, below)


def test_a_parent_that_sits_elsewhere_is_refused() -> None:
    shortcut = replace(GPU, parents=("pci0000:14", "0000:15:01.0"))
    assert "0000:16:00.0: parent 0000:15:01.0 sits elsewhere" in complaints(PORT, shortcut)


def test_without_an_iommu_there_are_no_groups_and_no_vfio() -> None:
    said = complaints(PORT, GPU, kernel=Kernel(iommu=False))
    assert any("in an IOMMU group of a node without an IOMMU" in complaint for complaint in said)
    assert any("refuses every function without an IOMMU" in complaint for complaint in said)


def test_device_nodes_need_the_class() -> None:
    assert "no class" in complaints(kernel=Kernel(vfio_class=False))[0]


def test_a_virtual_function_sits_where_its_physical_one_sits() -> None:
    physical = replace(GPU, driver="nvidia")
    virtual = replace(GPU, address="0000:16:00.4", vf_of=physical.address)
    Node(name="possible", devices=(PORT, physical, virtual))
    assert any("sits elsewhere" in said for said in complaints(PORT, physical, replace(virtual, parents=ROOT)))
    grandchild = replace(virtual, address="0000:16:00.5", vf_of=virtual.address)
    assert any("of a virtual function" in said for said in complaints(PORT, physical, virtual, grandchild))


def test_a_node_is_changed_by_making_another() -> None:
    node = boards.pcie_h100_nvl()
    address = next(device.address for device in node.devices if device.on_vfio)
    assert node.with_device(address, driver=None).device(address).driver is None
    assert node.device(address).driver == "vfio-pci"
    with pytest.raises(KeyError):
        node.without_device(address).device(address)


def test_taking_a_bridge_from_under_a_device_is_refused() -> None:
    with pytest.raises(ImpossibleNode):
        Node(name="small", devices=(PORT, GPU)).without_device(PORT.address)


def every_board() -> Iterator[Node]:
    for name, board in boards.ALL.items():
        node = board()
        assert node.name == name
        yield node


def test_every_board_is_possible_bound_and_unbound() -> None:
    for node in every_board():
        assert not any(device.on_vfio for device in boards.unbound(node).devices if device.vendor == boards.NVIDIA)


def test_every_board_says_where_it_is_known_from_or_that_it_is_a_guess() -> None:
    for board in boards.ALL.values():
        text = board.__doc__ or ""
        derived = ("`pcie_h100_nvl`" in text, "no_iommu" in board.__name__, "empty" in board.__name__)
        assert "Source:" in text or "No such machine" in text or any(derived), board.__name__


def test_a_thousand_gpus_have_a_thousand_addresses_and_some_wide_domains() -> None:
    gpus = [device for device in boards.thousand_gpus(1000).devices if device.on_vfio]
    assert len({device.address for device in gpus}) == 1000
    assert {len(device.address.split(":")[0]) for device in gpus} == {4, 5}
