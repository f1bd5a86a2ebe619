"""The broker on a real Redis that fails, moves, or is set back."""
