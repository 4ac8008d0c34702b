"""Two recorded runs compared: the first operator that differs by itself, why, and how much follows from it."""
