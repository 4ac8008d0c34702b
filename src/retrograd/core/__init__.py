"""Groundwork of several rooms that needs no framework: records, alignment, processes, stores. No torch."""
