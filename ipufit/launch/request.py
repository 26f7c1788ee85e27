# SPDX-License-Identifier: Apache-2.0
"""The processes that a user asks for, whatever starts them."""

from __future__ import annotations

from dataclasses import dataclass

from ipufit.errors import ConfigError


@dataclass(frozen=True)
class LaunchRequest:
    """A program to be run in several processes.

    Attributes:
        program: Script or module, and the arguments that it gets.
        processes: Number of processes, of all hosts together.
        replicas: Number of replicas, of all processes together; None leaves them to
            the script's config, and is one for each process under PopRun.
        ipus_per_replica: For PopRun; None is PopRun's own default, 1.
        options: More options for the launcher.
        is_module: Whether the program is a module, named as in an import.
        shows_all: Whether processes other than the first write to the terminal, too.

    Raises:
        ConfigError: The program is missing, or the processes can't share the replicas
            equally.

    Example:
        >>> LaunchRequest(("train.py", "--lr", "0.1"), processes=4, replicas=10)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: --replicas 10 can't be shared equally by 4 processes:
        use 8 or 12.
    """

    program: tuple[str, ...]
    processes: int
    replicas: int | None = None
    ipus_per_replica: int | None = None
    options: tuple[str, ...] = ()
    is_module: bool = False
    shows_all: bool = False

    def __post_init__(self) -> None:
        if not self.program:
            raise ConfigError("No script: name it after the options of `launch`.")
        if self.replicas is not None:
            require_shares("--replicas", self.replicas, self.processes, "processes")

    def option_names(self) -> frozenset[str]:
        """The names of options for the launcher, as `--name`, without their values."""
        return frozenset(map(_name, self.options))

    def option(self, name: str) -> str | None:
        """The value of an option for the launcher, the last one if it is repeated.

        Args:
            name: With its dashes.

        Returns:
            The value; None if the option isn't there, or ends the line.
        """
        value = None
        for token, following in zip(self.options, (*self.options[1:], None)):
            if _name(token) == name:
                value = token.partition("=")[2] if "=" in token else following
        return value

    def require_own(self, *names: str, by: str) -> None:
        """Refuse options for the launcher that `ipufit launch` sets by itself.

        Args:
            names: The options, with their dashes.
            by: Words for the option that sets them.

        Raises:
            ConfigError: The user has given one of them.
        """
        for name in names:
            if name in self.option_names():
                raise ConfigError(f"{name} can't be among the options: {by} sets it.")


def require_shares(option: str, number: int, sharers: int, word: str) -> None:
    """Refuse a number that can't be shared equally, and name the nearest that can.

    Args:
        option: The option that has set the number.
        number: The value of the option.
        sharers: Number of those that share it.
        word: Noun for them, in the plural.

    Raises:
        ConfigError: The number is no multiple of theirs.

    Example:
        >>> require_shares("--processes", 3, 2, "hosts")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: --processes 3 can't be shared equally by 2 hosts:
        use 2 or 4.
    """
    if number % sharers == 0:
        return
    below = number // sharers * sharers
    legal = f"{below} or {below + sharers}" if below else f"{sharers}"
    raise ConfigError(
        f"{option} {number} can't be shared equally by {sharers} {word}: use {legal}."
    )


def _name(token: str) -> str:
    """An option's name in one spelling: torchrun takes `_` for `-`."""
    return token.partition("=")[0].replace("_", "-")
