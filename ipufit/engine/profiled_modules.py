# SPDX-License-Identifier: Apache-2.0
"""The names that the modules of a user's network have in a timeline."""

from __future__ import annotations

from functools import cached_property

import torch

from ipufit.profiling import Timeline
from ipufit.profiling.timeline import OpenSpan

_LOSS = "loss"
_NETWORK = "module"
_PARTS = frozenset(
    {"upload", "forward", "backward", "update", "download", "mark modules"}
)
_NEVER_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict)


class NamedModules:
    """A timeline that hears an emulated device, and names modules as users do.

    The device names the scope of a module in the program: `module/layer1` for the child
    `layer1` of the network. Operations outside of the network are those of the loss,
    with what it counts and sums up.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
        network: The user's module.

    Example:
        >>> timeline = Timeline(iter([0.0, 1.0, 2.0, 3.0]).__next__)
        >>> timeline.start("call")
        >>> network = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.ReLU()]))
        >>> heard = NamedModules(timeline, network)
        >>> heard.end(heard.begin("module/0", "forward"))
        >>> timeline.stop()
        >>> [span.name for span in timeline.spans]
        ['0.0', 'call']
    """

    def __init__(self, timeline: Timeline, network: torch.nn.Module) -> None:
        self._timeline = timeline
        self._network = network

    @property
    def is_on(self) -> bool:
        """Whether the timeline records."""
        return self._timeline.is_on

    def begin(self, name: str, phase: str) -> OpenSpan | None:
        """Begin a span of a part of a call, or of a module within it."""
        if name not in _PARTS:
            name = self._name_of(name)
        return self._timeline.begin(name, phase)

    def end(self, span: OpenSpan | None) -> None:
        """End a span."""
        self._timeline.end(span)

    def _name_of(self, scope: str) -> str:
        root, _, inner = scope.partition("/")
        return self._names.get(scope, inner or scope) if root == _NETWORK else _LOSS

    @cached_property
    def _names(self) -> dict[str, str]:
        """Name by scope.

        A list of modules is never called, so it is missing in scopes. Where modules of
        several lists have one scope, it is their name.
        """
        names = {_NETWORK: type(self._network).__name__}
        for path, module in self._network.named_modules(remove_duplicate=False):
            if path and not isinstance(module, _NEVER_CALLED):
                scope = "/".join([_NETWORK, *self._called(path)])
                is_one = scope not in names
                names[scope] = path if is_one else scope[len(_NETWORK) + 1 :]
        return names

    def _called(self, path: str) -> list[str]:
        """The parts of a path whose modules are called."""
        module, found = self._network, []
        for part in path.split("."):
            module = getattr(module, part)
            if not isinstance(module, _NEVER_CALLED):
                found.append(part)
        return found
