"""What the page is told of a run folder."""
