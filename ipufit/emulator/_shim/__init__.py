# SPDX-License-Identifier: Apache-2.0
"""Folder of packages named `poptorch`, `popdist` and `popart`.

`_install` adds it to `sys.path` for processes that a script starts. Nothing imports
this package itself.
"""
