# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcifacts.ids import KINDS, VENDOR_NVIDIA, VENDORS, ClassCode, DeviceKind, kind_of

# What is a device, written out again: (vendor, base class and subclass) -> kind.
EXPECTED = {
    (0x10DE, 0x0302): "gpu",
    (0x10DE, 0x0300): "gpu",
    (0x10DE, 0x0680): "nvswitch",
}


@given(st.integers(0, 0xFFFFFF))
def test_a_class_code_is_its_three_parts(value: int) -> None:
    code = ClassCode(value)
    assert code.base << 16 | code.subclass << 8 | code.prog_if == value
    assert int(str(code), 16) == value
    assert len(str(code)) == 6


def test_the_table_decides_for_every_class_there_is() -> None:
    for base_and_subclass in range(0x10000):
        for vendor in (0x10DE, 0x1002, 0x15B3):
            kind = kind_of(vendor, ClassCode(base_and_subclass << 8))
            assert kind == EXPECTED.get((vendor, base_and_subclass))


@given(st.integers(0, 0xFF))
def test_the_programming_interface_decides_nothing(prog_if: int) -> None:
    assert kind_of(VENDOR_NVIDIA, ClassCode(0x030200 | prog_if)) is DeviceKind.GPU
    assert kind_of(VENDOR_NVIDIA, ClassCode(0x068000 | prog_if)) is DeviceKind.NVSWITCH


@pytest.mark.parametrize("value", [0x040300, 0x060400, 0x060000, 0x030100, 0x038000, 0x120000, 0x000302, 0x003020])
def test_what_sits_beside_a_gpu_is_no_device(value: int) -> None:
    assert kind_of(VENDOR_NVIDIA, ClassCode(value)) is None


def test_only_vendors_of_the_table_are_worth_a_look() -> None:
    assert {row.vendor for row in KINDS} == VENDORS == {0x10DE}


def test_bridges_are_told_by_their_exact_class() -> None:
    bridges = {value for value in range(0x10000) if ClassCode(value << 8).is_bridge}
    assert bridges == {0x0600, 0x0604, 0x0607, 0x0609}


def test_kinds_read_as_their_names() -> None:
    assert [str(kind) for kind in DeviceKind] == ["gpu", "nvswitch"]
