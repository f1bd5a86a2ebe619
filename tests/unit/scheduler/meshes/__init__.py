"""What each solver finds, and laws that hold for all of them."""
