# SPDX-License-Identifier: Apache-2.0
"""Programs compiled to machine code: a room that could be taken out."""
