"""Reduce-scatter with a fixed order of additions: all-to-all, then a sum in rank order.

A ring, a tree or a switch adds in an order that follows from the place of an element in the buffer, from the size of
the buffer and from the route that the library picks, so that grouping modules otherwise changes gradients. Here a rank
receives what every rank has for it and adds it up itself: element i is ((x0 + x1) + x2) + ... in float32 whatever
surrounds it. The same bytes travel; the price is a receive buffer as large as the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

from retrograd.compat.fsdp2 import STATE, parameter_groups, reduce_scatter_of
from retrograd.compat.registry import status, works
from retrograd.errors import NonFiniteGradientError, RetrogradError, UnsupportedVersionError, UsageError
from retrograd.fsdp.rank_sum import Scale, rank_sum

if not dist.is_available():
    raise RetrogradError(
        "this torch is built without torch.distributed, which reducing over ranks needs; install another"
    )

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def ordered_reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    op: Any = dist.ReduceOp.SUM,
    *,
    wire_dtype: torch.dtype | None = None,
    check_finite: bool = False,
    name: str | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`torch.distributed.reduce_scatter_tensor` with rank order and one rounding to the output.

    Args:
        output: [N] or any shape of N elements, contiguous; of the input's dtype, or float32 for a 16-bit input.
        input: W * N elements, contiguous, float32, bfloat16, float16 or float64; piece r goes to rank r of the group.
        group: the process group; None for all ranks.
        op: SUM, AVG (the sum is divided by W, once) or PREMUL_SUM(f) (the sum is multiplied by f, once).
        wire_dtype: None to send the input's dtype, or bfloat16 to send float32 rounded, a rank's own piece too.
            Exact where the values came from bfloat16, as gradients of bfloat16 parameters do.
        check_finite: Whether a NaN or Inf raises here and names the rank that sent it. On a GPU the host waits for
            the sum then.
        name: what is reduced, for that message.
        async_op: Whether to return a handle at once; the sum is launched by its `wait()`, on the stream current there.

    Returns:
        None, or with async_op a `Work`. On a GPU nothing waits for the device: the sum is launched on the current
        stream behind the all-to-all, and memory that is made here belongs to that stream.

    Sums are float32 (float64 for float64), in the order of ranks of the group. An element's bits depend on its own W
    values alone: not on N, on what else is in the buffer, nor on the algorithm that carries them.

    Raises:
        UsageError: shapes, dtypes, devices or layouts do not fit, the op is none of these, or this rank is not in
            the group.
        NonFiniteGradientError: with check_finite, on each rank that received a NaN or Inf.
    """
    ranks = dist.get_world_size(group)
    scale = _scale(op, ranks)
    _check(output, input, ranks, wire_dtype)
    if not output.numel():
        return _Pending(None, (), None) if async_op else None
    sent = input.view(-1) if wire_dtype is None else input.view(-1).to(wire_dtype)  # [W * N]
    received = torch.empty_like(sent)
    # With one rank too: the op then is a copy, and callers need no case of their own.
    work: Any = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
    finish = partial(_finish, output.view(-1), received.view(ranks, -1), scale, check_finite, name, group)
    if async_op:
        return _Pending(work, (received, sent), finish)
    finish()
    return None


@dataclass(eq=False)
class FixedOrderReduceScatter:
    """FSDP2's reduce-scatter in rank order, for `FSDPModule.set_custom_reduce_scatter`; see `ordered_reduce_scatter`.

        block.set_custom_reduce_scatter(retrograd.fsdp.FixedOrderReduceScatter())

    `retrograd.fsdp.fixed_order(model)` sets one on every module, with names. Gradients then are the same bits however
    modules are wrapped or grouped. Under HSDP this holds up to the all-reduce between replicas, which stays torch's.

    Args:
        wire_dtype, check_finite: as for `ordered_reduce_scatter`. For bfloat16 on the wire with float32 results set
            `MixedPrecisionPolicy(reduce_dtype=torch.float32)` too: FSDP allocates the result in reduce_dtype.
        name: the modules, for messages.

    Raises:
        UsageError: wire_dtype is neither None nor bfloat16.
    """

    wire_dtype: torch.dtype | None = None
    check_finite: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        _check_wire(self.wire_dtype)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised buffer from the caching allocator, of the stream that is current."""
        return torch.empty(*size, dtype=dtype, device=device)

    # torch 2.11 to 2.15 pass these by name.
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce input_tensor [W * N] into output_tensor [N]."""
        options = {"wire_dtype": self.wire_dtype, "check_finite": self.check_finite, "name": self.name}
        return ordered_reduce_scatter(output_tensor, input_tensor, group, op, async_op=async_op, **options)


class FixedOrder:
    """What `fixed_order` has set. `remove()` puts back what was there; as a context manager it does so at its end.

    Attributes:
        names: for each group of parameters the modules that share it, "a, b"; the root is "(root)".
    """

    def __init__(self, swaps: list[tuple[Any, Any, FixedOrderReduceScatter]]) -> None:
        self._swaps = swaps  # (first module of the group, comm before, ours)
        self.names = tuple(ours.name for _, _, ours in swaps)

    def remove(self) -> None:
        """Give every group the reduce-scatter it had; a second call does nothing.

        Raises:
            RetrogradError: something else has set a reduce-scatter since; nothing is undone.
        """
        for module, _, ours in self._swaps:
            now = reduce_scatter_of(_param_groups(module)[0])
            if now is not ours:
                raise RetrogradError(
                    f"the reduce-scatter of {ours.name} is {type(now).__name__} by now, expected the one that "
                    "fixed_order set; undo what was set after it first"
                )
        while self._swaps:
            module, before, _ = self._swaps.pop()
            module.set_custom_reduce_scatter(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<rank order in {len(self._swaps)} groups>"


def fixed_order(
    model: torch.nn.Module, *, wire_dtype: torch.dtype | None = None, check_finite: bool = False
) -> FixedOrder:
    """Reduce every gradient of a `fully_shard`ed model in rank order.

        for block in model.layers: fully_shard(block)
        fully_shard(model)
        handle = retrograd.fsdp.fixed_order(model)

    Args:
        model: holds at least one FSDPModule; itself or below.
        wire_dtype, check_finite: as for `ordered_reduce_scatter`.

    Returns:
        A handle with the names of the groups, whose `remove()` undoes it.

    Raises:
        UsageError: nothing is sharded, or a module has several groups of parameters (meshes per parameter), for which
            torch takes no reduce-scatter; nothing is set then.
        UnsupportedVersionError: this torch keeps its groups otherwise than the tested ones.
    """
    _check_wire(wire_dtype)
    swaps = []
    for module, names in _sharded(model):
        groups = _param_groups(module)
        if len(groups) > 1:
            raise UsageError(
                f"{', '.join(names)} has parameters on several meshes, for which torch takes no reduce-scatter of "
                "ours; expected one mesh a module: shard the parameters of another mesh with a fully_shard of their own"
            )
        if groups:  # none where modules below hold every parameter
            ours = FixedOrderReduceScatter(wire_dtype, check_finite, ", ".join(names))
            swaps.append((module, reduce_scatter_of(groups[0]), ours))
    for module, _, ours in swaps:
        module.set_custom_reduce_scatter(ours)
    return FixedOrder(swaps)


def _sharded(model: torch.nn.Module) -> list[tuple[Any, list[str]]]:
    """The first module of every `fully_shard` call and the names of all modules of it."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    sharded: dict[int, tuple[Any, list[str]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            # Modules of one call share one state.
            sharded.setdefault(id(fully_shard.state(module)), (module, []))[1].append(name or "(root)")
    if not sharded:
        raise UsageError(
            f"`model` ({type(model).__name__}) has no FSDPModule, expected one that torch.distributed.fsdp.fully_shard "
            "has sharded; shard it first"
        )
    return list(sharded.values())


def _param_groups(module: Any) -> list[Any]:
    """The groups of parameters of an FSDPModule: private, since torch can set a reduce-scatter and not tell it."""
    from torch.distributed.fsdp import fully_shard

    if not works(STATE):
        raise UnsupportedVersionError(
            f"{status(STATE).note}; call module.set_custom_reduce_scatter(retrograd.fsdp.FixedOrderReduceScatter()) on "
            "each module instead of fixed_order(model)"
        )
    return parameter_groups(fully_shard.state(module))


def _finish(
    output: torch.Tensor,  # [N]
    received: torch.Tensor,  # [W, N]
    scale: Scale,
    check_finite: bool,
    name: str | None,
    group: dist.ProcessGroup | None,
) -> None:
    """What remains when everything has been received."""
    flags = torch.zeros(len(received), dtype=torch.int32, device=output.device) if check_finite else None  # [W]
    rank_sum(received, output, scale, flags)
    if flags is not None and (bad := flags.nonzero().view(-1).tolist()):
        raise NonFiniteGradientError(_who_sent(received, bad, name, group))


class _Pending(dist.Work):
    """An all-to-all under way, which its buffers must outlive; `wait()` launches the sum. Without `finish`: done."""

    def __init__(self, work: Any, buffers: tuple[torch.Tensor, ...], finish: Callable[[], None] | None) -> None:
        super().__init__()
        self._work, self._buffers, self._finish = work, buffers, finish

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the transfer as the group's own `wait` does (on a GPU: the current stream waits) and add up."""
        if self._finish is None:
            return True
        self._work.wait() if timeout is None else self._work.wait(timeout)
        for buffer in self._buffers:
            if buffer.is_cuda:
                buffer.record_stream(torch.cuda.current_stream(buffer.device))  # may be another than it was made on
        finish, self._finish, self._buffers = self._finish, None, ()
        finish()
        return True

    def is_completed(self) -> bool:
        """Whether `wait()` has been called: before, the output holds nothing."""
        return self._finish is None


def _scale(op: Any, ranks: int) -> Scale:
    if op == dist.ReduceOp.SUM:
        return Scale()
    if op == dist.ReduceOp.AVG:
        return Scale("divide", ranks)
    if op == dist.ReduceOp.PREMUL_SUM and hasattr(op, "__getstate__"):
        # What pickling keeps is the only way to the factor; FSDP makes this op in set_gradient_divide_factor.
        state = op.__getstate__()
        if isinstance(state, tuple) and state[1] is not None:
            return Scale("multiply", float(state[1]))
    raise UsageError(f"op={op}, expected ReduceOp.SUM, AVG or PREMUL_SUM with its factor")


def _check_wire(wire_dtype: torch.dtype | None) -> None:
    if wire_dtype not in (None, torch.bfloat16):
        raise UsageError(
            f"wire_dtype={wire_dtype}, expected None (what FSDP reduces in) or torch.bfloat16; float16 would overflow"
        )


def _check(output: torch.Tensor, input: torch.Tensor, ranks: int, wire_dtype: torch.dtype | None) -> None:
    if ranks < 1:
        raise UsageError("this rank is not in `group`; only its members may call")
    _check_wire(wire_dtype)
    if input.dtype not in _DTYPES:
        raise UsageError(f"input is {input.dtype}, expected float32, bfloat16, float16 or float64")
    if wire_dtype is not None and input.dtype not in (torch.float32, torch.bfloat16):
        raise UsageError(f"wire_dtype={wire_dtype} with {input.dtype}, expected float32; leave wire_dtype None")
    if output.dtype not in (input.dtype, torch.float32) or input.dtype == torch.float64 != output.dtype:
        raise UsageError(f"output is {output.dtype} for {input.dtype}, expected the same, or float32 for 16 bits")
    if output.numel() * ranks != input.numel():
        raise UsageError(
            f"input has {input.numel()} elements and output {output.numel()}, expected {ranks} (ranks) x output; pad "
            "the input to a multiple of the number of ranks"
        )
    if output.device != input.device:
        raise UsageError(f"output is on {output.device} and input on {input.device}, expected one device")
    for name, tensor in (("output", output), ("input", input)):
        if not tensor.is_contiguous():
            raise UsageError(f"{name} has strides {tensor.stride()}, expected contiguous; pass .contiguous()")


def _who_sent(received: torch.Tensor, bad: list[int], name: str | None, group: dist.ProcessGroup | None) -> str:
    """The sentence of a NonFiniteGradientError; received [W, N], bad: its rows with a NaN or Inf."""
    members: Any = dist.group.WORLD if group is None else group
    parts = []
    for row in bad:
        values = received[row]
        first = int((~torch.isfinite(values)).nonzero()[0])
        parts.append(
            f"rank {dist.get_global_rank(members, row)} sent {int(values.isnan().sum())} NaN and "
            f"{int(values.isinf().sum())} Inf (the first is element {first} of {values.numel()})"
        )
    return (
        f"{'; '.join(parts)} to rank {dist.get_rank()} in the gradient of {name or 'a module without a name'}, "
        "expected finite numbers; look at the loss and the data of this step on the rank that sent them"
    )
