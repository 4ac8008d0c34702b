"""Equal blocks that run in another order on one rank: FSDP2 adds gradients of different blocks, and nothing says so.

    torchrun --nproc-per-node 2 examples/swapped_blocks.py            # wrong gradients, exit code 0
    retrograd fsdp check -- torchrun --nproc-per-node 2 examples/swapped_blocks.py
    torchrun --nproc-per-node 2 examples/swapped_blocks.py --mend     # blocks in the order of the model

Gloo on CPUs; each step prints how far the reduced gradients of the blocks are from those of one process.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

MEND = "--mend" in sys.argv


class Experts(nn.Module):
    """Sums the experts that a batch asks for; which ones is a set, as the tokens chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, asked: list[int]) -> torch.Tensor:
        """Run the experts, in the order in which they were asked for or in that of the model."""
        return self.head(sum(self.experts[i](x).relu() for i in (sorted(asked) if MEND else asked)))


def batch(rank: int, step: int) -> torch.Tensor:
    """Other numbers on each rank and at each step."""
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()


def one_process(state: dict[str, torch.Tensor], step: int) -> list[torch.Tensor]:
    """Gradients of the experts' weights as one process computes them from the batches of both ranks."""
    model = Experts()
    model.load_state_dict(state)
    for rank in (0, 1):
        (model(batch(rank, step), [0, 1, 2, 3]).square().mean() / 2).backward()
    return [expert.weight.grad for expert in model.experts]


def main() -> None:
    """Three steps on two ranks; from step 1 on the second rank meets the experts in another order."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Experts()
    for expert in model.experts:
        fully_shard(expert, reshard_after_forward=False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        state = {name: value.full_tensor() for name, value in model.state_dict().items()}
        for expert in model.experts:
            expert.unshard()  # gathered in one order everywhere: the gathers are not what goes wrong
        asked = [2, 0, 3, 1] if rank == 1 and step else [0, 1, 2, 3]
        loss = model(batch(rank, step), asked).square().mean()
        loss.backward()
        got = [expert.weight.grad.full_tensor() for expert in model.experts]
        off = [float((g - w).norm() / w.norm()) for g, w in zip(got, one_process(state, step), strict=True)]
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}, gradients of the experts off by", *(f"{100 * e:.4f} %" for e in off))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
