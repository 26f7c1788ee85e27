# SPDX-License-Identifier: Apache-2.0
"""Functions of PopTorch that a module may call in `forward`."""
