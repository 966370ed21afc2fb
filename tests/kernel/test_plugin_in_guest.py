# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The plugin and a kubelet's device manager on a real kernel, with functions that the kernel's vfio-pci holds."""

from __future__ import annotations

import json
import re
from functools import partial

from conformance.real_kubelet import Capacity, Pod
from tests.kernel.conftest import NewGuest
from tests.kernel.real_node import GPU, SWITCH, GuestKubelet, PluginInGuest, RealNode, cdi_nodes, names
from tests.kernel.waiting import until

from vmlab.machine import Iommu


def _running(node: RealNode, *, contained: bool = False) -> tuple[GuestKubelet, PluginInGuest]:
    """Start a kubelet, an observer and the plugin on a node that has everything bound, and wait for both lists."""
    node.load_vfio()
    kubelet = node.start_kubelet()
    node.start_observer()
    plugin = node.start_plugin(contained=contained)
    kubelet.wait(GPU, healthy=node.gpus, unhealthy=(), within_s=90)
    kubelet.wait(SWITCH, healthy=node.switches, unhealthy=(), within_s=90)
    return kubelet, plugin


def _resolves(node: RealNode) -> None:
    """Every id that the kubelet holds as healthy resolves to the node that the kernel made for it, and to no other."""
    cdi, cdevs = node.cdi(), node.cdevs()
    findings = cdi.refresh()
    assert (findings.error, dict(findings.files)) == ("", {})
    listed = {
        *names((a for a in node.gpus if a in cdevs), GPU),
        *names((a for a in node.switches if a in cdevs), SWITCH),
    }
    assert set(cdi.devices()) == listed
    for name in listed:
        (given,) = cdi.inject(name)
        assert (given.path, given.type, given.permissions) == (cdevs[name.split("=")[1]], "c", "rw")


def test_a_plugin_that_starts_before_dev_vfio_exists_says_so_once_and_lists_everything_after_modprobe(
    node: RealNode,
) -> None:
    assert node.guest.run("test -e /dev/vfio", check=False).exit_code == 1
    kubelet = node.start_kubelet()
    node.start_observer()
    plugin = node.start_plugin()
    plugin.wait_for("node.without-devices")
    assert kubelet.capacity() == Capacity({}, {}, ())

    node.load_vfio()
    kubelet.wait(GPU, healthy=node.gpus, unhealthy=(), within_s=90)
    kubelet.wait(SWITCH, healthy=node.switches, unhealthy=(), within_s=90)
    expected = {GPU: 2, SWITCH: 1}
    assert kubelet.capacity() == Capacity(expected, expected, ())
    assert len(plugin.events("node.without-devices")) == 1
    _resolves(node)
    assert plugin.terminate() == 0


def test_the_list_follows_each_unbind_and_bind(node: RealNode) -> None:
    kubelet, _ = _running(node)
    for resource, addresses in ((GPU, node.gpus), (SWITCH, node.switches)):
        for address in addresses:
            path = node.cdevs()[address]
            node.timed(f"unbind {address}", partial(node.unbind, address), resource=resource, what="delete", path=path)
            others = [other for other in addresses if other != address]
            kubelet.wait(resource, healthy=others, unhealthy=(), within_s=90)
            _resolves(node)
            node.timed(f"bind {address}", partial(node.bind, address), resource=resource, what="create", path=path)
            kubelet.wait(resource, healthy=addresses, unhealthy=(), within_s=90)
            _resolves(node)


def test_a_function_taken_off_the_bus_is_unhealthy_and_comes_back_under_its_id(node: RealNode) -> None:
    kubelet, plugin = _running(node)
    gone, other = node.gpus
    path = node.cdevs()[gone]
    node.timed(f"remove {gone}", lambda: node.remove(gone), resource=GPU, what="delete", path=path)
    kubelet.wait(GPU, healthy=[other], unhealthy=[gone], within_s=90)
    assert kubelet.capacity() == Capacity({GPU: 2, SWITCH: 1}, {GPU: 1, SWITCH: 1}, ())
    assert cdi_nodes(node.guest, GPU).keys() == {other}
    _resolves(node)

    # vfio-pci still knows the ids, so the function is bound as soon as it is found.
    node.timed(f"rescan finds {gone}", node.rescan, resource=GPU, what="create", path=path)
    kubelet.wait(GPU, healthy=node.gpus, unhealthy=(), within_s=90)
    assert plugin.wait_for("device.healthy", device=gone)["node"] == node.cdevs()[gone]
    assert not plugin.events("device.left")
    _resolves(node)


def test_after_a_rebind_in_the_other_order_each_id_has_the_node_that_is_now_its_own(node: RealNode) -> None:
    kubelet, _ = _running(node)
    before = node.cdevs()
    # By number, not by address: vfio-pci binds in the order in which functions came onto the bus.
    first, second = sorted(node.gpus, key=before.__getitem__)
    for address in (first, second):
        node.unbind(address)
    for address in (second, first):
        node.bind(address)
    after = node.cdevs()
    assert (after[first], after[second]) == (before[second], before[first])
    kubelet.wait(GPU, healthy=node.gpus, unhealthy=(), within_s=90)

    def as_kernel_says() -> bool | None:
        return cdi_nodes(node.guest, GPU) == {address: after[address] for address in node.gpus} or None

    until(as_kernel_says, f"CDI nodes {after}", lambda: str(cdi_nodes(node.guest, GPU)))
    _resolves(node)


def test_a_pod_gets_the_gpu_that_the_kubelet_booked_through_a_node_that_exists(node: RealNode) -> None:
    kubelet, _ = _running(node)
    given = kubelet.allocate(Pod.of("one", gpu=2, nvswitch=1))["main"]
    assert sorted(given.cdi) == sorted((*names(node.gpus, GPU), *names(node.switches, SWITCH)))
    assert (given.devices, given.mounts, given.envs) == ((), (), {})
    assert {one.path for one in node.cdi().inject(*given.cdi)} == set(node.cdevs().values())


def test_in_a_container_s_shape_it_sees_nodes_come_and_go_by_event(node: RealNode) -> None:
    kubelet = node.start_kubelet()
    node.start_observer()
    plugin = node.start_plugin(contained=True)
    plugin.wait_for("node.without-devices")
    status = node.guest.run(f"cat /proc/{plugin.pid}/status /proc/{plugin.pid}/mountinfo").out
    assert "CapEff:\t0000000000000000" in status
    assert "CapBnd:\t0000000000000000" in status
    assert re.search(r" /sys ro[,\s]", status)

    node.load_vfio()
    kubelet.wait(GPU, healthy=node.gpus, unhealthy=(), within_s=90)
    kubelet.wait(SWITCH, healthy=node.switches, unhealthy=(), within_s=90)
    _resolves(node)
    address = node.gpus[0]
    path = node.cdevs()[address]
    node.timed(f"contained: unbind {address}", lambda: node.unbind(address), resource=GPU, what="delete", path=path)
    kubelet.wait(GPU, healthy=node.gpus[1:], unhealthy=(), within_s=90)
    node.timed(f"contained: bind {address}", lambda: node.bind(address), resource=GPU, what="create", path=path)
    kubelet.wait(GPU, healthy=node.gpus, unhealthy=(), within_s=90)

    # The last node takes its folder along, the first one brings it back.
    everything = (*node.gpus, *node.switches)
    for each in everything:
        node.unbind(each)
    kubelet.wait(GPU, healthy=(), unhealthy=(), within_s=90)
    assert node.guest.run("test -e /dev/vfio/devices", check=False).exit_code == 1
    node.bind(address)
    kubelet.wait(GPU, healthy=[address], unhealthy=(), within_s=90)
    _resolves(node)
    assert not plugin.events("watch.unavailable", "run.unexpected", "cdi.failed", "socket.failed", "scan.failed")
    assert plugin.terminate() == 0


def test_on_a_kernel_without_device_nodes_it_names_the_bound_functions_and_lists_none(node: RealNode) -> None:
    node.load_vfio(stock=True)
    bound = [*node.gpus, *node.switches]
    links = node.guest.run(
        "for n in /sys/class/vfio-dev/*; do test -e $n/dev && echo $n; done; ls /sys/class/vfio-dev"
    ).out
    assert links.split() == [f"vfio{number}" for number in range(len(bound))], "the stock modules make nodes after all"
    kubelet = node.start_kubelet()
    plugin = node.start_plugin()
    told = plugin.wait_for("node.without-device-nodes")
    assert sorted(told["devices"]) == sorted(bound)
    assert kubelet.capacity() == Capacity({}, {}, ())
    assert node.guest.run("ls -A /var/run/cdi 2>/dev/null", check=False).out == ""

    # The right modules, without a restart of the plugin.
    node.unload_vfio()
    node.load_vfio()
    kubelet.wait(GPU, healthy=node.gpus, unhealthy=(), within_s=90)
    kubelet.wait(SWITCH, healthy=node.switches, unhealthy=(), within_s=90)
    assert plugin.terminate() == 0


def test_without_an_iommu_it_says_so_in_one_line_and_keeps_waiting(new_guest: NewGuest, figures: list[str]) -> None:
    with new_guest(Iommu.NONE) as guest:
        figures.append(f"boot to agent {guest.boot_s:.1f} s, without an IOMMU")
        node = RealNode(guest)
        node.reset()
        plugin = node.start_plugin()
        told = plugin.wait_for("node.without-devices")
        node.load_vfio()
        refusals = guest.run("dmesg | grep -E 'vfio-pci.*error -22'").out
        assert all(address in refusals for address in (*node.gpus, *node.switches))
        # A second start of the same program finds the module loaded and nothing bound: the same line, and no other.
        assert json.loads(guest.run("PYTHONPATH=/payload/site python3 -m kata_device_plugin list -o json").out) == []
        lines = [line["event"] for line in plugin.events()]
        assert [line for line in lines if line not in {"run.started", "kubelet.absent"}] == ["node.without-devices"]
        figures.append(f"without an IOMMU it says: {told['reason']}")
        assert plugin.is_running()
        assert plugin.terminate() == 0
