"""One launch, read from the command line and checked; everything else works from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.launcher.api import LaunchConfig

from flashrun.config import Settings

Kind = Literal["script", "module", "program", "run-path"]


@dataclass(frozen=True)
class Job:
    """What to run on this node.

    Attributes:
        settings: flashrun's own settings.
        launch: torch's, as ``torch.distributed.run.config_from_args`` makes it.
        kind: ``script``: a Python file, folder or zip; ``module``: ``-m``; ``program``:
            ``--no-python``; ``run-path``: ``--run-path``.
        target: the script, module or program, as the user gave it.
        args: the script's own arguments, untouched.
        entrypoint_name: title of the report of a failure.
        python: the interpreter of the workers.
        processors: by local rank, those that --numa-binding binds a worker to; empty without it.
    """

    settings: Settings
    launch: LaunchConfig
    kind: Kind
    target: str
    args: tuple[str, ...]
    entrypoint_name: str
    python: str
    processors: tuple[tuple[int, ...], ...] = ()
