# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The table of field reports names tests that exist, and the document says what the table says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.cluster.field_rows import FIELD, document

REPOSITORY = Path(__file__).parents[2]


def named_in(path: Path) -> set[str]:
    """Return the names of the tests in a file, without running it."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", FIELD)
def test_a_report_has_tests_that_exist_or_a_reason(row: str) -> None:
    report = FIELD[row]
    assert report.tests or report.note
    for test in report.tests:
        path, _, name = test.partition("::")
        assert name in named_in(REPOSITORY / path), f"{row} names {test}, which does not exist"


@pytest.mark.parametrize("row", FIELD)
def test_a_report_is_told_in_a_line_and_links_to_threads(row: str) -> None:
    report = FIELD[row]
    assert re.fullmatch(r"R\d{3}", row)
    assert report.says.endswith(".")
    assert "|" not in report.says + report.note
    for thread in report.threads:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+/(issues|pull)/\d+", thread)


def test_the_document_is_made_from_the_table() -> None:
    assert (REPOSITORY / "docs" / "field-reports.md").read_text() == document()
