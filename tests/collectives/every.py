"""Every kind of collective once; what each gives goes to a file, errors by their type."""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fun

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
world = dist.group.WORLD
x = torch.arange(4.0) + rank
many = torch.arange(4.0 * size) + rank


def into(call, *shape):
    out = torch.empty(shape)
    call(out)
    return out


def listed(call, count=size):
    out = [torch.empty(4) for _ in range(count)]
    call(out)
    return out


def objects(call, count=size):
    out = [None] * count
    call(out)
    return torch.tensor([float(o["rank"]) for o in out if o is not None])


def point_to_point():
    out = torch.empty(2)
    sent = torch.ones(2) * rank
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, out, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return out


def any_source():
    if rank:
        dist.send(torch.ones(1) * rank, 0)
        return None
    return torch.stack(sorted(into(dist.recv, 1) for _ in range(size - 1)))


def asynchronous():
    out = x.clone()
    future = dist.all_reduce(out, async_op=True).get_future()
    return future.then(lambda f: f.value()[0] * 2).wait()


def alone(call):
    mine = dist.new_group([0])
    return call(mine) if rank == 0 else None


def coalesced():
    with dist._coalescing_manager(world, torch.device("cpu")):
        dist.all_reduce(x.clone())


def in_place(call, *given):
    out = x.clone()
    call(out, *given)
    return out


CASES = {
    "all_reduce": lambda: in_place(dist.all_reduce),
    "all_reduce max": lambda: in_place(dist.all_reduce, dist.ReduceOp.MAX),
    "all_reduce half": lambda: into(lambda o: dist.all_reduce(o.fill_(1.5)), 3).half(),
    "all_reduce int": lambda: (lambda t: (dist.all_reduce(t), t)[1])(torch.arange(3) * rank),
    "asynchronous": asynchronous,
    "broadcast": lambda: in_place(dist.broadcast, 1),
    "reduce": lambda: in_place(dist.reduce, 1) if rank == 1 else in_place(dist.reduce, 1) * 0,
    "all_gather": lambda: listed(lambda o: dist.all_gather(o, x)),
    "all_gather_into": lambda: into(lambda o: dist.all_gather_into_tensor(o, x), 4 * size),
    "all_gather_coalesced": lambda: listed(
        lambda o: dist.all_gather_coalesced([[t] for t in o], [x])
    ),
    "all_reduce_coalesced": lambda: (lambda o: (dist.all_reduce_coalesced(o), o)[1])([x + 0]),
    "reduce_scatter_tensor": lambda: into(lambda o: dist.reduce_scatter_tensor(o, many), 4),
    "reduce_scatter": lambda: into(
        lambda o: dist.reduce_scatter(o, list(many.clone().chunk(size))), 4
    ),
    "all_to_all_single": lambda: into(lambda o: dist.all_to_all_single(o, many), 4 * size),
    "all_to_all": lambda: listed(lambda o: dist.all_to_all(o, list(many.chunk(size)))),
    "gather": lambda: listed(lambda o: dist.gather(x, o)) if rank == 0 else dist.gather(x),
    "scatter": lambda: into(
        lambda o: dist.scatter(o, list(many.chunk(size)) if rank == 0 else None), 4
    ),
    "all_gather_object": lambda: objects(lambda o: dist.all_gather_object(o, {"rank": rank})),
    "broadcast_object_list": lambda: (lambda o: (dist.broadcast_object_list(o), o)[1][0])(
        [torch.ones(2) * rank]
    ),
    "gather_object": lambda: objects(
        lambda o: dist.gather_object({"rank": rank}, o if rank == 0 else None)
    ),
    "send and recv": point_to_point,
    "any source": any_source,
    "a group of one": lambda: alone(lambda g: in_place(dist.all_reduce, dist.ReduceOp.SUM, g)),
    "barrier": lambda: dist.barrier(),
    "monitored_barrier": lambda: dist.monitored_barrier(),
    "coalescing manager": coalesced,
    "functional all_reduce": lambda: fun.all_reduce(x, "sum", world) + 0,
    "functional all_reduce avg": lambda: fun.all_reduce(x, "avg", world) + 0,
    "functional broadcast": lambda: fun.broadcast(x, 1, world) + 0,
    "functional all_gather": lambda: fun.all_gather_tensor(x, 0, world) + 0,
    "functional gather dim": lambda: fun.all_gather_tensor(many.view(4, size), 1, world) + 0,
    "functional reduce_scatter": lambda: fun.reduce_scatter_tensor(many, "sum", 0, world) + 0,
    "functional odd": lambda: fun.reduce_scatter_tensor(torch.ones(5), "sum", 0, world) + 0,
    "functional all_to_all": lambda: fun.all_to_all_single(many, None, None, world) + 0,
    "functional all_reduce_coalesced": lambda: [
        t + 0 for t in fun.all_reduce_coalesced([x, x + 1], "sum", world)
    ],
    "functional all_gather_coalesced": lambda: [
        t + 0 for t in fun.all_gather_into_tensor_coalesced([x, x + 1], world)
    ],
    "functional reduce_scatter_coalesced": lambda: [
        t + 0 for t in fun.reduce_scatter_tensor_coalesced([many] * 2, "sum", [0, 0], world)
    ],
}  # fmt: skip

found = {}
for name, case in CASES.items():
    try:
        found[name] = case()
    except Exception as error:  # noqa: BLE001  any way to fail is an answer
        found[name] = type(error).__name__
torch.save(found, os.path.join(sys.argv[1], f"rank{rank}.pt"))
dist.barrier()
dist.destroy_process_group()
