"""Every store that the broker can run on: memory and real Redis servers of every kind."""
