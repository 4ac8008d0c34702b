"""Cross-compiles Triton kernels without a GPU and reads their machine code. Importing this needs no triton."""

from retrograd.codegen.access import Access
from retrograd.codegen.compile import Launch, distinct, record, recording
from retrograd.codegen.facts import Facts, cross_compile, facts_of, facts_of_all
from retrograd.codegen.rules import WIDE, faults, narrow_loads
from retrograd.codegen.targets import Target, target_named, targets

__all__ = [
    "WIDE",
    "Access",
    "Facts",
    "Launch",
    "Target",
    "cross_compile",
    "distinct",
    "facts_of",
    "facts_of_all",
    "faults",
    "narrow_loads",
    "record",
    "recording",
    "target_named",
    "targets",
]
