# SPDX-License-Identifier: Apache-2.0
"""Traced programs with their loss, and the compiler's checks of them."""
