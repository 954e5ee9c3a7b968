"""flashrun: torchrun that keeps the survivors."""

import os as _os
import sys as _sys
import warnings as _warnings

__version__ = "0.1.0"

# How the interpreter was before anything of flashrun or torch was imported; workers are forks and
# get it back (see flashrun.node.worker_process.Origin).
STARTED_WITH_MODULES = frozenset(name.split(".", 1)[0] for name in _sys.modules)
STARTED_WITH_FILTERS = tuple(_warnings.filters)
# What stood first in sys.path when the launcher was called (of ``-m``: the working directory).
STARTED_FROM = _os.environ.pop("FLASHRUN_EXEC_FOLDER", None)
STARTED_WITH_ENVIRON = dict(_os.environ)
