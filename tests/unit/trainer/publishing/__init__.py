"""Who receives new weights, and how."""
