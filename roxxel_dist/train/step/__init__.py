"""One step: its state, its program, its optimizer."""
