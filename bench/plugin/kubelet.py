# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The kubelet that takes the times: go/kubelet, in a child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from conformance.json_lines import JsonLines, Refused


class Order(StrEnum):
    """What happens to the plugin directory before a new kubelet listens."""

    EMPTIED = "emptied"
    """Every socket is removed, as a kubelet does."""
    ALONE = "alone"
    """Only the dead kubelet.sock is."""


@dataclass(frozen=True, slots=True)
class State:
    """What the kubelet holds. Times are CLOCK_MONOTONIC, ns.

    `at_ns` is when the list came that was waited for, and `met` whether it did. `registered` says of each resource
    when the kubelet had dialled back. `devices` are the healthy ones, `numa` counts those with a NUMA node.
    """

    met: bool
    at_ns: int
    healthy: int
    registered: Mapping[str, int]
    devices: Mapping[str, tuple[str, ...]]
    numa: int

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> Self:
        devices = {resource: tuple(ids) for resource, ids in answer.get("devices", {}).items()}
        return cls(
            answer["met"],
            answer["at_ns"],
            answer["healthy"],
            answer["registered"],
            devices,
            answer.get("numa", 0),
        )


class Kubelet:
    """One kubelet from its first moment to its violent end; it listens after `start`."""

    def __init__(self, binary: Path, plugin_dir: Path, log: Path) -> None:
        self._process = JsonLines([str(binary)], name="kubelet", log=log)
        self._plugin_dir = plugin_dir

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it with SIGKILL: its socket file stays."""
        self._process.kill()

    def start(self, order: Order = Order.EMPTIED) -> int:
        """Make the socket; return the moment before it listened."""
        return int(self._process.ask("start", dir=str(self._plugin_dir), order=order)["at_ns"])

    def wait(self, healthy: int, *, after_ns: int, within_s: float) -> State:
        """Wait for a list, sent after a moment, that brings the healthy devices of all resources to a number."""
        answer = self._process.ask(
            "wait", healthy=healthy, after_ns=after_ns, within_ms=int(within_s * 1e3), within_s=within_s + 10
        )
        return State.from_json(answer)

    def state(self) -> State:
        """Return what it holds now."""
        return State.from_json(self._process.ask("state"))

    def allocate(
        self, resource: str, ids: Sequence[Sequence[str]], *, calls: int, warm_up: int
    ) -> tuple[int, ...] | str:
        """Return how long each call took in ns, or why one was refused."""
        try:
            answer = self._process.ask(
                "allocate",
                resource=resource,
                ids=[list(group) for group in ids],
                count=calls,
                warm_up=warm_up,
                within_s=120.0,
            )
        except Refused as refused:
            return refused.observed
        return tuple(answer["ns"]) if answer["named"] else "an answer that hands nothing to the runtime"

    def refusal(self, resource: str, unknown_id: str) -> tuple[str, str]:
        """Return the status code and the message of an Allocate for an id that was never listed."""
        answer = self._process.ask("refusal", resource=resource, id=unknown_id)
        return answer["code"], answer["message"]
