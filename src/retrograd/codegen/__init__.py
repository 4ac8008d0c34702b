"""Cross-compiles Triton kernels without a GPU and reads their machine code. Importing this needs no triton."""

from retrograd.codegen.compile import Launch, distinct, recording
from retrograd.codegen.kernel_facts import cross_compile, facts_of
from retrograd.codegen.listing import cross_compiled
from retrograd.codegen.loaded_kernels import of_run
from retrograd.codegen.schema import Codegen, Facts
from retrograd.runtime.gpu_targets import Target, target_named, targets

__all__ = [
    "Codegen",
    "Facts",
    "Launch",
    "Target",
    "cross_compile",
    "cross_compiled",
    "distinct",
    "facts_of",
    "of_run",
    "recording",
    "target_named",
    "targets",
]
