# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kata_device_plugin.preference import Place, preferred


def place(numa: int | None, *upstream: str, order: int = 0) -> Place:
    return Place(numa, upstream, (order,))


# Two sockets, two switches on each, two devices below each switch; ids in address order.
TWO_SOCKETS = {
    f"gpu{index}": place(index // 4, f"root{index // 4}", f"switch{index // 2}", f"port{index}", order=index)
    for index in range(8)
}


@pytest.mark.parametrize(
    ("available", "must", "size", "expected"),
    [
        pytest.param(range(8), (), 2, (0, 1), id="a pair below one switch"),
        pytest.param((1, 2, 3), (), 2, (2, 3), id="a whole switch before two halves"),
        pytest.param((0, 4, 5, 6), (), 2, (4, 5), id="a pair on another socket before one split over two"),
        pytest.param((0, 1, 4, 5, 6), (), 3, (4, 5, 6), id="the socket on which all fit"),
        pytest.param((0, 1, 2, 3, 4, 5), (), 2, (4, 5), id="the fuller socket first, large sets stay possible"),
        pytest.param(range(8), (), 8, range(8), id="all of them"),
        pytest.param(range(8), (5,), 2, (5, 4), id="next to what is fixed already"),
        pytest.param(range(8), (5,), 3, (5, 4, 6), id="on the socket of what is fixed already"),
        pytest.param((0, 1, 2, 7), (7,), 3, (7, 0, 1), id="what is fixed is kept, the rest stays together"),
        pytest.param((3, 0), (), 5, (0, 3), id="fewer than asked for: what there is"),
        pytest.param((0, 1), (1, 0), 1, (0,), id="more fixed than asked for: the lowest of them"),
        pytest.param((0, 1), (), 0, (), id="none asked for"),
        pytest.param((0, 1), (), -3, (), id="nonsense asked for"),
        pytest.param((), (), 2, (), id="none available"),
        pytest.param((0, 0, 1, 1), (0, 0), 2, (0, 1), id="repeats count once"),
    ],
)
def test_where_devices_are_taken_from(
    available: Sequence[int], must: Sequence[int], size: int, expected: Sequence[int]
) -> None:
    answer = preferred([f"gpu{index}" for index in available], [f"gpu{index}" for index in must], size, TWO_SOCKETS)
    assert answer == tuple(f"gpu{index}" for index in expected)


def test_an_unknown_numa_node_comes_after_known_ones() -> None:
    places = {"a": place(None, order=0), "b": place(1, order=1), "c": place(1, order=2)}
    assert preferred(["a", "b", "c"], [], 1, places) == ("b",)
    assert preferred(["a", "b", "c"], [], 2, places) == ("b", "c")


def test_without_any_topology_the_lowest_addresses_are_taken() -> None:
    places = {f"g{index}": place(None, order=index) for index in range(16)}
    assert preferred([f"g{index}" for index in reversed(range(16))], [], 3, places) == ("g0", "g1", "g2")


def test_ids_that_nobody_knows_are_taken_last_and_never_fail_the_call() -> None:
    places = {"b": place(0, order=1)}
    assert preferred(["zzz", "b", "aaa"], [], 2, places) == ("b", "aaa")


IDS = st.integers(0, 40).map(lambda number: f"id{number:02}")
PLACES = st.builds(
    place,
    st.none() | st.integers(0, 3),
    st.sampled_from(["r0", "r1", "r2"]),
    st.sampled_from(["s0", "s1", "s2", "s3"]),
    order=st.integers(0, 40),
)


@given(
    available=st.lists(IDS, max_size=40),
    must=st.lists(IDS, max_size=5),
    size=st.integers(-2, 45),
    places=st.dictionaries(IDS, PLACES),
)
def test_the_answer_is_unique_of_the_size_asked_keeps_what_is_fixed_and_ignores_order(
    available: list[str], must: list[str], size: int, places: dict[str, Place]
) -> None:
    answer = preferred(available, must, size, places)
    candidates = {*available, *must}
    assert len(set(answer)) == len(answer) == max(0, min(size, len(candidates)))
    assert set(answer) <= candidates
    if len(set(must)) <= size:
        assert set(must) <= set(answer)
    assert preferred(list(reversed(available)), list(reversed(must)), size, places) == answer


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.data())
def test_one_numa_node_is_enough_whenever_one_has_enough(nodes: list[int], data: st.DataObject) -> None:
    places = {f"id{index:02}": place(node, order=index) for index, node in enumerate(nodes)}
    size = data.draw(st.integers(1, max(nodes.count(node) for node in nodes)))
    answer = preferred(list(places), [], size, places)
    assert len({places[device_id].numa_node for device_id in answer}) == 1
