# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os

import pytest

from kata_device_plugin.errors import PathTooLong
from kata_device_plugin.server import is_socket_name, socket_path


def test_every_socket_has_a_name_of_its_own_that_is_told_by_its_resource() -> None:
    paths = {socket_path("/dir", "kata-nvidia.com-gpu-") for _ in range(100)}
    assert len(paths) == 100
    assert all(is_socket_name(os.path.basename(path), "kata-nvidia.com-gpu-") for path in paths)
    assert not any(is_socket_name(os.path.basename(path), "kata-nvidia.com-nvswitch-") for path in paths)


@pytest.mark.parametrize(
    "name",
    ["kubelet.sock", "kata-nvidia.com-gpu-large-01234567.sock", "kata-nvidia.com-gpu-01234567.sock.tmp", "kata-nvidia"],
)
def test_the_socket_of_another_is_not_taken_for_one_of_this_resource(name: str) -> None:
    assert not is_socket_name(name, "kata-nvidia.com-gpu-")


def test_the_longest_path_that_the_kernel_takes_is_taken_and_one_more_is_refused() -> None:
    room = 107 - len("/kata-nvidia.com-gpu-01234567.sock")
    assert len(socket_path("/" + "d" * (room - 1), "kata-nvidia.com-gpu-")) == 107
    with pytest.raises(PathTooLong) as caught:
        socket_path("/" + "d" * room, "kata-nvidia.com-gpu-")
    assert caught.value.limit == 107
    assert caught.value.exit_code == 2
