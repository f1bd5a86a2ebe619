"""Sandboxes of candidates' programs behind one interface, `sandbox`; `finding` says which works here."""
