"""Nanoseconds of each step of the C++ path of norms: marks that read the CPU's clock, put into a copy of its sources.

    python benchmarks/host_steps.py [--folder FOLDER] [--build]

On a GPU with an x86 CPU. The copy goes to FOLDER (a new one unless told), whose library is compiled first; --build
stops there. A line a call: microseconds in all, then the mean of each step, F in the forward's thread and B in the
backward's; the last lines are without launches, which leaves what the host does alone, and a view, which leaves
autograd alone.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "retrograd"
FORWARD, BACKWARD, CALLS = 0, 32, 2000  # first mark of each
CLOCK = """
#include <x86intrin.h>
namespace {
struct Marks { uint64_t sum[64], count[64]; };
inline Marks& marks() { static Marks all{}; return all; }
inline thread_local uint64_t last_clock = 0;
inline thread_local int first_mark = 0;
inline void begin_marks(int first) { first_mark = first; last_clock = __rdtsc(); }
inline void mark(int i) {
  marks().sum[first_mark + i] += __rdtsc() - last_clock;
  marks().count[first_mark + i]++;
  last_clock = __rdtsc();
}
"""
METHODS = """
PyObject* drain(PyObject*, PyObject*) {
  py::list all;
  for (int i = 0; i < 64; ++i) all.append(py::make_tuple(marks().sum[i], marks().count[i]));
  marks() = Marks{};
  return all.release().ptr();
}

PyObject* launch_by(PyObject*, PyObject* address) {
  state().launch = reinterpret_cast<LaunchFn>(PyLong_AsUnsignedLongLong(address));
  Py_RETURN_NONE;
}

"""
# Step, file, text, what stands there instead; `{}` is the mark.
HEADER, NORM = "runtime/cpp/host.hpp", "ops/norm/host/host.cpp"
STEPS: tuple[tuple[str, str, str, str], ...] = (
    ("stream, context, parameters", HEADER, "  check(held.launch(", "  {}\n  check(held.launch("),
    ("launch", HEADER, 'params, nullptr), "a kernel");\n', 'params, nullptr), "a kernel");\n  {}\n'),
    ("arguments", NORM, "  spec.centered = args[CENTERED]", "  {}\n  spec.centered = args[CENTERED]"),
    ("key", NORM, "  if (recipe == nullptr) return not_implemented();\n",
     "  if (recipe == nullptr) return not_implemented();\n  {}\n"),
    ("GIL, profiler", NORM, "at::sequence_number::peek());\n", "at::sequence_number::peek());\n  {}\n"),
    ("allocations", NORM, "  uint64_t slots[] = {address(call.x)", "  {}\n  uint64_t slots[] = {address(call.x)"),
    ("node", NORM, "    if (call.need) connect(call, made);\n", "    if (call.need) connect(call, made);\n    {}\n"),
    ("wrapping", NORM, "  if (!call.prenorm) return y.release", "  {}\n  if (!call.prenorm) return y.release"),
    ("saved tensors", NORM, "        results = launched(grad_y", "        {}\n        results = launched(grad_y"),
    ("checks, key", NORM, "    c10::OptionalDeviceGuard guard(device);\n",
     "    {}\n    c10::OptionalDeviceGuard guard(device);\n"),
    ("allocations", NORM, "    launch(recipe.launches[0], slots, device);\n",
     "    {}\n    launch(recipe.launches[0], slots, device);\n"),
    ("allocations of sums", NORM, "    launch(recipe.launches[1], slots, device);\n",
     "    {}\n    launch(recipe.launches[1], slots, device);\n"),
    ("freeing", NORM, "        if (results.empty()) results = in_python",
     "        {}\n        if (results.empty()) results = in_python"),
)  # fmt: skip


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(
            f"{path.name} has {text.count(old)} times {old!r}: the marks of this script are of another time"
        )
    path.write_text(text.replace(old, new))


def marked_copy(folder: Path) -> None:
    """The package in `folder`, with marks, unless it is there."""
    if (folder / "retrograd").exists():
        return
    shutil.copytree(SOURCE, folder / "retrograd", ignore=shutil.ignore_patterns("__pycache__"))
    for i, (_, name, old, new) in enumerate(STEPS):
        replaced(folder / "retrograd" / name, old, new.replace("{}", f"mark({i});"))
    header, norm = folder / "retrograd" / HEADER, folder / "retrograd" / NORM
    replaced(header, "namespace {\n\nusing at::ScalarType;", f"{CLOCK}\nusing at::ScalarType;")
    replaced(header, "PyObject* clear(PyObject*, PyObject*) {", f"{METHODS}PyObject* clear(PyObject*, PyObject*) {{")
    extra = '{"drain", drain, METH_NOARGS, nullptr}, {"launch_by", launch_by, METH_O, nullptr}, {"use_cuda", use_cuda'
    replaced(header, '{"use_cuda", use_cuda', extra)
    replaced(norm, "  TORCH_CHECK(count == ARGUMENTS", f"  begin_marks({FORWARD});\n  TORCH_CHECK(count == ARGUMENTS")
    again = "    const bool again = torch::autograd::GradMode::is_enabled();"
    replaced(norm, again, f"    begin_marks({BACKWARD});\n{again}")


def clock_ghz(folder: Path) -> float:
    """Ticks of the CPU's clock in a nanosecond."""
    program = folder / "clock.c"
    program.write_text(
        "#include <x86intrin.h>\nunsigned long long ticks(void) { return __rdtsc(); }\n"
        "int nothing(void *a, void *b, void *c, void *d) { return 0; }\n"
    )
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", program, "-o", folder / "clock.so"], check=True)
    ticks = ctypes.CDLL(str(folder / "clock.so")).ticks
    ticks.restype = ctypes.c_uint64
    began, first = time.perf_counter_ns(), ticks()
    time.sleep(0.2)
    return (ticks() - first) / (time.perf_counter_ns() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--build", action="store_true")
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    marked_copy(folder)
    sys.path.insert(0, str(folder))
    import torch
    import torch.nn.functional as F

    from retrograd.ops.norm import host, layer_norm, rms_norm

    host.path.library.build()
    if chosen.build:
        return 0
    host.on()
    module, ghz = host.path.module, clock_ghz(folder)

    def measure(label: str, call: Callable[[], Any]) -> None:
        for _ in range(200):
            call()
        torch.cuda.synchronize()
        module.drain()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        us = (time.perf_counter() - began) / CALLS * 1e6
        torch.cuda.synchronize()
        steps = [(i, ticks / CALLS / ghz) for i, (ticks, count) in enumerate(module.drain()) if count]
        parts = "; ".join(f"{'B' if i >= BACKWARD else 'F'} {STEPS[i % BACKWARD][0]} {ns:.0f}" for i, ns in steps)
        print(f"{label}: {us:.1f} us, in C++ {sum(ns for _, ns in steps) / 1e3:.1f}; {parts}", flush=True)

    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, ns of each step, {CALLS} calls")
    x = torch.randn(7, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.randn(8192, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    grad = torch.randn_like(x).detach()
    pairs = {
        "RMSNorm": (lambda: rms_norm(x, weight), lambda: F.rms_norm(x, (8192,), weight, 1e-6), [x, weight]),
        "LayerNorm": (
            lambda: layer_norm(x, weight, bias),
            lambda: F.layer_norm(x, (8192,), weight, bias),
            [x, weight, bias],
        ),
    }
    for name, (ours, theirs, leaves) in pairs.items():
        measure(f"{name} forward", ours)
        measure(f"torch's {name} forward", theirs)
        for label, forward in ((name, ours), (f"torch's {name}", theirs)):
            measure(f"{label} forward + backward", lambda f=forward, ls=leaves: torch.autograd.grad(f(), ls, [grad]))
    module.launch_by(ctypes.cast(ctypes.CDLL(str(folder / "clock.so")).nothing, ctypes.c_void_p).value)
    for name, (ours, _, leaves) in pairs.items():
        measure(
            f"{name} forward + backward without launches",
            lambda f=ours, ls=leaves: torch.autograd.grad(f(), ls, [grad]),
        )
    measure("a view, forward + backward", lambda: torch.autograd.grad(x.view_as(x), [x], [grad]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
