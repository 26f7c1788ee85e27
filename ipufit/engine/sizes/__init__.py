# SPDX-License-Identifier: Apache-2.0
"""How large a module's parts are, from tensors that have shapes and no values."""
