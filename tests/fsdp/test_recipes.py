"""Training loops of other libraries on two ranks, as docs/fsdp-recipes.md records them: nothing said, then a usual mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"), reason="needs torch.distributed and fork"
)
SCRIPT = Path(__file__).with_name("recipes.py")
PAGE = SCRIPT.parents[2] / "docs" / "fsdp-recipes.md"
# What the recipe needs beside torch, and of the mistake: who, what and where.
RECIPES = {
    "loop": ((), [r"rank 0 gathers an unnamed tensor .* at .*recipes.py:\d+ \(loop\) where rank 1 is at the end"]),
    "trainer": (
        ("transformers", "accelerate"),
        ["rank 1 reduces body.1.0, body.0.0 where rank 0 reduces an unnamed", r"rank 0 at .*recipes.py:\d+ \(on_step_end"],
    ),
    "lightning": (("lightning",), ["rank 1 reduces body.1.0, body.0.0 where rank 0 waits at a barrier with module"]),
    "zero": ((), [r"rank 1 reduces 1.0, 0.0 .* at .*recipes.py:\d+ \(zero\) where rank 0 is at the end of the step"]),
    "pipeline": ((), ["rank 1 raised StopIteration: the loader of the targets is empty, after send of a message to rank 0"]),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_left_alone_and_its_mistake_named(recipe):
    needs, sentences = RECIPES[recipe]
    for name in needs:
        pytest.importorskip(name, reason=f"the recipe is of {name}")
    command = [sys.executable, str(SCRIPT), recipe, f"{recipe}:wrong"]
    environment = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    healthy, wrong = json.loads(done.stdout).values()
    assert [end["code"] for end in healthy.values()] == [0, 0]
    assert "retrograd.fsdp" not in "".join(end["text"] for end in healthy.values())
    assert [end["code"] for end in wrong.values()] == [1, 1]
    texts = " ".join("".join(end["text"] for end in wrong.values()).split())
    for sentence in sentences:
        assert re.search(sentence, texts)


def test_the_page_has_a_section_for_each():
    assert {f"`{name}`" for name in RECIPES} <= set(re.findall(r"`\w+`", PAGE.read_text(encoding="utf-8")))
