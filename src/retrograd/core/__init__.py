"""What several rooms need and no framework is needed for: records, alignment, processes, stores. No torch."""
