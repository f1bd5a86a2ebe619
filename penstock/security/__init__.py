"""Who may talk to whom, and how it is kept from others: credentials, TLS, roles.

What a call or a route is open to stands beside it: in the protos' option `roles`, and where a route is added.
"""

from __future__ import annotations

from penstock.security.credentials import NO_SECURITY, Security

__all__ = ["NO_SECURITY", "Security"]
