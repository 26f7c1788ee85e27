# SPDX-License-Identifier: Apache-2.0
"""PopTorch's optimisers on the host, and the values of them that a device gets."""
