# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The rules for names that the simulated kubelet applies, case by case."""

from __future__ import annotations

import pytest

from simcluster import names


@pytest.mark.parametrize(
    ("name", "is_legal"),
    [
        ("nvidia.com/gpu", True),
        ("NVIDIA.com/gpu", False),
        ("nvidia.com/GPU_A.b-c", True),
        ("nvidia.com/" + "g" * 63, True),
        ("nvidia.com/" + "g" * 64, False),
        ("a" * 63 + "." + "b" * 63 + "." + "c" * 63 + "." + "d" * 52 + "/g", True),
        ("a" * 63 + "." + "b" * 63 + "." + "c" * 63 + "." + "d" * 53 + "/g", False),
        ("gpu", False),
        ("/gpu", False),
        ("nvidia.com/", False),
        ("nvidia.com/a/b", False),
        ("nvidia.com/-gpu", False),
        ("nvidia.com/gpu-", False),
        ("nvidia_com/gpu", False),
        ("nvidia.com/a[b]", False),
        ("kubernetes.io/gpu", False),
        ("sub.kubernetes.io/gpu", False),
        ("requests.nvidia.com/gpu", False),
    ],
)
def test_a_resource_name_is_judged_as_the_kubelet_judges_it(name: str, is_legal: bool) -> None:  # noqa: FBT001
    assert names.is_extended_resource(name) is is_legal


@pytest.mark.parametrize(
    ("name", "is_legal"),
    [
        ("nvidia.com/gpu=0000:65:00.0", True),
        ("nvidia.com/gpu=0", True),
        ("nvidia.com/gpu=a=b", False),
        ("nvidia.com/gpu", False),
        ("nvidia.com=0", False),
        ("nvidia.com/gpu=", False),
        ("nvidia.com/gpu=:0", False),
        ("nvidia.com/g.pu=0", False),
        ("9vidia.com/gpu=0", False),
    ],
)
def test_a_cdi_name_is_judged_as_the_oldest_reader_judges_it(name: str, is_legal: bool) -> None:  # noqa: FBT001
    assert names.is_qualified_cdi_name(name) is is_legal
