# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import inotify_simple
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simnode import boards
from simnode.__main__ import main
from simnode.node import Device, Kernel, Node
from simnode.tree import Fault, KernelRefusal, LiveNode

GPU = "0000:16:00.0"
OTHER_GPU = "0000:27:00.0"


@pytest.fixture
def live(tmp_path: Path) -> LiveNode:
    return LiveNode.create(tmp_path, boards.pcie_h100_nvl())


@pytest.fixture
def bare(tmp_path: Path) -> LiveNode:
    return LiveNode.create(tmp_path, boards.unbound(boards.pcie_h100_nvl()))


def snapshot(root: Path) -> dict[str, str]:
    """Return every path below a directory with what it holds: a link's target, a file's text, or nothing."""
    seen: dict[str, str] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            where = os.path.relpath(path, root)
            if os.path.islink(path):
                seen[where] = f"-> {os.readlink(path)}"
            else:
                seen[where] = "" if os.path.isdir(path) else Path(path).read_text()
    return seen


def dangling_links(root: Path) -> list[str]:
    return [
        os.path.join(folder, name)
        for folder, folders, files in os.walk(root)
        for name in (*folders, *files)
        if not os.path.exists(os.path.join(folder, name))
    ]


def test_a_function_looks_as_the_kernel_shows_it(live: LiveNode) -> None:
    # Layout and spelling as observed on Linux 7.3, QEMU 11.1.
    folder = live.sysfs / "devices/pci0000:15/0000:15:01.0" / GPU
    assert os.readlink(live.sysfs / "bus/pci/devices" / GPU) == f"../../../devices/pci0000:15/0000:15:01.0/{GPU}"
    assert (folder / "vendor").read_text() == "0x10de\n"
    assert (folder / "device").read_text() == "0x2321\n"
    assert (folder / "class").read_text() == "0x030200\n"
    assert (folder / "numa_node").read_text() == "0\n"
    assert (folder / "power_state").read_text() == "D3hot\n"
    assert (folder / "driver_override").read_text() == "(null)\n"
    assert (folder / "reset_method").read_text() == "flr bus\n"
    assert "PCI_ID=10DE:2321" in (folder / "uevent").read_text()
    assert (folder / "modalias").read_text().startswith("pci:v000010DEd00002321sv000010DEsd00001839bc03sc02i00")
    assert os.readlink(folder / "driver") == "../../../../bus/pci/drivers/vfio-pci"
    group = os.path.basename(os.readlink(folder / "iommu_group"))
    assert os.readlink(folder / "iommu_group") == f"../../../../kernel/iommu_groups/{group}"
    assert os.listdir(live.sysfs / "kernel/iommu_groups" / group / "devices") == [GPU]
    assert (live.sysfs / "bus/pci/drivers/vfio-pci" / GPU).samefile(folder)


def test_a_vfio_device_looks_as_the_kernel_shows_it(live: LiveNode) -> None:
    name = live.cdev(GPU)
    assert name == "vfio0"
    entry = live.sysfs / "class/vfio-dev" / name
    assert os.readlink(entry) == f"../../devices/pci0000:15/0000:15:01.0/{GPU}/vfio-dev/{name}"
    assert os.readlink(entry / "device") == f"../../../{GPU}"
    assert (entry / "dev").read_text() == "1:3\n"
    assert (entry / "subsystem").samefile(live.sysfs / "class/vfio-dev")
    node = live.node_path(GPU)
    assert node == live.dev_vfio / "devices" / name
    status = node.stat()
    assert stat.S_ISCHR(status.st_mode)
    assert (os.major(status.st_rdev), os.minor(status.st_rdev)) == (1, 3)
    group = os.path.basename(os.readlink(live.device_dir(GPU) / "iommu_group"))
    assert {"vfio", "devices", group} <= set(os.listdir(live.dev_vfio))


@pytest.mark.parametrize("board", [board for name, board in boards.ALL.items() if name != "thousand_gpus"])
def test_no_link_of_a_board_dangles(board: Callable[[], Node], tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, board())
    assert dangling_links(tmp_path) == []
    assert live.state() == live.node


def test_an_unknown_numa_node_is_written_as_the_kernel_writes_it(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.mixed())
    assert (live.device_dir("0000:17:00.0") / "numa_node").read_text() == "-1\n"


def test_a_wide_domain_hangs_below_the_bridge_that_opens_it(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.mixed())
    below = "pci0000:60/0000:60:00.5/pci10000:00/10000:00:04.0/10000:02:00.0"
    assert live.device_dir("10000:02:00.0") == live.sysfs / "devices" / below


def test_virtual_and_physical_functions_know_each_other(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.vgpu_host())
    physical = live.device_dir("0000:8c:00.0")
    assert (live.device_dir("0000:8c:03.5") / "physfn").samefile(physical)
    assert [os.readlink(physical / f"virtfn{index}") for index in range(4)] == [
        f"../0000:8c:03.{number}" for number in (3, 4, 5, 6)
    ]
    live.remove("0000:8c:03.4")
    assert sorted(name for name in os.listdir(physical) if name.startswith("virtfn")) == [
        "virtfn0",
        "virtfn2",
        "virtfn3",
    ]
    assert dangling_links(live.sysfs) == []


# What comes and goes, and in which order.


class Watched:
    """Every name that comes or goes in some directories, in order, as inotify tells it."""

    def __init__(self, *paths: Path) -> None:
        self._inotify = inotify_simple.INotify()
        self._paths: dict[int, Path] = {}
        flags = inotify_simple.flags
        for path in paths:
            mask = flags.CREATE | flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO
            self._paths[self._inotify.add_watch(path, mask)] = path

    def events(self) -> list[tuple[str, str, str]]:
        """Return (what, directory, name) of everything so far."""
        told = []
        for event in self._inotify.read(timeout=0):
            came = event.mask & inotify_simple.flags.CREATE
            told.append(("+" if came else "-", self._paths[event.wd].name, event.name))
        return told

    def close(self) -> None:
        self._inotify.close()


@pytest.fixture
def watched(live: LiveNode) -> Iterator[Watched]:
    watched = Watched(
        live.dev_vfio,
        live.dev_vfio / "devices",
        live.sysfs / "class/vfio-dev",
        live.sysfs / "bus/pci/devices",
        live.sysfs / "bus/pci/drivers/vfio-pci",
        live.device_dir(GPU),
        live.device_dir(GPU) / "vfio-dev/vfio0",
    )
    yield watched
    watched.close()


def group_of(live: LiveNode, address: str) -> str:
    return os.path.basename(os.readlink(live.device_dir(address) / "iommu_group"))


def test_an_unbind_takes_the_node_before_anything_else_of_the_vfio_device(live: LiveNode, watched: Watched) -> None:
    group = group_of(live, GPU)
    live.unbind(GPU)
    told = [event for event in watched.events() if event[2] != "power_state"]
    assert told[:5] == [
        ("-", "vfio-pci", GPU),
        ("-", GPU, "driver"),
        ("-", "devices", "vfio0"),
        ("-", "vfio0", "dev"),
        ("-", "vfio-dev", "vfio0"),
    ]
    assert told[-2:] == [("-", GPU, "vfio-dev"), ("-", "vfio", group)]


def test_a_bind_makes_the_node_after_everything_else(live: LiveNode, watched: Watched) -> None:
    group = group_of(live, GPU)
    live.unbind(GPU)
    watched.events()
    live.bind(GPU)
    assert watched.events() == [
        ("+", GPU, "driver"),
        ("+", "vfio-pci", GPU),
        ("+", "vfio", group),
        ("+", GPU, "vfio-dev"),
        ("+", "vfio-dev", "vfio0"),
        ("+", "devices", "vfio0"),
    ]


BIND_WITH_A_JOURNAL = """
import sys
from pathlib import Path
from simnode import boards
from simnode.tree import LiveNode

live = LiveNode.create(Path(sys.argv[1]), boards.pcie_h100_nvl())
live.unbind("0000:16:00.0")
journal = []
kinds = {"os.mkdir": 0, "os.symlink": 1, "open": 0}
sys.addaudithook(lambda event, arguments: event in kinds and journal.append(str(arguments[kinds[event]])))
live.bind("0000:16:00.0")
made, journal = journal, []
print("\\n".join(made))
"""


def test_a_bind_makes_the_device_number_before_the_node(tmp_path: Path) -> None:
    # Nobody can watch a folder that does not exist yet, so the process that makes it keeps a journal.
    done = subprocess.run(
        [sys.executable, "-c", BIND_WITH_A_JOURNAL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    made = [os.path.relpath(path, tmp_path) for path in done.stdout.split()]
    folder = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0"
    expected = [
        f"{folder}/driver",
        f"{folder}/vfio-dev/vfio0",
        "sys/class/vfio-dev/vfio0",
        f"{folder}/vfio-dev/vfio0/dev",
        "dev/vfio/devices/vfio0",
    ]
    assert [made.index(path) for path in expected] == sorted(made.index(path) for path in expected)


def test_removal_takes_the_driver_then_the_node_then_the_function(live: LiveNode, watched: Watched) -> None:
    live.remove(GPU)
    told = watched.events()
    order = [
        told.index(("-", "vfio-pci", GPU)),
        told.index(("-", "devices", "vfio0")),
        told.index(("-", "vfio-dev", "vfio0")),
        told.index(("-", GPU, "subsystem")),
        # Two directories are called "devices"; a function's name tells which one is meant.
        told.index(("-", "devices", GPU)),
        told.index(("-", GPU, "vendor")),
    ]
    assert order == sorted(order)
    assert not live.device_dir(GPU).exists()
    assert not live.is_present(GPU)


def test_the_folder_of_nodes_comes_with_the_first_and_goes_with_the_last(bare: LiveNode) -> None:
    assert not bare.dev_vfio.exists()
    assert not (bare.sysfs / "class/vfio-dev").exists()
    for address in (GPU, OTHER_GPU):
        bare.unbind(address)
        bare.bind(address)
    assert sorted(os.listdir(bare.dev_vfio / "devices")) == ["vfio0", "vfio1"]
    bare.unbind(GPU)
    assert os.listdir(bare.dev_vfio / "devices") == ["vfio1"]
    bare.unbind(OTHER_GPU)
    # The container node and its folder stay while the module is loaded.
    assert os.listdir(bare.dev_vfio) == ["vfio"]
    assert os.listdir(bare.sysfs / "class/vfio-dev") == []


def test_numbers_are_the_lowest_free_and_are_given_to_whoever_comes_next(live: LiveNode) -> None:
    third = "0000:85:00.0"
    assert [live.cdev(address) for address in (GPU, OTHER_GPU, third)] == ["vfio0", "vfio1", "vfio2"]
    live.unbind(OTHER_GPU)
    live.unbind(GPU)
    assert live.bind(OTHER_GPU) == "vfio0"
    assert live.bind(GPU) == "vfio1"
    assert (live.sysfs / "class/vfio-dev/vfio0/device").samefile(live.device_dir(OTHER_GPU))


def test_a_group_node_stays_until_the_last_of_its_group_is_off_vfio(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.rtx_pro_6000())
    gpu, audio = "0000:21:00.0", "0000:21:00.1"
    group = group_of(live, gpu)
    assert group == group_of(live, audio)
    live.unbind(gpu)
    assert (live.dev_vfio / group).exists()
    live.unbind(audio)
    assert not (live.dev_vfio / group).exists()


def test_a_function_that_returns_is_held_by_nobody(live: LiveNode) -> None:
    before = snapshot(live.sysfs)
    live.remove(GPU)
    live.rescan(GPU)
    assert live.driver(GPU) is None
    assert live.cdev(GPU) is None
    assert (live.device_dir(GPU) / "power_state").read_text() == "D0\n"
    live.bind(GPU)
    assert snapshot(live.sysfs) == before


def test_a_function_can_be_plugged_that_was_not_there(live: LiveNode) -> None:
    model = live.node.device(GPU)
    live.plug(replace(model, address="0000:16:01.0", iommu_group=99))
    assert live.cdev("0000:16:01.0") == "vfio4"
    assert live.state().device("0000:16:01.0").driver == "vfio-pci"


def test_a_kernel_without_device_nodes_has_the_class_and_the_groups(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.no_cdev_kernel())
    entry = live.sysfs / "class/vfio-dev/vfio0"
    assert entry.exists()
    assert not (entry / "dev").exists()
    assert not (live.dev_vfio / "devices").exists()
    assert (live.dev_vfio / group_of(live, GPU)).exists()
    live.unbind(GPU)
    assert not entry.exists()


def test_an_old_kernel_shows_group_nodes_only(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.old_kernel())
    assert live.driver(GPU) == "vfio-pci"
    assert live.cdev(GPU) is None
    assert not (live.sysfs / "class/vfio-dev").exists()
    assert (live.dev_vfio / group_of(live, GPU)).exists()
    group = group_of(live, GPU)
    live.unbind(GPU)
    assert not (live.dev_vfio / group).exists()


# What the kernel refuses.


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(KernelRefusal) as caught:
        act()
    assert hasattr(errno, caught.value.errno_name)
    assert caught.value.errno_name in str(caught.value)
    return caught.value.errno_name


def test_binding_twice_is_refused(live: LiveNode) -> None:
    assert refusal(lambda: live.bind(GPU)) == "EBUSY"


def test_unbinding_what_nobody_holds_is_refused(live: LiveNode) -> None:
    live.unbind(GPU)
    assert refusal(lambda: live.unbind(GPU)) == "ENODEV"


def test_a_removed_function_can_be_neither_bound_nor_removed_again(live: LiveNode) -> None:
    live.remove(GPU)
    assert refusal(lambda: live.bind(GPU)) == "ENODEV"
    assert refusal(lambda: live.remove(GPU)) == "ENOENT"


def test_a_function_on_the_bus_does_not_come_again(live: LiveNode) -> None:
    assert refusal(lambda: live.rescan(GPU)) == "EEXIST"


def test_a_bridge_is_removed_after_what_it_carries_and_comes_back_before(live: LiveNode) -> None:
    bridge = "0000:15:01.0"
    assert refusal(lambda: live.remove(bridge)) == "ENOTEMPTY"
    live.remove(GPU)
    live.remove(bridge)
    assert refusal(lambda: live.rescan(GPU)) == "ENODEV"
    live.rescan(bridge)
    live.rescan(GPU)
    assert live.is_present(GPU)


def test_without_an_iommu_vfio_refuses_every_function(tmp_path: Path) -> None:
    live = LiveNode.create(tmp_path, boards.no_iommu())
    live.unbind(GPU)
    assert refusal(lambda: live.bind(GPU)) == "EINVAL"
    assert not live.dev_vfio.exists()


def test_a_device_off_vfio_has_nothing_to_damage_there(live: LiveNode) -> None:
    live.unbind(GPU)
    assert refusal(lambda: live.damage(GPU, Fault.NODE_MISSING)) == "ENOENT"


# Damage and repair.


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_changes_the_tree_and_its_undo_restores_it(live: LiveNode, fault: Fault) -> None:
    before = snapshot(live.root / "sys"), snapshot(live.root / "dev")
    undo = live.damage(GPU, fault)
    assert (snapshot(live.root / "sys"), snapshot(live.root / "dev")) != before
    undo()
    assert (snapshot(live.root / "sys"), snapshot(live.root / "dev")) == before


@pytest.mark.parametrize("fault", Fault)
def test_an_undo_brings_nothing_back_that_the_kernel_took_away(live: LiveNode, fault: Fault) -> None:
    undo = live.damage(GPU, fault)
    live.remove(GPU)
    live.rescan(GPU)
    expected = snapshot(live.root / "sys"), snapshot(live.root / "dev")
    undo()
    assert (snapshot(live.root / "sys"), snapshot(live.root / "dev")) == expected
    assert dangling_links(live.root / "sys") + dangling_links(live.root / "dev") == []


@pytest.mark.parametrize("fault", Fault)
def test_a_damaged_device_can_still_be_unbound_and_bound(live: LiveNode, fault: Fault) -> None:
    undo = live.damage(GPU, fault)
    live.unbind(GPU)
    live.bind(GPU)
    undo()
    assert live.cdev(GPU) == "vfio0"
    assert dangling_links(live.root / "sys") + dangling_links(live.root / "dev") == []


def test_unreadable_means_unreadable_for_root_too(live: LiveNode) -> None:
    undo = live.block(live.sysfs / "class/vfio-dev")
    with pytest.raises(OSError, match="symbolic link") as caught:
        os.listdir(live.sysfs / "class/vfio-dev")
    assert caught.value.errno == errno.ELOOP
    undo()
    assert len(os.listdir(live.sysfs / "class/vfio-dev")) == 4


def test_litter_is_swept_up_again(live: LiveNode) -> None:
    undo = live.litter(live.dev_vfio / "devices/vfio77")
    assert (live.dev_vfio / "devices/vfio77").exists()
    undo()
    assert not (live.dev_vfio / "devices/vfio77").exists()


# Whatever happens, the tree agrees with itself.


class KernelMachine(RuleBasedStateMachine):
    """Random binds, unbinds, removals and rescans of a small board, against a model of three dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="simnode-")
        self.bound: dict[str, str] = {}
        self.numbers: dict[str, int] = {}

    @initialize()
    def write(self) -> None:
        node = boards.unbound(boards.rtx_pro_6000())
        self.live = LiveNode.create(Path(self._folder.name), node)
        self.addresses = [device.address for device in node.devices if device.vendor == boards.NVIDIA]
        self.absent: set[str] = set()
        for address in self.addresses:
            self.live.unbind(address)

    @rule(data=st.data(), driver=st.sampled_from(["vfio-pci", "nvidia", "nvgrace_gpu_vfio_pci"]))
    def bind(self, data: st.DataObject, driver: str) -> None:
        free = [a for a in self.addresses if a not in self.bound and a not in self.absent]
        if free:
            address = data.draw(st.sampled_from(free))
            name = self.live.bind(address, driver)
            self.bound[address] = driver
            if driver != "nvidia":
                lowest = min(set(range(len(self.numbers) + 1)) - set(self.numbers.values()))
                self.numbers[address] = lowest
                assert name == f"vfio{lowest}"
            else:
                assert name is None

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def unbind(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.bound)))
        self.live.unbind(address)
        del self.bound[address]
        self.numbers.pop(address, None)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        present = [a for a in self.addresses if a not in self.absent]
        if present:
            address = data.draw(st.sampled_from(present))
            self.live.remove(address)
            self.absent.add(address)
            self.bound.pop(address, None)
            self.numbers.pop(address, None)

    @precondition(lambda self: self.absent)
    @rule(data=st.data())
    def rescan(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.absent)))
        self.live.rescan(address)
        self.absent.discard(address)

    @invariant()
    def the_tree_agrees_with_the_model(self) -> None:
        live = self.live
        assert dangling_links(live.sysfs) == []
        listed = set(os.listdir(live.sysfs / "bus/pci/devices"))
        assert listed & set(self.addresses) == set(self.addresses) - self.absent
        names = {f"vfio{number}": address for address, number in self.numbers.items()}
        nodes = live.dev_vfio / "devices"
        assert nodes.exists() == bool(names)
        if names:
            assert set(os.listdir(nodes)) == set(names)
            assert set(os.listdir(live.sysfs / "class/vfio-dev")) == set(names)
        for name, address in names.items():
            assert (live.sysfs / "class/vfio-dev" / name / "device").samefile(live.device_dir(address))
        groups = {group_of(live, address) for address in self.numbers}
        if live.dev_vfio.exists():
            assert set(os.listdir(live.dev_vfio)) - {"vfio", "devices"} == groups

    def teardown(self) -> None:
        self._folder.cleanup()


TestWhateverTheKernelDoes = KernelMachine.TestCase
TestWhateverTheKernelDoes.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


@settings(max_examples=30, deadline=None)
@given(domain=st.integers(0, 0xFFFFFFFF), device=st.integers(0, 31), function=st.integers(0, 7))
def test_any_address_of_any_width_can_be_simulated(domain: int, device: int, function: int) -> None:
    address = f"{domain:04x}:00:{device:02x}.{function}"
    gpu = Device(address=address, vendor=0x10DE, device=1, class_code=0x030200, parents=(f"pci{domain:04x}:00",))
    node = Node(name="one", devices=(gpu,), kernel=Kernel(iommu=False))
    with tempfile.TemporaryDirectory() as folder:
        live = LiveNode.create(Path(folder), node)
        assert os.listdir(live.sysfs / "bus/pci/devices") == [address]


# For people.


def test_a_board_is_written_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gh200", str(tmp_path / "gh200")]) == 0
    assert "--sysfs" in capsys.readouterr().out
    assert (tmp_path / "gh200/dev/vfio/devices/vfio0").exists()


def test_an_unbound_board_is_written_on_request(tmp_path: Path) -> None:
    assert main(["--unbound", "gh200", str(tmp_path)]) == 0
    assert not (tmp_path / "dev/vfio").exists()


def test_boards_are_named_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(boards.ALL)


@pytest.mark.parametrize("argv", [[], ["gh200"], ["no-such-board", "there"]])
def test_what_was_not_understood_is_a_usage_error(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(SystemExit):
        main(["gh200", str(tmp_path)])
    assert os.listdir(tmp_path) == ["mine"]
