"""Operators of ATen without an effect, from the schemas of the installed torch: `graph/readers/pure_operators.txt`.

python tools/pure_operators.py          # writes the list
python tools/pure_operators.py --check  # exit 1 if it names an operator that this torch's schemas call impure

`name` stands for all overloads (those that write into `out=` apart), `name.overload` for one. `~` before it: it draws
random numbers; `*` behind it: its result may be a view of an argument.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parents[1] / "src" / "retrograd" / "graph" / "readers" / "pure_operators.txt"
# Their schemas do not say that they check, print or set something.
EFFECTS = ("assert", "print", "constrain_range", "_set_plan", "is_pinned", "backward_hook")
# Nor that they write running statistics, but for these.
STATISTICS = ("batch_norm", "instance_norm")
WITHOUT_STATISTICS = ("functional", "backward", "no_training", "no_stats", "elemt")


def schemas() -> dict[str, dict[str, tuple[bool, bool, bool]]]:
    """Of each operator its overloads: do they write into an argument, draw, return a view?"""
    import torch

    table: dict[str, dict[str, tuple[bool, bool, bool]]] = defaultdict(dict)
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if full.startswith("aten::") and operator is not None:
            schema = operator._schema
            view = any(value.alias_info is not None for value in schema.returns)
            draws = torch.Tag.nondeterministic_seeded in operator.tags
            table[name][overload or "default"] = schema.is_mutable, draws, view
    return table


def entries() -> list[str]:
    lines: list[str] = []
    for name, overloads in sorted(schemas().items()):
        statistics = any(word in name for word in STATISTICS) and not any(word in name for word in WITHOUT_STATISTICS)
        if statistics or any(word in name for word in EFFECTS) or name.endswith("_out"):
            continue
        kept = {o: facts for o, facts in overloads.items() if "out" not in o}
        pure = {o: facts for o, facts in kept.items() if not facts[0]}
        whole = len(pure) == len(kept)
        for names, facts in (
            [([name], list(pure.values()))] if whole else [([f"{name}.{o}"], [f]) for o, f in pure.items()]
        ):
            if facts:
                lines.append(f"{'~' * any(f[1] for f in facts)}{names[0]}{'*' * any(f[2] for f in facts)}")
    return lines


def main() -> int:
    if "--check" in sys.argv:
        impure = set(LIST.read_text().split()) - set(entries())
        known = {name for name, overloads in schemas().items() if overloads}
        wrong = sorted(entry for entry in impure if entry.strip("~*").partition(".")[0] in known)
        print("\n".join(wrong))
        return bool(wrong)
    LIST.write_text("\n".join(entries()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
