# SPDX-License-Identifier: Apache-2.0
"""What stands in for PopTorch's C++: tracing, compiling, and the device."""
