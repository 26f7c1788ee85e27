# SPDX-License-Identifier: Apache-2.0
"""PopTorch's optimisers on the host, and what the device is told of them."""
