"""c10d's dispatch: what the self-test finds where names are gone, renamed or mean something else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from retrograd.compat import registry
from retrograd.errors import UnsupportedVersionError
from retrograd.fsdp import record_collectives

if not torch.distributed.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from retrograd.compat import c10d_collectives as c10d

pytestmark = pytest.mark.usefixtures("untested_parts")


def test_this_torch_dispatches_as_known():
    assert registry.status(c10d.PART).difference == ""


def _gone(monkeypatch):
    monkeypatch.delattr(torch._C, "_dispatch_keyset_full_after")
    return "_dispatch_keyset_full_after"


def _loses_the_result(monkeypatch):
    monkeypatch.setattr(c10d, "_tensors", lambda nested: iter([torch.zeros(1)]))
    return "see other tensors"


def _another_unbox(monkeypatch):
    monkeypatch.setattr(torch.distributed.ProcessGroup, "unbox", staticmethod(lambda boxed: None))
    return "another process group"


def _kernels_are_not_called(monkeypatch):
    monkeypatch.setattr(torch.library.Library, "impl", lambda *args, **kwargs: None)
    return r"sees? \[\]|No backend|starts although|not implemented|Could not run"


@pytest.mark.parametrize("change", [_gone, _loses_the_result, _another_unbox, _kernels_are_not_called])
def test_a_torch_that_dispatches_otherwise_is_refused(monkeypatch, change):
    difference = change(monkeypatch)
    with pytest.raises(UnsupportedVersionError, match=difference) as caught:
        record_collectives().start()
    assert record_collectives()._active is None
    assert "use torch.profiler" in str(caught.value)


WHILE_IMPORTED = """
import sys
from retrograd.core.import_hook import AfterImport

def ask(name):
    from retrograd.compat import c10d_collectives as c10d, registry
    print(registry.status(c10d.PART).state, flush=True)

sys.meta_path.insert(0, AfterImport(("torch",), ask))
import torch
"""


def test_a_part_that_is_asked_while_torch_is_imported_does_not_wait_for_that_import():
    """As `retrograd fsdp check` asks: from the import of torch, which a thread with an import of its own would await."""
    done = subprocess.run([sys.executable, "-c", WHILE_IMPORTED], capture_output=True, text=True, timeout=300)
    assert done.stdout == "works\n", done.stderr
