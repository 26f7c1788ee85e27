# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for PopTorch's C++: tracing, compiling, and the device."""
