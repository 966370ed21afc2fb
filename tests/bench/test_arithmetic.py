# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark's own arithmetic, tables and command line. Nothing is measured here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bench.plugin import cli, report, targets
from bench.plugin.extent import FULL, SHORT
from bench.plugin.samples import Figure, Round, Samples, percentile, ratio, summary
from bench.plugin.subject import OURS, Subject
from hypothesis import given
from hypothesis import strategies as st

_FLOATS = st.floats(min_value=0, max_value=1e9)


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.5, 50), (0.99, 99), (1, 100), (0.001, 1), (0.991, 100)],
)
def test_a_percentile_of_1_to_100_is_the_number_itself(q: float, expected: float) -> None:
    assert percentile([*range(100, 0, -1)], q) == expected


@pytest.mark.parametrize("q", [0, -0.1, 1.1])
def test_a_percentile_beyond_the_values_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], q)


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@given(st.lists(_FLOATS, min_size=1), st.floats(min_value=0.01, max_value=1))
def test_a_percentile_is_an_observed_value_that_enough_values_do_not_exceed(values: list[float], q: float) -> None:
    found = percentile(values, q)
    assert found in values
    assert sum(value <= found for value in values) >= math.ceil(q * len(values))
    assert sum(value < found for value in values) < math.ceil(q * len(values))


def test_one_noisy_round_does_not_spoil_the_median() -> None:
    quiet, noisy = Round((1.0, 2.0, 3.0)), Round((500.0, 600.0))
    assert summary([quiet, noisy, quiet]) == Figure(2.0, 0, 8)


def test_the_99th_percentile_is_taken_in_each_round() -> None:
    rounds = [Round(tuple(map(float, range(1, 101)))), Round(tuple(map(float, range(201, 301))))]
    assert summary(rounds, 0.99).value == (99 + 299) / 2


def test_what_never_came_has_no_value_and_is_counted() -> None:
    assert summary([Round((), missed=2), Round((), missed=1)]) == Figure(None, 3, 3)


def test_what_came_only_sometimes_has_a_value_and_is_counted() -> None:
    assert summary([Round((4.0,), missed=1), Round((), missed=1)]) == Figure(4.0, 2, 3)


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [(3.0, 2.0, 1.5), (0.0, 2.0, 0.0), (3.0, 0.0, None), (None, 2.0, None), (3.0, None, None)],
)
def test_a_ratio_needs_both_and_something_to_divide_by(
    ours: float | None, other: float | None, expected: float | None
) -> None:
    assert ratio(Figure(ours, 0, 1), Figure(other, 0, 1)) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (1.234, "1.23"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (56.78, "56.8"),
        (99.96, "100"),
        (26014.4, "26,014"),
    ],
)
def test_numbers_have_three_digits_that_count(value: float, text: str) -> None:
    assert report.number(value) == text


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (None, "-"),
        (Figure(1.0, 0, 5), "1.00"),
        (Figure(1.0, 2, 5), "1.00 (2 of 5 missed)"),
        (Figure(None, 8, 8), "never (0 of 8)"),
    ],
)
def test_a_cell_says_what_is_missing(figure: Figure | None, text: str) -> None:
    assert report.cell(figure) == text


def _samples() -> Samples:
    samples = Samples()
    samples.add(OURS, "registered@12", 150.0)
    samples.add("sandbox-1", "registered@12", 300.0)
    samples.add(OURS, "registered@1000", 210.0)
    samples.add(OURS, "gone@12", 1.0, 2.0)
    samples.add("sandbox-1", "back@12", missed=8)
    samples.add(OURS, "back@12", 1.5, missed=1)
    return samples


def _verdict(figure: str, samples: Samples, peers: tuple[str, ...]) -> tuple[str, str]:
    target = targets.find(figure, 0.5)
    assert target is not None
    bound = targets.bound(target, samples, peers)
    ours = samples.figure(OURS, figure)
    assert bound is not None
    assert ours is not None
    return bound.origin, bound.verdict(ours)


def test_a_target_is_held_against_a_peer_that_took_part() -> None:
    assert _verdict("registered@12", _samples(), ("sandbox-1",)) == ("0.6 of sandbox-1", "met")


def test_a_target_without_its_peer_uses_what_was_stated_and_says_so() -> None:
    origin, verdict = _verdict("registered@12", _samples(), ("stub",))
    assert origin == "0.6 of sandbox, stated, not measured here"
    assert verdict == "within the stated range"


def test_a_target_can_be_another_figure_of_ours() -> None:
    assert _verdict("registered@1000", _samples(), ()) == ("1.5 of registered@12", "met")


def test_a_figure_with_misses_misses_its_target() -> None:
    assert _verdict("back@12", _samples(), ()) == ("orientation", "missed")


def test_a_target_whose_reference_was_not_measured_bounds_nothing() -> None:
    target = targets.find("scan-facts@8", 0.5)
    assert target is not None
    assert targets.bound(target, _samples(), ()) is None


def test_every_target_is_a_line_of_a_table() -> None:
    lines = {(row.key, row.q) for table in report.TABLES for row in table.rows}
    assert {(target.figure, target.q) for target in targets.TARGETS} <= lines


def test_a_table_shows_ours_the_peer_the_ratio_and_the_target() -> None:
    text = report.rendered(_samples(), ("sandbox-1",))
    line = next(line for line in text.splitlines() if line.startswith("every resource registered, 12 devices"))
    assert line.split(",")[1].split() == [
        *("12", "devices", "150", "300", "x0.50", "<=", "180", "(0.6", "of", "sandbox-1)", "met"),
    ]
    assert "never (0 of 8)" in text


def test_a_table_without_samples_is_left_out() -> None:
    assert "Allocate" not in report.rendered(_samples(), ())


def test_short_parses_and_takes_less_of_everything() -> None:
    short, full = cli.parse(["--short"]).extent, cli.parse([]).extent
    assert (short, full) == (SHORT, FULL)
    for name in SHORT.__dataclass_fields__:
        if name != "name":
            assert getattr(SHORT, name) < getattr(FULL, name), name


def test_peers_are_command_lines() -> None:
    request = cli.parse(["--peer", "a=/bin/a --b='c d'", "--peer", "e=env X=1 f", "--json", "x", "--without-stub"])
    assert request.peers == (Subject("a", ("/bin/a", "--b=c d")), Subject("e", ("env", "X=1", "f")))
    assert request.json == Path("x")
    assert not request.stub


@pytest.mark.parametrize(
    "arguments",
    [["--peer", "a"], ["--peer", "a="], ["--peer", "=b"], ["--peer", "ours=b"], ["--peer", "a=b", "--peer", "a=c"]],
)
def test_a_peer_without_a_name_of_its_own_or_a_command_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(arguments)
    assert ended.value.code == 2
    assert "--peer" in capsys.readouterr().err
