# SPDX-License-Identifier: Apache-2.0
"""A folder for `sys.path`: processes that a script starts find `poptorch` in it.

`_install` puts it there. Nothing imports this package itself.
"""
