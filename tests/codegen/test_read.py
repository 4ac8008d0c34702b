"""The readers of machine code on text, and what codegen says when it cannot work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from retrograd import codegen
from retrograd.codegen import amd, nvidia
from retrograd.errors import RetrogradError, UsageError

USAGE = "Function k:\n  REG:40 STACK:8 SHARED:1024 LOCAL:16 CONSTANT[0]:608 TEXTURE:0"


def widths(read, op):
    return sorted((access.bytes, access.count) for access in read["accesses"] if access.op == op)


def sass(*instructions):
    lines = (i if i.startswith("//") else f"        /*{16 * n:04x}*/     {i} ;" for n, i in enumerate(instructions))
    return nvidia.read(USAGE, "\n".join(lines))


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("LDG.E R2, desc[UR4][R2.64]", 4),
        ("@!P0 LDG.E.128 R4, desc[UR16][R2.64]", 16),
        ("@P1 LDG.E.LTC128B.64 R4, [R2.64]", 8),
        ("LDG.E.U16.CONSTANT R4, [R2.64]", 2),
        ("LDG.E.S8 R4, [R2.64]", 1),
        ("LDG.E.ENL2.256 R4, R8, [R2.64]", 32),
        ("@!UP0 LDG.E.64.STRONG.GPU R4, [R2.64]", 8),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R48], desc[UR16][R2.64], P1", 16),
        ("LDGSTS.E [R48], desc[UR16][R2.64], P1", 4),
        ("LD.E.128 R4, [R2.64]", 16),
    ],
)
def test_width_of_nvidia_loads(instruction, expected):
    assert widths(sass(instruction), "load") == [(expected, 1)]


def test_only_what_touches_global_memory_counts_ahead_of_the_wait():
    ahead = ["LDC.64 R4, c[0x0][0x28]", "LDS.128 R4, [R2]", "LDG.E R2, desc[UR4][R2.64]", "STG.E [R2.64], R3"]
    behind = ["LDGSTS.E [R48], desc[UR16][R2.64], P1", "RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R5"]
    copy = "UBLKCP.S.G [UR4], [UR6], UR8"

    def early(*instructions):
        return [(access.op, access.count) for access in sass(*instructions)["ahead_of_wait"]]

    assert early(*ahead, "ACQBULK", *behind) == [("load", 1), ("store", 1)]
    assert early(*ahead, *behind, copy) == [("atomic", 1), ("copy", 1), ("load", 1), ("load", 1), ("store", 1)]
    assert early("ACQBULK", *ahead, *behind, copy) == []


@pytest.mark.parametrize(
    "instruction", ["LDS.128 R4, [R2]", "LDC.64 R4, c[0x0][0x28]", "LDGDEPBAR", "@!PT LDG.E R4, [R2]", "LDL R4, [R1]"]
)
def test_other_nvidia_instructions_are_no_loads(instruction):
    assert sass(instruction)["accesses"] == ()


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R5", "add.f32"),
        ("@!P2 REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4", "add.f32x4"),
        ("ATOMG.E.CAS.STRONG.GPU PT, R4, [R2], R4, R5", "cas"),
        ("ATOMG.E.EXCH.64.STRONG.GPU PT, R4, [R2], R4", "exch.64"),
    ],
)
def test_kind_of_nvidia_atomics(instruction, kind):
    assert [access.kind for access in sass(instruction)["accesses"]] == [kind]


@pytest.mark.parametrize(
    ("instruction", "f64"),
    [
        ("DFMA R2, R4, R6, R8", True),
        ("F2F.F64.F32 R2, R4", True),
        ("MUFU.RCP64H R2, R4", True),
        ("MUFU.RCP R2, R4", False),
    ],
)
def test_nvidia_float64(instruction, f64):
    assert sass(instruction)["uses_f64"] is f64


def test_nvidia_resources_and_innermost_line():
    inner, outer = '//## File "/none/a.py", line 7 inlined at "/none/b.py", line 9', '//## File "/none/b.py", line 9'
    read = sass(inner, outer, "LDG.E.128 R4, [R2]", "LDG.E.128 R8, [R2]", outer, "STG.E [R2], R4")
    assert (read["registers"], read["spill_bytes"]) == (40, 24)
    assert [(a.op, a.count, a.source) for a in read["accesses"]] == [("load", 2, "a.py:7"), ("store", 1, "b.py:9")]


def amdgcn(*instructions):
    tail = ["    .vgpr_count:     76", "    .private_segment_fixed_size: 12"]
    return amd.read("\n".join([*(f"\t{instruction}" for instruction in instructions), *tail]))


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("buffer_load_dwordx4 v[8:11], v55, s[24:27], 0 offen", 16),
        ("global_load_dword v36, v18, s[18:19]", 4),
        ("global_load_ushort v36, v18, s[18:19]", 2),
        ("buffer_load_short_d16_hi v1, v2, s[4:7], 0 offen", 2),
        ("global_load_lds_dwordx4 v[2:3], off", 16),
        ("flat_load_dwordx2 v[2:3], v[4:5]", 8),
    ],
)
def test_width_of_amd_loads(instruction, expected):
    assert widths(amdgcn(instruction), "load") == [(expected, 1)]


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [
        ("buffer_atomic_add_f32 v1, v2, s[4:7], 0 offen", "add.f32"),
        ("global_atomic_pk_add_bf16 v1, v2, s[4:5]", "add.bf16x2"),
        ("global_atomic_cmpswap v1, v2, v[4:5], s[4:5] sc0", "cas"),
        ("global_atomic_cmpswap_x2 v1, v2, v[4:5], s[4:5] sc0", "cas"),
    ],
)
def test_kind_of_amd_atomics(instruction, kind):
    assert [access.kind for access in amdgcn(instruction)["accesses"]] == [kind]


def test_amd_resources():
    read = amdgcn(
        '.file\t1 "/none" "a.py"',
        ".loc\t1 7 20 is_stmt 1",
        "s_load_dwordx4 s[0:3], s[4:5], 0x0",
        "v_add_f64 v[0:1], v[2:3], v[4:5]",
        "global_store_dwordx2 v1, v[2:3], s[0:1]",
    )
    assert (read["registers"], read["spill_bytes"], read["uses_f64"]) == (76, 12, True)
    assert [(a.op, a.bytes, a.source) for a in read["accesses"]] == [("store", 8, "a.py:7")]


def test_unknown_target_names_the_known_ones():
    with pytest.raises(UsageError, match=r"'sm_70'.*sm_80, sm_90, sm_100, gfx942, gfx950"), codegen.recording("sm_70"):
        pass


def test_interpreting_process_is_told_so(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RetrogradError, match="TRITON_INTERPRET"), codegen.recording("sm_90"):
        pass


def test_works_up_to_the_compiler_without_triton_and_torch():
    code = (
        "import sys; sys.modules['triton'] = sys.modules['torch'] = None\n"
        "from retrograd import codegen\n"
        "assert len(codegen.targets()) == 5\n"
        "try: codegen.cross_compile(None, target='sm_90')\n"
        "except ImportError as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "retrograd[triton]" in done.stdout, done.stderr


def test_a_path_of_a_checkout_that_is_gone_is_read_here() -> None:
    """Triton's cache keeps the path of whoever compiled a kernel first."""
    from retrograd.codegen.access import names_at

    here = codegen.__path__[0].removesuffix("codegen") + "ops/msda/triton/sampling.py"
    lines = Path(here).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "tl.load(shapes_ptr + 2 * LEVEL)" in text)
    gone = "/nowhere/src/retrograd/ops/msda/triton/sampling.py"
    assert names_at("load", gone, line) == names_at("load", here, line) != ()
    assert names_at("load", "/nowhere/else.py", line) == ()


def test_a_kernel_of_anyone_is_found_where_its_module_is_now(tmp_path, monkeypatch) -> None:
    """As test_a_path_of_a_checkout_that_is_gone_is_read_here, for a file that is none of ours."""
    import importlib

    from retrograd.codegen.access import names_at

    (tmp_path / "moved_kernels.py").write_text("import triton.language as tl\n\ndef k(p):\n    tl.atomic_add(p, 1)\n")
    assert names_at("atomic", f"/nowhere/before/{tmp_path.name}/moved_kernels.py", 4) == ()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("moved_kernels")
    assert names_at("atomic", f"/nowhere/now/{tmp_path.name}/moved_kernels.py", 4) == ("p",)
    assert names_at("atomic", "/nowhere/another/moved_kernels.py", 4) == ()
