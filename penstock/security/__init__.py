"""Authentication, authorisation and encryption: credentials, TLS, roles.

The roles of a call stand beside it in the protos (option `roles`), those of a route where it is added.
"""

from __future__ import annotations

from penstock.security.credentials import NO_SECURITY, Security

__all__ = ["NO_SECURITY", "Security"]
