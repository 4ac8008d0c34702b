"""True logs of DebugMode, two a program, with a difference planted between them: run once, with torch 2.15 or newer.

    python tests/trace/debug_mode/write_logs.py

Each file is what `DebugMode.save_logs` writes; only folders in its stack traces are shortened, and gzip packs it.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
WRONG = "wrong"


class Block(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Scaled(torch.autograd.Function):
    """Three times x, whose backward may be wrong."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def _data() -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(7))


def _trained(
    model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.sum, lr: float = 0.1
) -> None:
    """Two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, foreach=False)
    for _ in range(2):
        loss(model(_data())).backward()
        optimizer.step()
        optimizer.zero_grad()


def seeds(fault: bool) -> None:
    model = nn.Sequential(Block(), nn.Dropout(0.5), Block())
    torch.manual_seed(2 if fault else 1)
    _trained(model)


def extra_operator(fault: bool) -> None:
    model = nn.Sequential(Block(), Block())

    def loss(y: torch.Tensor) -> torch.Tensor:
        y = y * 1.0009765625 if fault else y
        return y.square().mean()

    _trained(model, loss)


def missing_operator(fault: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one(x)
            y = y if fault else functional.relu(y)
            return self.two(y)

    _trained(Model())


def narrower(fault: bool) -> None:
    model = nn.Sequential(Block(), Block())
    with torch.autocast("cpu", torch.bfloat16, enabled=fault):
        model(_data()).float().square().mean()


def shapes(fault: bool) -> None:
    _trained(nn.Sequential(Block(), Block(hidden=48 if fault else 32)))


def another_order(fault: bool) -> None:
    left, right = nn.Linear(16, 8), nn.Linear(16, 8)

    def both(x: torch.Tensor) -> torch.Tensor:
        if fault:
            second, first = right(x).tanh(), left(x).sigmoid()
        else:
            first, second = left(x).sigmoid(), right(x).tanh()
        return first + second

    with torch.no_grad():
        both(_data()).sum()


def in_place(fault: bool) -> None:
    model = nn.Linear(16, 16)
    with torch.no_grad():
        y = model(_data())
        y = functional.relu_(y) if fault else functional.relu(y)
        y.add_(1.0) if fault else y + 1.0
        (y * 2.0).sum()


def not_a_number(fault: bool) -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        squares = y.square().sum(-1)
        return (squares - 1e3 if fault else squares + 1e3).log().mean()

    _trained(nn.Sequential(Block(), Block()), loss)


def weight(fault: bool) -> None:
    model = nn.Sequential(Block(), Block())
    with torch.no_grad():
        model[1].up.weight[0, 0] += 1.0 if fault else 0.0
    _trained(model)


def learning_rate(fault: bool) -> None:
    _trained(nn.Sequential(Block(), Block()), lr=0.2 if fault else 0.1)


def wrong_backward(fault: bool) -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](Scaled.apply(self[0](x), 2.0 if fault else 3.0))

    _trained(Model(Block(), Block()))


def another_gelu(fault: bool) -> None:
    class Model(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(functional.gelu(self.up(x), approximate="tanh" if fault else "none"))

    _trained(nn.Sequential(Block(), Model()))


def sign(fault: bool) -> None:
    """An L1 norm does not see it."""
    model = nn.Linear(16, 16)
    with torch.no_grad():
        y = model(_data())
        (torch.exp(Negated(fault)(y))).sum()


class Negated(nn.Module):
    def __init__(self, fault: bool) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(-1.0 if fault else 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def one_step_less(fault: bool) -> None:
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(2 if fault else 3):
        model(_data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled(fault: bool, backend: str = "aot_eager") -> None:
    model = nn.Sequential(Block(), Block())
    run = torch.compile(model, backend=backend) if fault else model
    _trained_as(run, model)


def inductor(fault: bool) -> None:
    compiled(fault, "inductor")


def _trained_as(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> None:
    run(_data()).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


def distributed(fault: bool) -> None:
    """DTensor, one rank of one: what it is laid out as differs."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(_data(), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(16, 8), mesh, [Shard(1) if fault else Replicate()])
    y = (x @ w).redistribute(mesh, [Replicate()])
    y.sum()


PROGRAMS = {
    program.__name__: program
    for program in (
        seeds, extra_operator, missing_operator, narrower, shapes, another_order, in_place, not_a_number, weight,
        learning_rate, wrong_backward, another_gelu, sign, one_step_less, compiled, inductor, distributed,
    )
}  # fmt: skip


def log(program: Callable[[bool], None], fault: bool, hashes: object = "norm", **how: object) -> str:
    """The text that `save_logs` writes of a program."""
    from torch.utils._debug_mode import DebugMode

    torch.manual_seed(0)
    inputs = how.pop("inputs", True)
    if program in (compiled, inductor) and fault:
        program(fault)  # compiled before it is logged
        torch.manual_seed(0)
    with (
        DebugMode(**{"record_nn_module": True, **how}) as mode,
        DebugMode.log_tensor_hashes(hashes, hash_inputs=inputs),
    ):
        program(fault)
    text = io.StringIO()
    DebugMode.save_logs(mode.logs, text)
    return _shortened(text.getvalue())


def _shortened(text: str) -> str:
    """Without folders of the machine that it was logged on."""
    text = text.replace(str(HERE), "/home/user/project")
    text = re.sub(r'(?<=File \\")/[^"\\]*?/(site-packages/|torchinductor_\w+/|lib/python3[^/]*/)', r"/usr/lib/\1", text)
    return text


def write(name: str, text: str) -> None:
    with (HERE / f"{name}.json.gz").open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(text.encode())


def main() -> None:
    chosen = sys.argv[1:] or [*PROGRAMS]
    for name in chosen:
        stack = name in ("wrong_backward", "another_gelu", "inductor")  # the traces are most of a file
        for fault in (False, True):
            write(f"{name}.{WRONG if fault else 'right'}", log(PROGRAMS[name], fault, record_stack_trace=stack))
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
