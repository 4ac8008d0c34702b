"""FX graphs -> Graph: the Python text that torch.compile and compiled autograd print, and graphs in memory.

Both ways give the same instructions: `fx_text` and `fx_object` turn arguments into the values of `fx_body`, which
writes them down. Torch is never imported.
"""

from __future__ import annotations

from retrograd.graph.readers.fx_object import from_fx as from_fx
from retrograd.graph.readers.fx_text import parse as parse
from retrograd.graph.readers.fx_text import starts as starts
