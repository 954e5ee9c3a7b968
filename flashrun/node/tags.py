"""The job's tag: one fixed-width string in the environment memory of every process of a job.

``<job, 16 hex digits>:<role or rank, 8>:<incarnation, 4>``, padded with dashes. The launcher starts
itself again with the tag in its environment (:mod:`flashrun.__main__`); each process that it forks
overwrites the last two parts in place.
"""

from __future__ import annotations

HELPERS = ("agent", "zygote", "store")


def job_of(tag: str) -> str:
    """The job's part of a tag."""
    return tag.split(":", 1)[0]


def with_role(tag: str, role: str, incarnation: str = "") -> str:
    """The tag of another process of the same job; same width."""
    return f"{job_of(tag)}:{role[:8]:-<8}:{incarnation[:4]:-<4}"


def of_worker(tag: str, local_rank: int, round_: int, incarnation: int) -> str:
    """The tag of one worker process; two processes of one rank never share one."""
    return with_role(tag, str(local_rank), f"{_base36(round_)}{_base36(incarnation)}")


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return digits[number // 36 % 36] + digits[number % 36]


def role_of(tag: str) -> str:
    """``"agent"``, ``"12"`` (a local rank), "" for the supervisor and what it left untagged."""
    parts = tag.split(":")
    return parts[1].rstrip("-") if len(parts) == 3 else ""


def is_helper(tag: str) -> bool:
    return role_of(tag) in HELPERS
