"""Run as a script: what codegen says of the specimens, and what the compilers say themselves, as JSON."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import specimens
import torch

from retrograd import codegen
from retrograd.catalog.launches import LaunchArguments, launches
from retrograd.codegen import loaded_kernels
from retrograd.compat.triton_compile import absent_gpu
from retrograd.runtime.triton import fake_gpu

HERE = Path(__file__).resolve().parent
SOME = ("sm_80", "sm_90", "gfx942")
SUBJECTS = {
    "norms": tuple(codegen.targets()),
    "ticket": SOME,
    "adds": SOME,
    "adds_bf16": SOME[:2],
    "tf32": ("sm_90", "sm_100", "gfx942", "gfx950"),
    "ieee": SOME[1:],
    "exact": SOME[1:],
    "unfused": SOME[1:2],
    "rough": SOME[1:],
    **dict.fromkeys(("waits_first", "waits_late", "never_waits", "not_early"), SOME[1:2]),
    "spills": SOME[1:2],
    "spills_on_amd": SOME[2:],
    "roomy": SOME[1:],
    "tuned": SOME[1:],
    "tuned_reset": SOME[1:2],
    "tuned_in_place": SOME[1:2],
    "tuned_restored": SOME[1:2],
}


def ptxas_log(launch: codegen.Launch) -> dict[str, int]:
    """Registers, stack and spilled bytes as ptxas itself reports them to Triton, whose options change with releases."""
    log = io.StringIO()
    with patch.dict(os.environ, TRITON_ALWAYS_COMPILE="1", TRITON_DUMP_PTXAS_LOG="1"), redirect_stdout(log):
        launch.compile()
    forms = {
        "registers": r"Used (\d+) registers",
        "stack": r"(\d+) bytes stack",
        "spilled": r"(\d+) bytes spill stores",
    }
    return {what: int(re.search(form, log.getvalue())[1]) for what, form in forms.items()}


def llvm_notes(assembly: str) -> dict[str, int]:
    """What LLVM writes below a kernel for AMD."""
    forms = {"registers": "TotalNumVgprs", "stack": "ScratchSize", "occupancy": "Occupancy"}
    return {what: int(re.search(rf"; {form}: (\d+)", assembly)[1]) for what, form in forms.items()}


def themselves(name: str, arch: str) -> dict[str, dict[str, int]]:
    """Kernel -> what its own compiler says."""
    target = codegen.target_named(arch)
    with codegen.recording(arch) as found, fake_gpu.gpu(target):
        getattr(specimens, name)()
    said = {}
    for launch in found:
        said[launch.kernel] = ptxas_log(launch) if target.nvidia else llvm_notes(launch.compile().asm["amdgcn"])
    return said


def pretended_run() -> dict[str, object]:
    """`--profile` on a GPU that is not there: Triton compiles, launches nothing, and the profiler's events are made up."""
    target = codegen.target_named("sm_90")
    x, out = torch.empty(4096), torch.empty(1024)
    tuner = specimens.tuned_kernel
    tuner.do_bench = lambda call, quantiles: (call(), [1.0, 1.0, 1.0])[1]

    def workload() -> None:
        specimens.add_kernel.warmup(x, out, 4096, BLOCK=1024, grid=(4,))
        specimens.add_kernel.warmup(x, out, 4096, BLOCK=2048, grid=(2,))
        tuner.run(x, out, 4096, grid=(4,), warmup=True)

    class Profile:
        def __init__(self, activities: object) -> None:
            pass

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> list[SimpleNamespace]:
            names = ["add_kernel", "add_kernel", "tuned_kernel"] * 2 + ["tuned_kernel"]
            cuda = torch.autograd.DeviceType.CUDA
            return [
                SimpleNamespace(
                    name=name,
                    device_type=cuda,
                    time_range=SimpleNamespace(start=at, elapsed_us=lambda at=at: 10.0 * (at % 3 + 1)),
                )
                for at, name in enumerate(names)
            ]

    with absent_gpu(target), fake_gpu.gpu(target), patch("torch.profiler.profile", Profile):
        found = codegen.of_run("pretended", workload)
        return json.loads(loaded_kernels.profiled(found, workload, copy_gb_per_s=10.0, repeats=2).to_json())


def recorded(name: str) -> dict[str, list]:
    """Architecture -> (kernel, grid) of what is launched; nothing is compiled."""
    found = {}
    for arch in ("sm_90", "gfx942"):
        workload = launches(f"{HERE / 'specimens.py'}:{name}", LaunchArguments(), arch)
        with codegen.recording(arch) as made:
            workload(codegen.target_named(arch))
        found[arch] = [(launch.kernel, launch.grid) for launch in made]
    return found


def main() -> None:
    found = {}
    for name, architectures in SUBJECTS.items():
        place = f"{HERE / 'specimens.py'}:{name}"
        workload = launches(place, LaunchArguments(), architectures[0])
        found[name] = json.loads(codegen.cross_compiled(name, workload, architectures, workers=0).to_json())
    kernel = launches(
        f"{HERE / 'specimens.py'}:add_kernel",
        LaunchArguments(signature="x_ptr=*bf16:1, out_ptr=*fp32, N=i32, BLOCK=1024"),
        "sm_90",
    )
    found["signature"] = json.loads(codegen.cross_compiled("signature", kernel, ["sm_90"], workers=0).to_json())
    shipped = launches("rms_norm_bias", LaunchArguments(dtype="bf16", case="N=2048"), "sm_90")
    found["shipped"] = json.loads(codegen.cross_compiled("shipped", shipped, ["sm_90"], workers=2).to_json())
    kills = launches(f"{HERE / 'specimens.py'}:kills", LaunchArguments(), "sm_90")
    found["kills"] = json.loads(codegen.cross_compiled("kills", kills, ["sm_90"], workers=1).to_json())
    found["recorded"] = {name: recorded(name) for name in ("ours", "asks")}
    found["run"] = pretended_run()
    found["themselves"] = {
        f"{name} {arch}": themselves(name, arch)
        for name, arch in (
            *(("norms", arch) for arch in codegen.targets()),
            *((name, arch) for name in ("roomy", "rough") for arch in SOME[1:]),
            ("spills", "sm_90"),
            ("spills_on_amd", "gfx942"),
        )
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
