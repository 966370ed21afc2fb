# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""How much is measured: the full run for people, the short one for every change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BOARD: Final = 12
"""Eight GPUs and four NVSwitches."""
MANY: Final = 1_000
MOST: Final = 5_000
"""Memory only: the list is well over HTTP/2's first flow-control window of 64 KiB."""
SCANNED: Final = (8, 1_000, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Counts and durations. A round is one turn of every subject."""

    name: str
    rounds: int
    rounds_of_many: int
    starts: int
    """Further rounds that only start the subject, since a start is short and varies much."""
    events: int
    calls: int
    restarts: int
    settle_s: float
    idle_s: int
    start_patience_s: float
    event_patience_s: float
    restart_patience_s: float
    pause_s: float
    """From a kubelet's death to the next one, as an operator's restart takes."""
    absence_s: float
    scan_passes: int
    scan_passes_of_most: int


FULL: Final = Extent(
    name="full",
    rounds=5,
    rounds_of_many=4,
    starts=10,
    events=12,
    calls=1_000,
    restarts=3,
    settle_s=30.0,
    idle_s=60,
    start_patience_s=60.0,
    event_patience_s=6.0,
    restart_patience_s=15.0,
    pause_s=1.0,
    absence_s=8.0,
    scan_passes=11,
    scan_passes_of_most=5,
)

SHORT: Final = Extent(
    name="short",
    rounds=2,
    rounds_of_many=1,
    starts=3,
    events=4,
    calls=200,
    restarts=1,
    settle_s=2.0,
    idle_s=12,
    start_patience_s=10.0,
    event_patience_s=1.0,
    restart_patience_s=1.5,
    pause_s=0.2,
    absence_s=1.0,
    scan_passes=3,
    scan_passes_of_most=1,
)
