"""Units without services: pure rules, parsing, arithmetic; folders mirror those of the product."""
