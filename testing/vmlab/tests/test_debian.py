# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Where packages come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmlab import debian
from vmlab.build import span_half
from vmlab.errors import NoArchive


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("deb http://a.example/debian trixie main\n", ["http://a.example/debian"]),
        ("deb [arch=amd64 signed-by=/k.gpg] https://a.example/x/debian/ trixie main\n", ["https://a.example/x/debian"]),
        ("Types: deb\nURIs: http://a.example/debian\nSuites: trixie\n", ["http://a.example/debian"]),
        ("URIs: http://a.example/other http://b.example/debian/\n", ["http://b.example/debian"]),
        ("# deb http://a.example/debian trixie main\ndeb-src http://a.example/debian trixie main\n", []),
        ("deb http://a.example/debian-security trixie main\n", []),
        ("", []),
    ],
)
def test_archives_are_found_in_both_formats_and_only_debian_s_own(text: str, expected: list[str]) -> None:
    assert list(debian.archives(text)) == expected


def test_the_environment_names_an_archive_before_anything_is_read(tmp_path: Path) -> None:
    given = {debian.VARIABLE: "http://a.example/debian/"}
    assert debian.archive(tmp_path, given) == "http://a.example/debian"


def test_a_machine_without_an_archive_is_told_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(NoArchive, match=debian.VARIABLE):
        debian.archive(tmp_path, {})


def test_only_the_span_iterator_is_kept_of_the_interval_tree() -> None:
    source = (
        "#include <linux/interval_tree.h>\n"
        "INTERVAL_TREE_DEFINE(struct interval_tree_node, rb,\n"
        "\t\t     START, LAST,, interval_tree)\n"
        "EXPORT_SYMBOL_GPL(interval_tree_insert);\n"
        "#ifdef CONFIG_INTERVAL_TREE_SPAN_ITER\n"
        "void interval_tree_span_iter_next(void) {}\n"
        "EXPORT_SYMBOL_GPL(interval_tree_span_iter_next);\n"
        "#endif\n"
    )
    half = span_half(source)
    assert "INTERVAL_TREE_DEFINE" not in half
    assert "EXPORT_SYMBOL" not in half
    assert "void interval_tree_span_iter_next(void) {}" in half
