# SPDX-License-Identifier: Apache-2.0
"""Two executors and the loops that run them."""
