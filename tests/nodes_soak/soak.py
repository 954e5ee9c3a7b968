"""Many membership events in one run of several nodes, seeded; compared with an undisturbed run.

Workers, agents, whoever leads and whole nodes are killed, nodes stand still and thaw, their links
are cut and mended, spares come and go, nodes are cordoned, and members of the etcd cluster fail.
Run it by ``scripts/soak_nodes``; what a seed decides are the events, not their moments.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.bars import facts
from tests import etcd, helpers
from tests.jobs import job
from tests.nodes_soak.fleet import (
    BOUND_S,
    SCRIPT,
    Failed,
    Fleet,
    Loss,
    Node,
    Plan,
    losses_in,
)
from tests.test_recovery import digest

# How often each kind comes in a deck, which is shuffled anew when all of it was played.
DECK = {
    "workers": 5, "agent": 2, "leader": 2, "node": 3, "two nodes": 1, "freeze": 1, "doze": 1,
    "cut": 1, "flap": 1, "spare goes": 1, "spare comes": 1, "cordon": 1, "member": 2,
}  # fmt: skip
EVERY = 4  # steps between two looks for the end, in train.py
AT_ONCE = ("workers", "agent", "leader", "node")  # may come while the one before is dealt with

# Why all may be restarted: what docs/recovery.md names for faults of this kind.
REASONS = (
    "what came last had not arrived when the node was lost",
    "no spare came within",
    "no survivor holds the state",
    "had formed",  # before the first group
    "replicas are not proved",
)


class Soak:
    """Plays events on a fleet.

    Args:
        say: takes a line.

    Attributes:
        played: of each event: number, kind, what was done, the seconds until training went on, when
            it began, the ranks of each node that was lost by it, and whether the next came at once.
    """

    def __init__(self, fleet: Fleet, seed: int, say: Callable[[str], None]) -> None:
        self.fleet = fleet
        self.draw = random.Random(seed)
        self.say = say
        self.played: list[dict[str, Any]] = []
        self._lost: list[list[int]] = []  # by this event
        self._deck: list[str] = []
        self._cordoned: tuple[str, int] | None = None  # address, until which event
        self._member_away: tuple[etcd.Member, int] | None = None
        self._hosted = fleet.plan.backend == "flash"

    def play(self, events: int, kinds: Sequence[str] = ()) -> None:
        """Play so many.

        Args:
            kinds: those, instead of what comes.

        Raises:
            Failed: something hung, or ended.
        """
        for number in range(1, events + 1):
            self._restore(number)
            self._tend()
            what, self._lost = "", []
            while not what:  # there may be nobody for it
                kind = kinds[number - 1] if kinds else self._next()
                began, at = time.monotonic(), time.time()
                what = getattr(self, "_" + kind.replace(" ", "_"))()
            at_once = kind in AT_ONCE and number < events and self.draw.random() < 0.25
            self.say(f"{number:3}. {kind}: {what}")
            if at_once:
                time.sleep(self.draw.random() * 0.3)  # any moment will do
            else:
                steps = self.draw.randint(2, 6)
                self.fleet.await_progress(steps, f"event {number} ({kind}: {what})")
            took = round(time.monotonic() - began, 2)
            self.played.append({
                "number": number, "kind": kind, "what": what, "s": took, "at": round(at, 2),
                "lost": self._lost, "at once": at_once,
            })  # fmt: skip
        self._restore(None)
        self.fleet.await_progress(3, "all events")

    def _next(self) -> str:
        while True:
            if not self._deck:
                self._deck = [kind for kind, count in DECK.items() for _ in range(count)]
                self.draw.shuffle(self._deck)
            kind = self._deck.pop()
            if kind in ("cut", "flap") and self.fleet.network is None:
                continue
            if kind == "member" and not self.fleet.members:
                continue
            if kind == "two nodes" and len(self._mortal()) < 2:
                continue
            return kind

    def _tend(self) -> None:
        """Nodes that were lost come back, as new ones at their old places."""
        plan = self.fleet.plan
        free = self.fleet.free_places()
        while len(self.fleet.living()) < plan.nodes + plan.spares and free:
            place = free.pop(self.draw.randrange(len(free)))
            self.say(f"     {self.fleet.add(place)} comes")

    def _restore(self, number: int | None) -> None:
        if self._cordoned is not None and (number is None or number >= self._cordoned[1]):
            said = self.fleet.command("uncordon", self._cordoned[0])
            if "may have ranks again" not in said:
                raise Failed(f"uncordon {self._cordoned[0]}: {said}\n{self.fleet.describe()}")
            self._cordoned = None
        if self._member_away is not None and (number is None or number >= self._member_away[1]):
            member, self._member_away = self._member_away[0], None
            if member.process is None:
                member.start()
            else:
                member.signal(signal.SIGCONT)

    # --- who ------------------------------------------------------------------------------------

    def _mortal(self) -> list[Node]:
        """Nodes with ranks that may be lost."""
        return [n for n in self.fleet.active() if not (self._hosted and n.place == 0)]

    def _await_spare(self, count: int = 1) -> None:
        """Mostly; without one, all wait for it or are restarted."""
        if self.draw.random() < 0.8:
            with suppress(TimeoutError):
                helpers.wait_until(lambda: len(self._ready()) >= count, f"{count} spares", 30)

    def _ready(self) -> list[Node]:
        said = (b"this node is a spare", b"this node waits")
        spares = self.fleet.spares()
        return [n for n in spares if any(text in n.job.output["err"] for text in said)]

    def _pick(self, nodes: Sequence[Node]) -> Node:
        return self.draw.choice(sorted(nodes, key=lambda n: n.place))

    def _of(self, node: Node) -> list[int]:
        """The ranks of a node that will be lost."""
        self._lost.append(self.fleet.of(node))
        return self._lost[-1]

    # --- the events: each does it, and says what; "": there was nobody for it --------------------

    def _workers(self) -> str:
        ranks = self.draw.sample(range(self.fleet.plan.ranks), self.draw.choice([1, 1, 1, 2]))
        self.fleet.kill_workers(ranks)
        return f"ranks {ranks} are killed"

    def _agent(self) -> str:
        node = self._pick(self.fleet.living())
        self.fleet.kill_agent(node)
        return f"the agent of {node} is killed"

    def _leader(self) -> str:
        which = self.draw.choice(["membership", "recovery"])
        addr = self.fleet.leaders().get(which, "")
        found = [n for n in self.fleet.living() if n.addr == addr]
        if not found:
            return ""
        self.fleet.kill_agent(found[0])
        return f"the agent of {found[0]}, which leads the {which}, is killed"

    def _node(self) -> str:
        self._await_spare()
        node = self._pick(self._mortal())
        ranks = self._of(node)
        self.fleet.kill(node)
        return f"{node} with ranks {ranks} is killed"

    def _two_nodes(self) -> str:
        self._await_spare(2)
        nodes = self.draw.sample(sorted(self._mortal(), key=lambda n: n.place), 2)
        ranks = [self._of(n) for n in nodes]
        self.fleet.kill(*nodes)
        return f"{nodes[0]} and {nodes[1]} with ranks {ranks} are killed"

    def _freeze(self) -> str:
        """Until others have its ranks; then its workers must end, and it is a spare."""
        self._await_spare()
        node = self._pick(self._mortal())
        ranks = self._of(node)
        pids = [self.fleet.at[rank].pid for rank in ranks]
        workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        self.fleet.freeze(node)
        self.fleet.look()
        node.away = True
        self.fleet.await_progress(2, f"{node} with ranks {ranks} was frozen")
        self.fleet.thaw(node)
        if helpers.await_exit(workers, BOUND_S):
            raise Failed(f"{node} was thawed and keeps its workers\n{self.fleet.describe()}")
        node.away = False
        return f"{node} with ranks {ranks} is frozen, its place is taken, and it is thawed"

    def _doze(self) -> str:
        node = self._pick(self.fleet.active())
        seconds = self.draw.uniform(0.3, 2.0)
        self.fleet.freeze(node)
        time.sleep(seconds)  # that is the event
        self.fleet.thaw(node)
        return f"{node} stands still for {seconds:.1f} s"

    def _cut(self) -> str:
        """Until others have its ranks, and it has ended by itself."""
        network = self.fleet.network
        assert network is not None
        self._await_spare()
        node = self._pick(self._mortal())
        ranks = self._of(node)
        network.cut(node.place)
        self.fleet.look()
        node.away = True
        self.fleet.await_progress(2, f"{node} with ranks {ranks} was cut off")
        self.fleet.wait_for(lambda: not node.alive, f"the end of {node}, which is cut off")
        network.mend(node.place)
        return f"{node} with ranks {ranks} is cut off, its place is taken, and it has ended"

    def _flap(self) -> str:
        network = self.fleet.network
        assert network is not None
        node = self._pick(self.fleet.active())
        seconds = self.draw.uniform(0.2, 1.2)
        network.cut(node.place)
        time.sleep(seconds)  # that is the event
        network.mend(node.place)
        return f"the link of {node} is down for {seconds:.1f} s"

    def _spare_goes(self) -> str:
        spares = self._ready()
        if not spares:
            return ""
        node = self._pick(spares)
        if self.draw.random() < 0.5:
            self.fleet.kill(node)
            return f"{node}, a spare, is killed"
        node.away = True
        node.job.signal(signal.SIGTERM)
        self.fleet.wait_for(lambda: not node.alive, f"the end of {node}, a spare that got SIGTERM")
        return f"{node}, a spare, is told to end"

    def _spare_comes(self) -> str:
        free = self.fleet.free_places()
        return f"{self.fleet.add(self.draw.choice(free))} comes" if free else ""

    def _cordon(self) -> str:
        """Until some events later."""
        if self._cordoned is not None:
            return ""
        node = self._pick(self.fleet.living())
        said = self.fleet.command("cordon", node.addr)
        if "gets no ranks" in said:
            at = len(self.played) + 1
            self._cordoned = node.addr, at + self.draw.randint(1, 3)
        elif "has no node" in said:  # it has not joined yet
            return ""
        else:
            raise Failed(f"cordon {node.addr}: {said}\n{self.fleet.describe()}")
        return said.replace("\n", "; ")

    def _member(self) -> str:
        """Until some events later; one at a time, so that a majority is there."""
        if self._member_away is not None:
            return ""
        member = self.draw.choice(self.fleet.members)
        how = self.draw.choice(["killed", "frozen"])
        member.kill() if how == "killed" else member.freeze()
        at = len(self.played) + 1
        self._member_away = member, at + self.draw.randint(1, 2)
        return f"member {member.name} of etcd is {how}"


def restarts(fleet: Fleet, played: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Why each round was ended, and in which events. Raises Failed: without a reason, or with one
    that these do not account for."""
    told = fleet.told()
    ends: dict[int, dict[str, Any]] = {}
    for event in told:
        if event["event"] == "stop" and "given up for lost" not in event["reason"]:
            at_once = _events_at(event["time"], played)
            why = {"why": event["reason"], "events": [e["number"] for e in at_once]}
            if event["time"] < ends.get(event["round"], {"time": math.inf})["time"]:
                ends[event["round"]] = {**why, "time": event["time"], "lost": _lost_in(at_once)}
    last = max((e["round"] for e in told if e["event"] == "started"), default=0)
    silent = [round_ for round_ in range(last) if not ends.get(round_, {}).get("why")]
    strange = {r: end for r, end in ends.items() if not _is_good(end, fleet.plan)}
    if silent or strange:
        raise Failed(f"rounds that ended without a word: {silent}; for a strange reason: {strange}")
    return {r: {key: end[key] for key in ("why", "events", "lost")} for r, end in ends.items()}


def _events_at(moment: float, played: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last event that had begun, and those before it that were not waited for."""
    found: list[dict[str, Any]] = []
    for event in reversed([e for e in played if e["at"] <= moment]):
        if found and not event["at once"]:
            break
        found.insert(0, event)
    return found


def _lost_in(events: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [ranks for event in events for ranks in event["lost"]]


def _is_good(end: dict[str, Any], plan: Plan) -> bool:
    """Whether the events account for a restart: copies are lost with a node and the next one."""
    copies = re.search(r"logs? of ranks? (\d+).* lost with their node", end["why"])
    if copies is not None:
        node = int(copies[1]) // plan.slots
        lost = {ranks[0] // plan.slots for ranks in end["lost"] if ranks}
        return {node, (node + 1) % plan.nodes} <= lost
    return any(word in end["why"] for word in REASONS)


def results(out: Path, ranks: int) -> dict[str, str]:
    """``"rank 0, model"`` -> hash."""
    return {
        f"rank {rank}, {name}": digest(value)
        for rank in range(ranks)
        for name, value in torch.load(out / f"rank{rank}.pt", weights_only=True).items()
    }


def undisturbed(folder: Path, ranks: int, steps: int) -> tuple[dict[str, str], set[Loss]]:
    """What a run of so many steps gives that nobody disturbs, under ``--recovery=off``, and the
    losses on its way."""
    out = folder / f"expected{steps}"
    out.mkdir()
    args = [str(out), str(folder / "never"), str(steps), "0"]
    with job(
        folder, "", f"--nproc-per-node={ranks}", args=args, script=SCRIPT, forked=True,
        name=f"quiet{steps}", env={"OMP_NUM_THREADS": "1"}, recovery="off",
    ) as run:  # fmt: skip
        if run.wait(4 * BOUND_S) != 0:
            raise Failed(f"the undisturbed run failed\n{run.err}")
        run.close()
        return results(out, ranks), losses_in(run.output["out"])


def soak(
    plan: Plan, seed: int, events: int, folder: Path, say: Callable[[str], None],
    kinds: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Run it; what came of it, as JSON. Raises Failed."""
    began = time.monotonic()
    with Fleet(plan, folder) as fleet:
        played = Soak(fleet, seed, say)
        played.play(events, kinds)
        fleet.end()
        told = fleet.told()
        why = restarts(fleet, played.played)
        losses = fleet.losses()
        seconds = time.monotonic() - began
    got = results(fleet.out, plan.ranks)
    steps = int(torch.load(fleet.out / "rank0.pt", weights_only=True)["step"])
    furthest = -(-max(step for _, step, _ in losses) // EVERY) * EVERY  # perhaps before a restart
    say(f"ended after {steps} steps, {len(losses)} losses told; now without events")
    wanted, all_losses = undisturbed(folder, plan.ranks, steps)
    if furthest > steps:
        all_losses = undisturbed(folder, plan.ranks, furthest)[1]
    unlike = sorted(name for name in wanted if wanted[name] != got.get(name))
    if unlike or losses - all_losses:
        strange = sorted(losses - all_losses)[:20]
        raise Failed(f"differs from the undisturbed run: {unlike}, losses {strange}")
    count = [sum(e["event"] == kind for e in told) for kind in ("node-lost", "node-replaced")]
    return {
        "seed": seed, "backend": plan.backend, "nodes": plan.nodes, "slots": plan.slots,
        "spares": plan.spares, "namespaces": fleet.network is not None,
        "losses equal": len(losses), "events": played.played, "launchers": len(fleet.nodes),
        "steps": steps,
        "nodes lost and replaced": count, "restarts": why, "equal": len(wanted),
        "s": round(seconds, 1),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run it.

    Returns:
        0: all was the same; 1: it was not, or something hung or failed.
    """
    parser = argparse.ArgumentParser(prog="scripts/soak_nodes", description=__doc__)
    parser.add_argument("--events", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None, help="of the events (default: drawn)")
    parser.add_argument("--backend", choices=["flash", "flash-etcd"], default="flash-etcd")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--spares", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.08, help="seconds of a forward")
    parser.add_argument("--out", type=Path, help="file to which the outcome is added, as JSON")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    plan = Plan(given.nodes, 2, given.spares, given.backend, given.pace)
    again = f"--events {given.events} --seed {seed} --backend {plan.backend}"
    again += f" --nodes {plan.nodes} --spares {plan.spares}"
    print(f"soak: scripts/soak_nodes {again}", flush=True)
    of_this_run = facts()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            found = soak(plan, seed, given.events, Path(folder), lambda s: print(s, flush=True))
        except (Failed, TimeoutError) as error:
            print(f"{error}\nsoak: FAILED; again: scripts/soak_nodes {again}", flush=True)
            return 1
    for round_, end in found["restarts"].items():
        print(f"round {round_} was ended in event(s) {end['events']}: {end['why']}")
    print(f"soak: {given.events} events, {found['equal']} results equal, {found['s']:.0f} s")
    if given.out is not None:
        runs = json.loads(given.out.read_text()) if given.out.exists() else []
        runs.append({"command": f"scripts/soak_nodes {again}", **of_this_run, **found})
        given.out.write_text(json.dumps(runs, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave nothing then, either
    raise SystemExit(main())
