# SPDX-License-Identifier: Apache-2.0
"""Tracing: run a module once, and record its operations as a graph."""
