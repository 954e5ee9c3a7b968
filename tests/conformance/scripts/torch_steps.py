# ruff: noqa: F821 - the names of the probe that these lines become a part of
"""Steps of the probe that import torch: in a script of their own, since a launcher may look at what
a script imports (see harness.prepare)."""


def _record(value, rank):
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        raise RuntimeError(value)

    main()


def _gloo(value, rank):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(rank) + 1])
    dist.all_reduce(total)
    say(f"sum {total.item()} of {dist.get_world_size()} threads {torch.get_num_threads()}")
    dist.destroy_process_group()


def _torch(value, rank):
    import torch

    say(f"torch threads {torch.get_num_threads()} {torch.get_num_interop_threads()}")
    say(f"set as torch loads: {sorted(n for n in os.environ if n.startswith('TORCHIND'))}")
    say(f"filters {[str(f[2]) for f in warnings.filters]}")


TORCH_STEPS = {"record": _record, "gloo": _gloo, "torch": _torch}
