# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcifacts import errors, sysfs
from pcifacts.errors import AttributeMalformed, AttributeMissing, AttributeUnreadable, PathUnreadable
from pcifacts.sysfs import Roots


def test_roots_are_those_of_a_host_unless_told_otherwise() -> None:
    roots = Roots()
    assert roots.pci_devices == "/sys/bus/pci/devices"
    assert roots.vfio_class == "/sys/class/vfio-dev"
    assert roots.iommu_groups == "/sys/kernel/iommu_groups"
    assert roots.device_nodes == "/dev/vfio/devices"


def test_an_attribute_that_is_not_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "no", tmp_path / "no/such", tmp_path / "file/below"):
        assert sysfs.attribute(str(path)) is None
        assert sysfs.hexadecimal(str(path), 4) is None
        assert sysfs.numa_node(str(path)) is None
        assert sysfs.device_number(str(path)) is None
        assert sysfs.link(str(path)) is None
        assert sysfs.link_name(str(path)) is None
        assert sysfs.entries(str(path)) is None
        assert not sysfs.exists(str(path))


def test_an_attribute_of_a_removed_device_is_none() -> None:
    # What the kernel answers for an attribute that is open while its device goes, or opened a moment later.
    assert sysfs.is_absence(OSError(errno.ENODEV, "No such device"))
    assert not sysfs.is_absence(OSError(errno.EACCES, "Permission denied"))


def test_what_the_kernel_refuses_is_an_error_with_the_path_and_the_reason(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(AttributeUnreadable) as attribute:
        sysfs.attribute(str(loop))
    assert attribute.value.path == str(loop)
    assert attribute.value.errno == errno.ELOOP
    assert attribute.value.observed == os.strerror(errno.ELOOP)
    with pytest.raises(AttributeUnreadable) as folder:
        sysfs.attribute(str(tmp_path))
    assert folder.value.errno == errno.EISDIR
    with pytest.raises(PathUnreadable) as listing:
        sysfs.entries(str(loop))
    assert "a readable directory" in str(listing.value)


@pytest.mark.parametrize(("text", "value"), [("0x10de\n", 0x10DE), ("0x10DE\n", 0x10DE), ("0x0000", 0)])
def test_a_number_is_read_as_the_kernel_prints_it(tmp_path: Path, text: str, value: int) -> None:
    (tmp_path / "vendor").write_text(text)
    assert sysfs.hexadecimal(str(tmp_path / "vendor"), 4) == value


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"10de\n",
        b"0x10d\n",
        b"0x10dee\n",
        b"0x1_de\n",
        b"0x 0de\n",
        b"-x10de\n",
        b"0x10de \n",
        b"\xff" * 64,
        b"0x10de\n0x10de\n",
        b"0x-0de\n",
        b"0X10DE\n",
        b"\x00\x00\x00\x00\x00\x00\n",
        "0x\u0661\u0660de\n".encode(),
    ],
    ids=ascii,
)
def test_every_other_number_is_malformed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "vendor"
    path.write_bytes(content)
    with pytest.raises(AttributeMalformed) as caught:
        sysfs.hexadecimal(str(path), 4)
    assert caught.value.path == str(path)
    assert "4 hexadecimal digits" in caught.value.expected
    assert "\n" not in str(caught.value)
    assert str(caught.value).isascii()


@given(st.integers(0, 0xFFFFFF))
def test_every_class_code_is_read_back(value: int) -> None:
    assert sysfs.parse_hexadecimal("class", f"0x{value:06x}\n".encode(), 6) == value


@given(st.binary(max_size=64))
def test_no_bytes_are_taken_for_a_number_that_prints_otherwise(content: bytes) -> None:
    try:
        value = sysfs.parse_hexadecimal("vendor", content, 4)
    except AttributeMalformed:
        return
    assert content.rstrip(b"\n").lower() == f"0x{value:04x}".encode()


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("0\n", 0),
        ("1\n", 1),
        ("63\n", 63),
        ("-1\n", None),
        ("", None),
        ("\n", None),
        ("zero\n", None),
        ("1.5\n", None),
        ("0x1\n", None),
        ("1 2\n", None),
        ("9" * 40, None),
        ("+1\n", None),
        ("1_0\n", None),
    ],
)
def test_a_numa_node_is_a_number_or_unknown(tmp_path: Path, text: str, node: int | None) -> None:
    (tmp_path / "numa_node").write_text(text)
    assert sysfs.numa_node(str(tmp_path / "numa_node")) == node


def test_an_unreadable_numa_node_is_unknown(tmp_path: Path) -> None:
    assert sysfs.numa_node(str(tmp_path)) is None


@given(st.integers(0, 4095), st.integers(0, 1048575))
def test_every_device_number_is_read_back(major: int, minor: int) -> None:
    assert sysfs._device_number(f"{major}:{minor}\n".encode()) == (major, minor)


@pytest.mark.parametrize("text", ["", "1", "1:", ":3", "a:b", "1:3:4", "-1:3", "1: 3", "0x1:0x3", "1:" + "3" * 40])
def test_every_other_device_number_is_malformed(tmp_path: Path, text: str) -> None:
    (tmp_path / "dev").write_text(text)
    with pytest.raises(AttributeMalformed):
        sysfs.device_number(str(tmp_path / "dev"))


def test_a_link_may_dangle_and_something_else_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "driver").symlink_to("../../bus/pci/drivers/vfio-pci")
    assert sysfs.link_name(str(tmp_path / "driver")) == "vfio-pci"
    assert sysfs.exists(str(tmp_path / "driver"))
    (tmp_path / "file").write_text("")
    with pytest.raises(AttributeMalformed, match="expected a symbolic link"):
        sysfs.link(str(tmp_path / "file"))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PathUnreadable):
        sysfs.link(str(tmp_path / "loop/below"))


@pytest.mark.parametrize(
    ("path", "below"),
    [
        ("../../../devices/pci0000:00/0000:00:10.0/0000:01:00.0", "pci0000:00/0000:00:10.0/0000:01:00.0"),
        ("/sys/devices/pci10000:e0/10000:e0:06.0", "pci10000:e0/10000:e0:06.0"),
        ("/sys/devices/platform/40000000.pcie/pci0009:00/0009:00:00.0", "pci0009:00/0009:00:00.0"),
        (
            "devices/pci0000:60/0000:60:00.5/pci10000:00/10000:00:02.0",
            "pci0000:60/0000:60:00.5/pci10000:00/10000:00:02.0",
        ),
        ("/tmp/pci-tests:3/sys/devices/pci0000:00/0000:00:10.0", "pci0000:00/0000:00:10.0"),
        ("/sys/devices/virtual/mdev", ""),
        ("", ""),
    ],
)
def test_the_way_from_the_root_is_found_in_a_path(path: str, below: str) -> None:
    assert sysfs.below_root(path.split("/")) == tuple(below.split("/") if below else ())


def test_every_error_says_what_was_expected_and_observed() -> None:
    made = [
        errors.PciAddressError("'x'", expected="an address", observed="'x'"),
        PathUnreadable("/a", errno=errno.EACCES, observed="Permission denied"),
        AttributeUnreadable("/a/b", errno=errno.EIO, observed="Input/output error"),
        AttributeMalformed("/a/b", expected="a number", observed="'?'"),
        AttributeMissing("/a/b", expected="an attribute"),
    ]
    assert {type(error) for error in made} == _every_subclass(errors.PcifactsError)
    for error in made:
        assert str(error).startswith(f"{error.subject}: ")
        assert f", expected {error.expected}, observed {error.observed}" in str(error)
        assert str(error).endswith(error.hint or error.observed)


def _every_subclass(base: type[errors.PcifactsError]) -> set[type[errors.PcifactsError]]:
    direct = set(base.__subclasses__())
    return direct.union(*(_every_subclass(child) for child in direct)) if direct else direct
