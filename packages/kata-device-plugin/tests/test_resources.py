# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kata_device_plugin.resources import RESOURCES, Resource, ResourceNameInvalid
from pcifacts import ids
from pcifacts.ids import ClassCode, DeviceKind


def test_every_kind_has_exactly_one_resource_and_no_two_share_a_name() -> None:
    assert set(RESOURCES) == set(DeviceKind)
    assert len({resource.name for resource in RESOURCES.values()}) == len(RESOURCES)


@pytest.mark.parametrize("subclass", ["0300", "0302"])
def test_both_display_classes_add_up_to_one_resource(subclass: str) -> None:
    kind = ids.kind_of(0x10DE, ClassCode(int(subclass + "00", 16)))
    assert kind is not None
    assert RESOURCES[kind].name == "nvidia.com/gpu"


@pytest.mark.parametrize(
    "name",
    ["nvidia.com/" + "a" * 63, "nvidia.com/gpu", "a/b", "x.example-1.org/GPU_model-1"],
)
def test_legal_names_are_taken(name: str) -> None:
    assert Resource(name).name == name


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("nvidia.com/" + "a" * 64, "63"),
        ("gpu", "slash"),
        ("nvidia.com/a/b", "slash"),
        ("kubernetes.io/gpu", "Kubernetes"),
        ("requests.nvidia.com/gpu", "Kubernetes"),
        ("nvidia.com/-gpu", "63"),
        ("nvidia.com/", "63"),
        ("NVIDIA.com/gpu", "subdomain"),
        ("a." * 126 + "com/gpu", "subdomain"),
        ("nvidia.com/h100.sxm", "CDI"),
        ("nvidia.com/8gpu", "CDI"),
    ],
)
def test_a_name_that_the_kubelet_or_a_cdi_reader_would_refuse_names_the_rule(name: str, rule: str) -> None:
    with pytest.raises(ResourceNameInvalid, match=re.escape(rule)) as caught:
        Resource(name)
    assert caught.value.name == name


@given(st.text(max_size=300))
def test_any_text_is_taken_or_refused_and_never_anything_else(name: str) -> None:
    try:
        resource = Resource(name)
    except ResourceNameInvalid:
        return
    assert resource.name.count("/") == 1
    assert "/" not in resource.spec_file
    assert "/" not in resource.socket_prefix


def test_the_longest_socket_name_leaves_room_for_the_kubelets_own_directory() -> None:
    longest = max(len(resource.socket_prefix) for resource in RESOURCES.values())
    assert len("/var/lib/kubelet/device-plugins/") + longest + len("01234567.sock") <= 107
