"""`retrograd env`: the record, its text, what is marked, and that none of it needs torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from retrograd import config, env
from retrograd.cli import main
from retrograd.compat import registry, versions
from retrograd.env import SCHEMA, facts
from retrograd.env.facts import variables
from retrograd.env.hazards import hazards
from retrograd.env.text import as_text
from retrograd.env.torch_flags import flags

GROUPS = (
    "versions",
    "machine",
    "devices",
    "compilers",
    "torch's flags",
    "variables",
    "settings",
    "caches",
    "compatibility",
)


@pytest.fixture(scope="module", autouse=True)
def _small_caches(tmp_path_factory):
    """Nobody's caches are counted, in this process and in those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def record(_small_caches):
    return env.survey()


def test_the_record_is_plain_json_with_a_schema(record):
    assert record["schema"] == SCHEMA == "retrograd.env/1"
    assert json.loads(json.dumps(record)) == record
    assert torch.__version__.partition("+")[0] == record["packages"]["torch"].partition("+")[0]
    assert record["packages"]["mmcv"] is None
    assert record["flags"]["num_threads"] == torch.get_num_threads()


def test_the_text_has_every_group_and_is_aligned(record):
    lines = as_text(record).splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert all(title.startswith(group) for title, group in zip(titles, GROUPS, strict=True))
    starts = {len(line) - len(line[2:].split("  ", 1)[1].lstrip()) for line in lines if "  torch " in line[:8]}
    assert len(starts) == 1


def _in_a_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_without_torch_it_says_so():
    out = _in_a_process("import sys; sys.modules['torch'] = None; from retrograd.cli import main; main(['env'])")
    assert "torch: not installed" in out
    assert "caches" in out


def test_what_needs_no_torch_imports_none():
    code = "from retrograd import env; import sys; f = env.survey(with_torch=False); print(f['torch'], 'torch' in sys.modules)"
    assert _in_a_process(code).strip() == "not asked for False"


def test_the_command_prints_both_forms():
    as_json = CliRunner().invoke(main, ["env", "--no-torch", "--json"])
    assert json.loads(as_json.stdout)["torch"] == "not asked for"
    assert "settings of retrograd" in CliRunner().invoke(main, ["env", "--no-torch"]).stdout


def test_reports_embed_what_they_did():
    assert set(env.collect()) == {
        *("python", "platform", "retrograd", "torch", "triton", "numpy", "devices", "TRITON_INTERPRET", "CI")
    }  # fmt: skip


def _facts(flags=None, variables=None, cuda=None, parts=(), packages=()):
    return {
        "flags": flags,
        "variables": variables or {},
        "toolkits": {"cuda": cuda},
        "compatibility": parts,
        "packages": dict(packages),
    }


# Flags and variables, whether torch is built for CUDA, and a word of the one hazard.
HAZARDS = {
    "tf32": ({"cuda.matmul.allow_tf32": True}, {}, None, "TF32 on"),
    "tf32-newer": ({"cuda.matmul.fp32_precision": "tf32"}, {}, None, "TF32 on"),
    "tf32-convolutions": ({"cudnn.allow_tf32": True}, {}, "13.0", "convolutions in 10 bits"),
    "medium": ({"float32_matmul_precision": "medium"}, {}, None, "bfloat16"),
    "16-bit-sums": ({"bf16_reduced_precision_reduction": True}, {}, "13.0", "partial sums"),
    "flushed": ({"flush_denormal": True}, {}, None, "subnormal"),
    "double": ({"default_dtype": "float64"}, {}, None, "are float64"),
    "benchmark": ({"cudnn.benchmark": True}, {}, None, "by timing"),
    "warn-only": ({"deterministic_algorithms": True, "deterministic_warn_only": True}, {}, None, "only warn"),
    "unfilled": ({"deterministic_algorithms": True, "fill_uninitialized_memory": False}, {}, None, "not filled"),
    "workspace": ({"deterministic_algorithms": True}, {}, "13.0", ":4096:8"),
    "override": ({}, {"NVIDIA_TF32_OVERRIDE": "0"}, None, "TF32 off"),
    "nccl": ({}, {"NCCL_ALGO": "Ring"}, None, "order of adding"),
    "interpreter": ({}, {"TRITON_INTERPRET": "1"}, None, "interpreted"),
    "blocking": ({}, {"CUDA_LAUNCH_BLOCKING": "1"}, None, "races hide"),
    "xla": ({}, {"XLA_USE_BF16": "1"}, None, "bfloat16 on XLA"),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards_are_marked(name):
    given, set_, cuda, word = HAZARDS[name]
    (found,) = hazards(_facts(given, set_, cuda))
    assert word in found["what"]


QUIET = {
    "plain": ({"cuda.matmul.allow_tf32": False, "default_dtype": "float32", "flush_denormal": False}, {}, None),
    "cpu-only": ({"cudnn.allow_tf32": True, "bf16_reduced_precision_reduction": True}, {}, None),
    "workspace": ({"deterministic_algorithms": True}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "13.0"),
    "switched-off": ({}, {"TRITON_INTERPRET": "0", "CUDA_LAUNCH_BLOCKING": "0"}, None),
    "no-torch": (None, {}, None),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_harmless_is_not_marked(name):
    assert hazards(_facts(*QUIET[name])) == []


def test_a_mark_stands_behind_its_line_or_at_the_end(record):
    here = {**record, "hazards": [{"where": "cudnn.benchmark", "what": "A"}, {"where": "NOT_SET", "what": "B"}]}
    lines = as_text(here).splitlines()
    assert any(line.startswith("  cudnn.benchmark") and line.endswith("! A") for line in lines)
    assert lines[-1] == "  ! NOT_SET: B"


def _part(state="works", difference=""):
    """A part of the compatibility table whose self-test says `difference`."""
    return {
        "part": "torch.something", "package": "torch", "purpose": "does something", "installed": "2.13", "ran": ["2.13"],
        "newer": False, "state": state, "difference": difference, "otherwise": "it goes on without",
    }  # fmt: skip


def test_a_part_that_works_is_no_hazard_and_one_that_does_not_says_what_happens():
    assert hazards(_facts(parts=[_part(), _part("not used")])) == []
    (hazard,) = hazards(_facts(parts=[_part("degraded", "gives 3, expected 2")]))
    assert hazard == {"where": "torch.something", "what": "gives 3, expected 2: it goes on without"}


def test_a_version_newer_than_tested_is_a_hazard():
    (hazard,) = hazards(_facts(packages={"torch": "99.0", "triton": versions.TESTED["triton"][-1], "jax": None}))
    assert hazard["where"] == "torch"
    assert f"tested with ({versions.tested('torch')})" in hazard["what"]


def test_parts_are_listed_without_their_frameworks():
    code = (
        "import sys; from retrograd import env; rows = env.compatibility(with_torch=False); "
        "print(len(rows), {r['state'] for r in rows} - {'not used', 'not installed'}, "
        "[m for m in ('torch', 'triton', 'jax', 'torch_xla') if m in sys.modules])"
    )
    count, others, imported = _in_a_process(code).split(maxsplit=2)
    assert int(count) >= 1
    assert (others, imported.strip()) == ("set()", "[]")


def test_every_file_that_declares_a_part_is_loaded():
    registry.load_parts()
    room = Path(registry.__file__).parent
    declaring = [file for file in room.rglob("*.py") if re.search(r"^@part\($", file.read_text(), re.M)]
    files = {Path(module.__file__) for name, module in sys.modules.items() if name.startswith("retrograd.compat.")}
    assert declaring
    assert set(declaring) <= files


def test_a_self_test_that_fails_is_told(monkeypatch):
    part = registry.Part("torch.gone", "torch", "asks", ("gone",), ("2.11",), "asks no more", lambda: torch.no_such)
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(registry, "load_parts", lambda frameworks: {})
    monkeypatch.setattr(registry, "_parts", {part.id: part})
    (row,) = env.compatibility(self_test=True)
    assert row["state"] == "degraded"
    assert "no_such" in row["difference"]
    (row,) = env.compatibility()
    assert row["state"] == "degraded"


def test_flags_follow_the_process():
    before = flags(torch)
    torch.backends.cudnn.benchmark = not before["cudnn.benchmark"]
    can_flush = torch.set_flush_denormal(True)
    try:
        now = flags(torch)
    finally:
        torch.backends.cudnn.benchmark = before["cudnn.benchmark"]
        torch.set_flush_denormal(False)
    changed = {name for name in now if now[name] != before[name]}
    assert changed == {"cudnn.benchmark"} | ({"flush_denormal"} if can_flush else set())
    assert flags(torch) == before


def test_a_flag_that_this_torch_lacks_is_none(monkeypatch):
    monkeypatch.delattr(torch, "is_deterministic_algorithms_warn_only_enabled")
    assert flags(torch)["deterministic_warn_only"] is None


def test_a_flag_that_cannot_be_read_says_why(monkeypatch):
    def refuse():
        raise RuntimeError("set by its other name\nmore")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    found = flags(torch)
    assert found["float32_matmul_precision"] == "cannot be read: RuntimeError: set by its other name"
    assert hazards(_facts(found)) == []


def test_variables_that_matter_are_shown_and_secrets_are_not(monkeypatch):
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hunter2")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    found = variables()
    assert (found["NCCL_PROTO"], found["TORCH_HUB_TOKEN"]) == ("Simple", "(hidden)")
    assert "SOMETHING_ELSE" not in found


def test_settings_say_where_they_come_from(monkeypatch):
    monkeypatch.setenv("RETROGRAD_HOST", "build")
    monkeypatch.delenv("CXX", raising=False)
    found = {setting.name: setting for setting in config.settings()}
    assert (found["RETROGRAD_HOST"].value, found["RETROGRAD_HOST"].source) == ("build", "environment")
    assert found["CXX"].source == "default"


def test_caches_are_where_the_variables_say(monkeypatch, tmp_path):
    (tmp_path / "triton" / "a").mkdir(parents=True)
    (tmp_path / "triton" / "a" / "kernel.cubin").write_bytes(b"x" * 100)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    ours, triton, inductor = facts.caches()
    assert (triton["files"], triton["bytes"], triton["complete"]) == (1, 100, True)
    assert (ours["path"], ours["files"], inductor["bytes"]) == (str(tmp_path / "home" / "retrograd"), 0, 0)
    monkeypatch.setattr(facts, "_MOST_FILES", 0)
    assert facts.caches()[1]["complete"] is False


def _program(folder, name, said):
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    path.chmod(0o755)


def test_compilers_are_those_on_the_path(monkeypatch, tmp_path):
    _program(tmp_path, "nvcc", "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88")
    _program(tmp_path, "mine", "mine (GCC) 12.2.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CXX", "mine -O1")
    found = {tool["name"]: tool for tool in facts.compilers()}
    assert found["nvcc"] == {"name": "nvcc", "path": str(tmp_path / "nvcc"), "version": "13.0"}
    assert found["c++"]["version"] == "12.2.0"


def test_gpus_are_those_of_the_driver(monkeypatch, tmp_path):
    _program(tmp_path, "nvidia-smi", "0, NVIDIA H200, 9.0, 143771, 580.95.05\n1, NVIDIA H200, 9.0, [N/A], 580.95.05")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    first, second = facts.gpus()
    assert first == {
        "index": "0",
        "name": "NVIDIA H200",
        "capability": "9.0",
        "memory_mib": 143771,
        "driver": "580.95.05",
    }
    assert second["memory_mib"] is None


def test_a_fork_that_may_not_ask_cuda_says_so(monkeypatch):
    def refused(index):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.\nMore of it.")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", refused)
    devices = env.collect()["devices"]
    assert devices == "cpu (CUDA is not asked: Cannot re-initialize CUDA in forked subprocess.)"
