"""JAX: what its log says, read from captured text; and, where JAX is installed, a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from retrograd.graph.watching.backends.jax import Miss, read_miss

# As jax 0.10.2 logs them (jax._src.interpreters.partial_eval, WARNING).
NEVER = """TRACING CACHE MISS at /home/u/train.py:21:16 (<module>):
  never seen function:
    step id=139840837845856 defined at /home/u/train.py:18"""
SHAPE = """TRACING CACHE MISS at /home/u/train.py:24:16 (main):
  for step defined at /home/u/train.py:18
  all previously seen cache keys differ. For the closest previous key:
  different input types:
  * at x, now f32[5,4] and before f32[8,4]"""
TREE = """TRACING CACHE MISS at /home/u/a (b):3/train.py:25:20 (<module>):
  for step defined at /home/u/train.py:18
  all previously seen cache keys differ. For the closest previous key:
  different input pytree:
  * at input path [0], now tuple of length 3 and before tuple of length 2, so the lengths do not match"""


@pytest.mark.parametrize(
    ("message", "miss"),
    [
        (NEVER, Miss("step", "train.py:21", "never seen function")),
        (
            SHAPE,
            Miss("step", "train.py:24", "different input types: * at x, now f32[5,4] and before f32[8,4]"),
        ),
    ],
    ids=["never", "shape"],
)
def test_a_miss_is_read(message, miss):
    assert read_miss(message) == miss


def test_another_structure_of_arguments_and_other_messages():
    found = read_miss(TREE)
    assert found.function == "step"
    assert found.why.endswith("so the lengths do not match")
    assert read_miss("Compiling step with global shapes and types [ShapedArray(float32[8,4])].") is None


PROGRAM = """
import jax, jax.numpy as jnp
import retrograd.graph as graph

@jax.jit
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

before = jax.config.values["jax_dump_ir_to"], jax.config.values["jax_explain_cache_misses"]

@jax.jit
def multiply(x):  # a function of JAX is called so, too
    return x * 3.0

with graph.watch("jax", expect=2) as o:
    w = jnp.ones((4, 2)) + jax.random.normal(jax.random.key(0), (4, 2))
    multiply(w)
    o.step()
    for batch in (8, 8, 5, 5):
        jnp.where(w > 0, w, 0.0).mean(), jnp.argsort(w), w * 2.0
        w = step(w, jnp.ones((batch, 4)))
        o.step()
assert before == (jax.config.values["jax_dump_ir_to"], jax.config.values["jax_explain_cache_misses"])
named, first, second = o.report().graphs
assert named.name == "multiply" and "are not counted" in o.report().notes[0], o.report()
assert (first.step, second.step, second.against, second.level) == (1, 3, 1, "strict"), o.report()
assert "now f32[5,4] and before f32[8,4]" in second.reason, second
assert [c.kind for c in second.causes] == ["shape_changed"], second.causes
assert second.seconds > 0 and first.name == "step"
print("done")
"""


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_a_real_run():
    # A process of its own: JAX's settings and threads are not for the other tests.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr


UNMARKED = """
import jax, jax.numpy as jnp, retrograd.graph
double = jax.jit(lambda x: x * 2.0)
for n in (3, 3, 4):
    double(jnp.ones(n))
    {mark}
"""


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
@pytest.mark.parametrize(("mark", "steps"), [("pass", [0, 0]), ("retrograd.graph.step()", [0, 2])])
def test_that_calls_cannot_be_counted_is_said(tmp_path, mark, steps):
    (tmp_path / "train.py").write_text(UNMARKED.format(mark=mark))
    command = [
        sys.executable,
        "-m",
        "retrograd",
        "graph",
        "watch",
        "--json",
        "--",
        "python",
        str(tmp_path / "train.py"),
    ]
    [report] = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert [graph["step"] for graph in report["graphs"]] == steps
    assert report["notes"][0].startswith(
        "JAX tells nobody" if mark == "pass" else "each call of retrograd.graph.step()"
    )
