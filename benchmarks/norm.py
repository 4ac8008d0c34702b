"""`retrograd bench norm` from a checkout that is not installed: python benchmarks/norm.py [options]."""

import sys

from retrograd.cli import main

main(["bench", "norm", *sys.argv[1:]])
