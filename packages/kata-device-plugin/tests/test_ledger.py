# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kata_device_plugin.ledger import RECHECKS_S, SETTLED_S, Ledger, Verdict
from kata_device_plugin.preference import Place
from kata_device_plugin.scanner import Sighting, Standing
from pcifacts.address import PciAddress
from pcifacts.ids import DeviceKind

A = PciAddress.parse("0000:65:00.0")
B = PciAddress.parse("0000:66:00.0")


def seen(
    address: PciAddress = A, standing: Standing = Standing.USABLE, *, cdev: int = 0, kind: DeviceKind = DeviceKind.GPU
) -> Sighting:
    reason = "" if standing is Standing.USABLE else standing.value
    if standing in (Standing.OFF_VFIO, Standing.ABSENT):
        return Sighting(address, standing, reason)
    place = Place(0, (), (address.ordinal,))
    return Sighting(address, standing, reason, kind, f"/dev/vfio/devices/vfio{cdev}", place)


def verdicts(ledger: Ledger, sighting: Sighting, now_s: float = 0.0) -> list[Verdict]:
    return [change.verdict for change in ledger.apply([sighting], now_s)]


def is_healthy(ledger: Ledger, address: PciAddress = A) -> bool | None:
    listed = ledger.find(address)
    return None if listed is None else listed.healthy


def test_a_bound_device_is_listed_once() -> None:
    ledger = Ledger()
    assert verdicts(ledger, seen()) == [Verdict.LISTED]
    assert verdicts(ledger, seen()) == []
    assert is_healthy(ledger)


def test_a_device_without_a_usable_node_is_listed_unhealthy_from_the_start() -> None:
    ledger = Ledger()
    assert verdicts(ledger, seen(standing=Standing.UNUSABLE)) == [Verdict.LISTED]
    assert is_healthy(ledger) is False
    assert verdicts(ledger, seen()) == [Verdict.HEALTHY]


def test_what_was_never_listed_is_not_missed() -> None:
    ledger = Ledger()
    for standing in (Standing.ABSENT, Standing.OFF_VFIO, Standing.WITHOUT_NODES):
        assert verdicts(ledger, seen(standing=standing)) == []
    assert ledger.addresses() == ()
    assert ledger.due_at_s() is None


def test_a_vanished_device_stays_unhealthy_for_ever_and_comes_back() -> None:
    ledger = Ledger()
    verdicts(ledger, seen())
    assert verdicts(ledger, seen(standing=Standing.ABSENT), 1.0) == [Verdict.UNHEALTHY]
    assert verdicts(ledger, seen(standing=Standing.ABSENT), 1e9) == []
    assert is_healthy(ledger) is False
    assert verdicts(ledger, seen(cdev=3), 1e9 + 1) == [Verdict.HEALTHY]


def test_a_device_taken_off_vfio_is_unhealthy_at_once_and_leaves_when_it_has_settled() -> None:
    ledger = Ledger()
    verdicts(ledger, seen())
    assert verdicts(ledger, seen(standing=Standing.OFF_VFIO), 1.0) == [Verdict.UNHEALTHY]
    assert verdicts(ledger, seen(standing=Standing.OFF_VFIO), 1.0 + SETTLED_S - 0.01) == []
    assert verdicts(ledger, seen(standing=Standing.OFF_VFIO), 1.01 + SETTLED_S) == [Verdict.LEFT]
    assert ledger.addresses() == ()
    assert ledger.due_at_s() is None


def test_a_rebind_does_not_move_the_capacity() -> None:
    ledger = Ledger()
    verdicts(ledger, seen())
    verdicts(ledger, seen(standing=Standing.UNUSABLE), 1.0)
    verdicts(ledger, seen(standing=Standing.OFF_VFIO), 1.1)
    assert verdicts(ledger, seen(cdev=5), 1.2) == [Verdict.HEALTHY]
    assert ledger.due_at_s() is None


def test_another_cdev_behind_the_same_device_is_told() -> None:
    ledger = Ledger()
    verdicts(ledger, seen())
    assert verdicts(ledger, seen(cdev=1)) == [Verdict.MOVED]


def test_a_device_that_lost_its_node_is_looked_at_until_it_has_settled() -> None:
    ledger = Ledger()
    verdicts(ledger, seen())
    verdicts(ledger, seen(standing=Standing.UNUSABLE), 10.0)
    looks = []
    for _ in range(10):
        at = ledger.due_at_s()
        if at is None:
            break
        looks.append(round(at - 10.0, 6))
        assert ledger.due(at) == (A,)
        verdicts(ledger, seen(standing=Standing.UNUSABLE), at)
    assert looks == list(RECHECKS_S)


def test_a_device_off_vfio_has_left_by_its_own_rechecks_alone() -> None:
    ledger = Ledger()
    verdicts(ledger, seen())
    verdicts(ledger, seen(standing=Standing.OFF_VFIO), 10.0)
    last = 10.0
    while (at := ledger.due_at_s()) is not None:
        for address in ledger.due(at):
            verdicts(ledger, seen(address, Standing.OFF_VFIO), at)
        last = at
    assert ledger.addresses() == ()
    assert last - 10.0 < 1.0


def test_another_kind_at_the_same_address_leaves_one_list_and_joins_the_other() -> None:
    ledger = Ledger()
    verdicts(ledger, seen())
    assert verdicts(ledger, seen(kind=DeviceKind.NVSWITCH)) == [Verdict.LEFT, Verdict.LISTED]
    assert ledger.of_kind(DeviceKind.GPU) == ()
    assert [listed.address for listed in ledger.of_kind(DeviceKind.NVSWITCH)] == [A]


def test_lists_are_in_address_order() -> None:
    ledger = Ledger()
    ledger.apply([seen(B, cdev=0), seen(A, cdev=1)], 0.0)
    assert [listed.address for listed in ledger.of_kind(DeviceKind.GPU)] == [A, B]


class AnyHistory(RuleBasedStateMachine):
    """Whatever is seen in whatever order, an id stands for one device, and only a usable one is healthy."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now = 0.0
        self.last: dict[PciAddress, Sighting] = {}
        self.ever: set[PciAddress] = set()

    @rule(
        address=st.sampled_from([A, B]),
        standing=st.sampled_from(Standing),
        cdev=st.integers(0, 2),
        wait=st.sampled_from([0.0, 0.01, 0.3, 0.6, 20.0]),
    )
    def see(self, address: PciAddress, standing: Standing, cdev: int, wait: float) -> None:
        self.now += wait
        self.last[address] = seen(address, standing, cdev=cdev)
        changes = self.ledger.apply([self.last[address]], self.now)
        assert all(change.listed.address == address for change in changes)
        if standing in (Standing.USABLE, Standing.UNUSABLE):
            self.ever.add(address)

    @rule()
    def recheck(self) -> None:
        at = self.ledger.due_at_s()
        if at is not None:
            self.now = max(self.now, at)
            for address in self.ledger.due(self.now):
                self.ledger.apply([self.last[address]], self.now)

    @invariant()
    def only_what_is_usable_is_healthy(self) -> None:
        for address in self.ledger.addresses():
            listed = self.ledger.find(address)
            assert listed is not None
            assert listed.healthy == (self.last[address].standing is Standing.USABLE)
            assert listed.healthy or listed.reason
            if listed.healthy:
                assert listed.node == self.last[address].node

    @invariant()
    def what_is_usable_is_listed_and_nothing_is_made_up(self) -> None:
        listed = set(self.ledger.addresses())
        assert listed <= self.ever
        assert {address for address, sight in self.last.items() if sight.standing is Standing.USABLE} <= listed


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
