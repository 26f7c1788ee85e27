# SPDX-License-Identifier: Apache-2.0
"""Running a module once, and the graph of what it did."""
