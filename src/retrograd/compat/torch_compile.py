"""Donated buffers of torch.compile: a compiled backward overwrites what its forward saved, so it can run only once.

The benchmark times the backward of one forward again and again, for which the configuration of AOTAutograd has a
private switch.
"""

from __future__ import annotations

from retrograd.compat.registry import part, works


def keep_saved_tensors() -> None:
    """Let backwards that are compiled from now on run more than once, where this torch can do so."""
    if works(PART):
        _switch_off()


def _switch_off() -> None:
    import torch._functorch.config as functorch

    functorch.donated_buffer = False


@part(
    "torch.donated_buffers",
    "runs the backward of a compiled function more than once",
    "the backward of torch.compile gets no time in a benchmark where torch refuses to run it again",
    names=("torch._functorch.config.donated_buffer",),
    ran=("2.13", "2.15"),
)
def PART() -> str:
    """A compiled backward runs again and again; without Inductor, whose compilers take seconds."""
    import torch

    _switch_off()
    x = torch.zeros(4, requires_grad=True)
    # exp(x) is saved and nobody outside of the graph holds it: such memory a backward may overwrite.
    function = torch.compile(lambda t: t.exp().exp(), backend="aot_eager", dynamic=False)
    # The backward is compiled by the first that runs; with retain_graph=True it would donate nothing anyway.
    torch.autograd.grad(function(x).sum(), x)
    y = function(x)
    gradients = [torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0] for _ in range(2)]
    return "" if torch.equal(*gradients) else "a second backward gives another gradient"
