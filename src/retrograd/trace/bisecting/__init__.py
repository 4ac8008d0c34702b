"""Which operators, computed in higher precision, make a mismatch with a reference go away."""
