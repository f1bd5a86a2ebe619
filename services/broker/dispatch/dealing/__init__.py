"""Places samples over a whole fleet at a cost that does not depend on its size."""
