# SPDX-License-Identifier: Apache-2.0
"""The values of Python that a program has baked in, and whether they have changed."""
