# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What we want to reach, as data, and whether a run reached it. Nothing fails because of it.

A target is relative to a peer where it can be, to another figure of ours, or an absolute orientation. What a peer
showed when it was measured last stands here too, and is used, marked as stated, in runs without that peer.
Source of the stated figures: one run on a 2-core x86_64 virtual machine, Linux 6.18, CPython 3.11.7, of NVIDIA's
sandbox-device-plugin (edb816e5) and kubevirt-gpu-device-plugin (d26f2374) and of kata-containers' kata-device-plugin
(49cf6a6), on a fake node with the same 12 functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.plugin.samples import Figure, Samples
from bench.plugin.subject import OURS

NOT_MEASURED: Final = "stated, not measured here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure of ours is at most `factor` times a reference.

    The reference is, in this order: the figure `own` of ours; the same figure of the peer whose name begins with
    `peer`, if it took part; the range `stated`.
    """

    figure: str
    sentence: str
    factor: float = 1.0
    q: float = 0.5
    own: str = ""
    peer: str = ""
    stated: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """What a figure may be at most: sure to be met at or below `low`, sure to be missed above `high`."""

    low: float
    high: float
    origin: str

    def verdict(self, figure: Figure) -> str:
        """Say whether a figure is within the bound; what never came is not."""
        if figure.value is None or figure.missed or figure.value > self.high:
            return "missed"
        return "met" if figure.value <= self.low else "within the stated range"


def _absolute(figure: str, limit: float, sentence: str, q: float = 0.5) -> Target:
    return Target(figure=figure, sentence=sentence, stated=(limit, limit), q=q)


TARGETS: Final = (
    Target(
        figure="registered@12",
        sentence="From exec until both resources are registered: at most 0.6 of sandbox-device-plugin.",
        factor=0.6,
        peer="sandbox",
        stated=(196.0, 291.0),
    ),
    Target(
        figure="registered@1000",
        sentence="The same with 1,000 devices: at most 1.5 times that with 12.",
        factor=1.5,
        own="registered@12",
    ),
    Target(
        figure="rss@12",
        sentence="Idle RSS with 12 devices: at most 0.6 of sandbox-device-plugin, about 28 MiB.",
        factor=0.6,
        peer="sandbox",
        stated=(47.9, 47.9),
    ),
    _absolute("rss@5000", 32.0, "Idle RSS with 5,000 devices: at most 32 MiB."),
    _absolute("threads@12", 1.0, "One thread."),
    _absolute("awake@12", 7.0, "Asleep between two rescans: awake in at most one second of ten."),
    _absolute("gone@12", 3.0, "A device that goes reaches the kubelet's stream in 3 ms, none missed."),
    _absolute("back@12", 3.0, "A device that comes back reaches the kubelet's stream in 3 ms, none missed."),
    _absolute("gone@1000", 10.0, "With 1,000 devices, a device that goes reaches the stream in 10 ms."),
    _absolute("back@1000", 10.0, "With 1,000 devices, a device that comes back reaches the stream in 10 ms."),
    *(
        Target(
            figure=f"allocate-{size}@12",
            sentence=f"Allocate of {size}, from Go: {name} at most that of the Rust reference.",
            q=q,
            peer="kata",
            stated=(stated, stated),
        )
        for size in (1, 8)
        for name, q, stated in (("the median", 0.5, 485.0), ("the 99th percentile", 0.99, 710.0))
    ),
    Target(
        figure="allocate-1@1000",
        sentence="Allocate of 1 out of 1,000 devices: the median at most 1.5 times that out of 12.",
        factor=1.5,
        own="allocate-1@12",
    ),
    *(
        _absolute(f"restart-{order}@12", 50.0, "Registered within 50 ms of a new kubelet's socket, in any order.")
        for order in ("emptied", "alone", "gap", "absent")
    ),
    *(
        Target(
            figure=f"scan-facts@{count}",
            sentence=f"One scan of {count:,} devices: at most 0.7 of the Go loop.",
            factor=0.7,
            peer="go loop",
        )
        for count in (8, 1_000, 10_000)
    ),
)


def find(figure: str, q: float) -> Target | None:
    """Return the target of a figure, or None."""
    return next((target for target in TARGETS if (target.figure, target.q) == (figure, q)), None)


def bound(target: Target, samples: Samples, peers: Sequence[str]) -> Bound | None:
    """Return what a target allows in this run, or None when its reference is missing."""
    if target.own:
        own = samples.figure(OURS, target.own, target.q)
        if own is None or own.value is None:
            return None
        return Bound(own.value * target.factor, own.value * target.factor, f"{target.factor:g} of {target.own}")
    for peer in peers:
        measured = samples.figure(peer, target.figure, target.q)
        if target.peer and peer.startswith(target.peer) and measured is not None and measured.value is not None:
            limit = measured.value * target.factor
            return Bound(limit, limit, f"{target.factor:g} of {peer}")
    if target.stated is None:
        return None
    low, high = (limit * target.factor for limit in target.stated)
    return Bound(low, high, f"{target.factor:g} of {target.peer}, {NOT_MEASURED}" if target.peer else "orientation")
