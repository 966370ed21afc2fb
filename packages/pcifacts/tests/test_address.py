# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcifacts import address as address_module
from pcifacts.address import PciAddress, by_ordinal
from pcifacts.errors import PciAddressError

addresses = st.builds(
    PciAddress, st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFF), st.integers(0, 0x1F), st.integers(0, 7)
)


@given(addresses)
def test_every_address_survives_the_round_trip(address: PciAddress) -> None:
    assert PciAddress.parse(str(address)) == address
    assert str(PciAddress.parse(str(address).upper())) == str(address)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0000:65:00.0", (0, 0x65, 0, 0)),
        ("0000:1B:1F.7", (0, 0x1B, 0x1F, 7)),
        ("ffff:ff:1f.7", (0xFFFF, 0xFF, 0x1F, 7)),
        ("10000:01:00.0", (0x10000, 1, 0, 0)),
        ("7fffffff:00:00.0", (0x7FFFFFFF, 0, 0, 0)),
    ],
)
def test_an_address_is_read_as_sysfs_spells_it(text: str, parts: tuple[int, int, int, int]) -> None:
    address = PciAddress.parse(text)
    assert (address.domain, address.bus, address.device, address.function) == parts
    assert str(address) == text.lower()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "65:00.0",
        "000:65:00.0",
        "00000:65:00.0",
        "00000000:65:00.0",
        "0000:065:00.0",
        "0000:65:0.0",
        "0000:65:20.0",
        "0000:65:00.8",
        "0000:65:00.f",
        "0000:65:00",
        "0000:65:00.",
        "0000:65:00.00",
        "0000:6g:00.0",
        "0x00:65:00.0",
        "-001:65:00.0",
        "0000:-1:00.0",
        "0000:65:00.-0",
        "+000:65:00.0",
        "0_00:65:00.0",
        " 000:65:00.0",
        "0000:65:00.0 ",
        "0000:65:00.0\n",
        "0000:65:00.0/..",
        "../0000:65:00.0",
        "0000:65:00.0\x00",
        "\u0660\u0660\u0660\u0660:65:00.0",
        "000\uff10:65:00.0",
        "0000:65:00:0",
        "0000:65.00.0",
        "vfio0",
    ],
    ids=ascii,
)
def test_every_other_text_is_refused(text: str) -> None:
    with pytest.raises(PciAddressError) as caught:
        PciAddress.parse(text)
    assert caught.value.observed == ascii(text)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isascii()


@given(st.text(alphabet="0123456789abcdefABCDEF:._+- \n", max_size=16))
def test_a_text_is_an_address_exactly_when_it_is_the_spelling_of_one(text: str) -> None:
    try:
        address = PciAddress.parse(text)
    except PciAddressError:
        return
    assert str(address) == text.lower()


@pytest.mark.parametrize("parts", [(-1, 0, 0, 0), (0, 256, 0, 0), (0, 0, 32, 0), (0, 0, 0, 8), (0, -1, 0, 0)])
def test_numbers_that_no_function_has_are_refused(parts: tuple[int, int, int, int]) -> None:
    with pytest.raises(PciAddressError):
        PciAddress(*parts)


@given(addresses, addresses)
def test_order_is_that_of_the_numbers(one: PciAddress, other: PciAddress) -> None:
    def numbers(address: PciAddress) -> tuple[int, int, int, int]:
        return (address.domain, address.bus, address.device, address.function)

    assert (one < other) == (numbers(one) < numbers(other))
    assert (one <= other) == (numbers(one) <= numbers(other))
    assert (one > other) == (numbers(one) > numbers(other))
    assert (one >= other) == (numbers(one) >= numbers(other))
    assert (one == other) == (numbers(one) == numbers(other))
    assert (by_ordinal(one) < by_ordinal(other)) == (one < other)
    if one == other:
        assert hash(one) == hash(other)


def test_a_wide_domain_comes_after_every_four_digit_one() -> None:
    texts = ["10000:01:00.0", "0000:9d:00.0", "ffff:00:00.0", "0000:1b:00.0"]
    assert [str(address) for address in sorted(map(PciAddress.parse, texts))] == [
        "0000:1b:00.0",
        "0000:9d:00.0",
        "ffff:00:00.0",
        "10000:01:00.0",
    ]


def test_functions_of_one_card_share_a_slot() -> None:
    assert PciAddress.parse("0000:21:00.1").slot == PciAddress.parse("0000:21:00.0").slot == "0000:21:00"


def test_a_flood_of_addresses_does_not_grow_memory_without_end() -> None:
    for number in range(address_module._PARSED_LIMIT + 10):
        PciAddress.parse(f"{number >> 8:04x}:{number & 0xFF:02x}:00.0")
    assert len(address_module._parsed) <= address_module._PARSED_LIMIT
    assert str(PciAddress.parse("0000:65:00.0")) == "0000:65:00.0"
