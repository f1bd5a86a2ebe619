"""A generator's side of environments: the calls, the conversation as tokens, and the session of one sample.

No engine here: `services.generator.decoding` decodes a session's turns.
"""
