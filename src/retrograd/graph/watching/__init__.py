"""Watching a run: which graphs each step compiles; at the first one too many what changed, since when, at what cost.

`session` and `words` are pure; `backends` hook into frameworks that are already imported and load none by themselves.
"""
