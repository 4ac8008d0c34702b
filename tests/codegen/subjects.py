"""Records made by hand, for what is decided without a compiler."""

from __future__ import annotations

from dataclasses import replace

from retrograd.codegen.access import Access
from retrograd.codegen.schema import Asked, Codegen, Facts, Kernel, Tuning

FACTS = Facts(
    kernel="norm_kernel",
    target="sm_90",
    arguments={"x_ptr": "*bf16", "y_ptr": "*fp32", "N": "i32"},
    constants={"BLOCK": 1024},
    aligned=("x_ptr", "y_ptr"),
    num_warps=4,
    num_stages=3,
    registers=40,
    spill_bytes=0,
    shared_bytes=1024,
    uses_f64=False,
    bulk_copies=0,
    accesses=(
        Access("load", 16, "sync", 4, "norm.py:12", ("cols", "x_ptr")),
        Access("load", 4, "sync", 1, "norm.py:13", ("mean_ptr",)),
        Access("store", 16, "sync", 4, "norm.py:20", ("cols", "y_ptr")),
    ),
    one_value=("norm.py:13",),
)
ADD = Asked("add", "f32", "relaxed", "gpu", "norm.py:30", ("y_ptr",))
TUNING = Tuning(2, {"BLOCK": 1024, "num_warps": 4})


def kernel(**changes: object) -> Kernel:
    """The healthy kernel with facts changed."""
    facts = replace(FACTS, **changes)
    return Kernel(facts.kernel, facts.target, "kernels/norm.py:10", facts=facts)


def record(*kernels: Kernel, target: str = "norm.py:launch") -> Codegen:
    """Kernels of one architecture or more."""
    return Codegen(target, tuple(dict.fromkeys(k.target for k in kernels)), kernels)
