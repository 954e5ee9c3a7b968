"""Errors that a user can mend."""

from __future__ import annotations

import errno


class UsageError(Exception):
    """Wrong flags, settings or environment, found before any worker starts.

    The message is one line: what is wrong, where it was given, what would be right.
    """


def writing_remedy(error: Exception, place: object) -> str:
    """What to do about an error of writing to the folder `place`."""
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make {place} writable"
    return f"make room in {place}"
