"""Planning problems, and fleets that follow a plan."""
