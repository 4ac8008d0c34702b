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
# Beside torch it needs these.
RECIPES = {"loop": (), "trainer": ("transformers", "accelerate"), "lightning": ("lightning",), "zero": (), "pipeline": ()}  # fmt: skip


def shown(recipe: str) -> list[str]:
    """What the page says is printed of the recipe's mistake, in pieces: the last block of its section."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n`{recipe}`: ", 1)[1].split("\n## ", 1)[0]
    return [placeless(piece).strip() for piece in re.findall(r"```\n(.*?)\n```", section, re.S)[-1].split("[...]")]


def placeless(text: str) -> str:
    """Without folders, numbers of lines and counts of messages, which change with an installation and its versions."""
    return re.sub(r"[\w./-]*/(\w+\.py)|(?<=\.py):\d+| \(collective \d+ of step \d+\)", r"\1", text)


@pytest.mark.dealt(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_left_alone_and_its_mistake_named(recipe):
    for name in RECIPES[recipe]:
        pytest.importorskip(name, reason=f"the recipe is of {name}")
    command = [sys.executable, str(SCRIPT), recipe, f"{recipe}:wrong"]
    environment = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    healthy, wrong = json.loads(done.stdout).values()
    assert [end["code"] for end in healthy.values()] == [0, 0]
    assert "retrograd.fsdp" not in "".join(end["text"] for end in healthy.values())
    assert [end["code"] for end in wrong.values()] == [1, 1]
    texts = " ".join("".join(end["text"] for end in wrong.values()).split())
    assert [piece for piece in shown(recipe) if piece not in placeless(texts)] == []
