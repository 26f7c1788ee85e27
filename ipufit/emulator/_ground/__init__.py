# SPDX-License-Identifier: Apache-2.0
"""Ground of all other packages: logs, switches, types, nested tensors."""
