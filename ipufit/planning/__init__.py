# SPDX-License-Identifier: Apache-2.0
"""Numbers of calls, pipelines and memory, from config, data and costs alone."""
