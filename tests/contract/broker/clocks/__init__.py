"""Clocks that are stepped or sleep, and brokers that are held: leases end only where their holders are silent."""
