# SPDX-License-Identifier: Apache-2.0
"""Attributes of custom operations, as PopTorch's C++ asks for them (`_utils.py`)."""

from __future__ import annotations

import pytest

import ipufit.emulator as poptorch


def test_json_is_read():
    assert poptorch.accessAttributes('{"alpha": [1, 2]}') == {"alpha": [1, 2]}


def test_an_address_stands_for_what_an_operation_was_called_with():
    attributes = {"alpha": 0.5}
    poptorch.attributes_lists.append(attributes)
    try:
        text = f"{poptorch.ATTR_PREFIX}{hex(id(attributes))}"
        assert poptorch.accessAttributes(text) is attributes
    finally:
        poptorch.attributes_lists.remove(attributes)


@pytest.mark.parametrize("text", [3, None, "alpha", "attr:xyz", "attr:0x1"])
def test_anything_else_is_an_error(text):
    with pytest.raises(ValueError, match=r"attribute_id_str|invalid literal"):
        poptorch.accessAttributes(text)
