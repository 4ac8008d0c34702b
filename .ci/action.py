"""Step of the GitHub Action: runs `retrograd $COMMAND` with annotations; findings go to $SARIF, a badge to $BADGE.

Words are split and patterns expanded as a shell does it; nothing else in the command is executed.
"""

import glob
import os
import shlex
import subprocess
import sys
from pathlib import Path

words = [name for word in shlex.split(os.environ["COMMAND"]) for name in sorted(glob.glob(word)) or [word]]  # noqa: PTH207
outputs = [word for name in ("SARIF", "BADGE") if os.environ.get(name) for word in ("-o", os.environ[name])]
command = [sys.executable, "-m", "retrograd", *words, "--format", "github", *outputs]
code = subprocess.run(command, check=False).returncode
with Path(os.environ.get("GITHUB_OUTPUT", os.devnull)).open("a", encoding="utf-8") as file:
    file.write(f"exit-code={code}\n")
sys.exit(code)
