"""C++ paths of eager ops after an install: when they are there, whether a call waits for them, and whether bits change.

    python benchmarks/host_path.py [--processes 2] [--seconds 150]

On a GPU, in an empty cache. Processes begin at once and call norms and deformable attention, forward and backward,
until the libraries that one of them compiles are taken; what was computed before is compared with what is computed
after it, bit for bit, eagerly, from a CUDA graph, from another thread and under torch.compile. A last process begins
when the libraries are there. Exit code 1 if a bit differs, or a path was not taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from retrograd import ops
from retrograd.ops.msda import host as msda_host
from retrograd.ops.norm import host as norm_host

HOSTS = (norm_host, msda_host)
LEVELS = [(40, 40), (20, 20)]
SHAPES = (
    ((64, 512), torch.float32),
    ((512, 4096), torch.bfloat16),
    ((7, 8192), torch.bfloat16),
    ((2, 3, 1000), torch.bfloat16),
)
Results = dict[str, list[torch.Tensor | None]]


def cases() -> dict[str, tuple[Any, dict[str, torch.Tensor], dict[str, Any]]]:
    """Function, inputs and options of each call, by name."""
    named = {}
    for (shape, dtype), name, residual in itertools.product(SHAPES, ("rms_norm", "layer_norm"), (False, True)):
        generator = torch.Generator("cuda").manual_seed(len(named))
        wide, vector = (torch.Size(shape), torch.Size(shape[-1:]))
        sizes = {"x": wide, "weight": vector, "bias": vector} | ({"residual": wide} if residual else {})
        inputs = {n: torch.randn(s, generator=generator, device="cuda").to(dtype) for n, s in sizes.items()}
        label = f"{name}{'+residual' * residual} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        named[label] = (getattr(ops, name), inputs, {"prenorm": True} if residual else {})
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator("cuda").manual_seed(len(named))
        sizes = {"value": (1, 2000, 8, 32), "sampling_locations": (1, 300, 8, 2, 4, 2)}
        sizes["attention_weights"] = sizes["sampling_locations"][:-1]
        inputs = {n: torch.rand(s, generator=generator, device="cuda") for n, s in sizes.items()}
        inputs["value"] = inputs["value"].to(dtype)
        options = {"spatial_shapes": LEVELS, "deterministic": True}
        named[f"ms_deform_attn {str(dtype).removeprefix('torch.')}"] = (ops.ms_deform_attn, inputs, options)
    return named


def why_not() -> str | None:
    """Why some op does not take its C++ path."""
    return next((reason for host in HOSTS if (reason := host.why_not()) is not None), None)


def call(norm: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor | None]:
    """Outputs and gradients."""
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    outs = norm(**leaves, **options)
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads = torch.autograd.grad(outs, list(leaves.values()), [torch.ones_like(o) * 0.5 for o in outs])
    return [*(o.detach() for o in outs), *grads]


def differing(first: Results, second: Results) -> list[str]:
    """Names of the calls with other bits."""
    pairs = ((name, zip(first[name], second[name], strict=True)) for name in first)
    return [name for name, tensors in pairs if not all(torch.equal(a, b) for a, b in tensors)]


def ways(named: dict[str, Any]) -> dict[str, Results]:
    """The results by a CUDA graph, by another thread and under torch.compile, of some calls."""
    some = dict([*list(named.items())[:3], *list(named.items())[-2:]])
    out: dict[str, Results] = {"graph": {}, "thread": {}, "compile": {}}
    for name, (norm, inputs, options) in some.items():
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            call(norm, inputs, options)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = call(norm, inputs, options)
        graph.replay()
        torch.cuda.synchronize()
        out["graph"][name] = [r.clone() for r in results]
        thread = threading.Thread(target=lambda n=name, a=(norm, inputs, options): out["thread"].update({n: call(*a)}))
        thread.start()
        thread.join()
    norm, inputs, options = named[name]
    out["compile"][name] = call(torch.compile(norm), inputs, options)
    torch.compiler.reset()
    return out


def watch(seconds: float, compiles: bool) -> dict[str, Any]:
    """One process: what it sees until the C++ path is taken."""
    named, began = cases(), time.perf_counter()
    first, longest = {}, 0.0
    for name, arguments in named.items():
        first[name] = call(*arguments)
        torch.cuda.synchronize()
    facts: dict[str, Any] = {"first_calls_s": round(time.perf_counter() - began, 2), "then": why_not()}
    before = ways(named) if compiles and why_not() is not None else {}
    calls = 0
    while why_not() is not None and time.perf_counter() - began < seconds:
        for arguments in named.values():
            at = time.perf_counter()
            call(*arguments)
            torch.cuda.synchronize()
            longest, calls = max(longest, time.perf_counter() - at), calls + 1
            if why_not() is None:
                break
    facts |= {"taken_after_s": round(time.perf_counter() - began, 2), "calls_meanwhile": calls}
    facts |= {"longest_call_ms": round(longest * 1e3, 2), "why_not": why_not()}
    again = {name: call(*arguments) for name, arguments in named.items()}
    facts["differing"] = differing(first, again)
    by_way = ways(named) if compiles else {}
    facts |= {f"differing_{way}": differing(results, {n: again[n] for n in results}) for way, results in by_way.items()}
    facts |= {f"differing_{way}_before": differing(r, {n: again[n] for n in r}) for way, r in before.items()}
    for host in HOSTS:
        host.off()
    facts["differing_python"] = differing({name: call(*arguments) for name, arguments in named.items()}, again)
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150.0, help="how long to wait for the library")
    parser.add_argument("--child", choices=["first", "later"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print("facts " + json.dumps(watch(chosen.seconds, chosen.child == "first")), flush=True)
        return 0
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "RETROGRAD_HOST"} | {"XDG_CACHE_HOME": cache}
        facts = []
        for kind, count in (("first", chosen.processes), ("later", 1)):
            command = [sys.executable, __file__, "--child", kind, "--seconds", str(chosen.seconds)]
            pipe = subprocess.PIPE
            running = [
                subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(count)
            ]
            for process in running:
                out, err = process.communicate()
                lines = [line for line in out.splitlines() if line.startswith("facts ")]
                facts += [json.loads(line.removeprefix("facts ")) for line in lines]
                told = [line for line in err.splitlines() if line.startswith("retrograd:")]
                print(f"{kind}: exit {process.returncode}, told {len(told)}: {told}", flush=True)
                print(json.dumps(facts[-1] if lines else err[-3000:], indent=1), flush=True)
        built = sorted(path.name for path in (Path(cache) / "retrograd/native").iterdir())
    print(f"in the cache: {built}")
    wrong = [name for fact in facts for key, names in fact.items() if key.startswith("differing") for name in names]
    wrong += [str(fact["why_not"]) for fact in facts if fact["why_not"] is not None]
    print(f"{len(facts)} processes, {len(cases())} calls each, wrong: {wrong or 'nothing'}")
    return 1 if wrong or len(facts) != chosen.processes + 1 else 0


if __name__ == "__main__":
    raise SystemExit(main())
