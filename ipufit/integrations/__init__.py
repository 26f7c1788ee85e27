# SPDX-License-Identifier: Apache-2.0
"""Models and data of other libraries: one module of this package for each library."""
