"""What workers and the recovery machine say to each other; JSON objects with an ``op``.

Worker to agent, each with ``rank`` and ``incarnation`` in its first message of a connection:

``hello``     rank, incarnation, pid, token, port (of its data server), generation, boundary
``formed``    it has begun to form a process group
``suspect``   generation, error: a collective failed here
``held``      generation, boundary, state (has it the state of that boundary?), finished, groups,
              check: it stands still and can take part in that generation. groups: ident ->
              {ranks, base, before, issued, done}, base and before: operations until this boundary
              and the one before; check: what must be equal at that boundary, line: names the
              iterations that it has shadowed under Join; kept: names of what the script keeps in
              places of its own and this rank has copies of; taken: of what a replacement needs of
              that
``built``     generation, seconds, bytes: its communicators are there and it has the state
``live``      generation: the script goes on
``failed``    generation, error: it could not do its part (a peer went away)
``diverged``  reason: this worker can't be exact any more (a replacement: it can't be what the dead
              worker was)
``finished``  boundary: the script has ended well; it stays to serve
``digest``    generation, tensors: name -> hash, of the state at the target
``replicas``  boundary, tensors: name -> hash, own: likewise, bytes, trees: hash of what else
              optimizers hold, line: as in check, settles: a Join of uneven inputs ends here,
              confirm: it waits for the comparison
``event``     event: one structured event for the log

Agent to worker:

``abort``     generation, dead: a newer generation is open; let go of the communicators
``plan``      generation, target, laggards, donors: rank -> "host:port", receives, compare, own:
              names of what the script keeps in places of its own and all ranks have equal
``others``    nodes: rank -> "host:port", of one worker of each node, for a replacement that asks
              which files they have changed
``own``       asked, shared: which of those names are equal on all ranks
``rebuild``   generation, donors: rank -> "host:port", from: ident -> sequence number, private,
              numbers
``confirmed`` boundary: all ranks have the same state there
``go``        generation
``exit``      everybody has ended: go
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

TOKEN = "FLASHRUN_TOKEN"
CHANNEL = "FLASHRUN_CHANNEL"
RUN_DIR = "FLASHRUN_RUN_DIR"
INCARNATION = "FLASHRUN_INCARNATION"
GENERATION = "FLASHRUN_GENERATION"
ADDRESS_GIVEN = "FLASHRUN_ADDRESS_GIVEN"  # "1": that is --local-addr
ADDRESS = "FLASHRUN_ADDRESS"  # where peers of other nodes reach this one; "": there are none
TABLE = "FLASHRUN_TABLE"  # path of the rank table, where there are several nodes
RETAIN = "FLASHRUN_RETAIN"  # "off": no copies of inputs; a number: at most so many bytes


def left(channel: str, rank: int) -> str:
    """The file of a rank's standing words: a JSON line with its ``incarnation``, then those. For an
    agent to which it has not come to say them."""
    return f"{channel}.said.{rank}"


RECOVERY_TIMEOUT = "FLASHRUN_RECOVERY_TIMEOUT"  # s; see config.Settings
HEARTBEAT = "FLASHRUN_HEARTBEAT_INTERVAL"  # s

# Of buffers that each rank has for itself (BatchNorm): where all have the same, a peer can send it.
SAME_BUFFERS = "SyncBatchNorm, or buffers broadcast before each optimizer step, avoid that"

STEP_SPLITS = "step-with-collectives"  # event: a step waits for others in the middle of its changes
# Of a DDP module: no backward yet; it had one, and rebuilds its buckets in its next forward.
BUCKETS_NOT_REBUILT = "", "next"
EXIT_DIVERGED = 117  # a replacement ends so after it has said why
