"""Private and undocumented names of frameworks: one file a part, with the versions it was run with and a self-test."""
