# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Our own protocol file against the descriptor that each kubelet is compiled with."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kata_device_plugin.v1beta1 import deviceplugin_pb2 as ours

_KINDS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
}


@pytest.fixture(scope="module")
def theirs(release: str, program: Callable[[str], Path]) -> Mapping[str, Any]:
    answer = subprocess.run([program(f"kubelet-{release}"), "-ask", "schema"], capture_output=True, check=True)
    schema: Mapping[str, Any] = json.loads(answer.stdout)
    return schema


def _type(field: FieldDescriptor) -> str:
    message = field.message_type
    if message is None:
        return _KINDS[field.type]
    if message.GetOptions().map_entry:
        return f"map<{_type(message.fields_by_name['key'])}, {_type(message.fields_by_name['value'])}>"
    return str(message.name)


def _fields(message: Descriptor) -> list[dict[str, Any]]:
    return [
        {
            "name": field.name,
            "number": field.number,
            "type": _type(field),
            "repeated": field.is_repeated and not _type(field).startswith("map<"),
        }
        for field in message.fields
    ]


def test_every_message_has_the_fields_numbers_and_types_of_the_kubelets(theirs: Mapping[str, Any]) -> None:
    described = {name: _fields(message) for name, message in ours.DESCRIPTOR.message_types_by_name.items()}
    assert described == theirs["messages"]


def test_every_service_has_the_methods_of_the_kubelets(theirs: Mapping[str, Any]) -> None:
    described = {
        name: [
            {
                "name": method.name,
                "request": method.input_type.name,
                "response": method.output_type.name,
                "stream": method.server_streaming,
            }
            for method in service.methods
        ]
        for name, service in ours.DESCRIPTOR.services_by_name.items()
    }
    assert described == theirs["services"]


def test_package_and_constants_are_those_of_the_kubelet(theirs: Mapping[str, Any]) -> None:
    from kata_device_plugin import daemon, registration, server

    assert ours.DESCRIPTOR.package == theirs["package"]
    assert theirs["constants"] == {
        "version": registration.API_VERSION,
        "healthy": server.HEALTHY,
        "unhealthy": server.UNHEALTHY,
        "plugin_path": daemon.Settings().device_plugin_dir + "/",
        "kubelet_socket": f"{daemon.Settings().device_plugin_dir}/{registration.KUBELET_SOCKET}",
    }
