# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What was measured, and the arithmetic on it. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of one subject at one thing: the values that came, and how many never did."""

    values: tuple[float, ...]
    missed: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """A number for a table; `value` is None when nothing came at all."""

    value: float | None
    missed: int
    tried: int


def percentile(values: Sequence[float], q: float) -> float:
    """Return the smallest value that at least the share `q` of all values does not exceed (nearest rank).

    An observed value, never one between two: a tail that was not seen is not reported.
    """
    if not values:
        raise ValueError("no values, so no percentile")
    if not 0 < q <= 1:
        raise ValueError(f"share {q}, expected above 0 and at most 1")
    return sorted(values)[math.ceil(q * len(values)) - 1]


def summary(rounds: Sequence[Round], q: float = 0.5) -> Figure:
    """Return the median over the rounds of each round's percentile.

    One noisy minute spoils one round and not the figure.
    """
    per_round = [statistics.median(r.values) if q == 0.5 else percentile(r.values, q) for r in rounds if r.values]
    missed = sum(r.missed for r in rounds)
    tried = missed + sum(len(r.values) for r in rounds)
    return Figure(statistics.median(per_round) if per_round else None, missed, tried)


def ratio(ours: Figure, other: Figure) -> float | None:
    """Return how many times the other's value ours is; None when either never came or there is nothing to divide by."""
    if ours.value is None or not other.value:
        return None
    return ours.value / other.value


class Samples:
    """Rounds by subject and by what was measured."""

    def __init__(self) -> None:
        self._rounds: defaultdict[tuple[str, str], list[Round]] = defaultdict(list)
        self._texts: dict[tuple[str, str], str] = {}

    def add(self, subject: str, key: str, *values: float, missed: int = 0) -> None:
        """Add one round."""
        self._rounds[subject, key].append(Round(values, missed))

    def note(self, subject: str, key: str, text: str) -> None:
        """Keep an answer that is no number; the last one counts."""
        self._texts[subject, key] = text

    def text(self, subject: str, key: str) -> str | None:
        """Return an answer that is no number."""
        return self._texts.get((subject, key))

    def rounds(self, subject: str, key: str) -> tuple[Round, ...]:
        """Return the rounds so far, none when it was not measured."""
        return tuple(self._rounds.get((subject, key), ()))

    def figure(self, subject: str, key: str, q: float = 0.5) -> Figure | None:
        """Return the figure, or None when it was not measured for this subject."""
        rounds = self.rounds(subject, key)
        return summary(rounds, q) if rounds else None

    def as_json(self) -> dict[str, Any]:
        """Return everything, by subject and key."""
        found: dict[str, Any] = {}
        for (subject, key), rounds in sorted(self._rounds.items()):
            found.setdefault(subject, {})[key] = [{"values": list(r.values), "missed": r.missed} for r in rounds]
        for (subject, key), text in sorted(self._texts.items()):
            found.setdefault(subject, {})[key] = text
        return found
