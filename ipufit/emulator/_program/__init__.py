# SPDX-License-Identifier: Apache-2.0
"""A traced module with its loss, checked as the compiler checks it."""
