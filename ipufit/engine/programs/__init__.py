# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: built, attached, run, their weights and optimiser in step."""
