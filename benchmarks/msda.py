"""`retrograd bench msda` from a checkout that is not installed: python benchmarks/msda.py [options]."""

import sys

from retrograd.cli import main

main(["bench", "msda", *sys.argv[1:]])
