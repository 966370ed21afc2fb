# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcifacts import function, inventory, vfio
from pcifacts.address import PciAddress
from pcifacts.errors import PathUnreadable
from pcifacts.inventory import Standing
from pcifacts.sysfs import Roots
from simnode import boards
from simnode.tree import Fault, LiveNode

DGX_GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
GRACE_GPUS = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")

# What every board has for guests, written by hand from what the board is; a missing kind means none.
EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    "hgx_h100": {
        "gpu": tuple(f"0000:{bus}:00.0" for bus in DGX_GPUS),
        "nvswitch": ("0000:05:00.0", "0000:06:00.0", "0000:07:00.0", "0000:08:00.0"),
    },
    "hgx_h200": {
        "gpu": tuple(f"0000:{bus}:00.0" for bus in DGX_GPUS),
        "nvswitch": ("0000:05:00.0", "0000:06:00.0", "0000:07:00.0", "0000:08:00.0"),
    },
    "hgx_b200": {"gpu": tuple(f"0000:{bus}:00.0" for bus in DGX_GPUS)},
    "hgx_b300": {"gpu": tuple(f"0000:{bus}:00.0" for bus in DGX_GPUS)},
    "gb200_tray": {"gpu": GRACE_GPUS},
    "gb300_tray": {"gpu": GRACE_GPUS},
    "gh200": {"gpu": ("0009:01:00.0",)},
    "vera_rubin_tray": {"gpu": GRACE_GPUS},
    "pcie_h100_nvl": {"gpu": ("0000:16:00.0", "0000:27:00.0", "0000:85:00.0", "0000:a6:00.0")},
    "rtx_pro_6000": {"gpu": ("0000:21:00.0", "0000:41:00.0", "0000:61:00.0", "0000:81:00.0")},
    "mixed": {"gpu": ("0000:16:00.0", "0000:17:00.0", "0000:41:00.0", "10000:02:00.0")},
    "no_iommu": {},
    "no_cdev_kernel": {},
    "old_kernel": {},
    "empty": {},
}
GPUS = EXPECTED["pcie_h100_nvl"]["gpu"]


def roots_of(live: LiveNode) -> Roots:
    return Roots(str(live.sysfs), str(live.dev_vfio))


def usable(roots: Roots) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for device in inventory.devices(roots).found:
        if device.standing is Standing.USABLE and not device.function.is_virtual_function:
            found[device.kind] = (*found.get(device.kind, ()), str(device.function.address))
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_a_board_has_exactly_what_it_should(name: str, tmp_path: Path) -> None:
    assert usable(roots_of(LiveNode.create(tmp_path, boards.ALL[name]()))) == EXPECTED[name]


def test_every_board_is_expected_to_have_something_or_nothing() -> None:
    # A host of virtual functions and the board for scale have tests of their own.
    assert set(boards.ALL) - set(EXPECTED) == {"vgpu_host", "thousand_gpus"}


def test_virtual_functions_are_told_from_the_card_they_are_cut_from(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.vgpu_host())
    found = inventory.devices(roots_of(live)).found
    assert [(str(d.function.address), d.function.is_virtual_function, d.standing) for d in found] == [
        ("0000:8c:00.0", False, Standing.HOST_DRIVER),
        ("0000:8c:03.3", True, Standing.HOST_DRIVER),
        ("0000:8c:03.4", True, Standing.HOST_DRIVER),
        ("0000:8c:03.5", True, Standing.USABLE),
        ("0000:8c:03.6", True, Standing.USABLE),
    ]


def test_as_many_gpus_as_there_are_are_found_in_order(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.thousand_gpus(100))
    found = inventory.devices(roots_of(live)).found
    assert len(found) == 100
    assert {device.standing for device in found} == {Standing.USABLE}
    assert [device.function.address for device in found] == sorted(device.function.address for device in found)


@pytest.mark.parametrize(
    ("board", "standing"),
    [
        ("no_iommu", Standing.HOST_DRIVER),
        ("no_cdev_kernel", Standing.NO_DEVICE_NUMBER),
        ("old_kernel", Standing.NO_VFIO_DEVICE),
    ],
)
def test_what_keeps_a_device_from_a_guest_is_told(board: str, standing: Standing, tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.ALL[board]())
    found = inventory.devices(roots_of(live)).found
    assert [str(device.function.address) for device in found] == list(GPUS)
    assert {device.standing for device in found} == {standing}


def test_a_device_is_followed_through_its_life(live: LiveNode, roots: Roots) -> None:
    def standing() -> Standing | None:
        return next((d.standing for d in inventory.devices(roots).found if str(d.function.address) == GPUS[0]), None)

    assert standing() is Standing.USABLE
    live.unbind(GPUS[0])
    assert standing() is Standing.NO_DRIVER
    live.bind(GPUS[0], "nvidia")
    assert standing() is Standing.HOST_DRIVER
    live.remove(GPUS[0])
    assert standing() is None
    live.rescan(GPUS[0])
    live.bind(GPUS[0])
    assert standing() is Standing.USABLE
    live.damage(GPUS[0], Fault.NODE_MISSING)
    assert standing() is Standing.NODE_UNUSABLE


def test_a_damaged_function_of_another_vendor_is_nobodys_business(live: LiveNode, roots: Roots) -> None:
    nic = "0000:c6:00.0"
    live.damage(nic, Fault.MALFORMED_CLASS)
    assert inventory.devices(roots).skipped == ()
    live.damage(nic, Fault.MALFORMED_VENDOR)
    assert [skipped.name for skipped in inventory.devices(roots).skipped] == [nic]


def test_a_bus_that_cannot_be_listed_is_an_error(live: LiveNode, roots: Roots) -> None:
    live.block(live.sysfs / "bus/pci/devices")
    with pytest.raises(PathUnreadable):
        inventory.devices(roots)


# Whatever is damaged, what is whole is found, nothing is found that should not be, and all is well afterwards.


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveNode]:
    with tempfile.TemporaryDirectory(prefix="pcifacts-") as folder:
        yield LiveNode.create(Path(folder), boards.pcie_h100_nvl())


HARMLESS = {
    Fault.MALFORMED_NUMA,
    Fault.EMPTY_NUMA,
    Fault.MISSING_NUMA,
    Fault.UNREADABLE_NUMA,
    # The inventory starts at the bus, and finds the VFIO device without its class link.
    Fault.DANGLING_DRIVER,
}


@settings(max_examples=60, deadline=None)
@given(damage=st.dictionaries(st.sampled_from(GPUS), st.sampled_from(Fault), max_size=4))
def test_no_damage_hides_a_neighbour_or_makes_a_broken_device_usable(
    shared: LiveNode, damage: dict[str, Fault]
) -> None:
    roots = roots_of(shared)
    undos = [shared.damage(address, fault) for address, fault in damage.items()]
    try:
        scan = inventory.devices(roots)
        found = {str(device.function.address): device.standing for device in scan.found}
        broken = {address for address, fault in damage.items() if fault not in HARMLESS}
        for address in set(GPUS) - set(damage):
            assert found[address] is Standing.USABLE
        for address in broken:
            assert found.get(address) is not Standing.USABLE
        names = [skipped.name for skipped in scan.skipped]
        assert len(names) == len(set(names))
        assert set(names) == set(damage) - set(found)
        assert set(names) <= broken
        cdevs = vfio.cdevs(roots)
        assert len(cdevs.found) + len(cdevs.skipped) >= len(GPUS) - sum(
            fault is Fault.CDEV_GONE_FROM_SYSFS for fault in damage.values()
        )
    finally:
        for undo in reversed(undos):
            undo()
    assert usable(roots) == EXPECTED["pcie_h100_nvl"]


@settings(max_examples=80, deadline=None)
@given(
    address=st.sampled_from(GPUS),
    name=st.sampled_from(["vendor", "device", "class", "numa_node", "subsystem_vendor", "subsystem_device"]),
    content=st.one_of(st.none(), st.binary(max_size=80)),
)
def test_no_bytes_in_an_attribute_end_a_scan_or_hide_a_neighbour(
    shared: LiveNode, address: str, name: str, content: bytes | None
) -> None:
    roots = roots_of(shared)
    undo = shared.write_attribute(address, name, content)
    try:
        scan = function.functions(roots)
        found = {str(f.address) for f in scan.found}
        assert found | {skipped.name for skipped in scan.skipped} == {d.address for d in shared.node.devices}
        assert {d.address for d in shared.node.devices} - {address} <= found
        assert all("\n" not in skipped.reason and skipped.reason.isascii() for skipped in scan.skipped)
        assert set(GPUS) - {address} <= {str(d.function.address) for d in inventory.devices(roots).found}
    finally:
        undo()


@settings(max_examples=60, deadline=None)
@given(
    folder=st.sampled_from(["sys/bus/pci/devices", "sys/class/vfio-dev", "dev/vfio/devices", "dev/vfio"]),
    names=st.lists(
        st.text(st.characters(exclude_characters="/\x00", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
            lambda name: name not in {".", ".."}
        ),
        max_size=4,
        unique=True,
    ),
)
def test_no_name_in_a_directory_ends_a_scan_or_hides_a_neighbour(
    shared: LiveNode, folder: str, names: list[str]
) -> None:
    roots = roots_of(shared)
    new = [shared.root / folder / name for name in names if not (shared.root / folder / name).exists()]
    undos = [shared.litter(path) for path in new]
    try:
        assert usable(roots) == EXPECTED["pcie_h100_nvl"]
        assert len(vfio.cdevs(roots).found) == len(GPUS)
        vfio.orphan_nodes(roots)
        assert len(vfio.group_nodes(roots).found) >= len(GPUS)
    finally:
        for undo in undos:
            undo()


# What the package is made of.

ASK_EVERYTHING = """
import sys
from pcifacts import function, inventory, iommu, vfio
from pcifacts.sysfs import Roots

loaded = {"logging", "pathlib", "subprocess", "socket", "asyncio", "shutil", "tempfile", "re"} & set(sys.modules)
loaded -= set(sys.argv[3].split(","))
assert not loaded, loaded


def only_reading(event, arguments):
    if event == "open":
        assert isinstance(arguments[2], int) and arguments[2] & 0o3 == 0, arguments
    elif event.partition(".")[0] in {"os", "shutil", "socket", "subprocess", "ctypes", "mmap"}:
        assert event in {"os.listdir", "os.scandir"}, event


sys.addaudithook(only_reading)
roots = Roots(sys.argv[1], sys.argv[2])
found = inventory.devices(roots).found
assert found and function.functions(roots).found and vfio.cdevs(roots).found and iommu.groups(roots).found
assert vfio.group_nodes(roots).found and not vfio.orphan_nodes(roots)
assert all(iommu.group_members(roots, group).found for group in iommu.groups(roots).found)
print(len(found))
"""


def test_asking_everything_only_reads_and_imports_little(live: LiveNode, roots: Roots) -> None:
    # What a bare interpreter loads by itself differs between versions, and dataclasses brings its own.
    bare = "import dataclasses, enum, sys; print(','.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-c", ASK_EVERYTHING, roots.sysfs, roots.dev_vfio, loaded]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(len(GPUS))


def test_the_kernel_order_of_changes_is_never_taken_for_damage(live: LiveNode, roots: Roots) -> None:
    # Between any two steps of the kernel a look may fall: an attribute without its function is no damage.
    address = PciAddress.parse(GPUS[0])
    live.unbind(GPUS[0])
    assert vfio.cdev(roots, "vfio0") is None
    (live.sysfs / "bus/pci/devices" / GPUS[0]).unlink()
    assert function.read_function(roots, address) is None
    assert inventory.devices(roots).skipped == ()
