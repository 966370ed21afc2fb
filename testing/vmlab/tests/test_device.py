# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""An emulated function, as its bus sees it, and the protocol that carries it."""

from __future__ import annotations

import errno
import json
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmlab.artifacts import Artifacts
from vmlab.device import H100, NVSWITCH, Access, Function, Identity, Operation, RegisterFile, Reset
from vmlab.machine import Iommu, Machine, qemu_arguments
from vmlab.vfio_user import Command, Refusal, Server, reply_to

POWER_CONTROL = 0x64
DEVICE_CONTROL = 0x80
CONFIG_REGION = 7


@pytest.fixture
def gpu() -> Function:
    """A GPU of a machine that has started."""
    function = Function.of(H100)
    function.reset(Reset.DEVICE)
    return function


def _word(function: Function, offset: int, width: int = 4) -> int:
    return int.from_bytes(function.read_config(offset, width), "little")


def _capabilities(function: Function) -> list[int]:
    found, at = [], _word(function, 0x34, 1)
    while at:
        found.append(_word(function, at, 1))
        at = _word(function, at + 1, 1)
    return found


def test_a_gpu_says_who_it_is(gpu: Function) -> None:
    assert _word(gpu, 0) == 0x233010DE
    assert _word(gpu, 8) >> 8 == 0x030200
    assert gpu.read_bar(0, 0, 4) == H100.boot_0


def test_capabilities_are_power_management_and_express_with_function_level_reset(gpu: Function) -> None:
    assert _capabilities(gpu) == [0x01, 0x10]
    assert _word(gpu, 0x7C) & 1 << 28


def test_power_management_shows_under_another_id_until_the_machine_has_started() -> None:
    assert 0x01 not in _capabilities(Function.of(H100))


@pytest.mark.parametrize("identity", [H100, NVSWITCH], ids=["gpu", "switch"])
def test_a_bar_tells_its_size_when_ones_are_written(identity: Identity) -> None:
    function = Function.of(identity)
    function.write_config(0x10, b"\xff" * 8)
    size = -(_word(function, 0x10, 8) & ~0xF) & (1 << 64) - 1
    assert size == function.bar_size(0)


def test_identity_is_read_only(gpu: Function) -> None:
    gpu.write_config(0, b"\0" * 4)
    assert _word(gpu, 0) == 0x233010DE


def test_a_sleeping_function_reads_ones_and_ignores_writes(gpu: Function) -> None:
    gpu.write_config(POWER_CONTROL, b"\x03\x00")
    gpu.write_bar(0, 0x100, 4, 1)
    assert gpu.read_bar(0, 0, 4) == 0xFFFFFFFF
    gpu.write_config(POWER_CONTROL, b"\x00\x00")
    assert (gpu.read_bar(0, 0, 4), gpu.read_bar(0, 0x100, 4)) == (H100.boot_0, 0)


def test_a_function_level_reset_forgets_registers_and_wakes(gpu: Function) -> None:
    gpu.write_bar(0, 0x100, 4, 7)
    gpu.write_config(POWER_CONTROL, b"\x03\x00")
    gpu.write_config(DEVICE_CONTROL, b"\x10\xa8")
    assert gpu.journal[-1] == Access(Operation.RESET, kind=Reset.FUNCTION_LEVEL)
    assert (gpu.config.power_state, gpu.read_bar(0, 0x100, 4)) == (0, 0)


def test_a_lost_function_reads_ones_everywhere(gpu: Function) -> None:
    gpu.lost = True
    assert (_word(gpu, 0), gpu.read_bar(0, 0, 4)) == (0xFFFFFFFF, 0xFFFFFFFF)


def test_the_journal_holds_what_arrived_with_its_width(gpu: Function) -> None:
    gpu.journal.clear()
    gpu.write_bar(0, 8, 4, 5)
    gpu.read_bar(0, 8, 2)
    assert gpu.journal == [Access(Operation.WRITE, 0, 8, 4, 5), Access(Operation.READ, 0, 8, 2, 5)]


@given(
    writes=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 2, 4]), st.integers(0, 2**32 - 1)), max_size=20),
    offset=st.integers(0, 60),
    width=st.sampled_from([1, 2, 4, 8]),
)
def test_registers_keep_bytes_whatever_the_width(writes: list[tuple[int, int, int]], offset: int, width: int) -> None:
    registers, memory = RegisterFile({}), bytearray(80)
    for at, size, value in writes:
        registers.write(0, at, size, value)
        memory[at : at + size] = value.to_bytes(4, "little")[:size]
    assert registers.read(0, offset, width) == int.from_bytes(memory[offset : offset + width], "little")


def test_a_region_read_answers_with_the_register(gpu: Function) -> None:
    body = reply_to(gpu, Command.REGION_READ, struct.pack("<QII", 0, 0, 4))
    assert body == struct.pack("<QIII", 0, 0, 4, H100.boot_0)


@pytest.mark.parametrize(
    ("command", "body", "number"),
    [
        (Command.REGION_READ, struct.pack("<QII", 0, 3, 4), errno.EINVAL),
        (Command.REGION_READ, struct.pack("<QII", 16 << 20, 0, 4), errno.EINVAL),
        (Command.REGION_READ, struct.pack("<QII", 4094, CONFIG_REGION, 4), errno.EINVAL),
        (Command.REGION_WRITE, struct.pack("<QIII", 0, 4, 4, 1), errno.EINVAL),
        (Command.DMA_READ, b"", errno.EOPNOTSUPP),
        (99, b"", errno.EOPNOTSUPP),
    ],
)
def test_what_is_not_there_is_refused(gpu: Function, command: int, body: bytes, number: int) -> None:
    with pytest.raises(Refusal) as refused:
        reply_to(gpu, command, body)
    assert refused.value.number == number


def test_no_region_can_be_mapped(gpu: Function) -> None:
    for region in range(9):
        body = struct.pack("<IIIIQQ", 32, 0, region, 0, 0, 0)
        _, flags, _, _, size, _ = struct.unpack("<IIIIQQ", reply_to(gpu, Command.DEVICE_GET_REGION_INFO, body))
        assert (flags, size) == {0: (3, 16 << 20), CONFIG_REGION: (3, 4096)}.get(region, (0, 0))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="vmlab-") as path:
        yield Path(path)


def _ask(client: socket.socket, number: int, command: int, body: bytes, flags: int = 0) -> tuple[int, int, bytes]:
    client.sendall(struct.pack("<HHIII", number, command, 16 + len(body), flags, 0) + body)
    got, _, size, answered, problem = struct.unpack("<HHIII", client.recv(16, socket.MSG_WAITALL))
    assert got == number
    return answered, problem, client.recv(size - 16, socket.MSG_WAITALL) if size > 16 else b""


def test_a_server_answers_one_client_after_the_other(gpu: Function, folder: Path) -> None:
    with Server(gpu, folder / "gpu.sock"):
        for _ in range(2):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(10)
                client.connect(str(folder / "gpu.sock"))
                _, _, version = _ask(client, 1, Command.VERSION, struct.pack("<HH", 0, 1) + b"{}\0")
                assert json.loads(version[4:-1])["capabilities"]
                flags, problem, _ = _ask(client, 2, 99, b"")
                assert (flags, problem) == (0x21, errno.EOPNOTSUPP)


def test_the_machine_has_a_port_for_each_function_and_an_iommu_only_when_asked(folder: Path) -> None:
    artifacts = Artifacts(root=folder, kernel_release="7.3", python="3.13", packages={})
    machine = Machine(functions={"gpu0": H100, "switch0": NVSWITCH})
    text = " ".join(qemu_arguments(machine, artifacts, folder))
    assert text.count("pcie-root-port") == text.count("vfio-user-pci") == 2
    assert "caching-mode=on" in text
    assert (machine.address("switch0"), machine.port("switch0")) == ("0000:02:00.0", "0000:00:11.0")
    bare = " ".join(qemu_arguments(Machine(functions={}, iommu=Iommu.NONE), artifacts, folder))
    assert "iommu" not in bare
