"""Lines of src that do what src did when the house was built, without what has been added since.

python tools/like_for_like.py              # the figure in CONTRIBUTING; two minutes
python tools/like_for_like.py --base REV   # beside another revision

A line stood there if git blame gives it to the base or an earlier revision, whatever its indentation and wherever it
was moved. Where a place was written anew, as many of its new lines count as there were old ones; what is more, and
files that came since, are additions.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The end of the house's own changes, before the checker knew foreign ops, TTIR was executed and ops were mutated.
BASE = "ed696449ae0"
_LINE = re.compile(r"^([0-9a-f]{40}) ", re.M)
_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.M)
# Lines that were indented otherwise, or moved within a file or from another one of the same commit, are what they were.
_BLAME = ("blame", "-w", "-M", "-C", "-l", "-s", "--root")


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def blamed(files: list[str], base: str) -> dict[str, list[bool]]:
    """Of each line of each file whether it stood at the base."""
    before = set(git("rev-list", base).split())

    def lines(file: str) -> list[bool]:
        return [commit in before for commit in _LINE.findall(git(*_BLAME, "HEAD", "--", file))]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(files, pool.map(lines, files), strict=True))


def rewritten(stood: dict[str, list[bool]], base: str) -> int:
    """Lines that stand in the place of others, place by place."""
    total = 0
    for part in git("diff", "-U0", "-w", "-M", base, "HEAD", "--", "src").split("\n+++ b/")[1:]:
        file = part.partition("\n")[0]
        for old, start, new in _HUNK.findall(part) if file in stood else ():
            first = int(start) - 1
            fresh = stood[file][first : first + int(new or 1)].count(False)
            total += min(int(old or 1), fresh)
    return total


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=BASE, help="revision that today's lines are held against")
    base = parser.parse_args().base
    listed = git("ls-tree", "-r", "--name-only", base, "src").split()
    then = sum(git("show", f"{base}:{file}").count("\n") for file in listed if file.endswith(".py"))
    stood = blamed(git("ls-files", "src/*.py").split(), base)
    kept, anew = sum(lines.count(True) for lines in stood.values()), rewritten(stood, base)
    now = sum(map(len, stood.values()))
    print(f"{then} lines then, {now} now; {kept} of them stood there and {anew} replace others: {kept + anew}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
