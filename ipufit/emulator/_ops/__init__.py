# SPDX-License-Identifier: Apache-2.0
"""Functions that a module may call in `forward`."""
