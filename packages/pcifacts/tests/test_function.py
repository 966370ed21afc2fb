# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pcifacts import function
from pcifacts.address import PciAddress
from pcifacts.errors import AttributeMalformed, AttributeMissing, PathUnreadable
from pcifacts.sysfs import Roots, SkipKind
from simnode import boards
from simnode.tree import Fault, LiveNode

GPU = PciAddress.parse("0000:16:00.0")


def roots_of(live: LiveNode) -> Roots:
    return Roots(str(live.sysfs), str(live.dev_vfio))


def test_a_function_is_read_whole(live: LiveNode, roots: Roots) -> None:
    gpu = function.read_function(roots, GPU)
    assert gpu is not None
    assert (gpu.vendor, gpu.device, gpu.class_code.value) == (0x10DE, 0x2321, 0x030200)
    assert (gpu.subsystem_vendor, gpu.subsystem_device) == (0x10DE, 0x1839)
    assert gpu.driver == "vfio-pci"
    assert gpu.numa_node == 0
    assert gpu.iommu_group == live.node.device(str(GPU)).iommu_group
    assert gpu.upstream == ("pci0000:15", "0000:15:01.0")
    assert not gpu.is_virtual_function


@pytest.mark.parametrize("name", [name for name in boards.ALL if name != "thousand_gpus"])
def test_every_function_of_every_board_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.ALL[name]())
    scan = function.functions(roots_of(live))
    assert scan.skipped == ()
    read = {
        str(f.address): (
            f.vendor,
            f.device,
            f.class_code.value,
            f.subsystem_vendor,
            f.subsystem_device,
            f.driver,
            f.numa_node,
            f.iommu_group,
            f.upstream,
            f.is_virtual_function,
        )
        for f in scan.found
    }
    written = {
        d.address: (
            d.vendor,
            d.device,
            d.class_code,
            d.subsystem_vendor,
            d.subsystem_device,
            d.driver,
            d.numa,
            d.iommu_group,
            d.parents,
            d.vf_of is not None,
        )
        for d in live.node.devices
    }
    assert read == written
    assert list(scan.found) == sorted(scan.found, key=lambda f: f.address)


def test_the_traits_are_those_of_the_function(roots: Roots) -> None:
    traits = function.read_traits(roots, GPU)
    whole = function.read_function(roots, GPU)
    assert traits is not None
    assert whole is not None
    assert (traits.vendor, traits.class_code, traits.numa_node) == (whole.vendor, whole.class_code, whole.numa_node)
    assert function.traits_in(os.path.realpath(function.directory(roots, GPU))) == traits


def test_a_removed_function_is_none_and_no_error(live: LiveNode, roots: Roots) -> None:
    folder = str(live.device_dir(str(GPU)))
    live.remove(str(GPU))
    assert function.read_function(roots, GPU) is None
    assert function.read_traits(roots, GPU) is None
    assert function.traits_in(folder) is None
    assert function.vendor(roots, GPU) is None
    assert function.driver(roots, GPU) is None
    assert function.iommu_group(roots, GPU) is None
    assert function.upstream(roots, GPU) == ()
    assert not function.is_present(roots, GPU)
    assert len(function.functions(roots).found) == len(live.node.devices) - 1


def test_a_function_half_removed_is_gone_rather_than_damaged(live: LiveNode, roots: Roots) -> None:
    # The kernel takes the links first and the attributes after them.
    folder = live.device_dir(str(GPU))
    (live.sysfs / "bus/pci/devices" / str(GPU)).unlink()
    (folder / "subsystem").unlink()
    (folder / "vendor").unlink()
    assert function.read_traits(roots, GPU) is None
    assert function.traits_in(str(folder)) is None


def test_the_driver_is_what_the_link_says_even_when_it_dangles(live: LiveNode, roots: Roots) -> None:
    live.damage(str(GPU), Fault.DANGLING_DRIVER)
    assert function.driver(roots, GPU) == "gone"
    live.unbind(str(GPU))
    assert function.driver(roots, GPU) is None
    live.bind(str(GPU), "nvidia")
    assert function.driver(roots, GPU) == "nvidia"


def test_a_group_link_without_a_number_is_malformed(live: LiveNode, roots: Roots) -> None:
    folder = live.device_dir(str(GPU))
    (folder / "iommu_group").unlink()
    (folder / "iommu_group").symlink_to("../../../../kernel/iommu_groups/none")
    with pytest.raises(AttributeMalformed, match="a numbered group"):
        function.iommu_group(roots, GPU)


@pytest.mark.parametrize("name", ["vendor", "device", "class"])
def test_an_attribute_that_every_function_has_is_missed(live: LiveNode, roots: Roots, name: str) -> None:
    live.write_attribute(str(GPU), name, None)
    with pytest.raises(AttributeMissing) as caught:
        function.read_function(roots, GPU)
    assert caught.value.path.endswith(f"{GPU}/{name}")


def test_subsystem_ids_may_be_missing(live: LiveNode, roots: Roots) -> None:
    live.write_attribute(str(GPU), "subsystem_vendor", None)
    live.write_attribute(str(GPU), "subsystem_device", None)
    gpu = function.read_function(roots, GPU)
    assert gpu is not None
    assert gpu.subsystem_vendor is gpu.subsystem_device is None


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.MALFORMED_VENDOR, SkipKind.MALFORMED),
        (Fault.EMPTY_VENDOR, SkipKind.MALFORMED),
        (Fault.MISSING_VENDOR, SkipKind.MALFORMED),
        (Fault.UNREADABLE_VENDOR, SkipKind.UNREADABLE),
        (Fault.MALFORMED_CLASS, SkipKind.MALFORMED),
        (Fault.EMPTY_CLASS, SkipKind.MALFORMED),
        (Fault.MISSING_CLASS, SkipKind.MALFORMED),
        (Fault.UNREADABLE_CLASS, SkipKind.UNREADABLE),
        (Fault.DANGLING_FUNCTION, SkipKind.DANGLING),
    ],
)
def test_a_damaged_function_is_skipped_once_and_hides_no_other(
    live: LiveNode, roots: Roots, fault: Fault, kind: SkipKind
) -> None:
    undo = live.damage(str(GPU), fault)
    scan = function.functions(roots)
    (skipped,) = scan.skipped
    assert (skipped.name, skipped.kind) == (str(GPU), kind)
    assert str(GPU) in skipped.reason
    assert {str(f.address) for f in scan.found} == {d.address for d in live.node.devices} - {str(GPU)}
    undo()
    assert function.functions(roots).skipped == ()


@pytest.mark.parametrize("fault", [Fault.MALFORMED_NUMA, Fault.EMPTY_NUMA, Fault.MISSING_NUMA, Fault.UNREADABLE_NUMA])
def test_a_damaged_numa_node_is_unknown_and_nothing_else(live: LiveNode, roots: Roots, fault: Fault) -> None:
    live.damage(str(GPU), fault)
    gpu = function.read_function(roots, GPU)
    assert gpu is not None
    assert gpu.numa_node is None
    assert function.functions(roots).skipped == ()


def test_a_name_that_is_no_address_is_skipped(live: LiveNode, roots: Roots) -> None:
    live.litter(live.sysfs / "bus/pci/devices/README")
    scan = function.addresses(roots)
    assert [(skipped.name, skipped.kind) for skipped in scan.skipped] == [("README", SkipKind.MALFORMED_NAME)]
    assert len(scan.found) == len(live.node.devices)


def test_a_bus_that_cannot_be_listed_is_an_error_and_not_an_empty_bus(live: LiveNode, roots: Roots) -> None:
    live.block(live.sysfs / "bus/pci/devices")
    with pytest.raises(PathUnreadable):
        function.functions(roots)


def test_a_node_without_a_pci_bus_has_no_functions(tmp_path: Path) -> None:
    assert function.functions(Roots(str(tmp_path), str(tmp_path))).found == ()


def test_a_copied_tree_reads_like_the_original(tmp_path: Path) -> None:
    # Recorded trees often hold folders where sysfs has links.
    folder = tmp_path / "bus/pci/devices/0000:16:00.0"
    folder.mkdir(parents=True)
    for name, text in (("vendor", "0x10de\n"), ("device", "0x2330\n"), ("class", "0x030200\n")):
        (folder / name).write_text(text)
    gpu = function.read_function(Roots(str(tmp_path)), GPU)
    assert gpu is not None
    assert (gpu.device, gpu.upstream, gpu.driver) == (0x2330, (), None)
