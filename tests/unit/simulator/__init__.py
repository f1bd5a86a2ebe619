"""The simulator on virtual clocks."""
