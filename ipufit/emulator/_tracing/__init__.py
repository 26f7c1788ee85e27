# SPDX-License-Identifier: Apache-2.0
"""Trace a module: run it once, and record its operations as a graph."""
