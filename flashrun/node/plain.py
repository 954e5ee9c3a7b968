"""A worker that is a fresh process and not a fork of the zygote.

`prepare` acts between fork and exec; `plain_site/sitecustomize.py` takes over in the interpreter:
it notes how the script failed, and where workers can be replaced in place `install` ends in the
same place as a forked worker. What a fork does at the end of its script
(`main_module.run_to_the_end`) comes here from ``atexit``, which is not told how the script ended:
an uncaught exception stands in ``sys.last_value``, and ``sys.exit`` is noted as it is called.
A ``raise SystemExit(1)`` is taken for a good end until every rank has ended; the exit status is
right in any case.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from flashrun.node import gloo_teardown

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "plain_site")


def prepare(environ: MutableMapping[str, str], record: str) -> None:
    """Have the interpreter that this process is about to become tell how its script failed, and
    load the runtime where there is one.

    Args:
        environ: of this process.
        record: private file for the facts of a failure.
    """
    rest = environ.get("PYTHONPATH", "")
    environ["PYTHONPATH"] = os.pathsep.join([SITE, rest]) if rest else SITE
    environ["FLASHRUN_PLAIN_PID"] = str(os.getpid())
    environ["FLASHRUN_RECORD"] = record


def install() -> None:
    """In the worker, when its script has imported torch."""
    gloo_teardown.install()
    from flashrun.worker import own_code, runtime
    from flashrun.worker.allocator import keep_freed_memory

    keep_freed_memory(os.environ)
    own_code.begin(os.environ)
    runtime.install()
